"""What several commands share: options and consoles."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.console import console
from harness.store import reader

out = console()
err = console(stderr=True)

STORE = reader.DEFAULT_ROOT
REPORTS = STORE.parent

_SUITE = "Suite file, or NAME of suites/NAME.yaml here, or else of a shipped suite: smoke."
OptionalSuite = Annotated[str | None, typer.Argument(metavar="SUITE", help=_SUITE)]
RulesOption = Annotated[
    str | None,
    typer.Option(metavar="SUITE", help="Judge by the rules of this suite file instead."),
]
_RUN = "Run id, the beginning of one, a run's folder, or latest."
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=_RUN)]
RunsArgument = Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help=_RUN)]
StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the recorded runs.")]
ReportsOption = Annotated[Path, typer.Option("--reports", help="Folder of the dated reports.")]
PolicyOption = Annotated[
    Path, typer.Option("--policy", help="Policy file: what a gate measures and requires.")
]
FilterOption = Annotated[
    list[str] | None,
    typer.Option(
        "--filter",
        "-f",
        metavar="PATTERN",
        help="Use only cases whose id matches PATTERN; !PATTERN excludes them. Repeatable.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="NAME=VALUE",
        help="Set an axis (seq_len=512,1024) or a setting (measure.processes=1). Repeatable.",
    ),
]
RowsOption = Annotated[
    str,
    typer.Option(
        metavar="AXES",
        help="Make a pivot table: axes of its rows, with commas; default all that vary.",
    ),
]
ColsOption = Annotated[
    str,
    typer.Option(metavar="AXES", help="Make a pivot table: axes of its columns, with commas."),
]
MetricOption = Annotated[
    str,
    typer.Option("--metric", "-m", help="Metric of the pivot table; default step_s."),
]
CountersOption = Annotated[
    bool,
    typer.Option(
        "--counters", help="Compare exact counts per step instead of times; needs no GPU."
    ),
]
WaitOption = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Wait up to SECONDS for a busy GPU."),
]
SelfTestOption = Annotated[bool, typer.Option(help="Self-test timers and probes first.")]


def command() -> tuple[str, ...]:
    """The command line of this process, as records keep it."""
    return ("harness", *sys.argv[1:])


def show(text: str) -> None:
    """Print text on standard output as it is."""
    out.print(text, markup=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a message on standard error."""
    err.print(text, markup=False, soft_wrap=True)


def write(data: bytes) -> None:
    """Write on standard output as it is; the reader may close it early, as `head` does."""
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        out.on_broken_pipe()
