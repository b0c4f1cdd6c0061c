"""Two runs, or two commits, compared: how their environments differ, then case by case.

Commits are measured now, in interleaved processes. Runs are compared as stored, and every interval
includes the variation between days. Both are judged by the gate's rules without a policy: no
absolute limits, no exemptions. A case of one side only, or one measured in another environment, is
undecided.
"""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from harness.analysis import summary
from harness.errors import HarnessError
from harness.gate import baselines, calibration, decide
from harness.gate import counters as counting
from harness.gate.policy import DEFAULT_MAX_AGE_DAYS, Policy
from harness.gate.records import (
    CounterChange,
    GateCase,
    GateSide,
    GateVerdict,
    Mode,
    Stage,
    State,
    VerdictSubject,
)
from harness.gate.unpaired import Process, compare_stored, too_few
from harness.machine import drift
from harness.records import Case, Comparison, Decision, Finding, Outcome, Run, Thresholds
from harness.suite.load import passes

ENVIRONMENT = "environment"
"""The check that leaves a comparison across environments undecided."""
SIDES = ("baseline", "candidate")
ONE_SIDE = frozenset({State.NEW, State.MISSING})
"""States of a case that one side does not have, or cannot run."""
PLAIN = Policy(path="", stage=Stage.SHADOW)
"""No absolute limits, no exemptions, default thresholds."""


def runs(
    baseline: Run,
    candidate: Run,
    *,
    filters: Sequence[str] = (),
    counters: bool = False,
    across: bool = False,
    calibrations: Path,
) -> GateVerdict:
    """Compare two stored runs.

    Args:
        filters: As of `harness run --filter`.
        counters: Compare counters per step instead of times.
        across: Judge even if the environments differ.
        calibrations: Folder of the node's calibration.

    Raises:
        HarnessError: They are the same run, or have no such case.
    """
    if baseline.run_id == candidate.run_id:
        raise HarnessError(f"both are run {baseline.run_id}", "Name two runs: harness list runs.")
    before = {c.case_id: c for c in baseline.suite.cases if passes(c.case_id, filters)}
    after = {c.case_id: c for c in candidate.suite.cases if passes(c.case_id, filters)}
    if not (before.keys() | after.keys()):
        raise HarnessError(f"no case of the two runs matches {list(filters)}")
    both = [case_id for case_id in after if case_id in before]
    around = drift.differences(baseline.environment, candidate.environment)
    why = {i: text for i in both if (text := _not_the_same(before[i], after[i]))}
    compared: Mapping[str, Comparison] = {}
    findings: tuple[Finding, ...] = ()
    if not counters:
        alike = [case_id for case_id in both if case_id not in why]
        compared, few, findings = _times(baseline, candidate, alike, calibrations)
        why |= few
    cases = [
        _judged(
            baseline,
            candidate,
            after[case_id],
            comparison=compared.get(case_id),
            why=why.get(case_id, ""),
            counters=counters,
        )
        for case_id in both
    ]
    foreign = [d for d in around if d.name not in baselines.EXPECTED]
    if foreign and not across:
        cases = [_across(case, foreign[0]) for case in cases]
    cases += [_one_side(candidate, c, State.NEW) for i, c in after.items() if i not in before]
    cases += [_one_side(baseline, c, State.MISSING) for i, c in before.items() if i not in after]
    suites = drift.configuration(
        replace(baseline.suite, cases=tuple(before[c] for c in both)),
        replace(candidate.suite, cases=tuple(after[c] for c in both)),
    )
    decision, reason = _overall(cases, findings)
    return GateVerdict(
        decision=decision,
        reason=reason,
        mode=Mode.COUNTERS if counters else Mode.BASELINE,
        stage=Stage.SHADOW,
        blocks=False,
        policy="",
        baseline=_side(baseline),
        candidate=_side(candidate),
        differences=(*around, *suites),
        cases=tuple(cases),
        findings=findings,
        remedies=tuple(_remedies(baseline, candidate, cases)),
        subject=VerdictSubject.COMPARISON,
    )


