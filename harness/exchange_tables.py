"""Tables of samples in files, CSV and Parquet, out and in."""

import csv
import importlib
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.exchange import Imported, read_limited
from harness.exchange_rows import KINDS, NEEDED, Row, Value, rows_of, runs_of
from harness.records import Run

MAX_ROWS = 20_000_000


# --- CSV ---------------------------------------------------------------------------------


def to_csv(runs: Iterable[Run]) -> str:
    """Runs as CSV: a header, then rows. A number stands to its last digit."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(KINDS)
    for run in runs:
        for row in rows_of(run):
            writer.writerow([_cell(row.get(name)) for name in KINDS])
    return text.getvalue()


def _cell(value: Value) -> str:
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def from_csv(file: Path) -> tuple[tuple[Imported, ...], tuple[str, ...]]:
    """The runs in a CSV file, and the names of columns that are not read.

    Raises:
        HarnessError: With the line that cannot be read.
    """
    data = read_limited(file)
    try:
        reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        header = next(reader, [])
        _require(header, file)
        rows = [
            (f"{file}:{reader.line_num}", _from_cells(header, cells, f"{file}:{reader.line_num}"))
            for cells in reader
            if cells
        ]
    except UnicodeDecodeError:
        raise HarnessError(f"{file}: this is not UTF-8", "Save it as UTF-8.") from None
    except csv.Error as error:
        raise HarnessError(f"{file}: not CSV: {error}") from None
    return runs_of(file, data, rows), _strange(header)


def _from_cells(header: Sequence[str], cells: Sequence[str], place: str) -> Row:
    if len(cells) != len(header):
        raise HarnessError(f"{place}: {len(cells)} cells under {len(header)} columns")
    return {
        name: _parsed(name, cell, place)
        for name, cell in zip(header, cells, strict=True)
        if name in KINDS
    }


def _parsed(name: str, cell: str, place: str) -> Value:
    kind = KINDS[name]
    if kind is str:
        return cell
    text = cell.strip()
    if not text:
        return None
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return int(text) if kind is int else _finite(float(text))
    except (ValueError, KeyError):
        wanted = {bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
        raise HarnessError(f"{place}: {name} is {cell!r}, and should be {wanted}") from None


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(value)
    return value


# --- Parquet -----------------------------------------------------------------------------


def to_parquet(runs: Iterable[Run], file: Path) -> None:
    """Write runs as Parquet, with the types of COLUMNS and null for what is absent.

    Raises:
        HarnessError: There is no pyarrow, or the file cannot be written.
    """
    arrow, parquet = _arrow(file)
    kinds = {str: arrow.string(), int: arrow.int64(), float: arrow.float64(), bool: arrow.bool_()}
    schema = arrow.schema([(name, kinds[kind]) for name, kind in KINDS.items()])
    try:
        with parquet.ParquetWriter(file, schema) as writer:
            for run in runs:
                rows = [{name: row.get(name) for name in KINDS} for row in rows_of(run)]
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
    except (OSError, OverflowError, arrow.ArrowException) as error:
        raise HarnessError(f"{file}: cannot be written: {error}") from None


def from_parquet(file: Path) -> tuple[tuple[Imported, ...], tuple[str, ...]]:
    """The runs in a Parquet file, and the names of columns that are not read.

    Raises:
        HarnessError: There is no pyarrow, or the file is no such table.
    """
    arrow, parquet = _arrow(file)
    data = read_limited(file)
    try:
        table = parquet.read_table(io.BytesIO(data))
    except (OSError, arrow.ArrowException) as error:
        raise HarnessError(f"{file}: not Parquet: {error}") from None
    header = list(table.column_names)
    _require(header, file)
    if table.num_rows > MAX_ROWS:
        raise HarnessError(f"{file}: more than {MAX_ROWS:,} rows", "Split it.")
    found = []
    for number, row in enumerate(table.select([n for n in header if n in KINDS]).to_pylist(), 1):
        place = f"{file}: row {number}"
        found.append((place, {name: _typed(name, row[name], place) for name in row}))
    return runs_of(file, data, found), _strange(header)


def _typed(name: str, value: Any, place: str) -> Value:
    kind = KINDS[name]
    if value is None:
        return "" if kind is str else None
    known: Value = float(value) if kind is float and type(value) is int else value
    if type(known) is not kind or (isinstance(known, float) and not math.isfinite(known)):
        raise HarnessError(f"{place}: {name} is {value!r}, and should be of type {kind.__name__}")
    return known


def _arrow(file: Path) -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise HarnessError(
            f"{file}: Parquet needs the package pyarrow, which is not here ({error})",
            "pip install 'nsa-harness[parquet]', or use --format csv.",
        ) from None


# --- both --------------------------------------------------------------------------------


def _require(header: Sequence[str], file: Path) -> None:
    if missing := [name for name in NEEDED if name not in header]:
        raise HarnessError(
            f"{file}: there is no column {missing[0]}",
            f"Needed are {' and '.join(NEEDED)}; harness/README.md names the others.",
        )
    if twice := [name for name in header if header.count(name) > 1]:
        raise HarnessError(f"{file}: column {twice[0]} is there twice", "Keep one of them.")


def _strange(header: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in header if name not in KINDS)
