"""Two runs, or two commits, side by side: what differs around them, then case by case.

Commits are measured now, in pairs of processes that take turns (harness.gating); of runs what was
stored is compared, and the scatter of two days is part of every interval. Both are judged by the
gate's rules, without its policy: no floors, no exemptions. What only one side has, or what was
taken in another environment, is undecided: an absent answer is never a pass.
"""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from harness.analysis import summary
from harness.analysis.comparison import Comparison, Thresholds
from harness.errors import HarnessError
from harness.gate import baselines, calibration, decide
from harness.gate import counters as counting
from harness.gate.calibration import DAY_CV, NoiseClass
from harness.gate.policy import DEFAULT_MAX_AGE_DAYS, Policy
from harness.gate.records import (
    CounterChange,
    GateCase,
    GateSide,
    GateVerdict,
    LeftOut,
    Mode,
    Stage,
    State,
)
from harness.gate.unpaired import Process, compare_stored
from harness.machine import drift
from harness.records import Case, Decision, Finding, Outcome, Run
from harness.suite.load import passes

ENVIRONMENT = "environment"
"""The check by which a comparison across environments is left open."""
SIDES = ("baseline", "candidate")
ONE_SIDE = frozenset({State.NEW, State.MISSING})
"""States of a case that one side does not have, or cannot run."""
PLAIN = Policy(path="", stage=Stage.SHADOW)
"""No floors, no exemptions, the harness's own numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The answer, with all that it rests on. Ratios are candidate over baseline."""

    decision: Decision
    reason: str
    method: Literal["stored", "interleaved", "counters"]
    baseline: GateSide
    candidate: GateSide
    differences: tuple[drift.Difference, ...] = ()
    """Of the environments, then of the suites; most suspect first."""
    cases: tuple[GateCase, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    findings: tuple[Finding, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def exit_status(self) -> int:
        """As the gate's: 0 no case is slower, 1 one is or fails, 3 undecided."""
        return self.decision.exit_status

    def only_in(self, state: State) -> tuple[GateCase, ...]:
        return tuple(case for case in self.cases if case.state is state)


def document(compared: Compared) -> dict[str, object]:
    """The answer as plain values, with its exit status beside it."""
    return {**asdict(compared), "exit_status": compared.exit_status}


# --- two runs ----------------------------------------------------------------------------


def runs(
    a: Run,
    b: Run,
    *,
    filters: Sequence[str] = (),
    counters: bool = False,
    across: bool = False,
    calibrations: Path,
) -> Compared:
    """Compare what two runs stored.

    Args:
        filters: As of `harness run --filter`.
        counters: Compare counters per step, exactly, and no times.
        across: The environments are what is compared: that they differ leaves nothing open.
        calibrations: Folder in which the node's calibration is looked for.

    Raises:
        HarnessError: They are one run, or have no such case.
    """
    if a.run_id == b.run_id:
        raise HarnessError(f"both are run {a.run_id}", "Name two runs: harness list runs.")
    before = {c.case_id: c for c in a.suite.cases if passes(c.case_id, filters)}
    after = {c.case_id: c for c in b.suite.cases if passes(c.case_id, filters)}
    if not (before.keys() | after.keys()):
        raise HarnessError(f"no case of the two runs fits {list(filters)}")
    both = [case_id for case_id in after if case_id in before]
    around = drift.differences(a.environment, b.environment)
    apart = {
        case_id: said
        for case_id in both
        if (said := _measured_otherwise(before[case_id], after[case_id]))
    }
    alike = [case_id for case_id in both if case_id not in apart]
    compared, why, found = ({}, {}, ()) if counters else _times(a, b, alike, calibrations)
    cases = [
        _judged(
            a,
            b,
            after[case_id],
            comparison=compared.get(case_id),
            why=apart.get(case_id) or why.get(case_id, ""),
            counters=counters,
        )
        for case_id in both
    ]
    foreign = [d for d in around if d.name not in baselines.EXPECTED]
    if foreign and not across:
        cases = [_unlike(case, foreign[0]) for case in cases]
    cases += [_one_side(b, c, State.NEW) for i, c in after.items() if i not in before]
    cases += [_one_side(a, c, State.MISSING) for i, c in before.items() if i not in after]
    suites = drift.configuration(
        replace(a.suite, cases=tuple(before[c] for c in both)),
        replace(b.suite, cases=tuple(after[c] for c in both)),
    )
    return _answer(
        Compared(
            decision=Decision.INCONCLUSIVE,
            reason="",
            method="counters" if counters else "stored",
            baseline=_side(a),
            candidate=_side(b),
            differences=(*around, *suites),
            cases=tuple(cases),
            findings=found,
        ),
        remedies=_remedies(a, b, cases, unlike=any(map(is_across, cases))),
    )


def _side(run: Run) -> GateSide:
    git = run.environment.git
    return GateSide(
        ref=run.run_id,
        commit=git.commit if git else "",
        run_id=run.run_id,
        run_folder=run.folder,
        uncommitted=run.environment.uncommitted,
    )


def _measured_otherwise(then: Case, now: Case) -> str:
    """Why one id is not one case: other axes, other code, another way to take a sample."""
    found = [
        f"{name}: {a} in the baseline, {b} in the candidate"
        for name, (a, b) in drift.measured(then, now).items()
    ]
    return f"not the same case: {'; '.join(found[:2])}" if found else ""


def _times(
    a: Run, b: Run, case_ids: Sequence[str], folder: Path
) -> tuple[Mapping[str, Comparison], Mapping[str, str], tuple[Finding, ...]]:
    """The comparisons of step times, why a case has none, and what is to be said of the whole."""
    stored, found = None, tuple[Finding, ...]()
    try:
        stored = calibration.load(
            folder,
            b.environment,
            b.suite.path,
            max_age_days=DEFAULT_MAX_AGE_DAYS,
            required=False,
        )
    except HarnessError as error:
        said = f"not used: {str(error).partition(chr(10))[0]}"
        found = (Finding(check="calibration", decision=Decision.GO, reason=said),)
    then: dict[str, Sequence[Process]] = {}
    now: dict[str, Sequence[Process]] = {}
    why: dict[str, str] = {}
    own: dict[str, Thresholds] = {}
    cases = [{c.case_id: c for c in run.suite.cases} for run in (a, b)]
    for case_id in case_ids:
        measured = [run.of(case_id) for run in (a, b)]
        sides = [baselines.processes(m, c[case_id]) for m, c in zip(measured, cases, strict=True)]
        short = [
            f"{len(side)} steady, undisturbed processes in the {name}"
            for name, side in zip(SIDES, sides, strict=True)
            if len(side) < baselines.FEWEST
        ]
        if short:
            why[case_id] = f"{' and '.join(short)}; two are the least"
        elif all(m.outcome is Outcome.OK for side in measured for m in side):
            then[case_id], now[case_id] = sides
            own[case_id] = calibration.thresholds(stored, case_id, Thresholds(), {})
    if not now:
        return {}, why, found
    day_cv = stored.day_cv if stored else DAY_CV[NoiseClass.TYPICAL]
    answers = compare_stored(then, now, day_cv=day_cv, thresholds=own)
    return {c.case_id: c for c in answers}, why, found


def _judged(
    a: Run, b: Run, case: Case, *, comparison: Comparison | None, why: str, counters: bool
) -> GateCase:
    base, head = a.of(case.case_id), b.of(case.case_id)
    counted = _counted(a, b, case.case_id)
    (summed,) = summary.summarise(_of_one(b, case))
    judged = decide.judge_case(
        decide.CaseEvidence(
            suite=b.suite.path,
            case=case,
            head=summed,
            measured=head,
            base=base,
            comparison=comparison,
            no_comparison=why,
            folder=b.folder,
            counted=counted if counters else None,
        ),
        mode=Mode.COUNTERS if counters else Mode.BASELINE,
        policy=PLAIN,
        environment=b.environment,
        today=datetime.date.today(),
    )
    if not counters and counted[0]:  # exact, and so worth telling beside any time
        told = replace(counted[1], counts=False)
        judged = replace(judged, counters=counted[0], findings=(*judged.findings, told))
    return _strict(judged)


def _of_one(run: Run, case: Case) -> Run:
    return replace(
        run,
        suite=replace(run.suite, cases=(case,)),
        measurements=run.of(case.case_id),
    )


def _counted(a: Run, b: Run, case_id: str) -> tuple[tuple[CounterChange, ...], Finding]:
    (before, no_a), (after, no_b) = (counting.counts_of(run.of(case_id)) for run in (a, b))
    missing = "; ".join(f"{side}: {no}" for side, no in zip(SIDES, (no_a, no_b), strict=True) if no)
    return counting.judge(before, after, whose="the baseline", why=missing)


def _strict(case: GateCase) -> GateCase:
    """A gate lets a case in that the base cannot run; here that is left open."""
    if case.state is not State.NEW:
        return case
    reason = f"only the candidate can run it: {case.reason}"
    finding = Finding(check="ran", decision=Decision.INCONCLUSIVE, reason=reason)
    return replace(
        case,
        decision=Decision.INCONCLUSIVE,
        reason=reason,
        findings=(*case.findings, finding),
    )


def _unlike(case: GateCase, first: drift.Difference) -> GateCase:
    """The case with its comparison left open: it is of the environments as much as of the code."""
    if case.state is not State.COMPARED:
        return case
    reason = f"{first.name} differs, and may be why"
    finding = Finding(check=ENVIRONMENT, decision=Decision.INCONCLUSIVE, reason=reason)
    return replace(
        case,
        decision=Decision.INCONCLUSIVE,
        reason=reason,
        findings=(*case.findings, finding),
        comparison=replace(case.comparison, pairs_needed=None, minutes_needed=None)
        if case.comparison
        else None,
    )


def _one_side(run: Run, case: Case, state: State) -> GateCase:
    reason = f"only the {SIDES[state is State.NEW]} has this case"
    return GateCase(
        case_id=case.case_id,
        suite=run.suite.path,
        decision=Decision.INCONCLUSIVE,
        reason=reason,
        state=state,
        findings=(Finding(check="ran", decision=Decision.INCONCLUSIVE, reason=reason),),
    )


def _remedies(a: Run, b: Run, cases: Sequence[GateCase], *, unlike: bool) -> tuple[str, ...]:
    said = []
    commits = [g.commit[:10] for run in (a, b) if (g := run.environment.git) and not g.dirty_sha256]
    open_ = [c for c in cases if c.decision is Decision.INCONCLUSIVE and c.state is State.COMPARED]
    if unlike:
        said.append("to compare the environments themselves: --across")
    if open_ and len(set(commits)) == 2:
        pairs = max((c.comparison.pairs_needed or 0 for c in open_ if c.comparison), default=0)
        many = f" ({pairs} pairs would do)" if pairs else ""
        suite = f" --suite {b.suite.path}"
        said.append(
            f"to decide, measure both now{many}: harness compare {' '.join(commits)}{suite}"
        )
    return tuple(said)


# --- two commits -------------------------------------------------------------------------


def commits(verdict: GateVerdict, environments: Sequence[Run]) -> Compared:
    """The answer of the gate's machinery, as that of a comparison.

    Args:
        environments: A stored run of each side, if there are any.
    """
    assert verdict.baseline is not None
    around: tuple[drift.Difference, ...] = ()
    if len(environments) == 2:
        around = drift.differences(*(run.environment for run in environments))
    cases = tuple(map(_strict, verdict.cases))
    return _answer(
        Compared(
            decision=verdict.decision,
            reason=verdict.reason,
            method="counters" if verdict.mode is Mode.COUNTERS else "interleaved",
            baseline=verdict.baseline,
            candidate=verdict.candidate,
            differences=around,
            cases=cases,
            left_out=verdict.left_out,
            findings=verdict.findings,
        ),
        remedies=verdict.remedies,
    )


def _answer(compared: Compared, remedies: Sequence[str]) -> Compared:
    decision, reason = decide.overall(compared.cases, compared.findings)
    if decision is Decision.INCONCLUSIVE:
        reason = _open(compared) or reason
    return replace(compared, decision=decision, reason=reason, remedies=tuple(remedies))


def _open(compared: Compared) -> str:
    """All that keeps a comparison undecided, what is of many cases before what is of one."""
    said = [
        f"{f.check}: {f.reason}"
        for f in compared.findings
        if f.counts and f.decision is Decision.INCONCLUSIVE
    ]
    across = [c for c in compared.cases if is_across(c)]
    if across:
        said.append(f"{across[0].reason}: no time is of the code alone")
    for state, name in zip((State.MISSING, State.NEW), SIDES, strict=True):
        if count := len(compared.only_in(state)):
            said.append(f"{count} case{'s'[: count > 1]} only in the {name}")
    left = [
        c
        for c in compared.cases
        if c.decision is Decision.INCONCLUSIVE and c.state not in ONE_SIDE and not is_across(c)
    ]
    if left:
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        said.append(f"{left[0].case_id}: {left[0].reason}{more}")
    return "; ".join(said)


def is_across(case: GateCase) -> bool:
    """Whether it is the environments that leave a comparison open."""
    return bool(case.findings) and case.findings[-1].check == ENVIRONMENT
