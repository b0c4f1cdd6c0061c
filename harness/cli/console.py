"""Rich renderables of a run, a plan, verdicts, the doctor. This module prints nothing."""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from harness import units
from harness.analysis.bounds import timeout_bound
from harness.analysis.study import Foreseen, Study
from harness.analysis.summary import summarise
from harness.gate.records import GateCase, GateRecord, GateSubject, State
from harness.git.repository import WORKING_TREE
from harness.machine.doctor import verdict as verdict_of
from harness.machine.doctor import worst
from harness.machine.drift import Difference
from harness.records import (
    METRICS,
    CaseSummary,
    Check,
    Decision,
    Environment,
    Grade,
    Outcome,
    Run,
    Suite,
    Verdict,
    worst_first,
)
from harness.report import endings
from harness.report.conditions import environment_rows
from harness.report.markdown import plain
from harness.report.series import gate_text
from harness.report.tables import NONE
from harness.report.text import command_text, note_text, why_ended
from harness.report.verdict_text import rule_sentence

EXIT_REFUSED = 2
WHOLE = ("case", "run", "suite", "outcome")
"""Columns that are never broken: ids are copied from them."""
LOG_WIDTH = 160
"""Columns of a file or a pipe, such as a CI log."""
HEADING = 16
"""Columns that a broken column keeps at least."""

