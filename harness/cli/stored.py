"""The commands `list` and `show`: what is stored."""

from collections import Counter
from typing import Annotated, Literal

import typer

from harness import units
from harness.analysis.study import Study
from harness.cli import console, options, pivots
from harness.cli import report as pages
from harness.cli.options import out, say, show
from harness.errors import HarnessError
from harness.records import Run, gpu_matches
from harness.report.answer import excused
from harness.report.series.rules import judged_by
from harness.store import reader
from harness.suite import load as suites


def list_(
    what: Annotated[
        Literal["suites", "runs"] | None, typer.Argument(metavar="[suites|runs]", help="Or both.")
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="Only runs of the suite with this name.")
    ] = "",
    gpu: Annotated[
        str,
        typer.Option(metavar="PATTERN", help="Only runs on a matching GPU; cpu for no GPU."),
    ] = "",
    commit: Annotated[
        str, typer.Option(metavar="HASH", help="Only runs of this commit, by hash or prefix.")
    ] = "",
    store_root: options.StoreOption = options.STORE,
) -> None:
    """List the shipped suites and the recorded runs.

    \b
    harness list
    harness list runs --suite smoke --gpu H200
    """
    if what != "runs":
        out.print(console.suites([suites.load(path) for path in suites.available()]))
    if what == "suites":
        return
    rows = console.table("run", "commit", "processes")

    def wanted(run: Run) -> bool:
        named = suite in ("", run.suite.name) and run.environment.commit.startswith(commit)
        return named and (not gpu or gpu_matches(gpu, run.environment.device_name))

    for run in reader.stored(store_root, say, wanted):
        ended = Counter(units.outcome_name(m.outcome) for m in run.measurements)
        said = ", ".join(f"{count} {name}" for name, count in ended.most_common())
        unfinished = "" if run.ended_at else "unfinished: "
        rows.add_row(run.run_id, run.environment.commit[:10], f"{unfinished}{said}")
    out.print(rows if rows.row_count else f"no matching runs in {store_root}")


def show_(
    run_ids: options.RunsArgument = None,
    rules: options.RulesOption = None,
    rows: options.RowsOption = "",
    cols: options.ColsOption = "",
    only: options.FilterOption = None,
    metric: options.MetricOption = "",
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Show a recorded run: its cases, and the verdict by its suite's rules; or a table of runs.

    \b
    harness show latest
    harness show 20261121-0730 --rules a100-retest
    harness show latest --rows seq_len --cols provider --metric peak_memory_bytes
    harness show RUN RUN --cols gpu    # platforms side by side

    A pivot table takes any axis, also workload, provider, gpu, commit and run. Axes in which cases
    differ and that are not columns are rows. --filter or --metric alone make one, too.
    """
    asked = bool(rows or cols or only or metric)
    if asked and rules:
        raise HarnessError("a pivot table has no verdict", "Remove --rules.")
    named = (reader.load(store_root, name) for name in run_ids or ["latest"])
    runs = [*{run.run_id: run for run in named}.values()]
    if not asked:
        if len(runs) > 1:
            raise HarnessError("several runs need a pivot table", "Add --cols run.")
        run = judged_by(rules or "", runs[0])
        of = Study(run)
        pages.show_cases(of)
        side = not rules and run.environment.command[1:2] in (("gate",), ("compare",))
        judged = "One side of a gate or comparison, which has the verdict. By a suite: --rules"
        out.print(judged if side else console.verdict(excused(of)))
        show(f"Run: {run.folder}")
        raise typer.Exit(0 if side else of.verdict.decision.exit_status)
    show(pivots.pivot(runs, rows, cols, metric or "step_s", only or ()))
