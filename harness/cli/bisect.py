"""The command `bisect`: find the commit that moved a number, or the difference of two runs."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.bisect import criteria, differences, history, processes, session
from harness.bisect.journal import DEFAULT_ROOT, BisectRequest, Build, Journal
from harness.cli import options
from harness.cli.options import command, document, say, show
from harness.errors import HarnessError
from harness.git.repository import Repository
from harness.report.series import bisection
from harness.store import reader
from harness.store.writer import now
from harness.suite import load as suites


def bisect(
    suite: options.OptionalSuite = None,
    case: Annotated[
        str, typer.Option(metavar="PATTERN", help="Case id, or a pattern that matches one.")
    ] = "",
    overrides: options.SetOption = None,
    good: Annotated[str, typer.Option(metavar="REV", help="A good commit.")] = "",
    bad: Annotated[
        str, typer.Option(metavar="REV", help="A later, bad commit.", show_default="HEAD")
    ] = "",
    metric: Annotated[
        str | None,
        typer.Option(help="Search by step_s (default), peak_memory_bytes or a reported metric."),
    ] = None,
    counter: Annotated[
        str | None, typer.Option(help="Search by a count per step: host_syncs, dispatched_ops, ...")
    ] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Treat this outcome as bad: crash, incorrect, hang, ...")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Search by whether this kernel runs.")
    ] = None,
    effect: Annotated[
        float, typer.Option(min=0.002, max=1.0, help="Smallest change to find: 0.03 is 3 %.")
    ] = 0.03,
    build: Annotated[
        str, typer.Option(metavar="CMD", help="Run CMD in each commit's worktree first.")
    ] = "",
    build_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Files the build depends on; commits with equal files share it. Repeatable.",
        ),
    ] = None,
    root: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FOLDER",
            help="Import code from this folder of each commit; default its root. Repeatable.",
        ),
    ] = None,
    enter_merges: Annotated[
        bool | None,
        typer.Option(help="If a merge is the first bad commit, search inside (default), or stop."),
    ] = None,
    budget: Annotated[
        float | None, typer.Option(metavar="MINUTES", min=0, help="Stop after MINUTES.")
    ] = None,
    runs: Annotated[
        tuple[str, str] | None,
        typer.Option(
            metavar="RUN RUN", help="Write a suite that tests each difference of two stored runs."
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Continue an unfinished bisection: its id, or latest."),
    ] = None,
    as_json: options.JsonOption = False,
    state: Annotated[Path, typer.Option(help="Folder of the bisections.")] = DEFAULT_ROOT,
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
    criterion = {"metric": metric, "counter": counter, "outcome": outcome, "kernel": kernel}
    given: dict[str, object] = {
        "a suite": suite,
        "--set": overrides,
        "--case": case,
        "--good": good,
        "--bad": bad,
        "--runs": runs,
        **{f"--{name}": value for name, value in criterion.items()},
        "--build": build,
        "--build-key": build_key,
        "--root": root,
        f"--{'no-' * (enter_merges is False)}enter-merges": enter_merges is not None,
    }
    common: dict[str, Any] = {
        "effect": effect,
        "build": Build(command=build, key=tuple(build_key or ())),
        "roots": tuple(root or (".",)),
        "command": command(),
    }
    start: BisectRequest | Journal
    if resume is not None:
        if also := [name for name, value in given.items() if value]:
            raise HarnessError(
                f"--resume continues the recorded request; {also[0]} would change it",
                f"Remove {also[0]}.",
            )
        start = Journal.resume(state, resume)
    elif runs is not None:
        if suite or good or bad or overrides:
            raise HarnessError(
                "--runs takes the suite from the two runs",
                "Remove the suite, --set, --good and --bad.",
            )
        path = state / f"differences-{runs[0]}-{runs[1]}.yaml".replace("/", "-")
        text = differences.suite_of([reader.load(stored, name) for name in runs], case, str(path))
        state.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        show(f"{path}\n{text[: text.index('schema:')].rstrip()}")
        raise typer.Exit(0)
    elif suite and good:
        repository = Repository.around(Path.cwd())
        loaded = suites.load(suite, overrides=overrides or ())
        one = criteria.one_case(loaded, case, suite)
        chosen = criteria.chosen(one, criterion)
        start = BisectRequest(
            started_at=now(),
            repository=str(repository.root),
            history=history.between(repository, good, bad or "HEAD"),
            suite=replace(loaded, cases=(one,)),
            case=criteria.prepared(one, chosen),
            criterion=chosen,
            enter_merges=enter_merges is not False,
            **common,
        )
    else:
        raise HarnessError(
            "a bisection needs a suite, --case and --good, or --runs and --case",
            "For example: harness bisect train --case nsa/seq_len=2048 --good v1.2",
        )
    resources = processes.Resources(
        state=state,
        budget_s=None if budget is None else 60 * budget,
        wait_s=wait_for_gpu,
        say=say,
    )
    result = session.run(start, resources)
    page = bisection.write(result, reports, datetime.date.today())
    if as_json:
        document({**bisection.document(result), "report": str(page)})
    else:
        show(f"{bisection.sentence(result)}\nReport: {page}")
        if result.resumable:
            show(f"Continue with: harness bisect --resume {result.folder.name}")
    raise typer.Exit(0 if result.found else 3)
