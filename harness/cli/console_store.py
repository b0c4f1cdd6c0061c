"""What the store holds, as Rich renderables. Nothing here prints.

Where the terminal is too narrow for a table, the columns that say least are left out: a row that
is folded into five lines says nothing.
"""

from collections.abc import Collection, Mapping, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness import units
from harness.index_query import Point
from harness.records import METRICS, Outcome
from harness.store import RunHeader

NONE = "–"
"""Not measured."""


class _Fitting:
    """The first of some tables that the terminal is wide enough for; the last where none is."""

    def __init__(self, *tables: Table) -> None:
        self._tables = tables

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=10_000)
        fits = (
            t for t in self._tables if console.measure(t, options=wide).maximum <= options.max_width
        )
        yield next(fits, self._tables[-1])


def fitting(*tables: Table) -> RenderableType:
    """Of tables of the same rows, the widest first, the first that the terminal has room for."""
    return _Fitting(*tables)


def plain_table(
    columns: Mapping[str, Sequence[RenderableType]], *, right: Collection[str] = ()
) -> Table:
    """A plain table of whole columns; those named in `right` hold numbers."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for name in columns:
        number = name in right
        # A run's id is copied from here, and a number that is cut is another number.
        table.add_column(
            name,
            justify="right" if number else "left",
            overflow="fold",
            no_wrap=number or name == "run",
        )
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    return table


def _without(columns: Mapping[str, Sequence[RenderableType]], *names: str) -> Table:
    return plain_table({name: cells for name, cells in columns.items() if name not in names})


def runs(headers: Sequence[RunHeader]) -> RenderableType:
    """The runs in the store, oldest first. An id says suite, device and time: where the terminal is
    narrow, their columns are left out."""
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
    """How a run's cases ended, the most frequent first; before that, what is wrong with the run."""
    if header.problem:
        problem = header.problem.partition("\n")[0]
        return Text(f"unreadable: {problem}", style="red")
    common = sorted(header.outcomes.items(), key=lambda item: (-item[1], item[0]))
    said = ", ".join(f"{count} {name}" for name, count in common)
    return Text(said if header.ended_at else f"unfinished: {said}" if said else "unfinished")


def history(case_id: str, metric: str, points: Sequence[Point]) -> RenderableType:
    """One case over runs, oldest first, each beside the one before it on the same device."""
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
        "outcome": [
            Text(p.outcome, style="green" if p.outcome == Outcome.OK else "red") for p in points
        ],
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
            Text(p.outcome, style="red")
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
            "Each change is to the row before it on the same device, and no verdict:"
            " `harness compare RUN RUN` is. +: with uncommitted changes."
        ),
    )
