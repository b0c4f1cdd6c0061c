"""What a program tells of itself in lines and files: metrics, and steps that are finished."""

import csv
import json
import math
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.records import MetricSource, Program, Steps

MAX_READINGS = 10_000
"""The newest of a metric that are kept."""
_SHOWN = 120


class MissingMetric(Exception):
    """A program did not tell what its suite says it tells, or not as a number."""


class NotFinite(Exception):
    """A program told NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Value:
    """One reading of a metric."""

    at: float
    """time.monotonic when its line arrived."""
    value: float


class Metrics:
    """All readings of one process."""

    def __init__(self, program: Program, folder: Path) -> None:
        """Before the program is started: `folder` is where its files lie."""
        self._folder = folder
        self._of_lines = [_LineReader(r) for r in program.readings if not r.file]
        self._of_files = [r for r in program.readings if r.file]
        self._before = {r.file: _stamp(folder / r.file) for r in self._of_files}
        self.values: dict[str, deque[Value]] = {
            r.metric: deque(maxlen=MAX_READINGS) for r in program.readings
        }

    def hear(self, line: str, at: float) -> None:
        """Take in one line of output.

        Raises:
            MissingMetric: A number is expected there, and none stands there.
            NotFinite: It is NaN or infinite.
        """
        for reader in self._of_lines:
            found = reader.read(line)
            if found is not None:
                where = f"in the line {_short(line)}"
                self._keep(reader.reading, found, at, where)

    def read_files(self, at: float) -> None:
        """Read the files, once the program has ended.

        Raises:
            MissingMetric: A file is absent, not written anew, or has no such number.
            NotFinite: As `hear`.
        """
        for reading in self._of_files:
            path = self._folder / reading.file
            stamp = _stamp(path)
            if stamp is None:
                raise MissingMetric(f"{reading.metric}: the program left no file {path}")
            if stamp == self._before[reading.file]:
                raise MissingMetric(f"{reading.metric}: {path} was not updated by this run")
            for found in _of_file(reading, path):
                self._keep(reading, found, at, f"in {path}")

    def require_all(self) -> None:
        """MissingMetric, if a metric was never seen."""
        for name, values in self.values.items():
            if not values:
                raise MissingMetric(f"{name}: {self._way(name)} was never seen in its output")

    def _way(self, name: str) -> str:
        (reading,) = (r.reading for r in self._of_lines if r.reading.metric == name)
        if reading.line:
            return f"a line that fits {reading.line!r}"
        after = f" after {reading.prefix!r}" if reading.prefix else ""
        return f"a JSON line with {reading.json!r}{after}"

    def _keep(self, reading: MetricSource, found: Any, at: float, where: str) -> None:
        self.values[reading.metric].append(Value(at, _number(reading, found, where)))


class _LineReader:
    def __init__(self, reading: MetricSource) -> None:
        self.reading = reading
        self._pattern = re.compile(reading.line) if reading.line else None
        self._begins = reading.prefix or "{"

    def read(self, line: str) -> Any:
        """What stands in a line for the metric; None where the line does not speak of it."""
        if self._pattern is not None:
            found = self._pattern.search(line)
            return found["value"] if found else None
        text = line.strip()
        if not text.startswith(self._begins):
            return None
        try:
            said = json.loads(text.removeprefix(self.reading.prefix))
        except ValueError as error:
            if not self.reading.prefix:
                return None  # some other line with a brace
            raise MissingMetric(
                f"{self.reading.metric}: no JSON: {error}: {_short(line)}"
            ) from None
        return _at(said, self.reading.json)


def _of_file(reading: MetricSource, path: Path) -> Iterator[Any]:
    """All values of a metric in a file.

    Raises:
        MissingMetric: It is not what it should be, or has none.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
        if reading.csv:
            rows = list(csv.DictReader(text.splitlines()))
            found = [row[reading.csv] for row in rows if row.get(reading.csv)]
        else:
            found = [v for d in _documents(text) if (v := _at(d, reading.json)) is not None]
    except (OSError, ValueError, csv.Error) as error:
        raise MissingMetric(f"{reading.metric}: {path} cannot be read: {error}") from None
    if not found:
        what = f"column {reading.csv!r}" if reading.csv else f"key {reading.json!r}"
        raise MissingMetric(f"{reading.metric}: {path} has no value at {what}")
    yield from found


def _documents(text: str) -> list[Any]:
    """One JSON document, or one a line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _at(document: Any, path: str) -> Any:
    """What stands at `a.b.0` of a document; None where nothing does."""
    for key in path.split("."):
        if isinstance(document, dict):
            document = document.get(key)
        elif isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        else:
            return None
    return document


def _number(reading: MetricSource, found: Any, where: str) -> float:
    if isinstance(found, bool) or not isinstance(found, int | float | str):
        raise MissingMetric(
            f"{reading.metric}: {json.dumps(found)[:_SHOWN]} is not a number, {where}"
        )
    try:
        value = float(found) * reading.scale
    except ValueError:
        raise MissingMetric(
            f"{reading.metric}: {_short(str(found))} is not a number, {where}"
        ) from None
    if not math.isfinite(value):
        raise NotFinite(f"{reading.metric} is {found}, {where}")
    return value


@dataclass(frozen=True, slots=True)
class Step:
    """A line that said a step is finished."""

    count: int | None
    """How many are, if it said so."""
    time_s: float | None
    """What this one took, if it said so."""


class StepReader:
    """Finds the lines that mean progress."""

    def __init__(self, steps: Steps) -> None:
        self._step = re.compile(steps.step)
        self._alive = re.compile(steps.alive) if steps.alive else None
        self._groups: Mapping[str, int] = self._step.groupindex

    def read(self, line: str) -> Step | None:
        """The step that a line finishes.

        Raises:
            MissingMetric: The line has no number where the pattern says one is.
            NotFinite: The time is NaN or infinite.
        """
        found = self._step.search(line)
        if found is None:
            return None
        named = found.groupdict()
        count = named.get("step")
        if count is not None and not count.isdecimal():
            raise MissingMetric(
                f"step: {count!r} is not a whole number, in the line {_short(line)}"
            )
        return Step(None if count is None else int(count), self._time_s(named, line))

    def is_alive(self, line: str) -> bool:
        return self._alive is not None and self._alive.search(line) is not None

    def _time_s(self, named: Mapping[str, str | None], line: str) -> float | None:
        for name, scale in (("step_s", 1.0), ("step_ms", 1e-3)):
            if (text := named.get(name)) is not None:
                reading = MetricSource(metric=name, scale=scale)
                time_s = _number(reading, text, f"in the line {_short(line)}")
                if time_s <= 0:
                    raise MissingMetric(
                        f"{name}: a step took {text}, in the line {_short(line)}; "
                        "have the program print more digits"
                    )
                return time_s
        return None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What changes when a file is written; None without one."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def _short(line: str) -> str:
    return repr(line if len(line) <= _SHOWN else line[:_SHOWN] + "...")
