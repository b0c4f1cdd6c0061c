"""The commands `doctor` (is this machine fit to measure on?) and `schema` (of suite files)."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from harness.cli import console, options
from harness.cli.options import command, document, out
from harness.errors import SuiteError
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
    as_json: options.JsonOption = False,
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
        _show_drift(recorded, here, as_json)
    here = doctor.examined(here, store=store_root)
    found = here.vitals.checks if here.vitals else ()
    if as_json:
        document(
            {
                "environment": asdict(here),
                "checks": [asdict(c) for c in found],
                "verdict": doctor.worst(found),
            }
        )
    else:
        out.print(console.doctor(here, found))
    raise typer.Exit(doctor.exit_status(found))


def _show_drift(recorded: Run, here: Environment, as_json: bool) -> NoReturn:
    """Show what differs from a run, and exit: 0 where nothing does."""
    found = (*drift.differences(recorded.environment, here), *_suite_drift(recorded))
    if as_json:
        document({"against": recorded.run_id, "differences": [asdict(d) for d in found]})
    else:
        out.print(console.differences(found, recorded.run_id, "here"))
    raise typer.Exit(Decision.INCONCLUSIVE.exit_status if found else 0)


def _suite_drift(recorded: Run) -> Sequence[drift.Difference]:
    """How the suite's file differs from the copy that the run kept."""
    kept = Path(recorded.folder, reader.SUITE_FILE)
    try:
        found = drift.configuration(suites.load(str(kept)), suites.load(recorded.suite.path))
        return tuple(found)
    except SuiteError as error:
        problem = str(error).partition("\n")[0]
        return (
            drift.Difference(
                name="suite", baseline=recorded.suite.path, candidate=problem, how="unknown"
            ),
        )


def schema() -> None:
    """Print the JSON Schema of suite files, for completion and checks in an editor.

    \b
    harness schema > suite.schema.json
    """
    document(json_schema())
