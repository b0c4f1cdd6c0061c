"""The `harness` command: its subcommands in the order of the help, and how each ends.

Only this module ends the process. Exit status: 0 GO or measured; 1 a regression or NO-GO;
2 the request could not be carried out; 3 undecided, interrupted, or an invalid environment; 4 a
defect of the harness.
"""

import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
import typer.core

from harness import __version__
from harness.cli import bisect, compare, doctor, exchange, gate, report, run, stored
from harness.cli.console import EXIT_REFUSED
from harness.cli.init import init
from harness.cli.options import out, say
from harness.errors import HarnessError
from harness.records import Decision
from harness.runner.run import terminating_like_ctrl_c

EXIT_DEFECT = 4

_UsageError: Any = typer.BadParameter.__mro__[1]
"""An unreadable command line: a class of the click inside typer, which does not export it."""


class Commands(typer.core.TyperGroup):
    """A mistake in the command line is one message; Ctrl-C and SIGTERM clean up and exit 3."""

    def make_context(self, *args: Any, **extra: Any) -> Any:  # a Context of the click in typer
        with _in_one_message():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminating_like_ctrl_c(), _in_one_message():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(Decision.INCONCLUSIVE.exit_status) from None
        except (BrokenPipeError, EOFError) as error:  # typer would exit with 1: a NO-GO
            raise RuntimeError(repr(error)) from error


class Command(typer.core.TyperCommand):
    """Its help may be cut, as by `head`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except BrokenPipeError:
            out.on_broken_pipe()
            raise


@contextmanager
def _in_one_message() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not a mistake: it prints the help
            raise
        see = f"See: {error.ctx.command_path if error.ctx else 'harness'} --help"
        said = error.format_message().replace("Value error, ", "")
        raise HarnessError(said.replace("Input should be", "must be"), see) from None
    except SystemExit:  # rich exits with 1 if the pipe is closed; a verdict exits by typer.Exit
        raise SystemExit(EXIT_REFUSED) from None


app = typer.Typer(
    name="harness",
    cls=Commands,
    help="Measure attention kernels and training steps, and compare them across commits.",
    epilog=(
        "Exit status: 0 GO or measured; 1 a regression or NO-GO; 2 the request could not be "
        "carried out; 3 undecided, or an invalid environment; 4 a defect of the harness."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_PANELS: dict[str, dict[str, Callable[..., None]]] = {
    "Measure": {
        "run": run.run,
        "show": stored.show_,
        "report": report.report_,
        "doctor": doctor.doctor_,
    },
    "Compare": {
        "init": init,
        "gate": gate.gate,
        "compare": compare.compare,
        "bisect": bisect.bisect,
    },
    "Records and forms": {
        "list": stored.list_,
        "export": exchange.export,
        "schema": doctor.schema,
    },
}
for panel, commands in _PANELS.items():
    for name, function in commands.items():
        app.command(name, cls=Command, rich_help_panel=panel)(function)


def main() -> None:
    """Entry point: a HarnessError is one message and exit 2; a defect, a traceback and exit 4."""
    warnings.filterwarnings("ignore", "Possible ", FutureWarning)  # `[[` in a suite's pattern
    try:
        app(prog_name="harness")
    except HarnessError as error:
        say(f"error: {error}")
        sys.exit(EXIT_REFUSED)
    except Exception:  # noqa: BLE001 - shown whole; as exit 1 it would be taken for a NO-GO
        say(
            f"{traceback.format_exc()}\n"
            f"error: this is a defect of the harness (version {__version__}), not a verdict\n"
            "  Report it with the lines above and your command: open an issue in the repository"
            " that the harness was installed from."
        )
        sys.exit(EXIT_DEFECT)
