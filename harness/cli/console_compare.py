"""Rich renderables of a comparison: how the environments differ, then case by case."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import units
from harness.analysis.comparison import Change
from harness.cli.console import DECISION_STYLE, table
from harness.cli.console_store import fitting, plain_table
from harness.gate.compare import ONE_SIDE, is_across, only_in
from harness.gate.records import WORST_FIRST, GateCase, GateVerdict, State
from harness.git.repository import WORKING_TREE
from harness.machine.drift import Difference
from harness.records import Decision
from harness.report.verdict_text import case_reason

_ONLY = {State.MISSING: "Only in the baseline", State.NEW: "Only in the candidate"}


def compared(answer: GateVerdict) -> RenderableType:
    """The two sides, how they differ, every case, and the answer last."""
    both = [case for case in answer.cases if case.state not in ONE_SIDE]
    lines: list[RenderableType] = [_sides(answer), Text()]
    if answer.differences:
        lines += [_differences(answer.differences), Text()]
    elif both:
        lines += [Text("The two recorded environments do not differ."), Text()]
    if both:
        lines += [_cases(both), Text()]
    for state, title in _ONLY.items():
        if only := only_in(answer, state):
            lines.append(Text(f"{title}, so not compared ({len(only)}):"))
            lines += [Text(f"  {case.case_id}", overflow="fold") for case in only]
            lines.append(Text())
    if answer.left_out:
        first, count = answer.left_out[0], len(answer.left_out)
        lines.append(Text(f"left out: {count}, such as {first.case_id}: {first.reason}"))
    lines += [Text(f"{f.check}: {f.reason}") for f in answer.findings]
    lines.append(
        Text.assemble((str(answer.decision), DECISION_STYLE[answer.decision]), f"  {answer.reason}")
    )
    lines += [Text(f"  {remedy}") for remedy in answer.remedies]
    return Group(*lines)


def _sides(answer: GateVerdict) -> Table:
    rows = table()
    for name, side in (("baseline", answer.baseline), ("candidate", answer.candidate)):
        if side is None:
            continue
        commit = f"commit {side.commit[:10]}{side.beyond}" if side.commit else "no commit"
        ref = "the working tree" if side.ref == WORKING_TREE else side.ref
        rows.add_row(Text(name, style="bold"), Text(ref), Text(commit))
    return rows


def _differences(found: Sequence[Difference]) -> RenderableType:
    columns: dict[str, Sequence[RenderableType]] = {
        "differs": [Text(d.name) for d in found],
        "baseline": [Text(d.baseline) for d in found],
        "candidate": [Text(d.candidate) for d in found],
        "how it could change a number": [Text(d.how, style="dim") for d in found],
    }
    brief = {name: cells for name, cells in columns.items() if not name.startswith("how")}
    return fitting(plain_table(columns), plain_table(brief))


def _cases(cases: Sequence[GateCase]) -> RenderableType:
    """The worst first. On a narrow terminal each id has a line of its own."""
    ordered = sorted(cases, key=lambda c: WORST_FIRST[c.decision])
    words = [Text(_word(c), style=DECISION_STYLE[c.decision]) for c in ordered]
    times = [[_time(c.baseline_s), _time(c.candidate_s), _change(c)] for c in ordered]
    columns: dict[str, Sequence[RenderableType]] = {
        "": words,
        "baseline": [t[0] for t in times],
        "candidate": [t[1] for t in times],
        "change": [t[2] for t in times],
        "case": [Text(c.case_id) for c in ordered],
        "why": [Text(_why(c)) for c in ordered],
    }
    columns = {name: cells for name, cells in columns.items() if any(map(str, cells))}
    narrow = table("", "case, step times, change, why")
    for word, c, (a, b, change) in zip(words, ordered, times, strict=True):
        numbers = f"{a} → {b}  {change}".rstrip() if a or b else ""
        below = "\n".join(filter(None, (numbers, _why(c))))
        narrow.add_row(word, Text.assemble((c.case_id, "bold"), "\n" + below if below else ""))
    return fitting(plain_table(columns, right=("baseline", "candidate")), narrow)


def _word(case: GateCase) -> str:
    if case.decision is Decision.INCONCLUSIVE:
        return "undecided"
    if case.state is State.FAILED:
        return "failed" if case.decision is Decision.NO_GO else "fails, as allowed"
    if case.change == Change.SAME:
        return "not slower"
    return case.change or ("same" if case.decision is Decision.GO else "changed")


def _time(seconds: float | None) -> str:
    return units.duration(seconds) if seconds else ""


def _change(case: GateCase) -> str:
    c = case.comparison
    return units.change(c.ratio, c.low, c.high) if c else ""


def _why(case: GateCase) -> str:
    """What decided, unless the numbers and the differences above show it."""
    beside = [f.reason for f in case.findings if not f.counts]
    shown = is_across(case) or (case.decision is Decision.GO and case.comparison is not None)
    return "; ".join(filter(None, ("" if shown else case_reason(case), *beside)))
