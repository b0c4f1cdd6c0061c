"""Sentences about the cases of a gate: a change against its base."""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial

from harness import units
from harness.gate.compare import ENVIRONMENT
from harness.gate.counters import CHECK, RENEW
from harness.gate.records import GateCase, GateRecord, GateSubject, Mode, Stage, State
from harness.records import WORST_FIRST, Change, Decision, Finding
from harness.report.text import fact_text, filled, words

_BEFORE, _SAID = words("gate").values()
"""Clauses before and after what a rule of the suites says."""
because = partial(filled, _SAID)
"""What the facts of a comparison say, or those of a bisection."""


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


def stated(f: Finding) -> str:
    """What a finding of a gate states."""
    return filled(_BEFORE, f.facts) + fact_text(f) + because(f.facts)


def reason(case: GateCase) -> str:
    """The finding that decided, as one sentence."""
    decisive = case.decisive
    return stated(decisive) if decisive else f"excused: {stated(case.findings[-1])}"


def case_reason(case: GateCase) -> str:
    """`case_sentence` for use beside `change_text`, which it does not repeat."""
    counted = [f.facts for f in case.findings if f.check == CHECK and f.decision is case.decision]
    facts = counted[0] if case.counters and counted else {}
    beside = {name: facts.get(name) for name in ("recorded_in", "differs_from")}
    return case_sentence(case, because(beside))


def case_sentence(case: GateCase, said: str = "") -> str:
    """What is said, or the reason of the case; what is undecided and what is exempt."""
    parts = said or reason(case), open_question(case), because(case.exemption)
    return "; ".join(filter(None, parts))


def case_text(case: GateCase) -> str:
    """Everything about a case, over several lines."""
    lines = [f"{case.decision}: {case_sentence(case)}", f"change: {change_text(case)}"]
    if case.baseline_s is not None and case.candidate_s is not None:
        times = units.duration(case.baseline_s), units.duration(case.candidate_s)
        pairs = case.comparison.ratio.n if case.comparison else 0
        lines.append(f"step time: {times[0]} → {times[1]}, {pairs} pairs")
    for f in case.findings:
        excused = "" if f.counts else " (excused)"
        lines.append(f"  {f.decision} by {f.check}{excused}: {stated(f)}")
    if case.log:
        lines.append(f"log: {case.log}")
    return "\n".join(lines)


def undecided_text(verdict: GateRecord) -> str:
    """The setting of the policy by which an undecided verdict blocks or not; else empty."""
    settled = verdict.decision in (Decision.GO, Decision.NO_GO)
    if settled or verdict.stage is not Stage.BLOCK:
        return ""
    return f"inconclusive: {'block' if verdict.blocks else 'neutral'}"


def verdict_reason(verdict: GateRecord) -> str:
    """What decided, as one sentence."""
    decision = verdict.decision
    if decision is Decision.GO:
        return _passed(verdict.cases)
    cases = [c for c in verdict.cases if c.decision is decision]
    said = [f"{f.check}: {stated(f)}" for f in verdict.findings if f.decision is decision]
    said += [f"{c.case_id}: {reason(c)}" for c in cases]
    of = len(verdict.cases)
    share = f"{len(cases)} of {of} cases: " if cases and of > 1 else ""
    more = f"; and {len(said) - 2} more" if len(said) > 2 else ""
    return share + "; ".join(said[:2]) + more


def _not_measured(cases: Sequence[GateCase]) -> bool:
    """Whether both sides are the same code, so that none was measured."""
    return bool(cases) and all(c.state is State.SAME and not c.gpu_s for c in cases)


def _passed(cases: Sequence[GateCase]) -> str:
    """What a GO says of its cases."""
    text = units.plural("case", len(cases))
    if _not_measured(cases):
        return f"{text}: {reason(cases[0])}; not measured"
    text += " passed"
    faster = [c.comparison for c in cases if c.comparison and c.change is Change.FASTER]
    if faster:
        best = min(faster, key=lambda c: c.ratio.value)
        text += f"; {len(faster)} faster ({best.case_id}: {units.ratio(best.ratio.value)})"
    new = sum(c.state is State.NEW for c in cases)
    return f"{text}; {new} new" if new else text


def next_steps(verdict: GateRecord) -> Iterator[str]:
    """What to do next, in sentences with a command or a setting."""
    counting, policy = verdict.mode is Mode.COUNTERS, verdict.policy
    compared = verdict.subject is GateSubject.COMPARISON  # nothing is to be merged
    if _not_measured(verdict.cases):
        yield "to measure it all the same: the option --measure"
    if any(f.check == ENVIRONMENT for case in verdict.cases for f in case.findings):
        yield "to judge although these differ: --across"
    failed = [c for c in verdict.cases if c.decision is not Decision.GO]
    pairs = [c.comparison.pairs_needed or 0 for c in failed if c.comparison]
    if policy and any(pairs):
        yield f"{max(pairs)} pairs would decide: confirm_pairs in {policy}"
    base, head = verdict.baseline, verdict.candidate
    commits = [side.commit[:10] for side in (base, head) if side and not side.uncommitted]
    commits = [] if len(set(filter(None, commits))) < 2 else commits
    both = [c for c in failed if c.decision is not Decision.NO_GO and c.state is State.COMPARED]
    if both and commits and not policy:  # of two runs
        command = f"harness compare {' '.join(commits)} --suite {both[0].suite}"
        yield f"to decide, measure both commits now: {command}"
    if compared:
        return
    slower = [c for c in failed if c.change is Change.SLOWER]
    if slower and commits:
        case = f"{slower[0].suite} --case {shlex.quote(slower[0].case_id)}"
        ends = f"--good {commits[0]} --bad {commits[1]}"
        yield f"to find the commit: harness bisect {case} {ends}"
    if slower or any(c.state is State.MISSING for c in failed):
        exempt = "exempt: [{cases: [...], because: ..., expires: DATE}]"
        yield f"if this is intended, add to {policy}: {exempt}"
    if counting and any(c.counters for c in failed):
        yield f"if the difference is intended, accept it: {RENEW}"
    if counting and any(c.state is State.UNCOMPARED for c in verdict.cases):
        yield "to compare with a commit instead: harness gate --counters --base REF"


def encode(verdict: GateRecord) -> str:
    """The verdict as JSON, with its exit status."""
    fields = plain(verdict) | {"cases": [plain(case) for case in verdict.cases]}
    fields["next_steps"] = [*next_steps(verdict)]
    fields["exit_status"] = verdict.decision.exit_status
    return json.dumps(fields, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(answer: GateCase | GateRecord) -> dict[str, object]:
    """All that it says, for JSON."""
    why = reason(answer) if isinstance(answer, GateCase) else verdict_reason(answer)
    found = [{**asdict(f), "reason": stated(f)} for f in answer.findings]
    return {"decision": answer.decision, "reason": why, **asdict(answer), "findings": found}
