"""A verdict as one page of Markdown, for a step summary and for a comment on a pull request.

Text from the verdict cannot add HTML, links or mentions.
"""

from harness import units
from harness.gate.records import GateCase, GateRecord, Stage
from harness.records import Decision, worst_first
from harness.report.markdown import cell, code
from harness.report.series import gate_text
from harness.report.series.machine_code import ir_table, kernel_table
from harness.report.series.render import rendered

MOST_CASES = 60
"""Cases with a row, the worst first: GitHub rejects comments of more than 65,536 characters."""
MAX_LISTED = 20
"""Findings and next steps, each."""

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


def page(verdict: GateRecord) -> str:
    """The verdict, its evidence, and its worst cases."""
    cases = worst_first(verdict.cases)
    values = {
        "verdict": verdict,
        "reason": gate_text.verdict_reason(verdict),
        "finding": gate_text.stated,
        "steps": [*gate_text.next_steps(verdict)],
        "rows": [_row(case) for case in cases[:MOST_CASES]],
        "kernels": kernel_table((k for c in cases for k in c.kernels), cases=True),
        "ir": ir_table(k for c in cases for k in c.kernels),
        "omitted": cases[MOST_CASES:],
        "effect": _effect(verdict),
        "counts": gate_text.case_counts,
        "signs": _SIGNS,
        "most": MAX_LISTED,
        "text": cell,
        "code": code,
        "duration": units.duration,
    }
    return rendered("verdict.md.j2", values)


def _effect(verdict: GateRecord) -> str:
    """What follows from the verdict, and which setting decides that."""
    blocked = "is blocked" if verdict.blocks else "is not blocked"
    setting = gate_text.undecided_text(verdict)
    why = f"stage {_STAGES[verdict.stage]}" + (f", {setting}" if setting else "")
    return f"The change {blocked} ({why})"


def _row(case: GateCase) -> str:
    sign = f"{_SIGNS[case.decision]} {case.decision}"
    why = cell(gate_text.case_reason(case), 600)
    return f"| {sign} | {code(case.case_id)} | {cell(gate_text.change_text(case))} | {why} |"
