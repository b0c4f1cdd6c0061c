"""Runs a gate: measures what is planned, then judges what was measured."""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from harness.analysis import comparison, summary
from harness.errors import HarnessError
from harness.gate import counters, decide
from harness.gate.plan import Ground, Plan, Request, Say, gone, opened, prepared, unfit
from harness.gate.records import GateCase, GateRecord, GateSide, GateSubject, Mode, Stage, State
from harness.gate.sources import PROSE, same_step
from harness.records import Comparison, Decision, Facts, Finding, Pair, Thresholds
from harness.runner.interleave import Bench, Observer, Side, Task, pairs
from harness.store import reader
from harness.store.writer import now

Key = tuple[str, str]
"""Suite and case id."""


def carry_out(request: Request, observer: Observer, say: Say) -> GateRecord:
    """Judge a change or a tree; a HarnessError if that cannot be carried out. At Ctrl-C or SIGTERM
    worktrees and workers are removed, and all finished measurements are stored."""
    with ExitStack() as held:
        ground = opened(request, held)
        merging = ground.trees.baseline is not None and request.given is None
        same = merging and not request.measure and ground.trees.same_code
        if same and not dict(gone(request.mode, ground)):
            return _unchanged(request, ground)
        return _judged(request, prepared(request, ground, held, say), held, observer)


def _unchanged(request: Request, ground: Ground) -> GateRecord:
    """The verdict of a change that leaves the code as it is: nothing is measured."""
    check, same = decide.AGAINST[request.mode], {"same_code": True}
    found = Finding(check=check, decision=Decision.GO, facts=same)
    cases = [
        GateCase(case_id=case.case_id, suite=path, state=State.SAME, findings=(found,))
        for path, suite in ground.suites.items()
        for case in suite.cases
    ]
    return _verdict(request, ground, cases)


def _verdict(request: Request, ground: Ground, cases: Sequence[GateCase]) -> GateRecord:
    """The verdict by what is known without a measurement, and these cases."""
    return GateRecord(
        mode=request.mode,
        stage=Stage(ground.policy.form.stage),
        policy=ground.policy.path,
        candidate=ground.trees.candidate,
        baseline=ground.trees.baseline,
        cases=tuple(cases),
        findings=ground.trees.findings,
        started_at=ground.began,
        ended_at=now(),
        subject=GateSubject.COMPARISON if request.given else GateSubject.GATE,
    )


@dataclass(frozen=True, slots=True)
class _Answers:
    """Results of the comparison, by suite and case id."""

    comparisons: Mapping[Key, Comparison] = field(default_factory=dict)
    remarks: Mapping[Key, Facts] = field(default_factory=dict)
    """Why a case has no comparison, or a weak one."""
    counted: Mapping[Key, counters.Compared] = field(default_factory=dict)
    same: frozenset[Key] = frozenset()
    """Whose first pair runs the same machine code in the same time."""
    findings: tuple[Finding, ...] = ()
    """Of the whole."""


def _judged(request: Request, plan: Plan, held: ExitStack, observer: Observer) -> GateRecord:
    if plan.sound:
        answers = _measured(request, plan, held, observer)
    else:
        answers = _Answers(remarks={t.key: {"unfit": True} for t in plan.tasks})
    cases = _cases(request, plan, answers)
    cases += [decide.judge_gone(*key, why, plan.policy) for key, why in plan.gone.items()]
    verdict = _verdict(request, plan, cases)
    verdict = replace(
        verdict,
        candidate=_with_runs(verdict.candidate, plan.sides[-1]),
        baseline=verdict.baseline and _with_runs(verdict.baseline, plan.sides[0]),
        device=plan.here.device_name,
        findings=(*plan.findings, *answers.findings),
        gpu_s=sum(c.gpu_s for c in cases),
    )
    return replace(verdict, blocks=decide.blocks(verdict.decision, plan.policy))


def _measured(request: Request, plan: Plan, held: ExitStack, observer: Observer) -> _Answers:
    bench = _started(request, plan, held, observer)
    timed = request.mode is not Mode.COUNTERS
    if wrong := bench.run_self_test(ask=timed and request.self_test):
        untested = {t.key: {"untested": True} for t in plan.tasks}
        return _Answers(remarks=untested, findings=(unfit({"self_test": list(wrong)}),))
    python = all(name.endswith((".py", *PROSE)) for name in plan.trees.changed)
    ask = plan.here.gpu is not None and python and not request.measure
    answers = _interleaved(plan, bench, ask) if timed else _Answers(counted=_counted(plan, bench))
    bench.finish()
    return answers


