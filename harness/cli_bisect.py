"""The command `bisect`: which commit moved a number."""

import datetime
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness import store
from harness import suite as suites
from harness.bisection import criteria, history, report, session
from harness.bisection.journal import DEFAULT_ROOT, Begun, Build, Journal
from harness.errors import HarnessError, SuiteError
from harness.gating.worktrees import Repository
from harness.records import Case, Suite

SHOWN_CASES = 5


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("bisect")(bisect)


def bisect(
    suite: Annotated[
        str | None, typer.Argument(help="Suite file, or the name of a shipped one.")
    ] = None,
    case: Annotated[
        str, typer.Option("--case", help="The case: its id, or a pattern that fits only it.")
    ] = "",
    good: Annotated[str, typer.Option("--good", metavar="REV", help="A commit that is good.")] = "",
    bad: Annotated[
        str, typer.Option("--bad", metavar="REV", help="A later one that is bad.")
    ] = "HEAD",
    metric: Annotated[
        str | None,
        typer.Option(help="step_s (the default), peak_memory_bytes, or what its program tells."),
    ] = None,
    counter: Annotated[
        str | None, typer.Option(help="An exact count of one step: host_syncs, dispatched_ops...")
    ] = None,
    outcome: Annotated[
        str | None, typer.Option(help="Bad is what ends so: crash, incorrect, hang...")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="A kernel or operator that runs, or not.")
    ] = None,
    effect: Annotated[
        float, typer.Option(min=0.002, max=1.0, help="Smallest change worth finding, a fraction.")
    ] = 0.03,
    build: Annotated[
        str, typer.Option(metavar="CMD", help="Run in each commit's worktree before it is used.")
    ] = "",
    build_key: Annotated[
        list[str] | None,
        typer.Option(
            "--build-key",
            metavar="GLOB",
            help="Files the build depends on: commits that agree in them share it. Repeatable.",
        ),
    ] = None,
    roots: Annotated[
        list[str] | None,
        typer.Option(
            "--root", help="Folder of a commit's tree to import from, '.' if none. Repeatable."
        ),
    ] = None,
    enter_merges: Annotated[
        bool, typer.Option("--enter-merges", help="Where the culprit is a merge, search its side.")
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="MIN", min=0, help="Stop after so many minutes.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with a bisection, or latest.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    state: Annotated[
        Path, typer.Option("--state", help="Folder of the bisections.")
    ] = DEFAULT_ROOT,
    reports: Annotated[
        Path, typer.Option("--reports", help="Folder of the dated reports.")
    ] = store.DEFAULT_ROOT.parent,
    wait_for_gpu: Annotated[
        float, typer.Option("--wait-for-gpu", metavar="SECONDS", min=0, help="Wait for the GPU.")
    ] = 0.0,
) -> None:
    """Find the commit that made a case slow, or wrong, or changed what it counts.

    harness bisect train --case 'nsa/seq_len=2048' --good v1.2 --bad main

    harness bisect counters --case selected --good v1.2 --counter host_syncs

    harness bisect --resume latest --budget 30

    Exit status: 0 the first bad commit is named, 3 undecided or out of budget.
    """
    repository = Repository.around(Path.cwd())
    journal = None
    if resume is not None:
        if suite or case or good:
            raise HarnessError(
                "--resume goes on with the recorded request", "Leave suite, case and commits out."
            )
        journal = Journal.resume(state, resume)
        begun = journal.begun
        repository = Repository.around(Path(begun.repository))
    else:
        if not (suite and good):
            raise HarnessError(
                "a bisection needs a suite, a --case and a --good commit",
                "For example: harness bisect train --case nsa/seq_len=2048 --good v1.2",
            )
        loaded, one = _one(suites.load(suite), case)
        criterion = criteria.chosen(
            one, metric=metric, counter=counter, outcome=outcome, kernel=kernel
        )
        begun = Begun(
            started_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            repository=str(repository.root),
            history=history.between(repository, good, bad),
            suite=loaded,
            case=criteria.prepared(one, criterion),
            criterion=criterion,
            effect=effect,
            build=Build(command=build, key=tuple(build_key or ())),
            roots=tuple(roots or (".",)),
            enter_merges=enter_merges,
            command=("harness", *sys.argv[1:]),
        )
    means = session.Means(
        state=state,
        budget_s=None if budget is None else 60 * budget,
        wait_s=wait_for_gpu,
        say=_say,
    )
    result = session.carry_out(begun, journal, repository, means)
    page = report.write(result, reports, datetime.date.today())
    if as_json:
        text = json.dumps({**report.document(result), "report": str(page)}, indent=2)
        sys.stdout.write(text + "\n")
    else:
        sys.stdout.write(f"{report.sentence(result)}\nReport: {page}\n")
        if result.resumable:
            sys.stdout.write(f"Go on: harness bisect --resume {result.folder.name}\n")
    raise typer.Exit(0 if result.found else 3)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _one(suite: Suite, pattern: str) -> tuple[Suite, Case]:
    """The suite with nothing but the one case that a pattern fits."""
    found = [c for c in suite.cases if c.case_id == pattern]
    if not found:
        filters = [pattern] if pattern else []
        found = [*suites.load(suite.path, filters=filters).cases]
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in found[:SHOWN_CASES])
        raise SuiteError(
            suite.path,
            f"--case {pattern or '(none)'} fits {len(found)} cases, and a bisection takes one",
            f"Some of them:\n  {ids}",
        )
    return replace(suite, cases=(found[0],)), found[0]
