"""The command `bisect`: which commit moved a number, or which difference of two runs."""

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from harness import store
from harness import suite as suites
from harness.bisection import (
    bench,
    cause_report,
    cause_session,
    criteria,
    history,
    report,
    session,
)
from harness.bisection.journal import DEFAULT_ROOT, Begun, Build, CausesBegun, Journal
from harness.errors import HarnessError, SuiteError
from harness.gating.worktrees import Repository
from harness.records import Case, Suite

SHOWN_CASES = 5


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("bisect", rich_help_panel="Judge")(bisect)


def bisect(
    suite: Annotated[
        str | None, typer.Argument(help="Suite file, or the name of a shipped one.")
    ] = None,
    case: Annotated[
        str, typer.Option("--case", help="The case: its id, or a pattern that fits only it.")
    ] = "",
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", "-s", help="axis=value or measure.sample_s=1. Repeatable."),
    ] = None,
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
    runs: Annotated[
        tuple[str, str] | None,
        typer.Option("--runs", metavar="A B", help="Two stored runs of one commit that differ."),
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="ID", help="Go on with a bisection, or latest.")
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
        float, typer.Option("--wait-for-gpu", metavar="SECONDS", min=0, help="Wait for the GPU.")
    ] = 0.0,
) -> None:
    """Find the commit, or the difference of two runs, that moved a number.

    harness bisect train --case 'nsa/seq_len=2048' --good v1.2 --bad main

    harness bisect counters --case selected --good v1.2 --counter host_syncs

    harness bisect --runs 20261119-0712 20261121-0730 --case train

    harness bisect --resume latest --budget 30

    Exit status: 0 the first bad commit, or the cause, is named; 3 undecided or out of budget.
    """
    criterion = {"metric": metric, "counter": counter, "outcome": outcome, "kernel": kernel}
    built = Build(command=build, key=tuple(build_key or ()))
    command = ("harness", *sys.argv[1:])
    means = bench.Means(
        state=state,
        budget_s=None if budget is None else 60 * budget,
        wait_s=wait_for_gpu,
        say=_say,
    )
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
    if resume is not None:
        if also := [name for name, value in given.items() if value]:
            raise HarnessError(
                f"--resume goes on with the recorded request, and {also[0]} would change it",
                "Leave it out.",
            )
        journal = Journal.resume(state, resume)
        begun = journal.request
        if isinstance(begun, CausesBegun):
            at = Repository.around(Path(begun.repository)) if begun.repository else None
            _conclude_causes(cause_session.carry_out(begun, journal, at, means), reports, as_json)
        repository = Repository.around(Path(begun.repository))
        _conclude(session.carry_out(begun, journal, repository, means), reports, as_json)
    if runs is not None:
        if suite or good or overrides:
            raise HarnessError(
                "--runs takes suite and code from the two runs",
                "Leave suite, --set and --good out.",
            )
        where = _repository_here()
        asked = cause_session.Asked(
            pattern=case,
            **criterion,
            effect=effect,
            build=built,
            roots=tuple(roots or (".",)),
            command=command,
        )
        wanted = cause_session.request(stored, runs, where, asked)
        _conclude_causes(cause_session.carry_out(wanted, None, where, means), reports, as_json)
    if not (suite and good):
        raise HarnessError(
            "a bisection needs a suite, a --case and a --good commit, or two --runs",
            "For example: harness bisect train --case nsa/seq_len=2048 --good v1.2",
        )
    repository = Repository.around(Path.cwd())
    loaded, one = _one(suite, case, overrides or ())
    chosen = criteria.chosen(one, **criterion)
    begun = Begun(
        started_at=bench.now(),
        repository=str(repository.root),
        history=history.between(repository, good, bad),
        suite=loaded,
        case=criteria.prepared(one, chosen),
        criterion=chosen,
        effect=effect,
        build=built,
        roots=tuple(roots or (".",)),
        enter_merges=enter_merges,
        command=command,
    )
    _conclude(session.carry_out(begun, None, repository, means), reports, as_json)


def _repository_here() -> Repository | None:
    try:
        return Repository.around(Path.cwd())
    except HarnessError:
        return None


def _conclude(result: session.Result, reports: Path, as_json: bool) -> NoReturn:
    page = report.write(result, reports, datetime.date.today())
    document = report.document(result) if as_json else None
    _say_result(result, report.sentence(result), document, page)


def _conclude_causes(result: cause_session.CausesResult, reports: Path, as_json: bool) -> NoReturn:
    page = cause_report.write(result, reports, datetime.date.today())
    document = cause_report.document(result) if as_json else None
    _say_result(result, cause_report.sentence(result), document, page)


def _say_result(
    result: session.Result | cause_session.CausesResult,
    sentence: str,
    document: dict[str, Any] | None,
    page: Path,
) -> NoReturn:
    if document is not None:
        sys.stdout.write(json.dumps({**document, "report": str(page)}, indent=2) + "\n")
    else:
        sys.stdout.write(f"{sentence}\nReport: {page}\n")
        if result.resumable:
            sys.stdout.write(f"Go on: harness bisect --resume {result.folder.name}\n")
    raise typer.Exit(0 if result.found else 3)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _one(ref: str, pattern: str, overrides: Sequence[str]) -> tuple[Suite, Case]:
    """A suite with nothing but the one case that a pattern fits."""
    suite = suites.load(ref, overrides=overrides)
    found = [c for c in suite.cases if c.case_id == pattern]
    found = found or [c for c in suite.cases if suites.fits(c.case_id, pattern)]
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in (found or suite.cases)[:SHOWN_CASES])
        raise SuiteError(
            suite.path,
            f"--case {pattern or '(none)'} fits {len(found)} cases, and a bisection takes one",
            f"Some of {'them' if found else 'the suite'}:\n  {ids}",
        )
    return replace(suite, cases=(found[0],)), found[0]
