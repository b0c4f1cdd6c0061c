"""The commands `import` and `export`: runs and verdicts from and for other tools."""

import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness import exchange, gate, store
from harness.analysis import scaling, summary
from harness.ci import runs
from harness.ci.annotations import annotations
from harness.ci.junit import junit
from harness.ci.page import comment, step_summary
from harness.errors import HarnessError
from harness.gating.records import GateVerdict, decode
from harness.records import Run

MAX_VERDICT_BYTES = 64 * 2**20

StoreOption = Annotated[Path, typer.Option("--store", help="Folder of the recorded runs.")]


class Format(StrEnum):
    """What `harness export` writes."""

    PYTEST_BENCHMARK = "pytest-benchmark"
    JUNIT = "junit"
    STEP_SUMMARY = "step-summary"
    ANNOTATIONS = "annotations"
    COMMENT = "comment"


_RENDERERS: Mapping[Format, Callable[[GateVerdict], str]] = {
    Format.JUNIT: junit,
    Format.STEP_SUMMARY: step_summary,
    Format.ANNOTATIONS: annotations,
    Format.COMMENT: comment,
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("import")(import_)
    app.command("export")(export)


def import_(
    file: Annotated[Path, typer.Argument(help="JSON of `pytest --benchmark-json FILE`.")],
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """Record the benchmarks of pytest-benchmark as a run, and print its id.

    harness import benchmarks.json
    """
    read = exchange.read_benchmarks(file)
    with store.create(store_root, read.suite, read.environment) as writer:
        for measurement in read.measurements:
            writer.append(measurement)
        writer.finish()
    sys.stdout.write(f"{writer.run_id}\n")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|FILE",
            help="A run, as for `harness show`, or the file of `harness gate --verdict FILE`.",
        ),
    ],
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")
    ] = None,
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """Write a run or a gate's verdict as another tool reads it.

    harness export latest --format pytest-benchmark -o run.json

    harness export verdict.json --format junit -o junit.xml

    harness export verdict.json --format step-summary >> "$GITHUB_STEP_SUMMARY"
    """
    is_verdict = source.endswith(".json") and Path(source).is_file()
    if form is Format.PYTEST_BENCHMARK:
        if is_verdict:
            raise HarnessError(
                f"{source}: a verdict holds no samples", "Name one of the runs that it is of."
            )
        text = _benchmarks(store.load(store_root, source))
    else:
        verdict = _read(Path(source)) if is_verdict else _judged(store.load(store_root, source))
        text = _RENDERERS[form](verdict)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise HarnessError(f"{output}: cannot be written: {error.strerror}") from None


def _benchmarks(run: Run) -> str:
    document = exchange.benchmarks(run)
    for case_id, why in exchange.left_out(run).items():
        sys.stderr.write(f"left out: {case_id}: {why}\n")
    if not document["benchmarks"]:
        raise HarnessError(
            f"run {run.run_id} has no case that ended ok", "There is nothing to export."
        )
    return json.dumps(document, indent=1, allow_nan=False) + "\n"


def _read(path: Path) -> GateVerdict:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_VERDICT_BYTES + 1)
    except OSError as error:
        raise HarnessError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > MAX_VERDICT_BYTES:
        raise HarnessError(f"{path}: more than {MAX_VERDICT_BYTES} bytes", "Is it a verdict?")
    return decode(data, str(path))


def _judged(run: Run) -> GateVerdict:
    cases = summary.summarise(run)
    return runs.of_run(
        run, cases, gate.judge(run.suite, run.environment, cases, scaling.fit(cases))
    )
