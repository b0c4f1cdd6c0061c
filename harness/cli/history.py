"""The commands `list`, `show` and `history`: what is stored, mostly by its summaries."""

import difflib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness import units
from harness.cli import console, options, pivots
from harness.cli import report as pages
from harness.cli.options import document, out, say, show
from harness.errors import HarnessError
from harness.records import METRICS, Outcome
from harness.report.series.rules import judged_by
from harness.store import reader, summaries
from harness.store.reader import RunHeader
from harness.store.summaries import HistoryPoint, RunFilter, Summaries
from harness.suite import load as suites
from harness.suite.choice import fits

NAMED = 8
"""Most cases that a message names."""


def list_(
    what: Annotated[str, typer.Argument(metavar="WHAT", help="suites or runs; default both.")] = "",
    suite: options.OfSuite = "",
    gpu: options.OnGpu = "",
    commit: options.OfCommit = "",
    since: options.Since = "",
    until: options.Until = "",
    outcome: options.WithOutcome = "",
    limit: options.Limit = None,
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """List the shipped suites and the recorded runs.

    \b
    harness list
    harness list runs --suite smoke --gpu H200 --since 2026-11-01 --limit 10
    harness list runs --outcome crash
    """
    if what not in ("", "suites", "runs"):
        raise HarnessError(f"cannot list {what!r}", "Use harness list suites or harness list runs.")
    choice = RunFilter(
        suite=suite, gpu=gpu, commit=commit, since=since, until=until, outcome=outcome, limit=limit
    )
    if choice != RunFilter():
        if what == "suites":
            raise HarnessError(
                "these options select runs, not suites", "Use: harness list runs, or no options."
            )
        what = "runs"
    found = [suites.load(path) for path in suites.available()] if what != "runs" else []
    headers: tuple[RunHeader, ...] = ()
    if what != "suites":
        stored = summaries.read(store_root, say)
        headers = stored.runs(choice) or _none_of(stored, suite, store_root)
    if as_json:
        known = [{"name": s.name, "question": s.question, "cases": len(s.cases)} for s in found]
        document({"suites": known, "runs": [asdict(h) for h in headers]})
        return
    if what != "runs":
        out.print(console.suites(found))
    if what != "suites":
        none = "no matching runs" if choice != RunFilter() else "no runs"
        out.print(listed(headers) if headers else f"{none} in {store_root}")


def history(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="Case id, a pattern, or a part of one.")
    ],
    metric: Annotated[
        str,
        typer.Option("--metric", "-m", help="Metric or counter to show: step_s, host_syncs, ..."),
    ] = "step_s",
    gpu: options.OnGpu = "",
    limit: options.Limit = None,
    as_json: options.JsonOption = False,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Show how one case changed over all recorded runs, oldest first, and since the last git tag.

    \b
    harness history 'checkpointing/*batch=16/gc=off' --gpu H200 --limit 20
    harness history checkpointing/nsa/seq_len=2048/batch=16/gc=off --metric host_syncs
    """
    known = summaries.read(store_root, say)
    case_id = _one_case(known.case_ids(), case, store_root)
    points = known.history(case_id, RunFilter(gpu=gpu, limit=limit))
    if metric not in METRICS:
        pivots.require_metric(metric, {name for p in points for name in p.metrics} or METRICS)
    if as_json:
        every_point = [asdict(p) for p in points]
        document({"case": case_id, "metric": metric, "points": every_point})
    elif points:
        out.print(followed(case_id, metric, points))
    else:
        show(f"no matching runs of {case_id} in {store_root}")


def listed(headers: Sequence[RunHeader]) -> Table:
    """The runs in the store, oldest first. An id contains suite, device and time."""
    rows = console.table("run", "commit", "cases")
    for h in headers:
        rows.add_row(h.run_id, h.commit[:10], _ended(h))
    return rows


def _ended(header: RunHeader) -> Text:
    """How a run's cases ended, the most frequent outcome first; or why it cannot be read."""
    if header.problem:
        problem = header.problem.partition("\n")[0]
        return Text(f"unreadable: {problem}", style="red")
    common = sorted(header.outcomes.items(), key=lambda item: (-item[1], item[0]))
    said = ", ".join(f"{count} {name}" for name, count in common)
    return Text(said if header.ended_at else f"unfinished: {said}" if said else "unfinished")


def followed(case_id: str, metric: str, points: Sequence[HistoryPoint]) -> RenderableType:
    """One case over runs, oldest first, each with its change from the one before."""
    title = METRICS[metric].title if metric in METRICS else metric
    rows = console.table("run", "commit", title, "change", right=(title, "change"))
    before: dict[str, tuple[float, str]] = {}
    for p in points:
        estimate, card = p.metrics.get(metric), p.device_id or p.host
        model = p.device if p.device_id else card
        change, (last, on) = "", before.get(model, (0.0, ""))
        if estimate and last:
            change = units.change(estimate.value / last) + ", other card" * (card != on)
        elif estimate and before:
            change = "other device"
        if estimate and estimate.value > 0:
            before[model] = estimate.value, card
        value = units.cell(metric, estimate) if estimate else "not measured"
        rows.add_row(
            escape(p.run_id),
            p.commit[:7] + ("+" if p.dirty else ""),
            value if p.outcome == Outcome.OK else console.outcome(p.outcome),
            change,
        )
    return Group(
        Text(case_id, style="bold"),
        rows,
        Text(
            "change: against the previous run on the same GPU model; for a verdict use"
            " `harness compare RUN RUN`. +: with uncommitted changes."
        ),
    )


def _none_of(known: Summaries, suite: str, root: Path) -> tuple[()]:
    """No runs, if a suite of that name exists."""
    names = {h.suite for h in known.runs() if h.suite} | {p.stem for p in suites.available()}
    if suite and suite not in names:
        raise HarnessError(
            f"no suite and no run in {root} is named {suite!r}",
            f"Use --suite with one of {', '.join(sorted(names))}.",
        )
    return ()


def _one_case(known: Sequence[str], wanted: str, root: Path) -> str:
    """The one case whose id matches an id, a pattern or a part of one."""
    if not known:
        raise HarnessError(f"{root} has no runs", "Record one: harness run SUITE")
    found = [wanted] if wanted in known else [i for i in known if fits(i, wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
        problem, shown = f"{wanted!r} matches {len(found)} cases of {root}", found[:NAMED] + more
    else:
        problem = f"{root} has no case {wanted!r}"
        shown = difflib.get_close_matches(wanted, known, 3, 0.3) or list(known[:3])
    raise HarnessError(problem, "\n    ".join(["Name one of these:", *shown]))


def show_(
    run_ids: options.RunsArgument = None,
    rules: options.RulesOption = None,
    rows: options.RowsOption = "",
    cols: options.ColsOption = "",
    only: options.FilterOption = None,
    metric: options.MetricOption = "",
    as_json: options.JsonOption = False,
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
    if asked and (rules or as_json):
        raise HarnessError("a pivot table has neither a verdict nor JSON", "Remove these options.")
    named = (reader.load(store_root, name) for name in run_ids or ["latest"])
    runs = [*{run.run_id: run for run in named}.values()]
    if not asked:
        if len(runs) > 1:
            raise HarnessError("several runs need a pivot table", "Add --cols run.")
        pages.conclude(judged_by(rules or "", runs[0]), None, as_json)
    named_axes = options.axes(rows), options.axes(cols)
    show(pivots.pivot(runs, *named_axes, metric or "step_s", only or ()))
