"""Metrics and steps that a program reports in lines of its output: setup, warm-up and samples."""

import json
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.measure.failures import NOT_FINITE, Failed, NonFinite
from harness.measure.steady import EVERY_READING, StepLog, StepSeries
from harness.records import MeasureSettings, MetricSource, Outcome, Program, Steps

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
            if (found := _in_line(source, line)) is not None:
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


class ProgramSteps(StepSeries):
    """One reading for each line after the setup: for a line of ten steps, the mean of the ten."""

    def __init__(
        self, settings: MeasureSettings, *, setup_steps: int, launched_at: float = 0.0
    ) -> None:
        super().__init__(settings, first=0)
        self.log = StepLog(launched_at)
        """The steps after setup, with the metrics of their lines, until they are reported."""
        self.setup_steps = setup_steps
        self.last_line_at: float | None = None
        """time.monotonic of the last line that reports a step."""
        self.last_step: int | None = None
        """The program's own number of its last step, if it prints one."""
        self.finished = 0
        self.one_by_one = True
        """Whether each line reports one step."""

    def add(self, steps: Sequence[Step], at: float) -> list[float]:
        """Add the steps of lines that arrived together; the times of those after setup, of one line
        at most EVERY_READING."""
        took: list[float] = []
        untimed: list[tuple[Step, int, int]] = []
        is_setup = restarted = False
        for step in steps:
            advance = self._advance(step)
            self.finished += advance
            if self.finished <= self.setup_steps:
                is_setup = True
            elif step.time_s is not None:
                self._keep(step.time_s, at - step.time_s, step, self.finished)
                took += [step.time_s] * min(advance, EVERY_READING)
            restarted |= advance == 0
            untimed += [(step, advance, self.finished)] if step.time_s is None else []
        if untimed and self.last_line_at is not None and not (is_setup or restarted):
            each_s = (at - self.last_line_at) / sum(advance for _, advance, _ in untimed)
            done = 0
            for step, advance, number in untimed:
                self._keep(each_s, self.last_line_at + done * each_s, step, number)
                done += advance
            took += [each_s] * min(done, EVERY_READING)
        if steps:
            self.last_line_at = at
            if self.warm_at is None and self.finished >= self.setup_steps:
                self.warm_at = min(self.began_at[0], at) if self.began_at else at
        return took

    def _advance(self, step: Step) -> int:
        """How many steps a line finishes; 0 if the program's count restarts."""
        if step.count is None:
            return 1
        before, self.last_step = self.last_step, step.count
        advance = 1 if before is None else max(0, step.count - before)
        self.one_by_one &= advance <= 1
        return advance

    def _keep(self, time_s: float, began_at: float, step: Step, number: int) -> None:
        if time_s > 0:
            self.append(began_at, time_s, time_s)
            own = number if step.count is None else step.count
            self.log.add(own, time_s, began_at + time_s, step.values)


def _short(found: object) -> str:
    return repr(found)[:_SHOWN]
