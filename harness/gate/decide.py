"""From what was measured to a verdict. Pure: records in, records out.

Each case gets findings, one per check, in this order: it ran and is right; the policy's floors
and ceilings; the comparison. The worst finding that counts decides the case, and the worst case
the whole. What is missing or unknown is INCONCLUSIVE, never GO.
"""

import datetime
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis import verdict
from harness.analysis.comparison import Change, Comparison
from harness.gate import counters
from harness.gate.policy import Exemption, Policy
from harness.gate.records import WORST_FIRST, CounterChange, GateCase, Mode, Stage, State
from harness.records import (
    FAILURES,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Fact,
    Finding,
    Measurement,
    Outcome,
    gpu_matches,
)

AGAINST = {
    Mode.RELATIVE: "against the baseline commit",
    Mode.BASELINE: "against the baseline",
    Mode.COUNTERS: counters.CHECK,
}
NOISY = frozenset({AGAINST[Mode.RELATIVE], AGAINST[Mode.BASELINE]})
"""Checks that compare times: all that noise can turn. A counter has none."""
NOTHING_TO_COMPARE = frozenset({Outcome.UNSUPPORTED, Outcome.INCORRECT, Outcome.NON_FINITE})
"""Outcomes of the base after which a case is as good as new: a wrong kernel has no latency."""

