"""What the command line shows, as Rich renderables. Nothing here prints."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness import phrases, units
from harness.doctor import Check, Grade, worst
from harness.doctor import verdict as verdict_of
from harness.drift import Difference
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Decision,
    Environment,
    Outcome,
    Proof,
    Suite,
    Verdict,
)

LOG_WIDTH = 160
"""Columns where the output is no terminal: a table folded to 80 is hard to read in a CI log."""

_DECISION_STYLE = {
    Decision.GO: "bold green",
    Decision.CONDITIONAL: "bold yellow",
    Decision.NO_GO: "bold red",
    Decision.INCONCLUSIVE: "bold magenta",
}
_GRADE_STYLE = {
    Grade.OK: "green",
    Grade.WARN: "yellow",
    Grade.FAIL: "red",
    Grade.UNKNOWN: "magenta",
}


def console(*, stderr: bool = False) -> Console:
    """A terminal has its own width, or that of COLUMNS; a file or a pipe has LOG_WIDTH."""
    here = Console(stderr=stderr)
    if not here.is_terminal and "COLUMNS" not in os.environ:
        here.width = LOG_WIDTH
    return here


def verdict(v: Verdict) -> RenderableType:
    """The decision, the rule that made it, and every rule's word."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for r in v.rules:
        table.add_row(
            Text(r.said, style=_DECISION_STYLE[r.decision] if r.applies else "dim"),
            escape(r.rule),
            escape(r.reason),
        )
    head = Text.assemble(
        "Verdict: ",
        (str(v.decision), _DECISION_STYLE[v.decision]),
        f"  (decided by: {v.decided_by})" if v.decided_by else "",
    )
    return Group(head, table)


def refuted(proof: Proof, folder: Path) -> RenderableType:
    """Why nothing is measured: what the instrument read wrongly."""
    table = Table(box=None, show_header=False, padding=(0, 1))
    for check in proof.refuted:
        table.add_row(Text("FAILED", style="bold red"), check.name, escape(check.fact))
    return Group(
        Text("The instrument did not prove itself, so nothing is measured (invalid environment):"),
        table,
        Text(f"Once it does: harness run --resume {folder}"),
        Text("With --no-proof it measures all the same, and the report says so."),
    )


def _cell(summary: CaseSummary, metric: str) -> str:
    estimate = summary.metrics.get(metric)
    return units.cell(metric, estimate) if estimate else ""


def summaries(cases: Sequence[CaseSummary]) -> RenderableType:
    """One row a case, with 95 % intervals; below, what must be known of some of them."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("case", overflow="fold")
    table.add_column("outcome", no_wrap=True)
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    free = {r.metric: r.unit for c in cases if c.case.program for r in c.case.program.readings}
    free = {name: unit for name, unit in free.items() if name not in METRICS}
    for name, unit in free.items():
        table.add_column(escape(f"{name} ({unit})"), justify="right", no_wrap=True)
    remarks: list[tuple[str, str]] = []
    failures: list[tuple[str, str]] = []
    for c in cases:
        ok = c.outcome is Outcome.OK
        table.add_row(
            escape(c.case.case_id),
            Text(c.outcome or "not run", style="green" if ok else "red"),
            _cell(c, "tokens_per_s"),
            _cell(c, "step_s"),
            *(_cell(c, name) for name in free),
        )
        if ok:
            remarks += [(c.case.case_id, note) for note in c.notes]
        elif detail := c.detail.strip().partition("\n")[0]:
            failures.append((c.case.case_id, detail))
    return Group(table, *_told_once(failures), *_told_once(remarks))


def _told_once(remarks: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each kind of remark; remarks that differ in numbers alone are of one kind."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for case_id, text in remarks:
        kinds.setdefault(re.sub(r"\d[\d,.]*", "0", text), []).append((case_id, text))
    for (case_id, text), *others in kinds.values():
        more = f" (and {len(others)} more like it)" if others else ""
        yield f"{escape(case_id)}: [dim]{escape(text)}{more}[/]"


def plan(suite: Suite) -> RenderableType:
    """What a run would do."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("case", overflow="fold")
    table.add_column("processes", justify="right")
    table.add_column("limit each", justify="right")
    table.add_column("environment", overflow="fold")
    if runs_programs := any(c.program for c in suite.cases):
        table.add_column("command", overflow="fold")
    for c in suite.cases:
        table.add_row(
            escape(c.case_id),
            str(c.settings.processes),
            units.duration(c.settings.timeout_s),
            escape(" ".join(f"{k}={v}" for k, v in c.env.items())),
            *([escape(phrases.command(c))] if runs_programs else []),
        )
    processes = sum(c.settings.processes for c in suite.cases)
    return Group(
        Text(f"{suite.title}: {suite.question}"),
        table,
        Text(f"{len(suite.cases)} cases, {processes} processes"),
        Text(
            "Planned from the file alone: `harness run` asks each workload first if it takes a case"
        ),
    )


def case_line(case: Case, process: int, what: str) -> str:
    """One line of progress."""
    what = f": {what}" if what else ""
    return f"{case.case_id} process {process + 1}/{case.settings.processes}{what}"


def first_line(text: str) -> str:
    """The first line, safe to print in markup."""
    return escape(text.partition("\n")[0])


def suites(found: Sequence[Suite]) -> RenderableType:
    """The shipped suites with their questions."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("suite", "cases", "question"):
        table.add_column(column, overflow="fold")
    for s in found:
        table.add_row(s.name, str(len(s.cases)), escape(s.question))
    return table


def doctor(environment: Environment, checks: Sequence[Check]) -> RenderableType:
    """The environment, then every check with its remedy."""
    facts = Table(box=None, show_header=False, padding=(0, 1))
    gpu = environment.gpu
    rows: list[tuple[str, str]] = [
        ("host", f"{environment.hostname}, {environment.os}"),
        (
            "CPU",
            f"{environment.cpu}, {environment.cpu_count} cores, "
            f"{units.size(environment.memory_bytes)}",
        ),
        (
            "GPU",
            f"{gpu.name}, {units.size(gpu.memory_bytes)}, driver {gpu.driver}, {gpu.uuid}"
            if gpu
            else f"not available ({environment.gpu_unavailable})",
        ),
        *((name, version or "absent") for name, version in environment.versions.items()),
        *((name, str(value)) for name, value in environment.torch_settings.items()),
        *environment.variables.items(),
    ]
    if environment.git:
        dirty = ", with changes" if environment.git.dirty_sha256 else ""
        rows.append(("git", f"{environment.git.branch} {environment.git.commit[:10]}{dirty}"))
    for name, value in rows:
        facts.add_row(Text(name, style="bold"), escape(value))

    table = Table(box=None, show_header=False, padding=(0, 1))
    for check in checks:
        table.add_row(
            Text(str(check.grade), style=_GRADE_STYLE[check.grade]),
            escape(check.name),
            escape(check.fact),
            escape(check.remedy),
        )
    grade = worst(checks)
    head = Text.assemble("Verdict: ", (verdict_of(checks), _GRADE_STYLE[grade]))
    return Group(facts, Text(), table, head)


def drift(run_id: str, found: Sequence[Difference]) -> RenderableType:
    """What differs from a run, most suspect first."""
    if not found:
        return Text(f"nothing that could move a number differs from {run_id}", style="green")
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("what", "then", "now", "how it could move a number"):
        table.add_column(column, overflow="fold")
    for d in found:
        table.add_row(*map(escape, (d.name, d.then, d.now, d.how)))
    count = len(found)
    head = Text(f"{count} difference{'s'[: count > 1]} from {run_id}, most suspect first")
    return Group(head, table)
