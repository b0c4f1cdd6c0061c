"""The command `bisect`: finds the commit, or the difference of two runs, that moved a number."""

import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from harness import store
from harness import suite as suites
from harness.bisection import criteria, history, processes, report, session, subjects
from harness.bisection.journal import (
    DEFAULT_ROOT,
    Build,
    CommitsRequest,
    DifferencesRequest,
    Journal,
)
from harness.errors import HarnessError
from harness.gating.worktrees import Repository


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("bisect", rich_help_panel="Judge")(bisect)


def bisect(
    suite: Annotated[
        str | None, typer.Argument(help="Suite file, or the name of a shipped one.")
    ] = None,
    case: Annotated[
        str, typer.Option("--case", help="Id of the case, or a pattern that matches only it.")
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="axis=value or measure.sample_s=1. Repeatable."),
    ] = None,
    good: Annotated[str, typer.Option("--good", metavar="REV", help="A commit that is good.")] = "",
    bad: Annotated[
        str, typer.Option("--bad", metavar="REV", help="A later commit that is bad.")
    ] = "HEAD",
    metric: Annotated[
        str | None,
        typer.Option(help="step_s (default), peak_memory_bytes, or a metric of the program."),
    ] = None,
    counter: Annotated[
        str | None, typer.Option(help="Exact count of one step: host_syncs, dispatched_ops, ...")
    ] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Treat this outcome as bad: crash, incorrect, hang, ...")
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="PATTERN", help="Kernel or operator that runs or not."),
    ] = None,
    effect: Annotated[
        float, typer.Option(min=0.002, max=1.0, help="Smallest change to find, as a fraction.")
    ] = 0.03,
    build: Annotated[
        str, typer.Option(metavar="CMD", help="Command that builds a commit's worktree.")
    ] = "",
    build_key: Annotated[
        list[str] | None,
        typer.Option(
            "--build-key",
            metavar="GLOB",
            help="Files the build depends on; commits with equal files share it. Repeatable.",
        ),
    ] = None,
    roots: Annotated[
        list[str] | None,
        typer.Option(
            "--root", help="Folder of a commit's tree to import from; '.' by default. Repeatable."
        ),
    ] = None,
    enter_merges: Annotated[
        bool, typer.Option("--enter-merges", help="If the culprit is a merge, search its commits.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="MIN", min=0, help="Stop after MIN minutes.")
    ] = None,
    runs: Annotated[
        tuple[str, str] | None,
        typer.Option("--runs", metavar="A B", help="Two stored runs of one commit that differ."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Continue a bisection: its id, or latest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    state: Annotated[
        Path, typer.Option("--state", help="Folder of the bisections.")
    ] = DEFAULT_ROOT,
    stored: Annotated[
        Path, typer.Option("--store", help="Folder of the recorded runs.")
    ] = store.DEFAULT_ROOT,
    reports: Annotated[
        Path, typer.Option("--reports", help="Folder of the dated reports.")
    ] = store.DEFAULT_ROOT.parent,
    wait_for_gpu: Annotated[
        float,
        typer.Option(
            "--wait-for-gpu", metavar="SECONDS", min=0, help="Wait up to SECONDS for a busy GPU."
        ),
    ] = 0.0,
) -> None:
    """Find the commit, or the difference of two runs, that moved a number.

    harness bisect train --case 'nsa/seq_len=2048' --good v1.2 --bad main

    harness bisect counters --case selected --good v1.2 --counter host_syncs

    harness bisect --runs 20261119-0712 20261121-0730 --case train

    harness bisect --resume latest --budget 30

    Exit status: 0 the first bad commit, or the cause, was found; 3 undecided or out of budget.
    """
    criterion = {"metric": metric, "counter": counter, "outcome": outcome, "kernel": kernel}
    given: dict[str, object] = {
        "a suite": suite,
        "--set": overrides,
        "--case": case,
        "--good": good,
        "--runs": runs,
        **{f"--{name}": value for name, value in criterion.items()},
        "--build": build,
        "--build-key": build_key,
        "--root": roots,
        "--enter-merges": enter_merges,
    }
    common: dict[str, Any] = {
        "effect": effect,
        "build": Build(command=build, key=tuple(build_key or ())),
        "roots": tuple(roots or (".",)),
        "command": ("harness", *sys.argv[1:]),
    }
    start: CommitsRequest | DifferencesRequest | Journal
    if resume is not None:
        if also := [name for name, value in given.items() if value]:
            raise HarnessError(
                f"--resume continues the recorded request, but {also[0]} would change it",
                "Leave it out.",
            )
        start = Journal.resume(state, resume)
    elif runs is not None:
        if suite or good or overrides:
            raise HarnessError(
                "--runs takes suite and code from the two runs",
                "Leave out the suite, --set and --good.",
            )
        first, second = (store.load(stored, name) for name in runs)
        here = _repository_here()
        start = subjects.of_runs(first, second, here, pattern=case, criterion=criterion, **common)
    elif suite and good:
        repository = Repository.around(Path.cwd())
        loaded = suites.load(suite, overrides=overrides or ())
        one = subjects.one_case(loaded, case, suite)
        chosen = criteria.chosen(one, **criterion)
        start = CommitsRequest(
            started_at=processes.now(),
            repository=str(repository.root),
            history=history.between(repository, good, bad),
            suite=replace(loaded, cases=(one,)),
            case=criteria.prepared(one, chosen),
            criterion=chosen,
            enter_merges=enter_merges,
            **common,
        )
    else:
        raise HarnessError(
            "a bisection needs a suite, a --case and a --good commit, or two --runs",
            "For example: harness bisect train --case nsa/seq_len=2048 --good v1.2",
        )
    resources = processes.Resources(
        state=state,
        budget_s=None if budget is None else 60 * budget,
        wait_s=wait_for_gpu,
        say=_say,
    )
    result = session.run(start, resources)
    page = report.write(result, reports, datetime.date.today())
    if as_json:
        document = {**report.document(result), "report": str(page)}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    else:
        sys.stdout.write(f"{report.sentence(result)}\nReport: {page}\n")
        if result.resumable:
            sys.stdout.write(f"To continue: harness bisect --resume {result.folder.name}\n")
    raise typer.Exit(0 if result.found else 3)


def _repository_here() -> Repository | None:
    try:
        return Repository.around(Path.cwd())
    except HarnessError:
        return None


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
