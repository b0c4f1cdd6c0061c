"""Pivot tables of stored cases over any axes. No table mixes two configurations."""

import csv
import difflib
import io
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from harness import units
from harness.analysis.scaling import groups_along
from harness.analysis.statistics import times_better
from harness.analysis.summary import summarise
from harness.errors import HarnessError
from harness.gate.compare import is_across
from harness.gate.records import GateCase
from harness.records import COUNTERS, Case, CaseSummary, Decision, Estimate, Outcome, Run, Scalar
from harness.report.render import rendered
from harness.report.tables import NONE, Table, axis_cells, metric_cell, titles
from harness.report.text import outcome_name
from harness.report.verdict_text import compared_text
from harness.store.tables import csv_cell
from harness.suite.choice import passes

_OF_RUN = ("gpu", "commit", "run")
_BARE = ("workload", "provider", *_OF_RUN)
"""Axes whose values need no name."""
UNDECIDED = "~"


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotCell:
    """A value or a ratio for people, and in SI units with its interval, or why there is none."""

    text: str
    value: float | str
    low: float | None = None
    high: float | None = None


PivotCells = Callable[[CaseSummary], PivotCell]
Line = tuple[Case, list[PivotCell | None]]
"""A row of a pivot table: its first case, and the cells of all columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PivotTables:
    """A pivot table, split where cases differ in an axis that is neither in rows nor columns."""

    parts: tuple[tuple[str, Table], ...]
    """The axes that split, and the table."""
    numbers: tuple[tuple[Scalar | None, ...], ...]
    """All parts in one, heading first: the axes that split are rows too, and each cell is three
    columns."""

    def markdown(self) -> str:
        return rendered("pivot.md.j2", {"parts": self.parts})

    def csv(self) -> str:
        text = io.StringIO()
        rows = (map(csv_cell, row) for row in self.numbers)
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()


def cases(runs: Sequence[Run], filters: Sequence[str] = ()) -> tuple[CaseSummary, ...]:
    """The cases of runs that pass the filters. Variables that they set are axes too, unless these
    are swept elsewhere; so are those of several runs, and their GPU, commit and id."""
    swept, found = {n for run in runs for c in run.suite.cases for n in c.swept}, []
    for run in runs:
        git, e = run.environment.git, run.environment
        commit = git.commit[:10] + "+" * e.uncommitted if git else "none"
        where = dict(zip(_OF_RUN, (e.device_name, commit, run.run_id), strict=True))
        shared, where = (e.variables, where) if len(runs) > 1 else ({}, {})
        for s in summarise(run):
            if passes(s.case.case_id, filters):
                env = {n: v for n, v in {**shared, **s.case.env}.items() if n not in swept}
                axes = {**where, **env, **s.case.axes}
                found.append(replace(s, case=replace(s.case, axes=axes, env=env)))
    return tuple(found)


def pivot(
    summaries: Sequence[CaseSummary],
    rows: Sequence[str],
    columns: Sequence[str],
    metric: str,
    cell: PivotCells,
    suffix: str = "",
) -> PivotTables:
    """A pivot table of `cases`. Without rows, these are all axes that vary and are no column.

    Axes that follow from others split nothing: of runs, if columns tell these apart; a variable
    that each provider sets for itself. A remark has their values.

    Args:
        suffix: What the cells state of the metric, if not its value.

    Raises:
        HarnessError: There is no case, no such axis or no such metric.
    """
    if not summaries:
        raise HarnessError("no case matches the filters", "List the cases: harness show RUN")
    swept = dict.fromkeys(n for s in summaries for n in s.case.swept)
    known = [*dict.fromkeys((*_BARE[:2], *swept, *(n for s in summaries for n in s.case.axes)))]
    named = (*rows, *columns)
    for name in named:
        if name not in known:
            raise HarnessError(f"no axis {name!r}", f"The axes are: {', '.join(known)}.")
        if named.count(name) > 1:
            raise HarnessError(f"{name!r} is named twice", "Name it in --rows or in --cols.")
    require_metric(metric, {"step_s", *(m for s in summaries for m in s.metrics)})
    title = titles([s.case for s in summaries])[metric] + suffix
    orders = {n: _order(s.case.get(n) for s in summaries) for n in known}
    moving = [n for n in known if len(orders[n]) > 1]
    soft = dict.fromkeys((*_OF_RUN, *(n for s in summaries for n in s.case.env if n not in swept)))
    rows = rows or [n for n in moving if n not in (*columns, *soft)]
    split = [n for n in moving if n not in (*rows, *columns, *soft)]
    follow, remarks = [], []
    for name in (n for n in soft if n in moving and n not in (*rows, *columns)):
        before = (*rows, *columns, *split)
        of_runs = [[n for n in _OF_RUN if n in before]]
        for by in of_runs if name in _OF_RUN else [[n] for n in before]:
            pairs = {(_said(s, by) or NONE, *axis_cells(s.case, [name])): 0 for s in summaries}
            if by and len({key for key, _ in pairs}) == len(pairs):
                said = "; ".join(": ".join(pair) for pair in pairs)
                remarks.append(f"{name} by {', '.join(by)}: {said}.")
                follow.append(name)
                break
        else:
            split.append(name)

    def place(s: CaseSummary) -> list[int]:
        values = ((n, s.case.get(n)) for n in (*columns, *split, *rows))
        return [orders[n].index((type(v), v)) for n, v in values]

    def column(s: CaseSummary) -> tuple[Scalar | None, ...]:
        return tuple(map(s.case.get, columns))

    def laid(group: Sequence[CaseSummary]) -> tuple[list[str], list[Line]]:
        heads = {column(s): _said(s, columns) or title for s in sorted(group, key=place)}
        lines = groups_along(group, *columns, *follow)
        cells = [{column(s): cell(s) for s in line} for line in lines]
        return [*heads.values()], [
            (line[0].case, [of.get(k) for k in heads])
            for line, of in zip(lines, cells, strict=True)
        ]

    ranked = sorted(summaries, key=lambda s: place(s)[len(columns) :])
    parts = []
    for group in groups_along(ranked, *rows, *columns, *follow):
        heads, lines = laid(group)
        texts = [(*axis_cells(k, rows), *(c.text if c else NONE for c in of)) for k, of in lines]
        table = Table(columns=(*rows, *(f">{h}" for h in heads)), rows=tuple(texts))
        parts.append((": ".join(filter(None, (title, _said(group[0], split)))), table))
    parts[-1] = parts[-1][0], replace(parts[-1][1], remarks=tuple(remarks))
    heads, lines = laid(ranked)
    axes = (*split, *rows)
    numbers: list[tuple[Scalar | None, ...]] = [
        (*axes, *(f"{head}{end}" for head in heads for end in ("", " lo", " hi")))
    ]
    for case, of in lines:
        whole = (x for c in of for x in ((c.value, c.low, c.high) if c else (None,) * 3))
        numbers.append((*map(case.get, axes), *whole))
    return PivotTables(parts=tuple(parts), numbers=tuple(numbers))


def require_metric(metric: str, measured: Collection[str]) -> None:
    """Raise HarnessError if there is no such metric among those measured."""
    if metric not in measured:
        near = difflib.get_close_matches(metric, sorted(measured), 1, 0.5)
        meant = f"Did you mean {near[0]}? " if near else ""
        problem = f"no metric {metric!r}"
        raise HarnessError(problem, f"{meant}Metrics: {', '.join(sorted(measured))}.")


def _order(values: Iterable[Scalar | None]) -> list[tuple[type, Scalar | None]]:
    """The different values of an axis: numbers ascending, others as they come. 1 is not True."""
    found = [*dict.fromkeys((type(v), v) for v in values)]
    numbers = all(kind in (int, float) for kind, _ in found)
    return sorted(found, key=lambda item: float(item[1] or 0)) if numbers else found


def _said(s: CaseSummary, axes: Sequence[str]) -> str:
    """`nsa, seq_len=512`: the values of a case's axes."""
    known = ((n, units.scalar(v)) for n in axes if (v := s.case.get(n)) is not None)
    return ", ".join(v if n in _BARE else f"{n}={v}" for n, v in known)