DECISION_STYLE = {
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


class _InertConsole(Console):
    """Text in what it prints cannot command the terminal; a closed pipe is not exit status 1."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for s in super().render(renderable, options):
            yield s if s.control else Segment(plain(s.text), s.style)

    def on_broken_pipe(self) -> None:
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise SystemExit(EXIT_REFUSED) from None


def console(*, stderr: bool = False) -> Console:
    """A terminal has its own width or COLUMNS; a file or a pipe has LOG_WIDTH.

    It highlights nothing by itself: Rich's search for numbers and paths takes minutes in a long
    word, and most text here comes from code under test.
    """
    here = _InertConsole(stderr=stderr, highlight=False)
    if not here.is_terminal and "COLUMNS" not in os.environ:
        here.width = LOG_WIDTH
    return here


class _Table(Table):
    """A plain table; where its columns do not fit, each row is an id with a list below it.

    A broken id cannot be copied, and a cut number is another number.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for column in self.columns:
            column.overflow = "fold"
        cells = [
            [t if isinstance(t, Text) else Text.from_markup(str(t)) for t in (c.header, *c.cells)]
            for c in self.columns
        ]
        widths = [max(Measurement.get(console, options, t).maximum for t in c) for c in cells]
        least = [
            width if column.no_wrap else min(width, HEADING)
            for column, width in zip(self.columns, widths, strict=True)
        ]
        if not self.show_header or sum(least) + 2 * len(least) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        (_, *names), *columns = cells
        titles = [heading.plain.replace("\n", "") for heading, *_ in columns]
        for name, *row in zip(names, *(rest for _, *rest in columns), strict=True):
            parts = zip(titles, row, strict=True)
            facts = Text(", ").join(
                Text.assemble(t, " ", cell) for t, cell in parts if cell.plain not in ("", NONE)
            )
            yield name
            yield Padding(facts, (0, 0, 0, 2))


def table(*columns: str, right: Collection[str] = ()) -> Table:
    """A plain table; without columns it has no header. Those in `right` hold numbers."""
    made = _Table(box=None, header_style="bold", padding=(0, 1), show_header=bool(columns))
    for name in columns:
        number = name in right
        whole = number or name in WHOLE
        made.add_column(name, justify="right" if number else "left", no_wrap=whole)
    return made


def verdict(v: Verdict) -> RenderableType:
    """The decision, the rule that made it, and the answer of every rule."""
    rules = table()
    for r in v.rules:
        rules.add_row(
            Text(r.said, style=DECISION_STYLE[r.decision] if r.applies else "dim"),
            escape(r.rule),
            escape(rule_sentence(r)),
        )
    said = v.said, DECISION_STYLE[v.decision]
    return Group(Text.assemble("Verdict: ", said, f"  (decided by: {v.decided_by})"), rules)


def ending(of: Study, page: Path | None) -> RenderableType:
    """The last lines of a run; a text that is too long for the terminal goes on below itself."""
    rows = Table.grid(padding=(0, 2))

    def add(label: str, text: str, style: str = "") -> None:
        rows.add_row(Text(label, style="bold"), Text(text, style=style, overflow="fold"))

    (label, said), *rest = endings.verdict_lines(of)
    add(label, said, DECISION_STYLE[of.verdict.decision])
    for line in (*rest, *endings.number_lines(of)):
        add(*line)
    add("Run", of.run.folder)
    if page:
        add("Report", str(page), f"link {page.resolve().as_uri()}")
    for line in endings.next_lines(of):
        add(*line)
    return rows


def _cell(summary: CaseSummary, metric: str) -> str:
    estimate, bound = summary.metrics.get(metric), timeout_bound(summary, metric)
    if estimate is None:
        return units.bound_text(metric, bound) if bound else ""
    return units.value(metric, estimate)


def summaries(cases: Sequence[CaseSummary]) -> RenderableType:
    """One row a case, with 95 % intervals; below, why cases failed and notes on the others."""
    reported = {r.metric: r.unit for c in cases if c.case.program for r in c.case.program.readings}
    reported = {name: unit for name, unit in reported.items() if name not in METRICS}
    titles = ("tokens/s", "step", *(f"{name} ({unit})" for name, unit in reported.items()))
    rows = table("case", "outcome", *map(escape, titles), right=[*map(escape, titles)])
    notes: list[tuple[str, str]] = []
    failures: list[tuple[str, str]] = []
    for c in cases:
        rows.add_row(
            escape(c.case.case_id),
            outcome(c.outcome or units.outcome_name(None)),
            *(_cell(c, name) for name in ("tokens_per_s", "step_s", *reported)),
        )
        if c.outcome is Outcome.OK:
            notes += [(c.case.case_id, note_text(note)) for note in c.notes]
        elif detail := why_ended(c).strip().partition("\n")[0]:
            failures.append((c.case.case_id, detail))
    return Group(rows, *_grouped(failures), *_grouped(notes))


def outcome(ended: str) -> Text:
    """An outcome: green where it is ok, else red."""
    return Text(ended, style="green" if ended == Outcome.OK else "red")


def _grouped(notes: Sequence[tuple[str, str]]) -> Iterator[str]:
    """A line for each kind of note; notes that differ only in numbers are of one kind."""
    kinds: dict[str, list[tuple[str, str]]] = {}
    for case_id, text in notes:
        kinds.setdefault(re.sub(r"\d[\d,.]*", "0", text), []).append((case_id, text))
    for (case_id, text), *others in kinds.values():
        more = f" (+{len(others)} more)" if others else ""
        yield f"{escape(case_id)}: [dim]{escape(text)}{more}[/]"


def plan(suite: Suite, last: Mapping[str, Run], others: Mapping[str, Foreseen]) -> RenderableType:
    """What a run would do, and how long it will take, by stored runs; `others`: other cases."""
    right = ("processes", "limit each", "expected", "step (bound)")
    rows = table("case", *right, "variables and command", right=right)
    expected = {i: fmean(m.wall_s for m in run.of(i)) for i, run in last.items()}
    runs = {run.run_id: run for run in last.values()}
    known = {(s.case.case_id, i): _step(s) for i, run in runs.items() for s in summarise(run)}
    steps = {i: known[i, run.run_id] for i, run in last.items()}
    low_s = high_s = 0.0
    for c in suite.cases:
        least_s = min(c.settings.sample_s, c.settings.timeout_s)
        ends_s = [expected.get(c.case_id, bound) for bound in (least_s, c.settings.timeout_s)]
        case_s = c.settings.processes * ends_s[0], c.settings.most * ends_s[1]
        low_s, high_s = low_s + case_s[0], high_s + case_s[1]
        rows.add_row(
            escape(c.case_id),
            c.settings.processes_text,
            units.duration(c.settings.timeout_s),
            _span(*case_s),
            steps.get(c.case_id) or _foreseen(others.get(c.case_id)),
            escape(" ".join((*(f"{k}={v}" for k, v in c.env.items()), command_text(c)))),
        )
    fewest = sum(c.settings.processes for c in suite.cases)
    most = sum(c.settings.most for c in suite.cases)
    at_least = f"{fewest} to " if most > fewest else ""
    return Group(
        Text(f"{suite.title} ({suite.path}): {suite.question}"),
        rows,
        Text(
            f"{units.plural('case', len(suite.cases))}, {at_least}{units.plural('process', most)}; "
            f"expected in all: {_span(low_s, high_s)}"
        ),
        Text(
            f"Expected times and steps: {units.plural('case', len(expected))} as in stored runs; "
            "other times between sample_s and timeout_s a process, other steps at the share of the "
            "bound of the most similar case; unknown without FLOPs, bytes or peaks in stored runs"
        ),
        Text("No workload was started; it may still decline a case when it runs."),
    )


def _step(before: CaseSummary) -> str:
    """`2.60 ms (1.02 ms)`: the step of an earlier run, and its lower bound by the roofline."""
    step_s, share = before.known("step_s"), before.known("roofline_share")
    bound = f" ({units.duration(step_s.value * share.value)})" if step_s and share else ""
    return f"{units.duration(step_s.value)}{bound}" if step_s else ""


def _foreseen(found: Foreseen | None) -> str:
    """`about 2.60 ms (1.02 ms)`, of a case that did not run here."""
    about = f"about {units.duration(found[0])} " if found and found[0] else ""
    return f"{about}({units.duration(found[1])})" if found else "unknown"


def _span(low_s: float, high_s: float) -> str:
    ends = dict.fromkeys(map(units.duration, (low_s, high_s)))
    return " to ".join(ends)


def suites(found: Sequence[Suite]) -> RenderableType:
    """The shipped suites with their questions."""
    rows = table("suite", "cases", "question")
    for s in found:
        rows.add_row(s.name, str(len(s.cases)), escape(s.question))
    return rows


def doctor(environment: Environment, checks: Sequence[Check]) -> RenderableType:
    """The environment, then every check with its remedy."""
    facts = table()
    for name, value in environment_rows(environment):
        facts.add_row(Text(name, style="bold"), escape(value))
    grade = worst(checks)
    head = Text.assemble("Verdict: ", (verdict_of(checks), _GRADE_STYLE[grade]))
    rows = table()
    for check in checks:
        rows.add_row(
            Text(str(check.grade), style=_GRADE_STYLE[check.grade]),
            escape(check.name),
            escape(check.fact),
            escape(check.remedy),
        )
    return Group(facts, Text(), rows, head)


def differences(found: Sequence[Difference], baseline: str, candidate: str) -> RenderableType:
    """How two machines differ, the most likely cause of another number first."""
    if not found:
        return Text(f"{baseline} and {candidate}: no difference between their environments")
    rows = table("differs", escape(baseline), candidate, "how it could change a number")
    for d in found:
        rows.add_row(*map(escape, (d.name, d.baseline, d.candidate, d.how)))
    return rows


def judged(verdict: GateRecord) -> RenderableType:
    """The two sides of a comparison and how they differ; every case; the answer last."""
    lines: list[RenderableType] = []
    cases = worst_first(verdict.cases)
    if verdict.subject is GateSubject.COMPARISON:
        lines += [_sides(verdict), Text()]
        lines += [differences(verdict.differences, "baseline", "candidate"), Text()]
        cases.sort(key=lambda c: c.state in (State.NEW, State.MISSING))
    if cases:
        lines.append(_gate_cases(cases))
    lines += [Text(f"{f.check}: {f.decision}: {gate_text.stated(f)}") for f in verdict.findings]
    decision = (str(verdict.decision), DECISION_STYLE[verdict.decision])
    subject = verdict.subject.capitalize()
    lines.append(Text.assemble(f"{subject}: ", decision, f"  {gate_text.verdict_reason(verdict)}"))
    lines += [Text(f"  {step}") for step in gate_text.next_steps(verdict)]
    if verdict.subject is GateSubject.GATE and verdict.decision is not Decision.GO:
        effect = "blocks" if verdict.blocks else "does not block"
        setting = gate_text.undecided_text(verdict)
        why = f"says {setting}" if setting else f"has stage {verdict.stage}"
        lines.append(Text(f"  With --ci it {effect}: the policy {why}"))
    if verdict.gpu_s:
        spent = units.duration(verdict.gpu_s)
        lines.append(Text(f"Time of all processes: {spent} on {verdict.device}"))
        lines += [Text(f"Recorded: harness show {folder}") for folder in verdict.candidate.folders]
    return Group(*lines)


def _sides(verdict: GateRecord) -> Table:
    rows = table()
    for name, side in (("baseline", verdict.baseline), ("candidate", verdict.candidate)):
        if side is not None:
            commit = f"commit {side.commit[:10]}{side.beyond}" if side.commit else "no commit"
            ref = "the working tree" if side.ref == WORKING_TREE else side.ref
            rows.add_row(Text(name, style="bold"), escape(ref), commit)
    return rows


def _gate_cases(cases: Sequence[GateCase]) -> Table:
    """Each id has a line of its own, so that it can be copied from a narrow terminal."""
    rows = table("", "case, step times, change, why")
    for case in cases:
        change = gate_text.change_text(case)
        if case.baseline_s and case.candidate_s:
            before, after = units.duration(case.baseline_s), units.duration(case.candidate_s)
            change = f"{before} → {after}  {change}"
        noted = [gate_text.stated(f) for f in case.findings if not f.counts]
        why = "; ".join((gate_text.case_reason(case), *noted))
        rows.add_row(
            Text(str(case.decision), style=DECISION_STYLE[case.decision]),
            Text.assemble((case.case_id, "bold"), f"\n{change}\n{why}"),
        )
    return rows
