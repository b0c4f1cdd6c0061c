"""Two runs, or two commits, compared: how their environments differ, then case by case.

Commits are measured now, in interleaved processes; runs are compared as stored. Both are judged by
the gate's rules without a policy. A case of one side only, or one measured in another environment,
is undecided.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from harness.analysis.study import Study
from harness.errors import HarnessError
from harness.gate import counters as counting
from harness.gate import decide
from harness.gate.policy import Policy, PolicyForm
from harness.gate.records import GateCase, GateRecord, GateSubject, Mode, State, side_of
from harness.gate.unpaired import CARD_CV, DAY_CV, compare_stored, too_few
from harness.machine import drift, facts
from harness.records import Case, Comparison, Decision, Facts, Finding, Measurement, Outcome, Run
from harness.runner.interleave import usable
from harness.suite.choice import passing

EXPECTED = ("commit", "uncommitted changes", "host", facts.INTERPRETER)
"""Differences that are allowed: the code under test, where this Python is, and the name of a
container. A CPU is identified by its host name in any case."""
CARD = "GPU UUID"
"""The difference of two cards of one model: allowed, and part of the interval."""
ENVIRONMENT = "environment"
"""The check that leaves a comparison across environments undecided."""
PLAIN = Policy(path="", form=PolicyForm.model_construct(stage="shadow", suites=[]))
"""No exemptions, default thresholds."""


def runs(
    baseline: Run,
    study: Study,
    *,
    filters: Sequence[str] = (),
    counters: bool = False,
    across: bool = False,
) -> GateRecord:
    """Compare a stored run with that of a study, in their times or their counters per step; a
    HarnessError if they are the same run, or have no case that passes the filters. With `across`
    they are judged even if their environments differ."""
    candidate = study.run
    if baseline.run_id == candidate.run_id:
        raise HarnessError(f"both are run {baseline.run_id}", "Name two runs: harness list runs.")
    sides = (passing(run.suite.cases, filters) for run in (baseline, candidate))
    before, after = ({c.case_id: c for c in cases} for cases in sides)
    if not (before.keys() | after.keys()):
        raise HarnessError(
            f"no case of the two runs matches {' '.join(map(repr, filters))}",
            f"List the cases: harness show {candidate.run_id}",
        )
    both = [case_id for case_id in after if case_id in before]
    around = tuple(drift.differences(baseline.environment, candidate.environment))
    changed = {i: how for i in both if (how := _differs(before[i], after[i]))}
    # In one suite only `--set` differs, so that times can be compared.
    one_suite = baseline.suite.sha256 == candidate.suite.sha256
    cases = _judged(baseline, study, [after[i] for i in both], changed, one_suite, counters)
    foreign = [d.name for d in around if d.name not in (*EXPECTED, CARD)]
    if not across:
        every = {case_id: {"differs": name} for name in foreign[:1] for case_id in both}
        spoilt = {**every, **(changed if one_suite else {})}
        cases = [_across(c, spoilt[c.case_id]) if c.case_id in spoilt else c for c in cases]
    cases += [_lacking(candidate, i, State.NEW) for i in after if i not in before]
    cases += [_lacking(candidate, i, State.MISSING) for i in before if i not in after]
    return GateRecord(
        mode=Mode.COUNTERS if counters else Mode.BASELINE,
        baseline=side_of(baseline),
        candidate=side_of(candidate),
        differences=around,
        cases=tuple(cases),
        subject=GateSubject.COMPARISON,
    )


def commits(verdict: GateRecord, environments: Sequence[Run]) -> GateRecord:
    """The verdict of a gate on two commits, as that of a comparison; `environments` has a stored
    run of each side, if there are any."""
    both = [run.environment for run in environments]
    around = tuple(drift.differences(*both)) if len(both) == 2 else ()
    return replace(verdict, cases=tuple(map(_strict, verdict.cases)), differences=around)


def _differs(baseline: Case, candidate: Case) -> Facts:
    """How two cases of one id are not the same: axes, code, or how samples are taken."""
    for name, (a, b) in drift.measured(baseline, candidate).items():
        return {"changed": name, "was": str(a) or "empty", "now": str(b) or "empty"}
    return {}


def _times(
    a: Run, b: Run, alike: Sequence[Case]
) -> tuple[Mapping[str, Comparison], Mapping[str, Facts]]:
    """The comparisons of step times, and why a case has none."""
    sides: dict[str, tuple[Sequence[Measurement], Sequence[Measurement]]] = {}
    why: dict[str, Facts] = {}
    for case in alike:
        measured = a.of(case.case_id), b.of(case.case_id)
        before, after = ([m for m in side if usable(m, case)] for side in measured)
        if problem := too_few(before, after):
            why[case.case_id] = problem
        elif all(m.outcome is Outcome.OK for side in measured for m in side):
            sides[case.case_id] = before, after
    measured_on = [
        {c: {m.card or run.environment.card for m in run.of(c)} for c in sides} for run in (a, b)
    ]
    one = a.environment.card == b.environment.card and (
        measured_on[0] == measured_on[1]  # with several GPUs, also the same one for every case
    )
    codes = [(g.commit, g.dirty_sha256) for run in (a, b) if (g := run.environment.git)]
    thresholds = PLAIN.thresholds()
    if len(codes) == 2 and codes[0] == codes[1]:  # one build
        thresholds = replace(thresholds, build_cv=0.0)
    found = compare_stored(
        sides,
        thresholds,
        day_cv=DAY_CV if one else CARD_CV,  # two hosts, if there is no card
        other_card=not one and b.environment.gpu is not None,
    )
    return {c.case_id: c for c in found}, why


def _judged(
    a: Run, of: Study, both: Sequence[Case], changed: dict[str, Facts], timed: bool, counters: bool
) -> list[GateCase]:
    """The cases of both runs, as a gate judges them. How some have `changed` is part of the reason;
    their times are compared if they are `timed`."""
    b, why = of.run, changed
    times: Mapping[str, Comparison] = {}
    if not counters:
        times, few = _times(a, b, [c for c in both if timed or c.case_id not in changed])
        why = {**few, **changed}
    counted = {c.case_id: counting.compare(a.of(c.case_id), b.of(c.case_id)) for c in both}
    cases = []
    for summed in (s for s in of.summaries if s.case.case_id in counted):
        case_id = summed.case.case_id
        evidence = decide.CaseEvidence(
            suite=b.suite.path,
            case=summed.case,
            summary=summed,
            candidate=b.of(case_id),
            baseline=a.of(case_id),
            comparison=times.get(case_id),
            no_comparison=why.get(case_id, {}),
            folder=b.folder,
            counted=counted[case_id] if counters else None,
            mode=Mode.COUNTERS if counters else Mode.BASELINE,
            policy=PLAIN,
        )
        case, (changes, finding) = decide.judge_case(evidence), counted[case_id]
        if not counters and changes:  # exact, so shown beside the times
            beside_times = (*case.findings, replace(finding, counts=False))
            case = replace(case, counters=changes, findings=beside_times)
        cases.append(_strict(case))
    return cases


def _strict(case: GateCase) -> GateCase:
    """A gate accepts a case that the baseline cannot run; a comparison leaves it undecided."""
    if case.state is not State.NEW:
        return case
    found = case.decisive or case.findings[-1]
    return _undecided(case, "ran", replace(found, facts={**found.facts, "only_candidate": True}))


def _across(case: GateCase, differs: Facts) -> GateCase:
    """The case with its comparison undecided: what differs may explain the change."""
    if case.state is not State.COMPARED:
        return case
    may_explain = Finding(decision=Decision.INCONCLUSIVE, facts={**differs, "may_explain": True})
    return _undecided(case, ENVIRONMENT, may_explain)


def _undecided(case: GateCase, check: str, found: Finding) -> GateCase:
    finding = replace(found, check=check, decision=Decision.INCONCLUSIVE)
    compared = case.comparison  # more pairs would not decide
    return replace(
        case,
        findings=(*case.findings, finding),
        overruled=True,
        comparison=compared and replace(compared, pairs_needed=None, minutes_needed=None),
    )


def _lacking(run: Run, case_id: str, state: State) -> GateCase:
    """A case that one side lacks."""
    side = "candidate" if state is State.NEW else "baseline"
    findings = (decide.not_measured({"only": side}),)
    return GateCase(case_id=case_id, suite=run.suite.path, state=state, findings=findings)