def _started(request: Request, plan: Plan, held: ExitStack, observer: Observer) -> Bench:
    """A bench with a new run of each side and suite."""
    plan.rig.observe(plan.here)
    bench = Bench(plan.sides, plan.rig, observer, held)
    for path, suite in plan.suites.items():
        measured = replace(suite, cases=tuple(t.case for t in plan.tasks if t.suite == path))
        for side in plan.sides:
            bench.record(request.store, side, measured, path)
    return bench


@dataclass(slots=True, eq=False)
class _Sampling:
    """One case, of which pairs are taken until a look at them decides."""

    task: Task
    plan: Plan
    thresholds: Thresholds
    wanted: int
    """Steady pairs by the next look."""
    spent: float = 0.0
    """Share of alpha of the looks so far."""
    last: bool = False
    """Whether no look follows."""
    answer: Comparison | None = None

    @property
    def failed(self) -> bool:
        return any(side.broken(self.task) for side in self.plan.sides)

    def pairs(self) -> tuple[Sequence[Pair], int]:
        """Its steady pairs, and the number of others."""
        return pairs(self.task, *self.plan.sides)

    @property
    def same(self) -> bool:
        """Whether its pair, the second if the first is unsteady, runs the same code as fast."""
        sides, found = [side.of(self.task)[-1:] for side in self.plan.sides], self.pairs()[0]
        if self.failed or not (all(sides) and found):
            return False
        return same_step(sides[0][0], sides[1][0], self.thresholds.screen_ratio)

    def missing(self) -> range:
        """The processes that the next look lacks."""
        t, taken = self.thresholds, len(self.plan.sides[-1].of(self.task))
        most = 2 * t.screen_pairs + max(t.confirm_pairs, t.most_pairs)
        return range(taken, min(taken + self.wanted - len(self.pairs()[0]), most))

    def look(self, cases: int) -> comparison.Statistics:
        """What its pairs show. The look spends a share of alpha, all of it if it is the last."""
        (found, _), now, share = self.pairs(), self.wanted, 1 - self.spent
        if len(found) > 2:
            sd = float(comparison.pair_sd(comparison.time_logs(found), comparison.swapped(found)))
            self.thresholds = self.plan.policy.thresholds(sd)
            self.wanted, share = comparison.look_after(now, sd, cases, self.spent, self.thresholds)
        self.spent += share
        self.last = self.wanted == now
        return comparison.statistics(found, self.thresholds, share)


def _take(bench: Bench, cases: Collection[_Sampling], stage: str) -> None:
    """Measure the missing pairs of each case, and in place of unsteady ones once more."""
    for again in (False, True):
        open_ = [c for c in cases if not c.failed and (c.pairs()[1] or not again)]
        if missing := [(c.task, indices) for c in open_ if (indices := c.missing())]:
            bench.rounds(missing, stage)


def _interleaved(plan: Plan, bench: Bench, ask_code: bool) -> _Answers:
    """Screen all cases, and look at those that stay open, by more pairs each time. `ask_code`: but
    for cases whose first pair runs the same machine code."""
    first = plan.policy.thresholds()
    cases = [_Sampling(task, plan, first, 1) for task in plan.tasks]
    old = [case for case in cases if ask_code and case.task.key not in plan.sides[0].cannot]
    _take(bench, old, "machine code")
    same = frozenset(case.task.key for case in old if case.same)
    cases = [case for case in cases if case.task.key not in same]
    for case in cases:
        case.wanted = first.screen_pairs
    _take(bench, cases, "screen")
    screened = [case for case in cases if case.pairs()[0] and not case.failed]
    for case in screened:
        t, (found, _) = case.thresholds, case.pairs()
        case.wanted = comparison.next_look(0, math.nan, len(screened), t)
        if comparison.screen(found, t):
            case.answer = comparison.screened(case.task.case.case_id, found, t)
    # Ids may repeat in another suite.
    looked = {str(i): case for i, case in enumerate(screened) if case.answer is None}
    while looked:
        _take(bench, looked.values(), "confirm")
        looked = {key: case for key, case in looked.items() if not case.failed}
        seen = {key: case.look(len(screened)) for key, case in looked.items()}
        limits = {key: case.thresholds for key, case in looked.items()}
        judged = comparison.judge(seen, limits, beside=len(screened) - len(looked))
        for key, answer in judged.items():
            case = looked[key]
            case.answer = replace(answer, case_id=case.task.case.case_id)
            if case.last or comparison.decided(answer, case.thresholds):
                del looked[key]
    answers = {c.task.key: c.answer for c in screened if c.answer and not c.failed}
    remarks = {}
    for case in cases:
        steady, others = len(case.pairs()[0]), case.pairs()[1]
        if others:
            remarks[case.task.key] = {"unsteady": others, "pairs": steady + others}
    return _Answers(answers, remarks, same=same)


