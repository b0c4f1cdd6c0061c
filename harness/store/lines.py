"""The lines of run.jsonl: one record each, as JSON with its kind."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from harness.errors import StoreError
from harness.records import SCHEMA_VERSION, Environment, Measurement, SelfTest, Stop, Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first line: what is measured, and where."""

    schema: int
    run_id: str
    started_at: str
    environment: Environment
    suite: Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """An interrupted run was resumed."""

    at: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last line: everything is measured, or the run was stopped and may be resumed."""

    at: str
    measurements: int
    elapsed_s: float | None = None
    """From the start of the run, by the monotonic clock; None for a resumed run."""
    wall_s: float | None = None
    """From the start of the command; None for a resumed run."""
    stopped: Stop | None = None
    """Why processes are left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredIn:
    """The environment of some later measurements, which name its card."""

    environment: Environment


Line = Started | SelfTest | MeasuredIn | Measurement | Resumed | Ended
KINDS: dict[str, type[Line]] = {
    "run": Started,
    "self_test": SelfTest,
    "environment": MeasuredIn,
    "measurement": Measurement,
    "resumed": Resumed,
    "end": Ended,
}


def encode(line: Line) -> bytes:
    """The line as UTF-8 JSON, with its newline; StoreError for NaN and infinity."""
    kind = next(kind for kind, record in KINDS.items() if isinstance(line, record))
    fields = _adapter(kind).dump_python(line, mode="json", warnings="error")
    try:
        text = json.dumps({"kind": kind, **fields}, allow_nan=False, ensure_ascii=False)
    except ValueError:
        where = f"{line.case_id}: " if isinstance(line, Measurement) else ""
        names = ", ".join(_non_finite(fields))
        raise StoreError(
            f"{where}{names} is NaN or infinite, which cannot be recorded",
            "Leave the value out, or use None if the record allows it.",
        ) from None
    return text.encode("utf-8", "replace") + b"\n"  # a lone surrogate becomes "?"


def decode(line: bytes, place: str) -> Line:
    """The record of one line, without unknown keys; `place` is its `path:number`, for a StoreError
    if it is damaged or has another schema."""
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # also UnicodeDecodeError
        raise damaged(place, f"not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise damaged(place, "not a JSON object")
    schema = fields.get("schema", SCHEMA_VERSION)  # only the first line has it
    if schema != SCHEMA_VERSION:
        raise StoreError(
            f"{place}: the run has schema {schema!r}; this harness reads schema {SCHEMA_VERSION}",
            "Read it with a harness of that schema. Its commits: "
            f"git log -S 'SCHEMA_VERSION = {schema}' -- harness/records/measured.py",
        )
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise damaged(place, f"unknown kind {kind!r}; known are {', '.join(KINDS)}")
    try:
        return _adapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or kind
        raise damaged(place, f"{field}: {first['msg']}") from None


def damaged(place: str, problem: str) -> StoreError:
    """The error for a file that was changed after it was written."""
    return StoreError(f"{place}: {problem}", "The file is damaged; restore it from a copy.")


@cache
def _adapter(kind: str) -> TypeAdapter[Line]:
    return TypeAdapter(KINDS[kind])


def _non_finite(value: Any, path: str = "") -> Iterator[str]:
    """Paths of NaN and infinite numbers in nested dictionaries and lists."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _non_finite(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _non_finite(item, f"{path}[{i}]")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
