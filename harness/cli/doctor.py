"""The commands `doctor` (is this machine fit to measure on?) and `schema` (of the user's files)."""

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli import console, options
from harness.cli.options import command, out, write
from harness.gate.policy import PolicyForm
from harness.git import repository
from harness.machine import doctor, drift, environment
from harness.records import Decision
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.suite import load as suites
from harness.suite.fields import schema_of
from harness.suite.schema import SuiteModel


def doctor_(
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="List every difference from a recorded run that could change a number.",
        ),
    ] = None,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Describe this machine and check whether it is fit to measure on.

    \b
    harness doctor
    harness doctor --against latest

    Exit status: 0 fit; 3 not fit. With --against: 0 no difference; 3 a difference.
    """
    recorded = reader.load(store_root, against) if against is not None else None
    if recorded is None:
        home = Path.cwd()
        launcher = Launcher(home=repository.home(home))
    else:
        factory, roots = recorded.suite.cases[0].factory, suites.shipped_roots(recorded.suite)
        home = environment.home_of(factory, roots)
        launcher = Launcher.of(recorded.suite)
    with launcher:
        here = environment.capture(launcher.describe(), command=command(), repository=home)
    if recorded is not None:
        found = tuple(drift.differences(recorded.environment, here))
        out.print(console.differences(found, recorded.run_id, "here"))
        raise typer.Exit(Decision.INCONCLUSIVE.exit_status if found else 0)
    here = doctor.examined(here, store=store_root)
    out.print(console.doctor(here, here.checks))
    raise typer.Exit(doctor.exit_status(here.checks))


def schema(
    gate: Annotated[bool, typer.Option("--gate", help="Of a gate's policy.")] = False,
) -> None:
    """Print the JSON Schema of suite files, for completion and checks in an editor.

    \b
    harness schema > suite.schema.json
    harness schema --gate > ci/gate.schema.json
    """
    form = PolicyForm if gate else SuiteModel
    write(json.dumps(schema_of(form), indent=2).encode() + b"\n")
