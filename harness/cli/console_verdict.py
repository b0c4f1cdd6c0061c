"""The answer of a gate or of a comparison, as a rich renderable. This module prints nothing."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness import units
from harness.cli.console import DECISION_STYLE, differences, table
from harness.gate.records import GateCase, GateVerdict, State, VerdictSubject
from harness.git.repository import WORKING_TREE
from harness.records import Decision
from harness.report.verdict_text import case_reason, change_text, undecided_text, worst_first


def shown(verdict: GateVerdict, table_of_cases: RenderableType | None = None) -> RenderableType:
    """The two sides of a comparison and how they differ; every case; the answer last.

    Args:
        table_of_cases: Shown in place of every case.
    """
    lines: list[RenderableType] = []
    cases = worst_first(verdict)
    if verdict.subject is VerdictSubject.COMPARISON:
        lines += [_sides(verdict), Text()]
        lines += [differences(verdict.differences, "baseline", "candidate"), Text()]
        cases.sort(key=lambda c: c.state in (State.NEW, State.MISSING))
    if table_of_cases or cases:
        lines.append(table_of_cases or _cases(cases))
    lines += [Text(f"{f.check}: {f.decision}: {f.reason}") for f in verdict.findings]
    if verdict.left_out:
        first, count = verdict.left_out[0], len(verdict.left_out)
        lines.append(Text(f"left out: {count}, such as {first.case_id}: {first.reason}"))
    decision = (str(verdict.decision), DECISION_STYLE[verdict.decision])
    subject = verdict.subject.capitalize()
    lines.append(Text.assemble(f"{subject}: ", decision, f"  {verdict.reason}"))
    lines += [Text(f"  {remedy}") for remedy in verdict.remedies]
    if verdict.subject is VerdictSubject.GATE and verdict.decision is not Decision.GO:
        effect = "blocks" if verdict.blocks else "does not block"
        setting = undecided_text(verdict)
        why = f"says {setting}" if setting else f"has stage {verdict.stage}"
        lines.append(Text(f"  With --ci it {effect}: the policy {why}"))
    if verdict.gpu_s:
        spent = units.duration(verdict.gpu_s)
        lines.append(Text(f"Time of all processes: {spent} on {verdict.device}"))
    return Group(*lines)


def _sides(verdict: GateVerdict) -> Table:
    rows = table()
    for name, side in (("baseline", verdict.baseline), ("candidate", verdict.candidate)):
        if side is not None:
            commit = f"commit {side.commit[:10]}{side.beyond}" if side.commit else "no commit"
            ref = "the working tree" if side.ref == WORKING_TREE else side.ref
            rows.add_row(Text(name, style="bold"), escape(ref), commit)
    return rows


def _cases(cases: Sequence[GateCase]) -> Table:
    """Each id has a line of its own, so that it can be copied from a narrow terminal."""
    rows = table("", "case, step times, change, why")
    for case in cases:
        change = change_text(case)
        if case.baseline_s and case.candidate_s:
            before, after = units.duration(case.baseline_s), units.duration(case.candidate_s)
            change = f"{before} → {after}  {change}"
        why = "; ".join((case_reason(case), *(f.reason for f in case.findings if not f.counts)))
        rows.add_row(
            Text(str(case.decision), style=DECISION_STYLE[case.decision]),
            Text.assemble((case.case_id, "bold"), f"\n{change}\n{why}"),
        )
    return rows
