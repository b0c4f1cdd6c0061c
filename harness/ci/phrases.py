"""What every rendering says of a case, in the same words."""

import math

from harness import units
from harness.gating.counting import CHECK
from harness.gating.records import WORST_FIRST, GateCase, GateVerdict, Stage
from harness.records import Decision

MAX_CHECKS = 20
"""Of a case, named in its text."""


def worst_first(verdict: GateVerdict) -> list[GateCase]:
    """The cases in the order in which they matter; those alike keep theirs."""
    return sorted(verdict.cases, key=lambda c: WORST_FIRST[c.decision])


def case_counts(verdict: GateVerdict) -> str:
    """`1 NO-GO, 2 INCONCLUSIVE, 9 GO`."""
    of = [(decision, verdict.count(decision)) for decision in WORST_FIRST]
    return ", ".join(f"{n} {decision}" for decision, n in of if n) or "no cases"


def change_text(case: GateCase) -> str:
    """`+4.1 % [+3.2 … +5.0] slower`, the counters that differ, or why there is no comparison."""
    c = case.comparison
    if c is not None and math.isfinite(c.ratio) and c.ratio > 0:
        return f"{units.change(c.ratio, c.low, c.high)} {c.change}"
    if case.counters:
        differ = (f"{c.name} {_count(c.before)} → {_count(c.after)}" for c in case.counters)
        return ", ".join(differ)
    if case.candidate_s is not None and math.isfinite(case.candidate_s):
        return f"{case.state}: {units.duration(case.candidate_s)}"
    return str(case.state)


def open_question(case: GateCase) -> str:
    """What an undecided case could have seen, and what would decide it."""
    c = case.comparison
    if c is None or case.decision is not Decision.INCONCLUSIVE:
        return ""
    seen = needed = ""
    if c.smallest_effect is not None:
        seen = f"a slowdown of {units.percent(c.smallest_effect)} would have been found"
    if c.pairs_needed is not None:
        minutes = c.minutes_needed
        cost = f", {units.number(minutes)} minutes" if minutes is not None else ""
        needed = f"{c.pairs_needed} pairs{cost} would decide"
    return "; ".join(filter(None, (seen, needed)))


def case_reason(case: GateCase) -> str:
    """What `sentence` says; it stands beside the change, and does not say that once more."""
    counted = [f.detail for f in case.findings if f.check == CHECK and f.decision is case.decision]
    return _said(case, counted[0] if case.counters and counted and counted[0] else case.reason)


def case_sentence(case: GateCase) -> str:
    """The reason, with what is open, what is excused and what surprised; it stands alone."""
    return _said(case, case.reason)


def _said(case: GateCase, reason: str) -> str:
    parts = [reason, open_question(case)]
    if case.exemption:
        parts.append(f"exempt: {case.exemption}")
    if case.unexpected_pass:
        parts.append("expected to fail, and it passed: take it off the policy's list")
    return "; ".join(filter(None, parts))


def case_text(case: GateCase) -> str:
    """All that is known of a case, over several lines."""
    lines = [f"{case.decision}: {case.reason}", f"change: {change_text(case)}"]
    if case.baseline_s is not None and case.candidate_s is not None:
        times = units.duration(case.baseline_s), units.duration(case.candidate_s)
        pairs = case.comparison.pairs if case.comparison else 0
        lines.append(f"step time: {times[0]} → {times[1]}, {pairs} pairs")
    if said := open_question(case):
        lines.append(said)
    if case.exemption:
        lines.append(f"exempt: {case.exemption}")
    for f in case.findings[:MAX_CHECKS]:
        excused = "" if f.counts else " (excused)"
        lines.append(f"  {f.decision} by {f.check}{excused}: {f.reason}")
    if len(case.findings) > MAX_CHECKS:
        lines.append(f"  and {len(case.findings) - MAX_CHECKS} more checks")
    if case.log:
        lines.append(f"log: {case.log}")
    return "\n".join(lines)


def undecided_text(verdict: GateVerdict) -> str:
    """`inconclusive: neutral`, where that setting of the policy's and not its stage says whether
    the verdict blocks; else empty."""
    settled = verdict.decision in (Decision.GO, Decision.NO_GO)
    if settled or verdict.stage is not Stage.BLOCK:
        return ""
    return f"inconclusive: {'block' if verdict.blocks else 'neutral'}"


def _count(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
