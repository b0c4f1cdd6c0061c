"""From measurements to a verdict. Records in, records out; for a changed kernel also its IR.

Each case gets one finding per check, in this order: it ran correctly; the comparison. The worst
finding that counts decides the case, and the worst case decides the gate.
Anything missing or unknown is INCONCLUSIVE, never GO.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from harness.analysis import verdict
from harness.analysis.summary import step_time
from harness.gate import counters
from harness.gate.policy import Policy
from harness.gate.records import GateCase, Mode, State
from harness.records import (
    FAILURES,
    NOT_OF_THE_CODE,
    Case,
    CaseSummary,
    Change,
    Comparison,
    Decision,
    Fact,
    Facts,
    Finding,
    Measurement,
    Outcome,
)
from harness.store.ir import changed_kernels
from harness.suite.choice import fits

AGAINST = {
    Mode.RELATIVE: "against the baseline commit",
    Mode.BASELINE: "against the baseline",
    Mode.COUNTERS: counters.CHECK,
}
NOTHING_TO_COMPARE = frozenset({Outcome.UNSUPPORTED, Outcome.INCORRECT, Outcome.NON_FINITE})
"""Outcomes of the baseline that make a case new, because the baseline has no valid step time."""

_OF_CHANGE = {
    Change.SAME: Decision.GO,
    Change.FASTER: Decision.GO,
    Change.SLOWER: Decision.NO_GO,
    Change.UNDECIDED: Decision.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEvidence:
    mode: Mode
    policy: Policy
    suite: str
    case: Case
    summary: CaseSummary | None
    """Of the candidate; None if it was not measured."""
    candidate: Sequence[Measurement] = ()
    baseline: Sequence[Measurement] = ()
    refused: str = ""
    """Why the baseline refused the case before it ran."""
    comparison: Comparison | None = None
    no_comparison: Facts = field(default_factory=dict)
    """Why there is no comparison, or what weakens it."""
    folder: str = ""
    """Of the candidate's run, for the log."""
    counted: counters.Compared | None = None
    """Result of the comparison of counters, in that mode."""
    same: bool = False
    """Whether the first pair runs the same machine code in the same time."""


def judge_case(evidence: CaseEvidence) -> GateCase:
    case_id = evidence.case.case_id
    if evidence.summary is None:
        state, found = State.UNCOMPARED, [not_measured(evidence.no_comparison)]
    else:
        found = _ran(evidence, evidence.summary)
        state = State.FAILED
        if evidence.summary.outcome is Outcome.OK:
            state, compared = _compared(evidence)
            found += compared
    findings, excuse = _excused(found, case_id, state, evidence.policy)
    bad = next((m for m in evidence.candidate if m.outcome is not Outcome.OK), None)
    sides = evidence.baseline, evidence.candidate
    return GateCase(
        case_id=case_id,
        suite=evidence.suite,
        state=state,
        findings=findings,
        exemption=excuse,
        comparison=evidence.comparison,
        counters=evidence.counted[0] if evidence.counted else (),
        kernels=tuple(changed_kernels(*(m[0].profile for m in sides))) if all(sides) else (),
        # A counted case runs once, which does not measure its time.
        baseline_s=None if evidence.counted else step_time(evidence.case, evidence.baseline),
        candidate_s=None if evidence.counted else step_time(evidence.case, evidence.candidate),
        gpu_s=sum(m.wall_s for m in (*evidence.baseline, *evidence.candidate)),
        log=f"{evidence.folder}/{bad.log}" if bad and bad.log else "",
    )


def judge_gone(suite: str, case_id: str, why: Facts, policy: Policy) -> GateCase:
    """The answer for a case of the baseline that is not measured."""
    state = State.MISSING
    found, excuse = _excused([not_measured(why)], case_id, state, policy)
    return GateCase(case_id=case_id, suite=suite, state=state, findings=found, exemption=excuse)


def not_measured(why: Facts) -> Finding:
    return Finding(check="ran", decision=Decision.INCONCLUSIVE, facts=why)


