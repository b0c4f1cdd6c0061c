"""The commands `list`, `show` and `history`: what is stored."""

from collections import Counter
from typing import Annotated, Literal, NoReturn

import typer
from rich.markup import escape

from harness import units
from harness.analysis import verdict as gate
from harness.analysis.summary import summarise
from harness.cli import console, options, pivots
from harness.cli import report as pages
from harness.cli.options import out, say, show
from harness.errors import HarnessError
from harness.records import Run, gpu_matches
from harness.report.series.rules import judged_by
from harness.report.tables import metric_cell
from harness.store import reader
from harness.suite import load as suites
from harness.suite.choice import fits


def list_(
    what: Annotated[
        Literal["suites", "runs"] | None, typer.Argument(metavar="[suites|runs]", help="Or both.")
    ] = None,
    suite: Annotated[
        str, typer.Option(metavar="NAME", help="Only runs of the suite with this name.")
    ] = "",
    gpu: options.OnGpu = "",
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
        named = suite in ("", run.suite.name) and _commit(run).startswith(commit)
        return named and _is_on(run, gpu)

    for run in reader.stored(store_root, say, wanted):
        ended = Counter(units.outcome_name(m.outcome) for m in run.measurements)
        said = ", ".join(f"{count} {name}" for name, count in ended.most_common())
        unfinished = "" if run.ended_at else "unfinished: "
        rows.add_row(run.run_id, _commit(run)[:10], f"{unfinished}{said}")
    out.print(rows if rows.row_count else f"no matching runs in {store_root}")


def history(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="Case id, a pattern, or a part of one.")
    ],
    metric: Annotated[str, typer.Option("--metric", "-m", help="Metric or counter.")] = "step_s",
    gpu: options.OnGpu = "",
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Show how cases changed over the recorded runs, oldest first.

    \b
    harness history 'checkpointing/*batch=16/gc=off' --gpu H200
    harness history checkpointing/nsa/seq_len=2048/batch=16/gc=off --metric host_syncs

    A change is against the previous run on the same GPU model. For a verdict: harness compare.
    """

    def wanted(run: Run) -> bool:
        return _is_on(run, gpu) and any(fits(c.case_id, case) for c in run.suite.cases)

    found = [
        (run, s)
        for run in reader.stored(store_root, say, wanted)
        for s in summarise(run)
        if fits(s.case.case_id, case)
    ]
    if not found:
        raise HarnessError(
            f"no matching run in {store_root} has a case {case!r}",
            "List the runs: harness list runs; the cases of one: harness show RUN",
        )
    pivots.require_metric(metric, {"step_s", *(name for _, s in found for name in s.metrics)})
    rows = console.table("case", "run", "commit", metric, "change", right=(metric, "change"))
    before: dict[tuple[str, str], tuple[float | None, str]] = {}
    for run, s in sorted(found, key=lambda point: point[1].case.case_id):
        here = run.environment
        last, card = before.get((s.case.case_id, here.device_name), (None, here.card))
        change = ""
        if estimate := s.metrics.get(metric):
            before[s.case.case_id, here.device_name] = estimate.value, here.card
            if last is not None:
                change = units.change(estimate.value / last) if last else f"{last:g} before"
                change += ", other card" if card != here.card else ""
        commit = _commit(run)[:10] + ("+" if here.uncommitted else "")
        value = escape(metric_cell(s, metric, True))
        rows.add_row(s.case.case_id, run.run_id, commit, value, change)
    out.print(rows)


def _commit(run: Run) -> str:
    git = run.environment.git
    return git.commit if git else ""


def _is_on(run: Run, gpu: str) -> bool:
    return not gpu or gpu_matches(gpu, run.environment.device_name)


def _show_run(run: Run) -> NoReturn:
    """Show all cases and rules, and exit with the verdict."""
    cases, verdict = gate.of_run(run)
    pages.show_cases(run, cases)
    out.print(console.verdict(verdict))
    show(f"Run: {run.folder}")
    raise typer.Exit(verdict.decision.exit_status)


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
        _show_run(judged_by(rules or "", runs[0]))
    show(pivots.pivot(runs, rows, cols, metric or "step_s", only or ()))
