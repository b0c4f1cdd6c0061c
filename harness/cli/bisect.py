"""The command `bisect`: find the commit that moved a number, or the difference of two runs."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from harness.bisect import criteria, differences, history, session
from harness.bisect.journal import DEFAULT_ROOT, BisectRequest, Journal
from harness.cli import options
from harness.cli.options import command, say, show
from harness.errors import HarnessError
from harness.git.repository import Repository
from harness.report.series import bisection
from harness.store import reader
from harness.store.writer import now
from harness.suite import load as suites

OneCase = Annotated[str, Option(metavar="PATTERN", help="Case id, or a pattern that matches one.")]
GoodCommit = Annotated[str, Option(metavar="REV", help="A good commit.")]
BadCommit = Annotated[str, Option(metavar="REV", help="A later, bad commit.", show_default="HEAD")]
ByMetric = Annotated[
    str | None, Option(help="Search by step_s (default), peak_memory_bytes or a reported metric.")
]
ByCounter = Annotated[
    str | None, Option(help="Search by a count per step: host_syncs, dispatched_ops, ...")
]
ByOutcome = Annotated[
    str | None, Option(help="Treat this outcome as bad: crash, incorrect, hang, ...")
]
Effect = Annotated[float, Option(min=0.002, max=1.0, help="Smallest change to find: 0.03 is 3 %.")]
BuildCommand = Annotated[
    str, Option(metavar="CMD", help="Run CMD in each commit's worktree first.")
]
Roots = Annotated[
    list[str] | None,
    Option(
        metavar="FOLDER",
        help="Import code from this folder of each commit; default its root. Repeatable.",
    ),
]
Budget = Annotated[float | None, Option(metavar="MINUTES", min=0, help="Stop after MINUTES.")]
TwoRuns = Annotated[
    tuple[str, str] | None,
    Option(metavar="RUN RUN", help="Write a suite that tests each difference of two stored runs."),
]
Resumed = Annotated[
    str | None, Option(metavar="ID", help="Continue an unfinished bisection: its id, or latest.")
]
State = Annotated[Path, Option(help="Folder of the bisections.")]


def bisect(
    suite: options.OptionalSuite = None,
    case: OneCase = "",
    overrides: options.SetOption = None,
    good: GoodCommit = "",
    bad: BadCommit = "",
    metric: ByMetric = None,
    counter: ByCounter = None,
    outcome: ByOutcome = None,
    effect: Effect = 0.03,
    build: BuildCommand = "",
    root: Roots = None,
    budget: Budget = None,
    runs: TwoRuns = None,
    resume: Resumed = None,
    state: State = DEFAULT_ROOT,
    stored: options.StoreOption = options.STORE,
    reports: options.ReportsOption = options.REPORTS,
    wait_for_gpu: options.WaitOption = 0.0,
) -> None:
    """Find the commit that moved a number; or write a suite that finds the difference of runs.

    \b
    harness bisect train --case 'nsa/seq_len=2048' --good v1.2 --bad main
    harness bisect counters --case selected --good v1.2 --counter host_syncs
    harness bisect --runs 20261119-0712 20261121-0730 --case train
    harness bisect --resume latest --budget 30

    Exit status: 0 found; 3 undecided, or out of budget.
    """
    criterion = {"metric": metric, "counter": counter, "outcome": outcome}
    asked = suite or overrides or good or bad or any(criterion.values()) or build or root
    if (resume and (case or runs or asked)) or (runs and asked):
        raise HarnessError(
            "--resume continues a search as it is; --runs needs --case alone",
            "Remove the other options.",
        )
    if resume is not None:
        start: BisectRequest | Journal = Journal.resume(state, resume)
    elif runs is not None:
        _write_suite(runs, case, state, stored)
        return
    elif suite and good:
        whole = suites.load(suite, overrides=overrides or ())
        repository = Repository.around(Path.cwd())
        one = criteria.one_case(whole, case, whole.path)
        chosen = criteria.chosen(one, criterion)
        start = BisectRequest(
            started_at=now(),
            repository=str(repository.root),
            history=history.between(repository, good, bad or "HEAD"),
            suite=replace(whole, cases=(one,)),
            case=criteria.prepared(one, chosen),
            criterion=chosen,
            command=command(),
            effect=effect,
            build=build,
            roots=tuple(root or (".",)),
        )
    else:
        raise HarnessError(
            "a bisection needs a suite, --case and --good, or --runs and --case",
            "For example: harness bisect train --case nsa/seq_len=2048 --good v1.2",
        )
    budget_s = None if budget is None else 60 * budget
    resources = session.Resources(state=state, budget_s=budget_s, wait_s=wait_for_gpu, say=say)
    result = session.run(start, resources)
    page = bisection.write(result, reports, datetime.date.today())
    show(f"{bisection.sentence(result)}\nReport: {page}")
    if result.resumable:
        show(f"Continue with: harness bisect --resume {result.folder.name}")
    raise typer.Exit(0 if result.found else 3)


def _write_suite(runs: tuple[str, str], case: str, state: Path, stored: Path) -> None:
    """Write the suite of the differences of two runs, and show how to run it."""
    first, second = (reader.load(stored, name) for name in runs)
    path = state / f"differences-{first.run_id}-{second.run_id}.yaml"
    text = differences.suite_of([first, second], case, str(path))
    state.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    show(f"{path}\n{text[: text.index('schema:')].rstrip()}")
