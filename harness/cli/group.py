"""How a command line is read, and how every command ends that is not let go to its end."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
import typer.core

from harness.cli.console import console
from harness.errors import HarnessError
from harness.execution.runner import terminating_like_ctrl_c
from harness.records import Decision

ORDER = (
    *("run", "show", "report", "doctor", "overhead"),
    *("gate", "compare", "bisect", "calibrate", "baseline"),
    *("list", "history", "export", "import", "index", "schema"),
)
"""In which `--help` names the commands: what a newcomer wants first stands first."""


_UsageError: Any = typer.BadParameter.__mro__[1]
"""That a command line cannot be read: of the click inside typer, which does not export it."""


class Commands(typer.core.TyperGroup):
    """A misspelt command line is one message; Ctrl-C and SIGTERM clean up and exit 3 in every phase
    of every command."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(super().list_commands(ctx), key=ORDER.index)

    def make_context(self, *args: Any, **extra: Any) -> Any:  # a Context of the click in typer
        with _in_one_message():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        try:
            with terminating_like_ctrl_c(), _in_one_message():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            console(stderr=True).print("interrupted")
            raise typer.Exit(Decision.INCONCLUSIVE.exit_status) from None


@contextmanager
def _in_one_message() -> Iterator[None]:
    """What a command line says wrongly, told as every other mistake is."""
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # which is no mistake, and prints the help
            raise
        raise _usage_error(error) from None


def _usage_error(error: Any) -> HarnessError:
    said = error.format_message()
    said = re.sub(r"Input should be greater than or equal to (\S+)", r"it must be \1 or more", said)
    said = re.sub(r"Input should be less than or equal to (\S+)", r"it must be \1 or less", said)
    said = said.replace("Input should", "it should")
    command = error.ctx.command_path if error.ctx else "harness"
    return HarnessError(said, f"See: {command} --help")
