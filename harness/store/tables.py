"""Runs as tables: CSV, Parquet and pandas with one row per sample.

A process without samples and a case without processes have one row each. Telemetry, counters, the
profile, rules and the self-test are in JSON lines only.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness import units
from harness.errors import HarnessError
from harness.records import Measurement, Run
from harness.store import reader
from harness.store.summaries import NOT_RUN

Value = str | int | float | bool | None
Row = Mapping[str, Value]

COLUMNS: Mapping[str, type] = {
    # of a run
    "run_id": str,
    "suite": str,
    "started_at": str,
    "host": str,
    "device": str,
    "device_id": str,
    "driver": str,
    "torch": str,
    "commit": str,
    "branch": str,
    "uncommitted": str,
    # of a case
    "case_id": str,
    "workload": str,
    "provider": str,
    "axes": str,
    "min_samples": int,
    # of a process
    "process": int,
    "outcome": str,
    "detail": str,
    "clock": str,
    "steady": bool,
    "tokens": int,
    "flops": int,
    "bytes": int,
    "peak_memory_bytes": int,
    "lower_bound_s": float,
    "wall_s": float,
    # of a sample
    "sample": int,
    "sample_s": float,
    "host_sample_s": float,
    "sample_at_s": float,
    "discarded": str,
}
"""Name and type, in the order of the file; README.md here says what each means."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_OF_HEADER = ("run_id", "suite", "started_at", "host", "device", "device_id", "commit", "branch")
_OF_PROCESS = (
    *("process", "detail", "steady", "tokens", "flops", "bytes"),
    *("peak_memory_bytes", "lower_bound_s", "wall_s"),
)


def to_csv(runs: Iterable[Run]) -> str:
    """Runs as CSV with a header; numbers keep every digit."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for run in runs:
        writer.writerows({n: csv_cell(value) for n, value in row.items()} for row in _rows(run))
    return text.getvalue()


def csv_cell(value: Value) -> str:
    """A value as CSV writes it; numbers keep every digit."""
    if value is None:
        return ""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"  # a spreadsheet then shows the text and computes nothing
    return str(value).lower() if isinstance(value, bool) else str(value)


def to_parquet(runs: Iterable[Run], file: Path) -> None:
    """Write runs as Parquet, with the types of COLUMNS and null for absent values.

    Raises:
        HarnessError: pyarrow is not installed, or the file cannot be written.
    """
    import pandas as pd  # slow

    try:
        pd.concat(map(frame, runs)).to_parquet(file, engine="pyarrow", index=False)
    except ImportError as error:
        raise HarnessError(
            f"{file}: Parquet needs the package pyarrow, which cannot be imported ({error})",
            "pip install 'nsa-harness[parquet]', or use --format csv.",
        ) from None
    except OSError as error:
        raise HarnessError(f"{file}: cannot be written: {error}") from None


def frame(run: Run) -> Any:
    """The rows of a run as a pandas frame, with the types of COLUMNS."""
    import pandas as pd

    kinds = {str: "string", int: "Int64", float: "float64", bool: "boolean"}
    typed = {name: kinds[kind] for name, kind in COLUMNS.items()}
    return pd.DataFrame(_rows(run), columns=[*COLUMNS]).astype(typed)


def _rows(run: Run) -> Iterator[Row]:
    """The rows of a run, in the order of its cases."""
    here, git = run.environment, run.environment.git
    header = reader.header_of(run)
    whole: dict[str, Value] = {
        **{name: getattr(header, name) for name in _OF_HEADER},
        "driver": here.gpu.driver if here.gpu else "",
        "torch": here.versions.get("torch") or "",
        "uncommitted": git.dirty_sha256 if git else "",
    }
    for case in run.suite.cases:
        of_case: dict[str, Value] = {
            **whole,
            "case_id": case.case_id,
            "workload": case.workload,
            "provider": case.provider,
            "axes": json.dumps(dict(case.axes), ensure_ascii=False),
            "min_samples": case.settings.min_samples,
        }
        measured = run.of(case.case_id)
        if not measured:
            why = units.stop_text(run.stopped) if run.stopped else ""
            yield {**of_case, "outcome": NOT_RUN, "detail": why}
        for m in measured:
            yield from _process_rows(of_case, m)


def _process_rows(of_case: Row, m: Measurement) -> Iterator[Row]:
    process: dict[str, Value] = {
        **of_case,
        **{name: getattr(m, name) for name in _OF_PROCESS},
        "outcome": str(m.outcome),
        "clock": str(m.clock) if m.clock else None,
    }
    if not m.samples_s:
        yield process
    count = len(m.samples_s)
    for i, sample_s in enumerate(m.samples_s):
        yield {
            **process,
            "sample": i,
            "sample_s": sample_s,
            "host_sample_s": m.host_samples_s[i] if len(m.host_samples_s) == count else None,
            "sample_at_s": m.samples_at_s[i] if len(m.samples_at_s) == count else None,
            "discarded": " ".join(r for r, bad in m.discarded.items() if i in bad) or None,
        }
