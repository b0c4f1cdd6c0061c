"""The commands `list`, `history` and `index`: what the store holds, by its index."""

import difflib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from harness import index, store
from harness import suite as suites
from harness.cli import console, console_store
from harness.errors import HarnessError
from harness.index_query import Choice, Index, Point
from harness.records import METRICS

out = console.console()
err = console.console(stderr=True)

NAMED = 8
"""Cases that a message names at most."""

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the recorded runs.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of tables.")
]
SuiteOption = Annotated[str, typer.Option("--suite", help="Only runs of this suite, by its name.")]
GpuOption = Annotated[
    str, typer.Option("--gpu", metavar="PATTERN", help="Only on such a GPU; cpu for none.")
]
CommitOption = Annotated[
    str,
    typer.Option("--commit", metavar="HASH", help="Only of this commit; its beginning will do."),
]
SinceOption = Annotated[str, typer.Option("--since", metavar="DATE", help="Only from this day on.")]
UntilOption = Annotated[
    str, typer.Option("--until", metavar="DATE", help="Only up to this day, which is included.")
]
OutcomeOption = Annotated[
    str, typer.Option("--outcome", help="Only with a case that ended so: crash, timeout, ok.")
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", "-n", min=1, help="Only the latest so many.")
]

index_app = typer.Typer(name="index", help="The index of the recorded runs.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("list", rich_help_panel="Keep")(list_)
    app.command(rich_help_panel="Keep")(history)
    app.add_typer(index_app, rich_help_panel="Keep")


def list_(
    what: Annotated[str, typer.Argument(help="suites, or runs; both when left out.")] = "",
    suite: SuiteOption = "",
    gpu: GpuOption = "",
    commit: CommitOption = "",
    since: SinceOption = "",
    until: UntilOption = "",
    outcome: OutcomeOption = "",
    limit: LimitOption = None,
    as_json: JsonOption = False,
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """List the shipped suites and the recorded runs.

    harness list runs --suite smoke --gpu H200 --since 2026-11-01 --limit 10

    harness list runs --outcome crash
    """
    if what not in ("", "suites", "runs"):
        raise HarnessError(f"nothing is listed under {what!r}", "There are suites and runs.")
    choice = Choice(
        suite=suite,
        gpu=gpu,
        commit=commit,
        since=since,
        until=until,
        outcome=outcome,
        limit=limit,
    )
    if choice != Choice():
        if what == "suites":
            raise HarnessError("suites are all listed", "Options choose runs: harness list runs.")
        what = "runs"
    found = [suites.load(path) for path in suites.available()] if what != "runs" else []
    headers = (
        index.ask(store_root, lambda known: known.runs(choice), _say) if what != "suites" else ()
    )
    if as_json:
        known = [{"name": s.name, "question": s.question, "cases": len(s.cases)} for s in found]
        _document({"suites": known, "runs": [asdict(h) for h in headers]})
        return
    if what != "runs":
        out.print(console.suites(found))
    if what != "suites":
        none = "no such runs" if choice != Choice() else "no runs"
        out.print(console_store.runs(headers) if headers else f"{none} in {store_root}")


def history(
    case: Annotated[
        str, typer.Argument(metavar="CASE", help="A case's id, or a pattern or part of one.")
    ],
    metric: Annotated[
        str, typer.Option("--metric", "-m", help="What to follow: step_s, host_syncs, ...")
    ] = "step_s",
    suite: SuiteOption = "",
    gpu: GpuOption = "",
    commit: CommitOption = "",
    since: SinceOption = "",
    until: UntilOption = "",
    outcome: OutcomeOption = "",
    limit: LimitOption = None,
    as_json: JsonOption = False,
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """Show one case over all runs that have it, oldest first.

    harness history 'checkpointing/*batch=16/gc=off' --gpu H200 --limit 20

    harness history checkpointing/nsa/seq_len=2048/batch=16/gc=off --metric host_syncs
    """
    choice = Choice(
        suite=suite,
        gpu=gpu,
        commit=commit,
        since=since,
        until=until,
        outcome=outcome,
        limit=limit,
    )

    def question(known: Index) -> tuple[str, tuple[Point, ...]]:
        case_id = _one_case(known.case_ids(), case, store_root)
        points = known.history(case_id, choice, metric=None if as_json else metric)
        if metric not in METRICS and not any(metric in point.metrics for point in points):
            points = known.history(case_id, choice)  # to name what there is instead
        return case_id, points

    case_id, points = index.ask(store_root, question, _say)
    measured = {name for point in points for name in point.metrics}
    if metric not in METRICS and metric not in measured:
        names = sorted(measured or METRICS)
        near = difflib.get_close_matches(metric, names, 1, 0.5)
        meant = f"Did you mean {near[0]}? " if near else ""
        raise HarnessError(f"there is no metric {metric!r}", f"{meant}There is {', '.join(names)}.")
    if as_json:
        _document({"case": case_id, "metric": metric, "points": [asdict(p) for p in points]})
    elif points:
        out.print(console_store.history(case_id, metric, points))
    else:
        out.print(f"no such runs of {case_id} in {store_root}", markup=False, highlight=False)


@index_app.command()
def rebuild(as_json: JsonOption = False, store_root: StoreOption = store.DEFAULT_ROOT) -> None:
    """Make the index from the run folders alone, whatever is there now."""
    count = index.rebuild(store_root, _say)
    if as_json:
        _document({"index": str(store_root / index.INDEX), "runs": count})
    else:
        out.print(f"{store_root / index.INDEX}: {count:,} runs", highlight=False, soft_wrap=True)


def _one_case(known: Sequence[str], wanted: str, root: Path) -> str:
    """The id of the case that somebody means."""
    if wanted in known:
        return wanted
    pattern = wanted if any(c in wanted for c in "*?[") else f"*{wanted}*"
    fits = [case_id for case_id in known if fnmatchcase(case_id, pattern)]
    if len(fits) == 1:
        return fits[0]
    if not known:
        raise HarnessError(f"{root} holds no runs", "`harness run` makes one.")
    if fits:
        shown = [*fits[:NAMED], *([f"and {len(fits) - NAMED} more"] if len(fits) > NAMED else ())]
        problem, lead = f"{wanted!r} fits {len(fits)} cases of {root}", "Name one of them:"
    else:
        shown = difflib.get_close_matches(wanted, known, 3, 0.3) or list(known[:3])
        problem, lead = f"{root} has no case {wanted!r}", "Those most like it:"
    raise HarnessError(problem, "\n    ".join((lead, *shown)))


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)


def _document(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