def _ran(evidence: CaseEvidence, summary: CaseSummary) -> list[Finding]:
    """Whether it ran correctly, and with the required kernels and operators."""
    pairs = 1 if evidence.same else evidence.case.settings.processes
    asked = replace(evidence.case, settings=replace(evidence.case.settings, processes=pairs))
    found = replace(verdict.ran(asked, summary), check="ran")
    ended, base = summary.outcome, {m.outcome for m in evidence.baseline}
    lost = ended not in (None, Outcome.OK, *NOT_OF_THE_CODE)
    if lost and ended not in FAILURES and base == {Outcome.OK}:
        found = replace(found, decision=Decision.NO_GO, facts={"baseline_runs": True})
    elif ended in FAILURES and ended in base:
        found = replace(found, facts={"baseline_fails": True})
    if found.fact is Fact.RAN:
        count = sum(m.outcome is Outcome.OK for m in evidence.candidate)
        found = replace(found, fact=Fact.STATED, facts={"ended_ok": count})
    attested = verdict.attested(summary)
    return [found, *([replace(attested, check=verdict.WHAT_RAN)] if attested else [])]


def _compared(evidence: CaseEvidence) -> tuple[State, list[Finding]]:
    check = AGAINST[evidence.mode]
    but = {"but": evidence.no_comparison}
    if evidence.counted is not None:
        finding = evidence.counted[1]
        state = State.UNCOMPARED if finding.decision is Decision.INCONCLUSIVE else State.COMPARED
        return state, [replace(finding, facts={**finding.facts, **but})]
    if evidence.same:
        same = {"same_machine_code": True}
        return State.SAME, [Finding(check=check, decision=Decision.GO, facts=same)]
    if (found := evidence.comparison) is not None:
        decision, facts = _OF_CHANGE[found.change], {**found.facts, **but}
        return State.COMPARED, [Finding(check=check, decision=decision, facts=facts)]
    bad = next((m for m in evidence.baseline if m.outcome is not Outcome.OK), None)
    if evidence.refused or (bad is not None and bad.outcome in NOTHING_TO_COMPARE):
        why = evidence.refused or (f"{bad.outcome}: {bad.detail}" if bad else "")
        new = {"new": why.strip().partition("\n")[0]}
        return State.NEW, [Finding(check=check, decision=Decision.GO, facts=new)]
    without = {"baseline_failed": True} if bad else evidence.no_comparison or {"no_baseline": True}
    finding = Finding(check=check, decision=Decision.INCONCLUSIVE, facts=without)
    if bad is not None:
        finding = replace(finding, fact=Fact.ENDED, outcome=bad.outcome, detail=bad.detail)
    return State.UNCOMPARED, [finding]


def _excused(
    found: list[Finding], case_id: str, state: State, policy: Policy
) -> tuple[tuple[Finding, ...], Facts]:
    """The findings with the exemption of the case applied, and its facts. It excuses a
    comparison that is not GO, and a case that is missing; never a case that failed, or that could
    not be compared."""
    today = datetime.date.today()
    valid = [e for e in policy.form.exempt if today <= e.expires]
    entry = next((e for e in valid if any(fits(case_id, p) for p in e.cases)), None)
    if entry is None or state not in (State.COMPARED, State.MISSING):
        return tuple(found), {}
    whole = state is State.MISSING
    meant = [f for f in found if f.decision is not Decision.GO]
    meant = [f for f in meant if whole or f.check in AGAINST.values()]
    kept = (replace(f, counts=False) if f in meant else f for f in found)
    facts = {"exempt_until": entry.expires.isoformat(), "exempt_because": entry.because}
    return tuple(kept), facts if meant else {}


def blocks(decision: Decision, policy: Policy) -> bool:
    """Whether the policy keeps a change with this verdict from being merged."""
    if policy.form.stage != "block" or decision is Decision.GO:
        return False
    return decision is Decision.NO_GO or policy.form.inconclusive == "block"
