"""The command `compare`: two runs, two commits, or a commit and the working tree."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from harness import comparing, index, store
from harness import suite as suites
from harness.cli import console, console_compare
from harness.cli.gate import GateProgress
from harness.comparing import Compared
from harness.errors import HarnessError, StoreError
from harness.gating import files, policy
from harness.gating.planning import Request
from harness.gating.policy import Choice, Policy
from harness.gating.records import Mode
from harness.gating.session import carry_out
from harness.gating.worktrees import WORKING_TREE, Repository
from harness.index_query import Choice as Runs
from harness.records import Run

out = console.console()
err = console.console(stderr=True)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command(rich_help_panel="Judge")(compare)


def compare(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A run or a commit: what B is held against.")
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="A run, a commit, or . for the working tree.")
    ],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            "--suite", help="Of commits: measure this suite, not those of ci/gate.yaml. Repeatable."
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--filter", "-f", help="Only cases whose id fits; ! leaves out. Repeatable."),
    ] = None,
    counters: Annotated[
        bool,
        typer.Option("--counters", help="Compare counters per step, exactly; needs no GPU."),
    ] = False,
    across: Annotated[
        bool, typer.Option("--across", help="Of runs: judge although their environments differ.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document instead of tables.")
    ] = False,
    store_root: Annotated[
        Path, typer.Option("--store", help="Folder of the recorded runs.")
    ] = store.DEFAULT_ROOT,
    policy_file: Annotated[
        Path, typer.Option("--policy", help="Where the gate's suites and numbers are.")
    ] = policy.DEFAULT,
    baselines: Annotated[
        Path, typer.Option("--baselines", help="Folder of baselines and calibrations.")
    ] = files.FOLDER,
    wait_for_gpu: Annotated[
        float,
        typer.Option(
            "--wait-for-gpu", metavar="SECONDS", min=0, help="Wait so long for a GPU in use."
        ),
    ] = 0.0,
    proof: Annotated[
        bool, typer.Option(help="Have the instrument prove itself before it times anything.")
    ] = True,
) -> None:
    """Compare two runs, two commits, or a commit and the working tree.

    harness compare RUN RUN                  what was stored, the scatter of days included

    harness compare main HEAD                measured now, in processes that take turns

    harness compare HEAD . --suite smoke     what is not committed yet; nothing of it is touched

    Exit status: 0 B is slower nowhere, 1 it is, or fails, 3 something is undecided.
    """
    if a == WORKING_TREE:
        raise HarnessError(
            "the working tree is what is new, and comes second", f"harness compare {b} ."
        )
    runs = [_run_of(name, store_root) for name in (a, b)]
    match runs:
        case [Run() as first, Run() as second]:
            if suite:
                raise HarnessError("two runs have their suites", "Leave --suite out.")
            answer = comparing.runs(
                first,
                second,
                filters=only or (),
                counters=counters,
                across=across,
                calibrations=baselines,
            )
        case [None, None]:
            if across:
                raise HarnessError("--across is of runs; commits are measured in one place")
            request = Request(
                mode=Mode.COUNTERS if counters else Mode.RELATIVE,
                base=a,
                head=b,
                exact=True,
                given=_policy(policy_file, suite or (), only or ()),
                every_case=True,
                store=store_root,
                baselines=baselines,
                command=("harness", *sys.argv[1:]),
                wait_for_gpu_s=wait_for_gpu,
                proof=proof,
            )
            answer = _measured(request)
        case _:
            name, run = (b, runs[0]) if runs[0] else (a, runs[1])
            raise HarnessError(
                f"{name} is a commit, and {run.run_id if run else ''} a run",
                _runs_of(name, store_root),
            )
    if as_json:
        document = comparing.document(answer)
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        out.print(console_compare.compared(answer))
    raise typer.Exit(answer.exit_status)


def _run_of(name: str, root: Path) -> Run | None:
    """The run that a name means; None where it means a commit, or the working tree.

    Raises:
        HarnessError: It means neither, or both.
    """
    if name == WORKING_TREE:
        return None
    problem = None
    try:
        run = store.load(root, name)
    except StoreError as error:
        run, problem = None, error
    try:
        commit = Repository.around(Path.cwd()).commit(name)
    except HarnessError:
        commit = ""
    if run and commit and name not in (run.run_id, "latest"):
        raise HarnessError(
            f"{name} is the beginning of run {run.run_id}, and commit {commit[:10]}",
            "Write the run's whole id, or more of the commit.",
        )
    if run:
        return run
    if commit:
        return None
    if problem and "fits" in str(problem):
        raise problem
    raise HarnessError(
        f"{name!r} is neither a run in {root} nor a commit of this repository",
        "`harness list runs` shows the runs, `git log --oneline` the commits.",
    )


def _runs_of(name: str, root: Path) -> str:
    """What to do about a commit beside a run: its runs, if there are any."""
    if name == WORKING_TREE:
        return "Record a run of it first: harness run SUITE."
    commit = Repository.around(Path.cwd()).commit(name)
    found = index.ask(root, lambda known: known.runs(Runs(commit=commit, limit=3)), _say)
    if not found:
        return "There is no run of that commit: check it out and record one, or name two commits."
    return f"Its runs: {', '.join(h.run_id for h in found)}."


def _measured(request: Request) -> Compared:
    """Two commits, or a commit and the working tree, measured now.

    Raises:
        HarnessError: They are the same, or the request cannot be carried out.
    """
    repository = Repository.around(Path.cwd())
    mine = request.head == WORKING_TREE
    base, head = (repository.commit(r) for r in (request.base, "HEAD" if mine else request.head))
    if base == head and not (mine and repository.dirty()):
        what = "the working tree is as committed, and" if mine else ""
        raise HarnessError(
            f"{what} {request.base} and {request.head} are both commit {base[:10]}".strip(),
            "How far a node differs from itself is what `harness calibrate` measures.",
        )
    with GateProgress() as progress:
        verdict = carry_out(request, progress, _say)
    sides = [side for side in (verdict.base, verdict.head) if side and side.run_id]
    return comparing.commits(
        verdict, [store.load(request.store, side.run_id.split()[0]) for side in sides]
    )


def _policy(file: Path, named: Sequence[str], filters: Sequence[str]) -> Policy:
    """What a gate's policy says of suites and numbers, without what it asks or excuses."""
    if not file.is_file() and not named:
        raise HarnessError(
            f"{file} is not there to say what is measured", "Name a suite: --suite suites/x.yaml."
        )
    plain = not file.is_file() and file == policy.DEFAULT  # one that was asked for must be there
    found = comparing.PLAIN if plain else policy.load(file)[0]
    kept = replace(
        found, path=str(file), rules=(), kernels=(), exemptions=(), new_cases_block=False
    )
    choices = tuple(Choice(suite=_from_root(name)) for name in named)
    kept = replace(kept, choices=choices or kept.choices, counted=choices or kept.counted)
    if not filters:
        return kept
    return replace(
        kept,
        choices=tuple(replace(c, filters=tuple(filters)) for c in kept.choices),
        counted=tuple(replace(c, filters=tuple(filters)) for c in kept.counted),
    )


def _from_root(name: str) -> str:
    """The path of a suite from the root of the repository, by its path from here or its name."""
    root = Repository.around(Path.cwd()).root
    file = Path(name)
    if not file.is_file():
        by_name = {p.stem: p for p in suites.available()}
        file = by_name.get(file.stem, file)
    whole = file.resolve()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else name


def _say(text: str) -> None:
    err.print(text, highlight=False, markup=False, soft_wrap=True)
