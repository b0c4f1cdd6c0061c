"""The commands `doctor` (is this machine fit to measure on?) and `schema` (of suite files)."""

import json
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness.cli import console, options
from harness.cli.options import command, out, write
from harness.git import repository
from harness.machine import doctor, drift, environment
from harness.records import Decision, Environment, Run
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.suite import load as suites
from harness.suite.schema import json_schema


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
    home = Path.cwd()
    if recorded is not None:
        factory = recorded.suite.cases[0].factory
        home = environment.home_of(factory, suites.shipped_roots(recorded.suite))
    with (
        Launcher.of(recorded.suite)
        if recorded
        else Launcher(home=repository.home(home)) as launcher
    ):
        here = environment.capture(launcher.describe(), command=command(), repository=home)
    if recorded is not None:
        _show_drift(recorded, here)
    here = doctor.examined(here, store=store_root)
    out.print(console.doctor(here, here.checks))
    raise typer.Exit(doctor.exit_status(here.checks))


def _show_drift(recorded: Run, here: Environment) -> NoReturn:
    """Show what differs from a run, and exit: 0 where nothing does."""
    found = tuple(drift.differences(recorded.environment, here))
    out.print(console.differences(found, recorded.run_id, "here"))
    raise typer.Exit(Decision.INCONCLUSIVE.exit_status if found else 0)


def schema() -> None:
    """Print the JSON Schema of suite files, for completion and checks in an editor.

    \b
    harness schema > suite.schema.json
    """
    write(json.dumps(json_schema(), indent=2).encode() + b"\n")