def commits(verdict: GateVerdict, environments: Sequence[Run]) -> GateVerdict:
    """The verdict of a gate on two commits, as that of a comparison.

    Args:
        environments: A stored run of each side, if there are any.
    """
    around: tuple[drift.Difference, ...] = ()
    if len(environments) == 2:
        around = drift.differences(*(run.environment for run in environments))
    cases = tuple(map(_strict, verdict.cases))
    decision, reason = _overall(cases, verdict.findings)
    return replace(
        verdict,
        decision=decision,
        reason=reason,
        stage=Stage.SHADOW,
        blocks=False,
        policy="",
        cases=cases,
        differences=around,
        subject=VerdictSubject.COMPARISON,
    )


def is_across(case: GateCase) -> bool:
    """Whether different environments leave the comparison undecided."""
    return bool(case.findings) and case.findings[-1].check == ENVIRONMENT


# --- two runs ----------------------------------------------------------------------------


def _side(run: Run) -> GateSide:
    git = run.environment.git
    return GateSide(
        ref=run.run_id,
        commit=git.commit if git else "",
        run_id=run.run_id,
        run_folder=run.folder,
        uncommitted=run.environment.uncommitted,
    )


def _not_the_same(baseline: Case, candidate: Case) -> str:
    """Why two cases of one id differ: axes, code, or how samples are taken."""
    found = [
        f"{name}: {a} in the baseline, {b} in the candidate"
        for name, (a, b) in drift.measured(baseline, candidate).items()
    ]
    return f"not the same case: {'; '.join(found[:2])}" if found else ""


def _times(
    a: Run, b: Run, case_ids: Sequence[str], folder: Path
) -> tuple[Mapping[str, Comparison], Mapping[str, str], tuple[Finding, ...]]:
    """The comparisons of step times, why a case has none, and findings of the whole."""
    stored, findings = None, tuple[Finding, ...]()
    try:
        stored = calibration.load(
            folder, b.environment, b.suite.path, max_age_days=DEFAULT_MAX_AGE_DAYS, required=False
        )
    except HarnessError as error:
        reason = f"not used: {str(error).splitlines()[0]}"
        findings = (Finding(check="calibration", decision=Decision.GO, reason=reason),)
    baseline: dict[str, Sequence[Process]] = {}
    candidate: dict[str, Sequence[Process]] = {}
    why: dict[str, str] = {}
    cases = [{c.case_id: c for c in run.suite.cases} for run in (a, b)]
    for case_id in case_ids:
        measured = [run.of(case_id) for run in (a, b)]
        before, after = (
            baselines.processes(m, c[case_id]) for m, c in zip(measured, cases, strict=True)
        )
        if problem := too_few(before, after):
            why[case_id] = problem
        elif all(m.outcome is Outcome.OK for side in measured for m in side):
            baseline[case_id], candidate[case_id] = before, after
    own = {c: calibration.thresholds(stored, c, Thresholds(), {}) for c in candidate}
    day_cv = calibration.day_cv(stored)
    found = compare_stored(baseline, candidate, day_cv=day_cv, thresholds=own)
    return {c.case_id: c for c in found}, why, findings


