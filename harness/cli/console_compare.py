"""A comparison as Rich renderables: what differs around the two sides, then case by case."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from harness import units
from harness.analysis.compare import Change
from harness.cli.console_store import fitting, plain_table
from harness.comparing import ONE_SIDE, Compared, is_across
from harness.drift import Difference
from harness.gating.records import WORST_FIRST, GateCase, GateSide, State
from harness.gating.worktrees import WORKING_TREE
from harness.records import Decision

_STYLE = {Decision.GO: "green", Decision.NO_GO: "bold red", Decision.INCONCLUSIVE: "magenta"}
OPEN = "neither shown slower nor under"
"""How a comparison says that its interval decides nothing."""
_ONLY = {State.MISSING: "Only in A", State.NEW: "Only in B"}


def compared(answer: Compared) -> RenderableType:
    """The two sides, how they differ, every case, and the answer last."""
    both = [case for case in answer.cases if case.state not in ONE_SIDE]
    lines: list[RenderableType] = [_sides(answer.a, answer.b), Text()]
    if answer.differences:
        lines += [_differences(answer.differences), Text()]
    elif both:
        lines += [Text("Nothing that was recorded of the two environments differs."), Text()]
    if both:
        lines.append(_cases(both))
        if open_ := [case for case in both if _is_open(case)]:
            under = open_[0].reason.partition(f"{OPEN} ")[2].partition(";")[0]
            lines.append(Text(f" undecided: {OPEN} {under} by the whole interval", style="dim"))
        lines.append(Text())
    for state, title in _ONLY.items():
        if only := answer.only_in(state):
            lines.append(Text(f"{title} ({len(only)}), so not compared:"))
            lines += [Text(f"  {case.case_id}", overflow="fold") for case in only]
            lines.append(Text())
    if answer.left_out:
        first = answer.left_out[0]
        lines.append(Text(f"{len(answer.left_out)} left out: {first.case_id}: {first.reason}"))
    lines += [Text(f"{f.check}: {f.reason}") for f in answer.findings]
    lines.append(
        Text.assemble((str(answer.decision), _STYLE[answer.decision]), f"  {answer.reason}")
    )
    lines += [Text(f"  {remedy}") for remedy in answer.remedies]
    return Group(*lines)


def _sides(a: GateSide, b: GateSide) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    for name, side in (("A", a), ("B", b)):
        commit = f"commit {side.commit[:10]}{side.beyond}" if side.commit else "no commit"
        ref = "the working tree" if side.ref == WORKING_TREE else side.ref
        table.add_row(Text(name, style="bold"), Text(ref), Text(commit))
    return table


def _differences(found: Sequence[Difference]) -> RenderableType:
    columns: dict[str, Sequence[RenderableType]] = {
        "differs": [Text(d.name) for d in found],
        "A": [Text(d.then) for d in found],
        "B": [Text(d.now) for d in found],
        "how it could move a number": [Text(d.how, style="dim") for d in found],
    }
    brief = {name: cells for name, cells in columns.items() if not name.startswith("how")}
    return fitting(plain_table(columns), plain_table(brief))


def _cases(cases: Sequence[GateCase]) -> RenderableType:
    """The worst first. Ids are long: unless there is room for a line a case, each has its own."""
    ordered = sorted(cases, key=lambda c: WORST_FIRST[c.decision])
    words = [Text(_word(c), style=_STYLE[c.decision]) for c in ordered]
    times = [[_time(c.baseline_s), _time(c.candidate_s), _change(c)] for c in ordered]
    columns: dict[str, Sequence[RenderableType]] = {
        "B is": words,
        "A": [t[0] for t in times],
        "B": [t[1] for t in times],
        "B against A": [t[2] for t in times],
        "case": [Text(c.case_id) for c in ordered],
        "why": [Text(_why(c)) for c in ordered],
    }
    columns = {name: cells for name, cells in columns.items() if any(map(str, cells))}
    narrow = Table(box=None, header_style="bold", padding=(0, 1))
    narrow.add_column("B is", no_wrap=True)
    narrow.add_column("case, step times of A and B, change, why", overflow="fold")
    for word, c, (a, b, change) in zip(words, ordered, times, strict=True):
        numbers = f"{a} → {b}  {change}".rstrip() if a or b else ""
        told = "\n".join(filter(None, (numbers, _why(c))))
        narrow.add_row(word, Text.assemble((c.case_id, "bold"), "\n" + told if told else ""))
    return fitting(plain_table(columns, right=("A", "B")), narrow)


def _word(case: GateCase) -> str:
    if case.decision is Decision.INCONCLUSIVE:
        return "undecided"
    if case.state is State.FAILED:
        return "failed" if case.decision is Decision.NO_GO else "as allowed"
    if case.change == Change.SAME:
        return "not slower"
    return case.change or ("same" if case.decision is Decision.GO else "changed")


def _time(seconds: float | None) -> str:
    return units.duration(seconds) if seconds else ""


def _change(case: GateCase) -> str:
    return units.change(case.ratio, case.low, case.high) if case.ratio else ""


def _why(case: GateCase) -> str:
    """What neither the numbers nor the differences above them say."""
    beside = [f.reason for f in case.findings if not f.counts]
    told = "" if is_across(case) or _is_open(case) else case.reason
    if case.state is State.COMPARED and case.ratio:
        held = case.decision is Decision.GO
        told = "" if held else told.partition(", ")[2] or told  # the ratio stands there already
    allowed = told.partition(f"({case.case_id}: ")[2]
    return "; ".join(filter(None, (allowed.removesuffix(")") or told, *beside)))


def _is_open(case: GateCase) -> bool:
    """Whether it is its interval alone that leaves a case undecided."""
    return case.change == Change.UNDECIDED and OPEN in case.reason