_OF_CHANGE = {
    Change.SAME: Decision.GO,
    Change.FASTER: Decision.GO,
    Change.SLOWER: Decision.NO_GO,
    Change.UNDECIDED: Decision.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseEvidence:
    """All that is known of one case."""

    suite: str
    case: Case
    head: CaseSummary | None
    """None: nothing of it was measured."""
    measured: Sequence[Measurement] = ()
    """The head's processes."""
    base: Sequence[Measurement] = ()
    refused: str = ""
    """Why the base cannot run the case, known before anything ran; empty where it can."""
    comparison: Comparison | None = None
    no_comparison: str = ""
    """Why there is none, where the base, or a baseline, is there."""
    folder: str = ""
    """Of the head's run, for the log."""
    counted: tuple[tuple[CounterChange, ...], Finding] | None = None
    """What the comparison of counters said, in that mode."""


def judge_case(
    evidence: CaseEvidence,
    *,
    mode: Mode,
    policy: Policy,
    environment: Environment,
    today: datetime.date,
) -> GateCase:
    """The gate's answer for one case."""
    case_id = evidence.case.case_id
    if evidence.head is None:
        state, found = State.UNCOMPARED, [_not_measured(evidence.no_comparison)]
    else:
        found = _ran(evidence, evidence.head)
        state = State.FAILED
        if evidence.head.outcome is Outcome.OK:
            found += _absolute(evidence.head, mode, policy, environment)
            state, compared = _compared(evidence, mode, policy)
            found += compared
    found, excuse, unexpected = _excused(found, case_id, state, policy, today)
    decision, reason = settle(found)
    bad = next((m for m in evidence.measured if m.outcome is not Outcome.OK), None)
    return GateCase(
        case_id=case_id,
        suite=evidence.suite,
        decision=decision,
        reason=reason,
        state=state,
        findings=tuple(found),
        comparison=evidence.comparison,
        counters=evidence.counted[0] if evidence.counted else (),
        # A case that is only counted is timed once, which is not a measurement of its time.
        baseline_s=None if evidence.counted else _median(evidence.base, evidence.case),
        candidate_s=None if evidence.counted else _median(evidence.measured, evidence.case),
        exemption=excuse,
        unexpected_pass=unexpected,
        gpu_s=sum(m.wall_s for m in (*evidence.base, *evidence.measured)),
        log=f"{evidence.folder}/{bad.log}" if bad and bad.log else "",
    )


def judge_gone(
    suite: str, case_id: str, why: str, *, policy: Policy, today: datetime.date
) -> GateCase:
    """The answer for a case that there was, and that is not measured."""
    found = [_not_measured(why)]
    found, excuse, _ = _excused(found, case_id, State.MISSING, policy, today)
    decision, reason = settle(found)
    return GateCase(
        case_id=case_id,
        suite=suite,
        decision=decision,
        reason=reason,
        state=State.MISSING,
        findings=tuple(found),
        exemption=excuse,
    )


def _not_measured(reason: str) -> Finding:
    return Finding(check="ran", decision=Decision.INCONCLUSIVE, reason=reason)


def settle(found: Sequence[Finding]) -> tuple[Decision, str]:
    """The worst finding that counts, and its reason."""
    told = [f for f in found if f.counts]
    if not told:
        return Decision.GO, f"excused: {found[-1].reason}" if found else "nothing was asked"
    worst = min(told, key=lambda f: WORST_FIRST[f.decision])
    if worst.decision is Decision.GO:
        return Decision.GO, told[-1].reason
    return worst.decision, worst.reason


# --- the checks --------------------------------------------------------------------------


def _ran(evidence: CaseEvidence, head: CaseSummary) -> list[Finding]:
    """Whether it ran and is right, and whether what ran is what was asked for."""
    found = _said(verdict.ran(evidence.case, head), "ran")
    ended, base = head.outcome, {m.outcome for m in evidence.base}
    lost = ended not in (None, Outcome.OK, Outcome.INVALID_ENVIRONMENT)
    if lost and ended not in FAILURES and base == {Outcome.OK}:
        reason = f"{found.reason}; the baseline runs it"
        found = replace(found, decision=Decision.NO_GO, reason=reason)
    elif ended in FAILURES and ended in base:
        found = replace(found, reason=f"{found.reason}; so does the baseline")
    if found.fact is Fact.RAN:
        count = sum(m.outcome is Outcome.OK for m in evidence.measured)
        found = replace(found, reason=f"{_counted(count, 'process')} ended ok")
    attested = verdict.attested(head)
    return [found, *([_said(attested, verdict.WHAT_RAN)] if attested else [])]


def _said(found: Finding, check: str) -> Finding:
    """A finding of the suite's rules as one of the gate's, with its sentence."""
    return replace(found, check=check, reason=units.finding_sentence(found))


def _absolute(
    head: CaseSummary, mode: Mode, policy: Policy, environment: Environment
) -> list[Finding]:
    """What floors and ceilings say. Counters mode compares, and asks none of them."""
    device = environment.device_name
    rules = [
        rule
        for rule in policy.rules
        if mode is not Mode.COUNTERS and gpu_matches(rule.gpu, device)
        if rule.match.accepts(head.case)
    ]
    if not rules and mode is Mode.ABSOLUTE:
        unknown = f"the policy states no floor or ceiling for it on {device}"
        return [Finding(check="absolute", decision=Decision.INCONCLUSIVE, reason=unknown)]
    found = [_said(verdict.judge_case(rule, head), rule.name) for rule in rules]
    return [
        f if f.decision is Decision.GO else replace(f, reason=f"{f.reason}; {f.check}")
        for f in found
    ]


def _compared(evidence: CaseEvidence, mode: Mode, policy: Policy) -> tuple[State, list[Finding]]:
    if mode is Mode.ABSOLUTE:
        return State.UNCOMPARED, []
    check = AGAINST[mode]
    if evidence.counted is not None:
        finding = evidence.counted[1]
        known = finding.decision is not Decision.INCONCLUSIVE
        return State.COMPARED if known else State.UNCOMPARED, [finding]
    if evidence.comparison is not None:
        decision, reason = _OF_CHANGE[evidence.comparison.change], evidence.comparison.reason
        if evidence.no_comparison:
            reason = f"{reason} ({evidence.no_comparison})"
        return State.COMPARED, [Finding(check=check, decision=decision, reason=reason)]
    bad = next((m for m in evidence.base if m.outcome is not Outcome.OK), None)
    if evidence.refused or (bad is not None and bad.outcome in NOTHING_TO_COMPARE):
        why = evidence.refused or (f"{bad.outcome}: {bad.detail}" if bad else "")
        decision = Decision.NO_GO if policy.new_cases_block else Decision.GO
        blocks = "; the policy blocks new cases" if policy.new_cases_block else ""
        reason = (
            f"new: the baseline cannot run it ({_first_line(why)}); absolute rules only{blocks}"
        )
        return State.NEW, [Finding(check=check, decision=decision, reason=reason)]
    if bad is not None:
        reason = f"the baseline did not run: {str(bad.outcome).replace('_', ' ')}: "
        reason += _first_line(bad.detail)
    else:
        reason = evidence.no_comparison or "no process of the other side ran"
    finding = Finding(check=check, decision=Decision.INCONCLUSIVE, reason=reason)
    return State.UNCOMPARED, [finding]


# --- exemptions --------------------------------------------------------------------------


def _excused(
    found: list[Finding], case_id: str, state: State, policy: Policy, today: datetime.date
) -> tuple[list[Finding], str, bool]:
    """The findings with the policy's exemptions applied, their sentence, and whether a case that
    is expected to fail has passed."""
    said, unexpected = [], False
    for exemption in policy.exemptions:
        if not exemption.covers(case_id):
            continue
        if exemption.expired(today):
            found = [*found, expired(exemption)]
            continue
        if exemption.expect == "noisy":
            # Where nothing was compared, as a base or a baseline is missing, it was not for noise.
            if state is not State.COMPARED or not any(f.check in NOISY for f in found):
                continue
            found = [_uncounted(f) if f.check in NOISY else f for f in found]
        said.append(exemption.sentence)
        if exemption.expect == "missing" and state is State.MISSING:
            found = [_uncounted(f) for f in found]
        elif exemption.expect == "failure":
            if all(f.decision is Decision.GO for f in found):
                unexpected = True
                told = f"it passed, and is expected to fail; drop {exemption.place}"
                found = [*found, Finding(check="exemption", decision=Decision.GO, reason=told)]
            else:
                found = [_uncounted(f) for f in found]
    return found, "; ".join(said), unexpected


def expired(exemption: Exemption) -> Finding:
    """What an exemption says once its day is over."""
    return Finding(
        check="exemption",
        decision=Decision.NO_GO,
        reason=f"the exemption at {exemption.place} expired on {exemption.expires.isoformat()} "
        f"({exemption.reason}); repair the case and drop the line, or renew it",
    )


def _uncounted(finding: Finding) -> Finding:
    """A finding that is reported and turns nothing; one of an expired exemption still counts."""
    return finding if finding.check == "exemption" else replace(finding, counts=False)


def _median(measured: Sequence[Measurement], case: Case) -> float | None:
    enough = case.settings.min_samples
    medians = [statistics.median(m.kept_s) for m in measured if m.is_evidence(enough)]
    return statistics.median(medians) if medians else None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


# --- the whole ---------------------------------------------------------------------------


def overall(cases: Sequence[GateCase], findings: Sequence[Finding]) -> tuple[Decision, str]:
    """The worst of all cases and findings, in one sentence."""
    whole = [f for f in findings if f.counts]
    decisions = [f.decision for f in whole] + [c.decision for c in cases]
    if not decisions:
        return Decision.GO, "the change concerns no case"
    worst = min(decisions, key=lambda d: WORST_FIRST[d])
    decisive = [f"{f.check}: {f.reason}" for f in whole if f.decision is worst]
    concerned = [c for c in cases if c.decision is worst]
    if worst is not Decision.GO:
        decisive += [f"{c.case_id}: {c.reason}" for c in concerned]
        share = f"{len(concerned)} of {len(cases)} cases: " if concerned and len(cases) > 1 else ""
        more = f"; and {len(decisive) - 2} more" if len(decisive) > 2 else ""
        return worst, share + "; ".join(decisive[:2]) + more
    faster = [c.comparison for c in cases if c.comparison and c.change is Change.FASTER]
    text = f"{_counted(len(cases), 'case')} hold" + ("s" if len(cases) == 1 else "")
    if not cases:
        text = "the change concerns no case"
    if faster:
        best = min(faster, key=lambda c: c.ratio)
        text += f"; {len(faster)} faster, {best.case_id} by {units.change(best.ratio)}"
    if new := [c for c in cases if c.state is State.NEW]:
        text += f"; {len(new)} new"
    if passed := [c for c in cases if c.unexpected_pass]:
        text += f"; {len(passed)} passed that the policy expects to fail"
    return worst, text


def blocks(decision: Decision, policy: Policy) -> bool:
    """Whether the policy keeps a change with this verdict from being merged."""
    if policy.stage is not Stage.BLOCK:
        return False
    return decision is Decision.NO_GO or (
        decision is not Decision.GO and policy.inconclusive_blocks
    )


def remedies(
    cases: Sequence[GateCase],
    policy: Policy,
    mode: Mode,
    *,
    on_gpu: bool = False,
    merging: bool = True,
) -> list[str]:
    """What would settle what is open, in sentences with a command or a setting.

    Args:
        merging: A change asks to come in. What was only compared needs no leave.
    """
    said = []
    undecided = [c.comparison for c in cases if c.comparison and c.decision is not Decision.GO]
    asked = [c.pairs_needed or 0 for c in undecided]
    if most := max(asked, default=0):
        how, where = f"confirm_pairs in {policy.path}", ""
        if mode is Mode.BASELINE:
            how, where = "harness gate --base REF", " here and now"
        said.append(f"{most} pairs{where} would decide{_cost(cases, most, on_gpu)}: {how}")
    if not merging:
        return said
    if any(c.state is State.MISSING and c.decision is not Decision.GO for c in cases):
        said.append(
            f"if a case is meant to go, exempt it in {policy.path}: "
            "{cases: [...], expect: missing, reason: ..., expires: ...}"
        )
    limits = {rule.name for rule in policy.rules}
    broken = (f for c in cases for f in c.findings if f.counts and f.decision is Decision.NO_GO)
    if any(f.check in limits for f in broken):
        said.append(f"if a floor or ceiling is meant to move, move it in {policy.path}")
    if mode is Mode.COUNTERS and any(c.counters and c.decision is not Decision.GO for c in cases):
        said.append(f"if the change is meant, accept it: {counters.RENEW}")
    if mode is Mode.COUNTERS and any(c.state is State.UNCOMPARED for c in cases):
        said.append("a base needs no counters on record: harness gate --counters --base REF")
    if mode is Mode.ABSOLUTE and any(_lacks_rules(c) for c in cases):
        said.append(
            f"state floors and ceilings under `absolute` in {policy.path}, or compare with a "
            "base: harness gate --base REF"
        )
    return said


def _cost(cases: Sequence[GateCase], pairs: int, on_gpu: bool) -> str:
    """What so many pairs of every open case take: `confirm_pairs` is one number for all of them,
    those included whose comparison is excused. Empty where nobody knows it of one of them."""
    compared = [c.comparison for c in cases if c.comparison]
    open_ = [(c.minutes_needed, c.pairs_needed) for c in compared if c.pairs_needed]
    each = [minutes / needed for minutes, needed in open_ if minutes and needed]
    if len(each) < len(open_):
        return ""
    minutes = units.number(pairs * sum(each))
    unit = "GPU minutes" if on_gpu else "minutes"
    return f", about {minutes} {unit} for {_counted(len(each), 'open case')}"


def _lacks_rules(case: GateCase) -> bool:
    return any(f.check == "absolute" for f in case.findings)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{('es' if noun.endswith('s') else 's') * (number != 1)}"
