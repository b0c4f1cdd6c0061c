"""Sentences about the cases of a gate: a change against its base."""

from collections import Counter
from collections.abc import Sequence

from harness import units
from harness.gate.counters import CHECK
from harness.gate.records import GateCase, GateVerdict, Stage, State
from harness.records import WORST_FIRST, Change, Decision

MAX_CHECKS = 20
"""Checks that the text of one case lists."""


def case_counts(cases: Sequence[GateCase]) -> str:
    """`1 NO-GO, 2 INCONCLUSIVE, 9 GO`."""
    counts = Counter(case.decision for case in cases)
    return ", ".join(f"{counts[d]} {d}" for d in WORST_FIRST if counts[d]) or "no cases"


def change_text(case: GateCase) -> str:
    """`4.1 % [3.2 … 5.0] slower`, `+0.1 % [-1.0 … +1.0] (same)`, the counters that differ, or why
    there is no comparison."""
    c = case.comparison
    if c is not None:
        text = units.ratio(c.ratio)
        return text if c.change in (Change.SLOWER, Change.FASTER) else f"{text} ({c.change})"
    if case.counters:
        return ", ".join(map(str, case.counters))
    state = "not compared" if case.state is State.UNCOMPARED else str(case.state)
    if case.candidate_s is not None:
        return f"{state}: {units.duration(case.candidate_s)}"
    return state


def open_question(case: GateCase) -> str:
    """What an undecided case could have shown, and what would decide it."""
    c = case.comparison
    if c is None or case.decision is not Decision.INCONCLUSIVE:
        return ""
    parts = []
    if c.smallest_effect is not None:
        parts.append(f"a slowdown of {units.percent(c.smallest_effect)} would have been found")
    if c.pairs_needed is not None:
        minutes = c.minutes_needed
        cost = f", {units.number(minutes)} minutes" if minutes is not None else ""
        parts.append(f"{c.pairs_needed} pairs{cost} would decide")
    return "; ".join(parts)


def case_reason(case: GateCase) -> str:
    """`case_sentence` for use beside `change_text`, which it does not repeat."""
    counted = [f.detail for f in case.findings if f.check == CHECK and f.decision is case.decision]
    return case_sentence(case, counted[0] if case.counters and counted else "")


def case_sentence(case: GateCase, reason: str = "") -> str:
    """The reason, or that of the case; what is undecided and what is exempt."""
    return "; ".join(filter(None, (reason or case.reason, open_question(case), case.exemption)))


def case_text(case: GateCase) -> str:
    """Everything about a case, over several lines."""
    lines = [f"{case.decision}: {case_sentence(case)}", f"change: {change_text(case)}"]
    if case.baseline_s is not None and case.candidate_s is not None:
        times = units.duration(case.baseline_s), units.duration(case.candidate_s)
        pairs = case.comparison.ratio.n if case.comparison else 0
        lines.append(f"step time: {times[0]} → {times[1]}, {pairs} pairs")
    for f in case.findings[:MAX_CHECKS]:
        excused = "" if f.counts else " (excused)"
        lines.append(f"  {f.decision} by {f.check}{excused}: {f.reason}")
    if len(case.findings) > MAX_CHECKS:
        lines.append(f"  and {len(case.findings) - MAX_CHECKS} more checks")
    if case.log:
        lines.append(f"log: {case.log}")
    return "\n".join(lines)


def undecided_text(verdict: GateVerdict) -> str:
    """The setting of the policy by which an undecided verdict blocks or not; else empty."""
    settled = verdict.decision in (Decision.GO, Decision.NO_GO)
    if settled or verdict.stage is not Stage.BLOCK:
        return ""
    return f"inconclusive: {'block' if verdict.blocks else 'neutral'}"
