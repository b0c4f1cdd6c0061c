"""A verdict as one page of Markdown within a size limit, whatever the number of cases.

The least important cases are omitted first, and counted. Text from the verdict cannot add HTML,
links or mentions.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from harness import units
from harness.gate.records import GateCase, GateVerdict, Stage
from harness.records import WORST_FIRST, Decision
from harness.report.markdown import cell, code
from harness.report.series.gate_text import (
    case_counts,
    case_reason,
    change_text,
    undecided_text,
    worst_first,
)
from harness.report.series.render import rendered

SUMMARY_BYTES = 2**20 - 1
"""GitHub rejects a step summary of 1 MiB or more."""
COMMENT_CHARACTERS = 30_000
"""GitHub rejects comments of more than 65,536, and ci/post_comment.sh puts two pages into one."""
MAX_LISTED = 20
"""Findings and remedies, each."""

_TYPED = ("harness ", "exempt: ")
"""How a command line, or a line of a policy, begins."""
_SIGNS = {
    Decision.GO: "✅",
    Decision.NO_GO: "❌",
    Decision.INCONCLUSIVE: "❔",
    Decision.CONDITIONAL: "❔",
}
_STAGES = {
    Stage.SHADOW: "shadow: recorded, blocks nothing",
    Stage.WARN: "warn: shown, blocks nothing",
    Stage.BLOCK: "block",
}


def step_summary(verdict: GateVerdict) -> str:
    """For $GITHUB_STEP_SUMMARY: under 1 MiB of UTF-8."""
    return page(verdict, most=SUMMARY_BYTES, size=lambda text: len(text.encode()))


def comment(verdict: GateVerdict) -> str:
    """The body of a comment on a pull request."""
    return page(verdict, most=COMMENT_CHARACTERS, size=len)


def page(verdict: GateVerdict, *, most: int, size: Callable[[str], int]) -> str:
    """The verdict, its evidence, and as many of its cases as fit, the worst first.

    Args:
        most: Largest size of the page.
        size: Measures it.
    """
    cases = worst_first(verdict)
    rows = [_row(case) for case in cases]

    def with_rows(count: int) -> str:
        return _rendered(verdict, rows[:count], cases[count:])

    whole = with_rows(len(rows))
    if size(whole) <= most:
        return whole
    # The page without omitted cases lacks a line, so it is not part of the search.
    fitting = bisect_right(range(len(rows)), most, key=lambda count: size(with_rows(count)))
    return with_rows(max(0, fitting - 1))


def _rendered(verdict: GateVerdict, rows: Sequence[str], omitted: Sequence[GateCase]) -> str:
    counts = Counter(case.decision for case in omitted)
    values = {
        "verdict": verdict,
        "rows": rows,
        "omitted": [(d, counts[d]) for d in WORST_FIRST if counts[d]],
        "effect": _effect(verdict),
        "counts": case_counts(verdict),
        "signs": _SIGNS,
        "most": MAX_LISTED,
        "more": _more,
        "step": _step,
        "text": cell,
        "code": code,
        "duration": units.duration,
    }
    return rendered("verdict.md.j2", values)


def _effect(verdict: GateVerdict) -> str:
    """What follows from the verdict, and which setting decides that."""
    blocked = "is blocked" if verdict.blocks else "is not blocked"
    setting = undecided_text(verdict)
    why = f"stage {_STAGES[verdict.stage]}" + (f", {setting}" if setting else "")
    return f"The change {blocked} ({why})"


def _row(case: GateCase) -> str:
    sign = f"{_SIGNS[case.decision]} {case.decision}"
    why = cell(case_reason(case), 600)
    return f"| {sign} | {code(case.case_id)} | {cell(change_text(case))} | {why} |"


def _more(listed: Sequence[object]) -> str:
    more = len(listed) - MAX_LISTED
    return f"- and {more} more\n" if more > 0 else ""


def _step(remedy: str) -> str:
    """A sentence, with the command or policy line at its end as code."""
    sentence, colon, typed = remedy.partition(": ")
    if remedy.startswith(_TYPED):
        return code(remedy, 500)
    if colon and typed.startswith(_TYPED):
        return f"{cell(sentence)}: {code(typed, 500)}"
    return cell(remedy, 500)
