"""The command `export`: runs and verdicts for other tools."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.analysis import verdict as gate
from harness.cli import options
from harness.errors import HarnessError
from harness.gate.records import GateVerdict, decode
from harness.integrations import run_verdict
from harness.integrations.annotations import annotations
from harness.integrations.junit import junit
from harness.integrations.page import comment, step_summary
from harness.store import reader

Format = Literal["junit", "step-summary", "annotations", "comment"]

_RENDERERS: Mapping[str, Callable[[GateVerdict], str]] = {
    "junit": junit,
    "step-summary": step_summary,
    "annotations": annotations,
    "comment": comment,
}


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run, as in `harness show`, or the file of `harness gate --verdict FILE`.",
        ),
    ],
    form: Annotated[Format, typer.Option("--format", help="Format to write.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of printing."),
    ] = None,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Write a run or a gate's verdict in a format that CI reads.

    \b
    harness export verdict.json --format junit -o junit.xml
    harness export verdict.json --format step-summary >> "$GITHUB_STEP_SUMMARY"
    """
    if source.endswith(".json") and Path(source).is_file():
        verdict = decode(Path(source).read_bytes(), source)
    else:
        run = reader.load(store_root, source)
        verdict = run_verdict.of_run(run, *gate.of_run(run))
    _write(_RENDERERS[form](verdict).encode(), output)


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        options.write(data)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise HarnessError(f"cannot write {output}: {error.strerror}") from None
