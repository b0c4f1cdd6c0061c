"""The lines of run.jsonl: one record each, as JSON with its kind; and a file of such lines."""

import fcntl
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, Self

from pydantic import TypeAdapter, ValidationError

from harness.errors import StoreError
from harness.records import SCHEMA_VERSION, Environment, Measurement, SelfTest, Stop, Suite

LOG_FOLDER = "logs"
LOG_NAME_LENGTH = 80
"""Of a case id in a file name; a hash makes the name unique."""


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
        problem = f"{where}{names} is NaN or infinite, which cannot be recorded"
        remedy = "Leave the value out, or use None if the record allows it."
        raise StoreError(problem, remedy) from None
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


class LineFile:
    """Appends to a file of JSON lines; its only writer while open. Neither a kill nor a full disk
    damages a line. A context: leaving it releases the file."""

    card = ""
    """Of the measurements to come, if they are of a run."""

    def __init__(self, path: Path, remedy: str, first: bytes = b"") -> None:
        """Lock a file; or make it with its `first` line, which is then on the disk. An OSError if
        it cannot be written, a BlockingIOError if another process does. `remedy`: for later."""
        self.folder = path.parent
        self._path, self._remedy = path, remedy
        flags = os.O_CREAT | os.O_EXCL if first else 0
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if first:
                self._append(first)
                # Without this a power cut may leave no folder that names the file.
                for folder in (path.parent, path.parent.parent):
                    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                    try:
                        os.fsync(fd)
                    finally:
                        os.close(fd)
        except BaseException:  # also Ctrl-C: the descriptor holds the lock
            self.close()
            raise

    def add(self, data: bytes) -> None:
        """Append lines; all are on the disk when this returns. After a StoreError none of them is,
        and the lines before them are kept."""
        try:
            self._append(data)
            if not os.fstat(self._fd).st_nlink:
                raise FileNotFoundError
        except OSError as error:
            raise self._cannot_write(self._path, error) from error

    def cut(self) -> int:
        """Remove an incomplete last line; its length."""
        data = self._path.read_bytes()
        whole_bytes = data.rfind(b"\n") + 1
        os.ftruncate(self._fd, whole_bytes)
        return len(data) - whole_bytes

    def log_path(self, case_id: str, process: int) -> Path:
        """The file for the output of one worker process; made if absent, or a StoreError."""
        name = re.sub(r"[^\w.=-]", "_", case_id, flags=re.ASCII).lstrip(".")
        digest = hashlib.sha256(case_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        path = self.folder / LOG_FOLDER / f"{name[:LOG_NAME_LENGTH]}-{digest}.{process}.log"
        try:
            path.parent.mkdir(exist_ok=True)  # somebody may have removed the logs
            path.touch()
        except OSError as error:
            raise self._cannot_write(path, error) from error
        return path

    def _cannot_write(self, path: Path, error: OSError) -> StoreError:
        if not self._path.exists():
            problem = f"cannot write {path}: somebody removed the run while it went on"
            return StoreError(problem, "Its measurements are lost. Start it again.")
        return StoreError(f"cannot write {path}: {error.strerror}", self._remedy)

    def close(self) -> None:
        """Release the file."""
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _append(self, data: bytes) -> None:
        """Write and sync all of `data`, or leave the file unchanged."""
        before = os.fstat(self._fd).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except BaseException:  # also Ctrl-C: no half line may precede the next
            os.ftruncate(self._fd, before)
            raise


def dated(began: datetime, *words: str) -> str:
    """A name for a folder that sorts by time and contains words."""
    names = (re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words)
    return "-".join([f"{began:%Y%m%d-%H%M%S}", *names, secrets.token_hex(2)])


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