def _judged(
    a: Run, b: Run, case: Case, *, comparison: Comparison | None, why: str, counters: bool
) -> GateCase:
    counted = _counted(a, b, case.case_id)
    measured = b.of(case.case_id)
    alone = replace(b, suite=replace(b.suite, cases=(case,)), measurements=measured)
    (summed,) = summary.summarise(alone)
    judged = decide.judge_case(
        decide.CaseEvidence(
            suite=b.suite.path,
            case=case,
            summary=summed,
            candidate=measured,
            baseline=a.of(case.case_id),
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
    if not counters and counted[0]:  # exact, so shown beside the times
        beside = replace(counted[1], counts=False)
        judged = replace(judged, counters=counted[0], findings=(*judged.findings, beside))
    return _strict(judged)


def _counted(a: Run, b: Run, case_id: str) -> tuple[tuple[CounterChange, ...], Finding]:
    (before, no_a), (after, no_b) = (counting.counts_of(run.of(case_id)) for run in (a, b))
    missing = "; ".join(f"{side}: {no}" for side, no in zip(SIDES, (no_a, no_b), strict=True) if no)
    return counting.judge(before, after, source="the baseline", why=missing)


def _strict(case: GateCase) -> GateCase:
    """A gate accepts a case that the baseline cannot run; a comparison leaves it undecided."""
    if case.state is not State.NEW:
        return case
    return _undecided(case, "ran", f"only the candidate can run it: {case.reason}")


def _across(case: GateCase, first: drift.Difference) -> GateCase:
    """The case with its comparison undecided: the environment may explain the difference."""
    if case.state is not State.COMPARED:
        return case
    case = _undecided(case, ENVIRONMENT, f"{first.name} differs, and may explain the change")
    if case.comparison is None:
        return case
    return replace(
        case, comparison=replace(case.comparison, pairs_needed=None, minutes_needed=None)
    )


def _undecided(case: GateCase, check: str, reason: str) -> GateCase:
    finding = Finding(check=check, decision=Decision.INCONCLUSIVE, reason=reason)
    return replace(
        case, decision=finding.decision, reason=reason, findings=(*case.findings, finding)
    )


def _one_side(run: Run, case: Case, state: State) -> GateCase:
    reason = f"only the {SIDES[state is State.NEW]} has this case"
    empty = GateCase(
        case_id=case.case_id,
        suite=run.suite.path,
        decision=Decision.INCONCLUSIVE,
        reason=reason,
        state=state,
    )
    return _undecided(empty, "ran", reason)


def _remedies(a: Run, b: Run, cases: Sequence[GateCase]) -> Iterator[str]:
    if any(map(is_across, cases)):
        yield "to compare the environments themselves: --across"
    commits = [g.commit[:10] for run in (a, b) if (g := run.environment.git) and not g.dirty_sha256]
    open_ = [c for c in cases if c.decision is Decision.INCONCLUSIVE and c.state is State.COMPARED]
    if open_ and len(set(commits)) == 2:
        pairs = max((c.comparison.pairs_needed or 0 for c in open_ if c.comparison), default=0)
        needed = f" ({pairs} pairs would decide)" if pairs else ""
        command = f"harness compare {' '.join(commits)} --suite {b.suite.path}"
        yield f"to decide, measure both commits now{needed}: {command}"


# --- the whole ---------------------------------------------------------------------------


def _overall(cases: Sequence[GateCase], findings: Sequence[Finding]) -> tuple[Decision, str]:
    decision, reason = decide.overall(cases, findings)
    if decision is Decision.INCONCLUSIVE:
        reason = "; ".join(_open(cases, findings)) or reason
    return decision, reason


def _open(cases: Sequence[GateCase], findings: Sequence[Finding]) -> Iterator[str]:
    """All reasons why a comparison is undecided, those that concern many cases first."""
    for f in findings:
        if f.counts and f.decision is Decision.INCONCLUSIVE:
            yield f"{f.check}: {f.reason}"
    if across := [c for c in cases if is_across(c)]:
        yield across[0].reason
    for state, name in zip((State.MISSING, State.NEW), SIDES, strict=True):
        if count := sum(c.state is state for c in cases):
            yield f"{count} case{'s'[: count > 1]} only in the {name}"
    left = [
        c
        for c in cases
        if c.decision is Decision.INCONCLUSIVE and c.state not in ONE_SIDE and not is_across(c)
    ]
    if left:
        more = f", and {len(left) - 1} more" if len(left) > 1 else ""
        yield f"{left[0].case_id}: {left[0].reason}{more}"
