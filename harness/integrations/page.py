"""A verdict as one page of Markdown that fits where it goes, whatever the number of cases.

What does not fit is left out case by case, from the least important, and counted: a table is
never cut in the middle. No HTML, no link and no mention comes from the verdict's own text.
"""

from collections.abc import Callable, Iterator, Sequence

from harness import units
from harness.gate.records import GateCase, GateSide, GateVerdict, Stage, Subject
from harness.records import Decision
from harness.report.markdown import cell, code
from harness.report.verdict_text import (
    case_counts,
    case_reason,
    change_text,
    undecided_text,
    worst_first,
)

SUMMARY_BYTES = 2**20 - 1
"""GitHub shows no step summary of 1 MiB or more."""
COMMENT_CHARACTERS = 60_000
"""GitHub refuses comments of more than 65,536; the rest is for whoever posts it."""
MAX_LISTED = 20
"""Of findings, remedies and cases left out."""

_TYPED = ("harness ", "{")
"""How what is to be typed begins, on a command line or in a policy."""
_HEAD = "| | case | change | why |\n|:--|:--|:--|:--|\n"
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
    """The body of a pull request's comment; who posts it adds the mark it is found by again."""
    return page(verdict, most=COMMENT_CHARACTERS, size=len)


def page(verdict: GateVerdict, *, most: int, size: Callable[[str], int]) -> str:
    """The verdict, what it rests on, and as many of its cases as fit, the worst first.

    Args:
        most: The page's largest size.
        size: Measures it.
    """
    top = "\n\n".join(_top(verdict))
    bottom = "\n\n".join(_bottom(verdict))
    cases = worst_first(verdict)
    # Room for the count of what is left out is kept, whether or not it is needed.
    room = most - size(f"{top}\n\n{_HEAD}\n\n{_omitted(cases)}\n\n{bottom}\n")
    rows: list[str] = []
    for case in cases:
        row = _row(case)
        if (room := room - size(row)) < 0:
            break
        rows.append(row)
    table = _HEAD + "".join(rows) if rows else ""
    rest = _omitted(cases[len(rows) :])
    return "\n\n".join(filter(None, (top, table.rstrip("\n"), rest, bottom))) + "\n"


def _top(verdict: GateVerdict) -> Iterator[str]:
    yield f"## {_SIGNS[verdict.decision]} {verdict.subject.capitalize()}: {verdict.decision}"
    yield f"{cell(verdict.reason, 1000).rstrip('.')}. {_effect(verdict)}."
    mode = f"{verdict.mode} " if verdict.subject is Subject.GATE else ""
    facts = [
        f"{case_counts(verdict)} of {len(verdict.cases)} cases",
        f"{mode}on {cell(verdict.device) or 'an unknown device'}",
        f"candidate {_side(verdict.candidate)}",
    ]
    if verdict.baseline is not None:
        facts.append(f"baseline {_side(verdict.baseline)}")
    if verdict.calibration:
        facts.append(f"calibration {cell(verdict.calibration)}")
    if verdict.gpu_s:
        facts.append(f"{units.duration(verdict.gpu_s)} of processes")
    yield " · ".join(facts)
    if verdict.findings:
        yield _listed(
            [
                f"**{f.decision if f.counts else 'not applied'}** {cell(f.check)}: {cell(f.reason)}"
                for f in verdict.findings
            ]
        )


def _effect(verdict: GateVerdict) -> str:
    """What follows from the verdict, and by what."""
    if verdict.subject is Subject.RUN:
        return f"A run, judged by the rules of {code(verdict.policy) or 'its suite'}"
    blocked = "is blocked" if verdict.blocks else "is not blocked"
    setting = undecided_text(verdict)
    why = f"stage {_STAGES[verdict.stage]}" + (f", {setting}" if setting else "")
    return f"The change {blocked} ({why})"


def _side(side: GateSide) -> str:
    return code(side.commit[:12] or side.ref) + side.beyond


def _bottom(verdict: GateVerdict) -> Iterator[str]:
    if verdict.left_out:
        cases = f"{len(verdict.left_out)} case{'s' * (len(verdict.left_out) != 1)}"
        yield f"Not measured, because no changed file concerns the suite: {cases}."
        yield _listed([f"{code(o.case_id)}: {cell(o.reason)}" for o in verdict.left_out])
    if verdict.remedies:
        yield "What would settle it:"
        yield _listed([_remedy(text) for text in verdict.remedies])


def _remedy(text: str) -> str:
    """A sentence, with the command or the policy's line that it ends in as code."""
    sentence, colon, typed = text.partition(": ")
    if text.startswith(_TYPED):
        return code(text, 500)
    if colon and typed.startswith(_TYPED):
        return f"{cell(sentence)}: {code(typed, 500)}"
    return cell(text, 500)


def _row(case: GateCase) -> str:
    sign = f"{_SIGNS[case.decision]} {case.decision}"
    why = cell(case_reason(case), 600)
    return f"| {sign} | {code(case.case_id)} | {cell(change_text(case))} | {why} |\n"


def _omitted(cases: Sequence[GateCase]) -> str:
    """How many cases are left out, by decision; nothing where none is."""
    if not cases:
        return ""
    of = {d: sum(c.decision is d for c in cases) for d in _SIGNS}
    each = ", ".join(f"{n} {d}" for d, n in of.items() if n)
    return f"{len(cases)} more cases do not fit here: {each}. They are in the verdict's file."


def _listed(lines: Sequence[str]) -> str:
    more = len(lines) - MAX_LISTED
    shown = [*lines[:MAX_LISTED], *([f"and {more} more"] if more > 0 else [])]
    return "\n".join(f"- {line}" for line in shown)
