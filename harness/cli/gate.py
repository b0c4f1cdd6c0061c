"""The command `gate`: judge a change by a policy."""

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import console, options
from harness.cli.options import command, out, say, show
from harness.cli.progress import GateProgress
from harness.errors import HarnessError
from harness.gate import policy
from harness.gate.counters import FILE
from harness.gate.plan import Request
from harness.gate.records import Mode
from harness.gate.session import carry_out, count
from harness.git.repository import WORKING_TREE
from harness.report.series.gate_text import encode


def gate(
    base: Annotated[
        str,
        typer.Option(metavar="REF", help="Compare with the merge base of the candidate and REF."),
    ] = "",
    head: Annotated[
        str, typer.Option(metavar="REF", help="The candidate; . is the working tree.")
    ] = WORKING_TREE,
    counters: options.CountersOption = False,
    record: Annotated[
        bool,
        typer.Option("--record", help="With --counters: store the counts, to accept a change."),
    ] = False,
    policy_file: options.PolicyOption = policy.DEFAULT,
    ci: Annotated[
        bool,
        typer.Option("--ci", help="Exit 0 unless the policy's stage blocks this verdict."),
    ] = False,
    verdict_file: Annotated[
        Path | None, typer.Option("--verdict", metavar="FILE", help="Write the verdict as JSON.")
    ] = None,
    store_root: options.StoreOption = options.STORE,
    wait_for_gpu: options.WaitOption = 0.0,
    self_test: options.SelfTestOption = True,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure also what runs the same code.")
    ] = False,
) -> None:
    """Judge a change by a policy: GO, NO-GO or INCONCLUSIVE.

    \b
    harness gate --base origin/main    # candidate and merge base, interleaved processes
    harness gate --counters            # exact counts per step, on any machine
    harness gate --counters --record   # store them; commit ci/baselines/counters.json

    Exit status: 0 GO; 1 NO-GO; 2 the request could not be carried out; 3 INCONCLUSIVE.
    """
    if record and (base or head != WORKING_TREE or not counters):
        raise HarnessError("--record stores counts of the working tree", "Give --counters alone.")
    if not (base or counters):
        raise HarnessError(
            "nothing to compare with: neither --base nor --counters is given",
            "Give --base REF. Two stored runs: harness compare RUN RUN",
        )
    request = Request(
        mode=Mode.COUNTERS if counters else Mode.RELATIVE,
        policy=policy_file,
        base=base,
        head=head,
        store=store_root,
        command=command(),
        wait_for_gpu_s=wait_for_gpu,
        self_test=self_test,
        measure=measure,
    )
    if verdict_file is not None:
        _require_writable(verdict_file)
    if record:
        with GateProgress() as progress:
            made = count(request, progress, say)
        show(f"{FILE}: {sum(map(len, made.cases.values()))} cases, torch {made.torch}")
        return
    with GateProgress() as progress:
        verdict = carry_out(request, progress, say)
    if verdict_file is not None:
        verdict_file.write_text(encode(verdict), encoding="utf-8")
    out.print(console.judged(verdict))
    raise typer.Exit(0 if ci and not verdict.blocks else verdict.decision.exit_status)


def _require_writable(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"")
        file.unlink()  # neither an earlier verdict nor an empty file may be read as this one
    except OSError as error:
        raise HarnessError(
            f"cannot write {file}: {error.strerror}", "Choose another file."
        ) from None
