"""The command `export`: the verdict of a gate for CI."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from harness.cli import options
from harness.errors import HarnessError
from harness.gate.records import GateRecord, decode
from harness.integrations.annotations import annotations
from harness.integrations.junit import junit
from harness.integrations.page import page

Format = Literal["junit", "page", "annotations"]

_RENDERERS: Mapping[str, Callable[[GateRecord], str]] = {
    "junit": junit,
    "page": page,
    "annotations": annotations,
}


def export(
    source: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file of `harness gate --verdict FILE`.")
    ],
    form: Annotated[Format, typer.Option("--format", help="Format to print.")],
) -> None:
    """Print a gate's verdict in a format that CI reads.

    \b
    harness export verdict.json --format junit > junit.xml
    harness export verdict.json --format page >> "$GITHUB_STEP_SUMMARY"
    """
    try:
        data = source.read_bytes()
    except OSError as error:
        raise HarnessError(
            f"cannot read {source}: {error.strerror}", "Write one: harness gate --verdict FILE"
        ) from None
    options.write(_RENDERERS[form](decode(data, str(source))).encode())
