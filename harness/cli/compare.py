"""The command `compare`: two runs, two commits, or a commit and the working tree."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from harness.analysis.study import Study
from harness.cli import console, options
from harness.cli.options import command, out, say
from harness.cli.progress import GateProgress
from harness.errors import HarnessError, StoreError
from harness.gate import compare as comparing
from harness.gate import policy
from harness.gate.plan import Request
from harness.gate.policy import ChosenSuite, Policy
from harness.gate.records import GateRecord, Mode
from harness.gate.session import carry_out
from harness.git.repository import WORKING_TREE, Repository
from harness.records import Run
from harness.store import reader
from harness.suite import load as suites


def compare(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="A run or a commit.")],
    candidate: Annotated[
        str,
        typer.Argument(metavar="CANDIDATE", help="A run, a commit, or . for the working tree."),
    ],
    suite: Annotated[
        str,
        typer.Option(
            metavar="SUITE",
            help="Measure this suite instead of those of ci/gate.yaml; for commits only.",
        ),
    ] = "",
    only: options.FilterOption = None,
    counters: options.CountersOption = False,
    across: Annotated[
        bool,
        typer.Option(
            "--across", help="Judge stored runs even if their environments differ; runs only."
        ),
    ] = False,
    store_root: options.StoreOption = options.STORE,
    wait_for_gpu: options.WaitOption = 0.0,
    self_test: options.SelfTestOption = True,
) -> None:
    """Compare two runs, two commits, or a commit and the working tree.

    \b
    harness compare RUN RUN                  # as stored; includes the variation between days
    harness compare main HEAD                # measured now, in interleaved processes
    harness compare HEAD . --suite smoke     # your uncommitted changes, in a copy

    Exit status: 0 no case is slower; 1 a case is slower or fails; 3 a case is undecided.
    """
    first, second = (_run_of(name, store_root) for name in (baseline, candidate))
    if first and second:
        if suite:
            raise HarnessError("--suite applies to commits only", "Remove --suite.")
        answer = comparing.runs(
            first, Study(second), filters=only or (), counters=counters, across=across
        )
    elif first or second:
        raise HarnessError(
            f"only one of {baseline} and {candidate} is a run",
            "Name two commits, or two runs: harness list runs --commit COMMIT",
        )
    else:
        if across:
            raise HarnessError(
                "--across applies to stored runs only", "Remove --across, or name two runs."
            )
        request = Request(
            mode=Mode.COUNTERS if counters else Mode.RELATIVE,
            base=baseline,
            head=candidate,
            given=_policy(suite, only or ()),
            store=store_root,
            command=command(),
            wait_for_gpu_s=wait_for_gpu,
            self_test=self_test,
        )
        answer = _measured(request)
    out.print(console.judged(answer))
    raise typer.Exit(answer.decision.exit_status)


def _run_of(name: str, root: Path) -> Run | None:
    """The run of that name; None for a commit or the working tree, a HarnessError for neither."""
    if name == WORKING_TREE:
        return None
    try:
        return reader.load(root, name)
    except StoreError as error:
        try:
            Repository.around(Path.cwd()).commit(name)
        except HarnessError:
            raise HarnessError(f"{name!r} is not a commit here, and {error}") from None
        return None


def _measured(request: Request) -> GateRecord:
    """Two commits, or a commit and the working tree, measured now; a HarnessError if both are the
    same code, or if the request cannot be carried out."""
    repository = Repository.around(Path.cwd())
    mine = request.head == WORKING_TREE
    base, head = (repository.commit(r) for r in (request.base, "HEAD" if mine else request.head))
    if base == head and not (mine and repository.dirty()):
        clean = " (the working tree has no changes)" if mine else ""
        raise HarnessError(
            f"{request.base} and {request.head} are both commit {base[:10]}{clean}",
            "Name two commits that differ.",
        )
    with GateProgress() as progress:
        verdict = carry_out(request, progress, say)
    sides = [side.folders for side in (verdict.baseline, verdict.candidate) if side]
    return comparing.commits(verdict, [reader.load(request.store, f[0]) for f in sides if f])


def _policy(suite: str, filters: Sequence[str]) -> Policy:
    """The suites and numbers of the gate's policy, without its rules and exemptions."""
    exists = policy.DEFAULT.is_file()
    if not exists and not suite:
        raise HarnessError(
            f"{policy.DEFAULT} not found, so no suite is chosen",
            "Name one: --suite suites/x.yaml",
        )
    form = (policy.load(policy.DEFAULT) if exists else comparing.PLAIN).form
    own = [ChosenSuite(suite=_from_root(suite))] if suite else []
    chosen = {
        key: [c.model_copy(update={"cases": list(filters)}) if filters else c for c in own or kept]
        for key, kept in (("suites", form.suites), ("counters", form.counters))
    }
    without = {"stage": "shadow", "exempt": []}
    return Policy(path=str(policy.DEFAULT), form=form.model_copy(update=chosen | without))


def _from_root(name: str) -> str:
    """The path of a suite from the repository's root, from its path here or its name."""
    root = Repository.around(Path.cwd()).root
    file = Path(name)
    if not file.is_file():
        file = next((p for p in suites.available() if p.stem == file.stem), file)
    whole = file.resolve()
    return whole.relative_to(root).as_posix() if whole.is_relative_to(root) else name
