"""Rich renderables of stored runs and of a case's history. This module prints nothing.

Where the terminal is too narrow for a table, its least informative columns are left out.
"""

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness import units
from harness.cli.console import outcome, table
from harness.records import METRICS, Outcome
from harness.store.index import HistoryPoint
from harness.store.reader import RunHeader

NONE = "–"
"""Not measured."""


class _Fitting:
    """The first of some tables that fits the terminal; the last where none does."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=10_000)
        fits = (
            t for t in self._tables if console.measure(t, options=wide).maximum <= options.max_width
        )
        yield next(fits, self._tables[-1])


def fitting(*tables: Table) -> RenderableType:
    """Of tables of the same rows, the widest first, the first that fits the terminal."""
    return _Fitting(*tables)


def plain_table(
    columns: Mapping[str, Sequence[RenderableType]], *, right: Collection[str] = ()
) -> Table:
    """A plain table of whole columns; those named in `right` hold numbers."""
    made = table(*columns, right=right)
    for row in zip(*columns.values(), strict=True):
        made.add_row(*row)
    return made


def _without(columns: Mapping[str, Sequence[RenderableType]], *names: str) -> Table:
    return plain_table({name: cells for name, cells in columns.items() if name not in names})


def runs(headers: Sequence[RunHeader]) -> RenderableType:
    """The runs in the store, oldest first. An id contains suite, device and time, so a narrow
    terminal does without their columns."""
    columns: dict[str, Sequence[RenderableType]] = {
        "run": [h.run_id for h in headers],
        "suite": [escape(h.suite) for h in headers],
        "device": [escape(h.device) for h in headers],
        "commit": [h.commit[:10] for h in headers],
        "started": [units.utc(h.started_at) if h.started_at else "" for h in headers],
        "cases": [_ended(h) for h in headers],
    }
    return fitting(plain_table(columns), _without(columns, "started", "device", "suite"))


def _ended(header: RunHeader) -> Text:
    """How a run's cases ended, the most frequent outcome first; or why it cannot be read."""
    if header.problem:
        problem = header.problem.partition("\n")[0]
        return Text(f"unreadable: {problem}", style="red")
    common = sorted(header.outcomes.items(), key=lambda item: (-item[1], item[0]))
    said = ", ".join(f"{count} {name}" for name, count in common)
    return Text(said if header.ended_at else f"unfinished: {said}" if said else "unfinished")


def history(case_id: str, metric: str, points: Sequence[HistoryPoint]) -> RenderableType:
    """One case over runs, oldest first, each with its change from the one before."""
    title = METRICS[metric].title if metric in METRICS else metric
    changes: list[str] = []
    before: dict[tuple[str, str], float] = {}
    for p in points:
        estimate, where = p.metrics.get(metric), (p.device, p.device_id or p.host)
        last = before.get(where)
        if estimate and last:
            changes.append(units.change(estimate.value / last))
        else:
            changes.append("other device" if estimate and before else "")
        if estimate and estimate.value > 0:
            before[where] = estimate.value
    estimates = [p.metrics.get(metric) for p in points]
    columns: dict[str, Sequence[RenderableType]] = {
        "started": [units.utc(p.started_at) for p in points],
        "commit": [p.commit[:10] + ("+" if p.dirty else "") for p in points],
        "device": [escape(p.device) for p in points],
        "outcome": [outcome(p.outcome) for p in points],
        title: [units.cell(metric, e) if e else NONE for e in estimates],
        "change": changes,
        "run": [escape(p.run_id) for p in points],
    }
    shorter = {name: cells for name, cells in columns.items() if name not in ("started", "device")}
    shorter = {"run": shorter.pop("run"), **shorter}
    shortest: dict[str, Sequence[RenderableType]] = {
        "run": columns["run"],
        "commit": [p.commit[:7] + ("+" if p.dirty else "") for p in points],
        title: [
            outcome(p.outcome)
            if p.outcome != Outcome.OK
            else (units.value(metric, e) if e else NONE)
            for p, e in zip(points, estimates, strict=True)
        ],
        "change": changes,
    }
    return Group(
        Text(case_id, style="bold"),
        fitting(*(plain_table(c, right=(title, "change")) for c in (columns, shorter, shortest))),
        Text(
            "change: against the previous run on the same device; for a verdict use"
            " `harness compare RUN RUN`. +: with uncommitted changes."
        ),
    )
