"""Metrics and finished steps that a program reports in lines of its output."""

import json
import math
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.measure.failures import NOT_FINITE, Failed, NonFinite
from harness.records import MetricSource, Outcome, Program, Steps

MAY_OVERFLOW = "grad_norm"
"""The one metric that may be NaN or infinite: a step of fp16 that overflowed is left out."""
MAX_READINGS = 10_000
"""Newest readings kept of a metric."""
_SHOWN = 120


@dataclass(frozen=True, slots=True)
class Value:
    """One reading of a metric."""

    at: float
    """time.monotonic when its line arrived."""
    value: float


class ReportedMetrics:
    """All readings of one process."""

    def __init__(self, program: Program) -> None:
        self._sources = program.readings
        self.values: dict[str, deque[Value]] = {
            r.metric: deque(maxlen=MAX_READINGS) for r in program.readings
        }
        self._overflowed = False

    def read_line(self, line: str, at: float) -> dict[str, float]:
        """Read one line of output; returns its values by metric. Raises Failed if one is
        not a number, NonFinite if it is NaN or infinite."""
        values = {}
        for source in self._sources:
            found = _in_line(source, line)
            if found is not None:
                value = _number(source, found, line)
                values[source.metric] = value
                if math.isfinite(value):
                    self.values[source.metric].append(Value(at, value))
                else:
                    self._overflowed = True
        return values

    def require_all(self) -> None:
        """Raise Failed if a metric has no reading."""
        for source in self._sources:
            if self.values[source.metric] or (self._overflowed and source.metric == MAY_OVERFLOW):
                continue
            wanted = f"a line that matches '{source.line}'"
            if source.json:
                after = f" after {source.prefix!r}" if source.prefix else ""
                wanted = f"a JSON line with {source.json!r}{after}"
            problem = f"{source.metric}: the output does not contain {wanted}"
            raise Failed(Outcome.UNSUPPORTED, problem)


def _in_line(source: MetricSource, line: str) -> Any:
    """The metric's value in a line; None if it has none."""
    if source.line:
        found, said = re.search(source.line, line), NOT_FINITE.search(line)
        if found and said and said.start() < found.start("value") < said.start("nan"):
            return None  # a word of this sentence
        return found["value"] if found else None
    text = line.strip()
    if not text.startswith(source.prefix or "{"):
        return None
    try:
        value = json.loads(text.removeprefix(source.prefix))
    except ValueError as error:
        if not source.prefix:
            return None  # another line that begins with a brace
        problem = f"{source.metric}: not JSON: {error}: {_short(line)}"
        raise Failed(Outcome.UNSUPPORTED, problem) from None
    for key in source.json.split("."):
        if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(source: MetricSource, found: Any, line: str) -> float:
    try:
        if isinstance(found, bool):
            raise ValueError
        value = float(found) * source.scale
    except (TypeError, ValueError):
        problem = f"{source.metric}: {_short(found)} is not a number, in the line {_short(line)}"
        raise Failed(Outcome.UNSUPPORTED, problem) from None
    if not math.isfinite(value) and source.metric != MAY_OVERFLOW:
        raise NonFinite(f"{source.metric} is {found}, in the line {_short(line)}", source.metric)
    return value


@dataclass(frozen=True, slots=True)
class Step:
    """A line that reports a finished step."""

    count: int | None
    """Steps finished so far, if reported."""
    time_s: float | None
    """Time of this step, if reported."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What was reported since the step before, by metric."""


def step_in(line: str, steps: Steps) -> Step | None:
    """The step that a line finishes. Raises Failed if a group of the pattern matches no
    number, NonFinite if a time is NaN or infinite."""
    found = re.search(steps.step, line)
    if found is None:
        return None
    named = found.groupdict()
    count = named.get("step")
    if count is not None and not count.isdecimal():
        problem = f"step: {count!r} is not a whole number, in {_short(line)}"
        raise Failed(Outcome.UNSUPPORTED, problem)
    time_s = None
    for name, scale in (("step_s", 1.0), ("step_ms", 1e-3)):
        if time_s is None and (text := named.get(name)) is not None:
            time_s = _number(MetricSource(metric=name, scale=scale), text, line)
            if time_s <= 0:
                problem = f"{name}: a step took {text}, in the line {_short(line)}"
                raise Failed(Outcome.UNSUPPORTED, f"{problem}; have the program print more digits")
    return Step(None if count is None else int(count), time_s)


def _short(found: object) -> str:
    return repr(found)[:_SHOWN]