def _counted(plan: Plan, bench: Bench) -> Mapping[Key, counters.Compared]:
    """Compare counters with those of the baseline commit, or without one with the recorded ones.
    Counts that the change itself records are accepted."""
    bench.rounds([(task, range(1)) for task in plan.tasks], "counters")
    candidate, useless = plan.sides[-1], counters.unfit(plan.recorded, plan.here)
    kept = None if useless else plan.recorded
    answers = {}
    for task in plan.tasks:
        of_suite = kept.cases.get(task.suite, {}) if kept else {}
        recorded = of_suite.get(task.case.case_id)
        if plan.trees.baseline is None:
            after, why = counters.counts_of(candidate.of(task))
            missing = {"not_in": str(counters.FILE), "record": counters.RENEW}
            source, no = "the recorded counters", {"lacks": why} if why else useless or missing
            answers[task.key] = counters.judge(recorded, after, source=source, why=no)
        elif task.key not in plan.sides[0].cannot:  # such a case is judged as new
            before = plan.sides[0].of(task)
            answers[task.key] = counters.compare(before, candidate.of(task), recorded)
    return answers


def _cases(request: Request, plan: Plan, answers: _Answers) -> list[GateCase]:
    """The answer for every task, from its stored measurements."""
    candidate = plan.sides[-1]
    baseline = plan.sides[0] if plan.trees.baseline else None
    runs = {path: reader.load(request.store, w.folder) for path, w in candidate.writers.items()}
    measured = {
        (path, summed.case.case_id): summed
        for path, run in runs.items()
        if run.measurements
        for summed in summary.summarise(run)
    }
    return [
        decide.judge_case(
            decide.CaseEvidence(
                suite=task.suite,
                case=task.case,
                summary=measured.get(task.key),
                candidate=candidate.of(task),
                baseline=baseline.of(task) if baseline else (),
                refused=baseline.cannot.get(task.key, "") if baseline else "",
                comparison=answers.comparisons.get(task.key),
                no_comparison=answers.remarks.get(task.key, {}),
                counted=answers.counted.get(task.key),
                same=task.key in answers.same,
                folder=runs[task.suite].folder if task.suite in runs else "",
                mode=request.mode,
                policy=plan.policy,
            )
        )
        for task in plan.tasks
    ]


def _with_runs(side: GateSide, measured: Side) -> GateSide:
    return replace(side, folders=tuple(str(w.folder) for w in measured.writers.values()))


def count(request: Request, observer: Observer, say: Say) -> counters.CounterBaseline:
    """Count the policy's cases in the working tree, and record the counts; a HarnessError if a case
    failed, or if its counters are not exact."""
    with ExitStack() as held:
        plan = prepared(request, opened(request, held), held, say)
        bench = _started(request, plan, held, observer)
        bench.rounds([(task, range(1)) for task in plan.tasks], "counters")
        bench.finish()
        counted: dict[str, dict[str, counters.Counts]] = {}
        for task in plan.tasks:
            found, why = counters.counts_of(plan.sides[-1].of(task))
            if found is None:
                ended = next((m for m in plan.sides[-1].of(task) if m.detail), None)
                detail = f"{ended.outcome}: {ended.detail}" if ended else why
                raise HarnessError(
                    f"{task.case.case_id} has no counters: {detail}",
                    "Nothing was recorded. Repair the case, or remove it from the suite.",
                )
            counted.setdefault(task.suite, {})[task.case.case_id] = found
        return counters.store(plan.here, counted)
