"""The command `export`: runs and verdicts for other tools."""

from collections.abc import Callable, Mapping, Sequence
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
from harness.report.markdown import plain
from harness.store import reader

Format = Literal["csv", "parquet", "junit", "step-summary", "annotations", "comment"]
_TABLES = ("csv", "parquet")
"""Formats of several runs."""

_RENDERERS: Mapping[str, Callable[[GateVerdict], str]] = {
    "junit": junit,
    "step-summary": step_summary,
    "annotations": annotations,
    "comment": comment,
}


def export(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...|FILE",
            help="Runs, as in `harness show`, or the file of `harness gate --verdict FILE`.",
        ),
    ],
    form: Annotated[Format, typer.Option("--format", help="Format to write.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to FILE instead of printing."),
    ] = None,
    store_root: options.StoreOption = options.STORE,
) -> None:
    """Write runs or a gate's verdict in a format that other tools read.

    \b
    harness export RUN RUN --format csv -o runs.csv      # one row per sample; also parquet
    harness export verdict.json --format junit -o junit.xml
    harness export verdict.json --format step-summary >> "$GITHUB_STEP_SUMMARY"
    """
    verdicts = [s for s in sources if s.endswith(".json") and Path(s).is_file()]
    if verdicts and form in _TABLES:
        raise HarnessError(
            f"{verdicts[0]}: a verdict contains no samples", "Export one of its runs instead."
        )
    if form not in _TABLES and len(sources) > 1:
        raise HarnessError(f"--format {form} takes one run, not {len(sources)}", "Name one.")
    if form == "parquet":
        if output is None:
            raise HarnessError("Parquet cannot be printed", "Name a file: --output runs.parquet")
        from harness.store import frames  # pandas is slow to import

        frames.to_parquet((reader.load(store_root, s) for s in sources), output)
        return
    _write(_exported(form, sources, bool(verdicts), store_root), output)


def _exported(form: Format, sources: Sequence[str], is_verdict: bool, root: Path) -> bytes:
    if form == "csv":
        from harness.store import frames  # pandas is slow to import

        return plain(frames.to_csv(reader.load(root, s) for s in sources)).encode()
    (source,) = sources
    if is_verdict:
        return _RENDERERS[form](decode(Path(source).read_bytes(), source)).encode()
    run = reader.load(root, source)
    return _RENDERERS[form](run_verdict.of_run(run, *gate.of_run(run))).encode()


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        options.write(data)
        return
    try:
        output.write_bytes(data)
    except OSError as error:
        raise HarnessError(f"cannot write {output}: {error.strerror}") from None
