"""The command `bisect`: find the commit, or the difference of two runs, that moved a number."""

import datetime
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

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
from harness.cli import options
from harness.cli.options import command, document, say, show
from harness.errors import HarnessError, SuiteError
from harness.gating.worktrees import Repository
from harness.records import Case, Suite

SHOWN_CASES = 5


def bisect(
    suite: options.OptionalSuite = None,
    case: Annotated[
        str, typer.Option(metavar="PATTERN", help="Case id, or a pattern that matches one.")
    ] = "",
    overrides: options.SetOption = None,
    good: Annotated[str, typer.Option(metavar="REV", help="A good commit.")] = "",
    bad: Annotated[str, typer.Option(metavar="REV", help="A later, bad commit.")] = "HEAD",
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
        bool,
        typer.Option("--enter-merges", help="If a merge is the first bad commit, search inside."),
    ] = False,
    budget: Annotated[
        float | None, typer.Option(metavar="MINUTES", min=0, help="Stop after MINUTES.")
    ] = None,
    runs: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="RUN RUN", help="Search the differences between two stored runs."),
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
    """Find the commit, or the difference of two runs, that moved a number.

    \b
    harness bisect train --case 'nsa/seq_len=2048' --good v1.2 --bad main
    harness bisect counters --case selected --good v1.2 --counter host_syncs
    harness bisect --runs 20261119-0712 20261121-0730 --case train
    harness bisect --resume latest --budget 30

    Exit status: 0 found; 3 undecided, or out of budget.
    """
    criterion = {"metric": metric, "counter": counter, "outcome": outcome, "kernel": kernel}
    built, roots = Build(command=build, key=tuple(build_key or ())), tuple(root or (".",))
    means = bench.Means(
        state=state,
        budget_s=None if budget is None else 60 * budget,
        wait_s=wait_for_gpu,
        say=say,
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
        "--root": root,
        "--enter-merges": enter_merges,
    }
    if resume is not None:
        if also := [name for name, value in given.items() if value]:
            raise HarnessError(
                f"--resume continues the recorded request; {also[0]} would change it",
                f"Remove {also[0]}.",
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
                "Remove the suite, --set and --good.",
            )
        where = _repository_here()
        asked = cause_session.Asked(
            pattern=case,
            **criterion,
            effect=effect,
            build=built,
            roots=roots,
            command=command(),
        )
        wanted = cause_session.request(stored, runs, where, asked)
        _conclude_causes(cause_session.carry_out(wanted, None, where, means), reports, as_json)
    if not (suite and good):
        raise HarnessError(
            "a bisection needs a suite, --case and --good, or --runs",
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
        roots=roots,
        enter_merges=enter_merges,
        command=command(),
    )
    _conclude(session.carry_out(begun, None, repository, means), reports, as_json)


def _repository_here() -> Repository | None:
    try:
        return Repository.around(Path.cwd())
    except HarnessError:
        return None


def _conclude(result: session.Result, reports: Path, as_json: bool) -> NoReturn:
    page = report.write(result, reports, datetime.date.today())
    _show_result(result, report.sentence(result), report.document(result), page, as_json)


def _conclude_causes(result: cause_session.CausesResult, reports: Path, as_json: bool) -> NoReturn:
    page = cause_report.write(result, reports, datetime.date.today())
    sentence, answer = cause_report.sentence(result), cause_report.document(result)
    _show_result(result, sentence, answer, page, as_json)


def _show_result(
    result: session.Result | cause_session.CausesResult,
    sentence: str,
    answer: dict[str, Any],
    page: Path,
    as_json: bool,
) -> NoReturn:
    if as_json:
        document({**answer, "report": str(page)})
    else:
        show(f"{sentence}\nReport: {page}")
        if result.resumable:
            show(f"Continue with: harness bisect --resume {result.folder.name}")
    raise typer.Exit(0 if result.found else 3)


def _one(ref: str, pattern: str, overrides: Sequence[str]) -> tuple[Suite, Case]:
    """A suite reduced to the one case that a pattern matches."""
    suite = suites.load(ref, overrides=overrides)
    found = [c for c in suite.cases if c.case_id == pattern]
    found = found or [c for c in suite.cases if suites.fits(c.case_id, pattern)]
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in (found or suite.cases)[:SHOWN_CASES])
        raise SuiteError(
            suite.path,
            f"--case {pattern or '(none)'} matches {len(found)} cases; a bisection takes one",
            f"Name one of them:\n  {ids}" if found else f"Cases of this suite:\n  {ids}",
        )
    return replace(suite, cases=(found[0],)), found[0]
