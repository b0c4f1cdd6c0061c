"""The command `init`: a suite, a policy and workflows for a repository that has no gate."""

from typing import Annotated

import typer

from harness.cli.options import command, say, show
from harness.cli.progress import ProgressBar
from harness.errors import HarnessError
from harness.integrations import first_gate


def init(
    program: Annotated[
        str,
        typer.Option(
            "--command", metavar="TEXT", help="The program to measure; {rows} stands for an axis."
        ),
    ] = "",
    factory: Annotated[
        str, typer.Option(metavar="MODULE:FUNCTION", help="Or the factory of a workload.")
    ] = "",
    providers: Annotated[
        list[str] | None,
        typer.Option("--provider", metavar="NAME", help="A provider of the factory. Repeatable."),
    ] = None,
    axes: Annotated[
        list[str] | None,
        typer.Option("--axis", metavar="NAME=VALUES", help="An axis: rows=256,4096. Repeatable."),
    ] = None,
) -> None:
    """Write the first gate of this repository: suite, policy, workflows.

    \b
    harness init --command "python bench.py --rows {rows}" --axis rows=256,4096
    harness init --factory benchmarks.workloads:softmax --provider mine --axis rows=256,4096

    Measures every case here. Overwrites no file.
    """
    if bool(program) == bool(factory) or bool(factory) != bool(providers):
        raise HarnessError(
            "a gate measures either a program, or a factory with its providers",
            'For example: harness init --command "python bench.py"',
        )
    swept = dict(map(first_gate.axis, axes or ()))
    asked = {"command": program, "factory": factory, "providers": providers, "axes": swept}
    found = first_gate.prepared(
        {key: value for key, value in asked.items() if value},
        line=command(),
        say=say,
        shown=ProgressBar,
    )
    found.write()
    for note in found.notes:
        show(note)
    show("\n  ".join(["Written:", *found.files]))
    show("Next: try the gate (harness gate --base HEAD), then commit these files.")
