"""The commands `import` and `export`: runs and verdicts from and for other tools."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from harness import exchange, exchange_lines, exchange_tables, gate, store
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

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    PYTEST_BENCHMARK = "pytest-benchmark"
    JUNIT = "junit"
    STEP_SUMMARY = "step-summary"
    ANNOTATIONS = "annotations"
    COMMENT = "comment"


class Source(StrEnum):
    """What `harness import` reads."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"
    PYTEST_BENCHMARK = "pytest-benchmark"


_ENDINGS: Mapping[str, Source] = {
    ".jsonl": Source.JSONL,
    ".csv": Source.CSV,
    ".parquet": Source.PARQUET,
    ".json": Source.PYTEST_BENCHMARK,
}
_TABLES = frozenset({Format.JSONL, Format.CSV, Format.PARQUET})
"""Forms that hold several runs."""

_RENDERERS: Mapping[Format, Callable[[GateVerdict], str]] = {
    Format.JUNIT: junit,
    Format.STEP_SUMMARY: step_summary,
    Format.ANNOTATIONS: annotations,
    Format.COMMENT: comment,
}


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("import", rich_help_panel="Keep")(import_)
    app.command("export", rich_help_panel="Keep")(export)


def import_(
    file: Annotated[
        Path,
        typer.Argument(help="FILE.jsonl, .csv or .parquet of `harness export`, or .json of pytest"),
    ],
    form: Annotated[
        Source | None, typer.Option("--format", help="What it is, where its name does not say.")
    ] = None,
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """Record what a file holds as runs, and print their ids.

    harness import runs.jsonl         runs as they were written, under their own ids

    harness import benchmarks.json    of `pytest --benchmark-json benchmarks.json`

    harness import timings.csv        needs the columns case_id and sample_s
    """
    match form or _ENDINGS.get(file.suffix.lower()):
        case Source.JSONL:
            ids = exchange_lines.import_runs(file, store_root)
        case Source.CSV:
            ids = _record(*exchange_tables.from_csv(file), store_root)
        case Source.PARQUET:
            ids = _record(*exchange_tables.from_parquet(file), store_root)
        case Source.PYTEST_BENCHMARK:
            ids = _record([exchange.read_benchmarks(file)], (), store_root)
        case _:
            raise HarnessError(
                f"{file}: its name does not say what it is", f"Say --format {' or '.join(Source)}."
            )
    sys.stdout.write("".join(f"{run_id}\n" for run_id in ids))


def _record(
    runs: Sequence[exchange.Imported], not_read: Sequence[str], store_root: Path
) -> tuple[str, ...]:
    if not_read:
        sys.stderr.write(f"note: not read: {', '.join(not_read)}\n")
    ids = []
    for run in runs:
        with store.create(
            store_root, run.suite, run.environment, started_at=run.started_at
        ) as writer:
            for measurement in run.measurements:
                writer.append(measurement)
            writer.finish()
        ids.append(writer.run_id)
    return tuple(ids)


def export(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...|FILE",
            help="Runs, as for `harness show`, or the file of `harness gate --verdict FILE`.",
        ),
    ],
    form: Annotated[Format, typer.Option("--format", help="What to write.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write here instead of printing.")
    ] = None,
    store_root: StoreOption = store.DEFAULT_ROOT,
) -> None:
    """Write runs or a gate's verdict as another tool, or another harness, reads them.

    harness export latest --format jsonl -o run.jsonl       whole, for `harness import`

    harness export RUN RUN --format csv -o runs.csv         a row a sample; so does parquet

    harness export latest --format pytest-benchmark -o run.json

    harness export verdict.json --format junit -o junit.xml

    harness export verdict.json --format step-summary >> "$GITHUB_STEP_SUMMARY"
    """
    verdicts = [s for s in sources if s.endswith(".json") and Path(s).is_file()]
    if verdicts and form in (*_TABLES, Format.PYTEST_BENCHMARK):
        raise HarnessError(
            f"{verdicts[0]}: a verdict holds no samples", "Name one of the runs that it is of."
        )
    if form not in _TABLES and len(sources) > 1:
        raise HarnessError(f"--format {form} is of one run, not {len(sources)}", "Name one.")
    if form is Format.PARQUET:
        if output is None:
            raise HarnessError("Parquet is nothing to print", "Name a file with --output.")
        exchange_tables.to_parquet((store.load(store_root, s) for s in sources), output)
        return
    _write(_exported(form, sources, bool(verdicts), store_root), output)


def _exported(form: Format, sources: Sequence[str], is_verdict: bool, root: Path) -> bytes:
    if form is Format.JSONL:
        folders = [Path(store.load(root, s).folder) for s in sources]
        return b"".join(map(exchange_lines.export, folders))
    if form is Format.CSV:
        return exchange_tables.to_csv(store.load(root, s) for s in sources).encode()
    (source,) = sources
    if form is Format.PYTEST_BENCHMARK:
        return _benchmarks(store.load(root, source)).encode()
    verdict = _read(Path(source)) if is_verdict else _judged(store.load(root, source))
    return _RENDERERS[form](verdict).encode()


def _write(data: bytes, output: Path | None) -> None:
    if output is None:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        output.write_bytes(data)
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
    data = exchange.read_limited(path, MAX_VERDICT_BYTES, "Is it a verdict?")
    return decode(data, str(path))


def _judged(run: Run) -> GateVerdict:
    cases = summary.summarise(run)
    return runs.of_run(
        run, cases, gate.judge(run.suite, run.environment, cases, scaling.fit(cases))
    )