# --- cells -------------------------------------------------------------------------------


def values(metric: str) -> PivotCells:
    """A metric with its interval, or how the case ended."""

    def cell(s: CaseSummary) -> PivotCell:
        e, text = s.metrics.get(metric), metric_cell(s, metric, True)
        if s.outcome is not Outcome.OK:
            ended = outcome_name(s.outcome)
            return PivotCell(text=ended if text == NONE else text, value=ended)
        if e is None:
            return PivotCell(text=text, value=text)
        return PivotCell(text=text, value=e.value, low=e.low, high=e.high)

    return cell


def changes(metric: str, judged: Sequence[GateCase], before: Sequence[CaseSummary]) -> PivotCells:
    """A metric of the candidate over that of the baseline.

    Step times are as judged. The interval of another metric is over processes, without the
    variation between days.
    """
    answers = {case.case_id: case for case in judged}
    baseline = {s.case.case_id: s.metrics.get(metric) for s in before}

    def cell(s: CaseSummary) -> PivotCell:
        case, a, b = answers[s.case.case_id], baseline.get(s.case.case_id), s.metrics.get(metric)
        if metric == "step_s" or a is None or b is None:
            return _judged(case)
        found, decided = _ratio(metric, a, b)
        return found if decided and not is_across(case) else _undecided(found)

    return cell


def _judged(case: GateCase) -> PivotCell:
    c, undecided = case.comparison, case.decision is Decision.INCONCLUSIVE
    if c is None:
        found = PivotCell(text=str(case.state), value=str(case.state))
    else:
        text = units.change(c.ratio, c.low, c.high) if undecided else compared_text(c)
        found = PivotCell(text=text, value=c.ratio, low=c.low, high=c.high)
    return _undecided(found) if undecided else found


def _undecided(cell: PivotCell) -> PivotCell:
    return replace(cell, text=f"{UNDECIDED} {cell.text}", value=UNDECIDED)


def _ratio(metric: str, before: Estimate, after: Estimate) -> tuple[PivotCell, bool]:
    """The cell, and whether it is decided that they differ, or that they do not."""
    exact = metric in COUNTERS
    if exact or min(before.value, after.value) <= 0:  # 0 has no ratio
        ends = dict.fromkeys(units.plain(metric, e.value, 3) for e in (before, after))
        text = " → ".join(ends) if len(ends) > 1 else "same"
        return PivotCell(text=text, value=text), exact
    r = times_better(after, before, higher_is_better=True)
    if r.low is None or r.high is None or r.processes < 2:
        return PivotCell(text=units.change(r.value), value=r.value), False
    same = r.low == r.value == r.high == 1
    text = "same" if same else units.change(r.value, r.low, r.high)
    cell = PivotCell(text=text, value=r.value, low=r.low, high=r.high)
    return cell, same or not r.low <= 1 <= r.high
