"""A pivot table of stored cases over any axes, made by pandas."""

from collections.abc import Iterator, Sequence

from harness import units
from harness.analysis.summary import summarise
from harness.errors import HarnessError
from harness.records import Outcome, Run
from harness.report.tables import NONE, metric_cell
from harness.suite.choice import passing
from harness.suite.positions import nearest

_CELL = " "  # no axis has this name
_OF_RUN = ("gpu", "commit", "run")


def pivot(
    runs: Sequence[Run], row_axes: str, column_axes: str, metric: str, filters: Sequence[str] = ()
) -> str:
    """A metric of the cases that pass the filters; a HarnessError without such a case, axis or
    metric. Every axis that varies and is not a column is a row, so a cell is of one configuration;
    the run is one where its cells would coincide. Axes are names with commas between them."""
    import pandas as pd  # slow

    rows, columns = (
        text.replace(" ", "").split(",") if text else [] for text in (row_axes, column_axes)
    )
    frame = pd.DataFrame(_cases(runs, metric, filters))
    if frame.empty:
        raise HarnessError("no case matches the filters", "List the cases: harness show RUN")
    frame = frame.fillna(NONE)  # pandas leaves out rows with a missing axis
    axes = [name for name in frame.columns if name != _CELL]
    for name in (*rows, *columns):
        if name not in axes or (name in rows and name in columns):
            what = "named twice" if name in axes else "no axis"
            raise HarnessError(f"{name!r} is {what}", f"The axes are: {', '.join(axes)}.")
    varying = [name for name in axes if name not in _OF_RUN and frame[name].nunique() > 1]
    index = [*rows, *(name for name in varying if name not in (*rows, *columns))]
    if not index or frame.duplicated([*index, *columns]).any():
        index.append("run")
    table = frame.pivot_table(
        values=_CELL, index=index, columns=[*columns], aggfunc="first", sort=False
    )
    return f"{metric}\n{table.fillna(NONE).to_string()}"


def _cases(runs: Sequence[Run], metric: str, filters: Sequence[str]) -> Iterator[dict[str, str]]:
    """A case's axes, its run, and its metric with the interval, or how it ended."""
    summaries = {run.run_id: summarise(run) for run in runs}
    measured = {m for found in summaries.values() for s in found for m in s.metrics}
    if metric not in (known := {"step_s", *measured}):
        raise HarnessError(f"no metric {metric!r}", nearest(metric, sorted(known)))
    for run in runs:
        dirty = "+" if run.environment.uncommitted else ""
        commit = run.environment.commit[:10] + dirty or NONE
        wanted = {case.case_id for case in passing(run.suite.cases, filters)}
        for s in summaries[run.run_id]:
            if s.case.case_id in wanted:
                of_case = {"workload": s.case.workload, "provider": s.case.provider, **s.case.axes}
                of_run = (run.environment.device_name, commit, run.run_id)
                text = metric_cell(s, metric, True)
                ended = text == NONE and s.outcome is not Outcome.OK
                yield {
                    **{name: units.scalar(value) for name, value in of_case.items()},
                    **dict(zip(_OF_RUN, of_run, strict=True)),
                    _CELL: units.outcome_name(s.outcome) if ended else text,
                }
