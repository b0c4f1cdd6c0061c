"""Where the steady state of a series of step times begins.

1. The end of the warm-up, by MSER: cut where the standard error of the rest is smallest,
   d* = argmin_d  s^2(d) / (n - d),  over the first half of the series. Readings far from the
   level of the second half are clipped first, so that one outlier cannot cut off everything
   before it (MSER-5 averages batches of five instead, which hides a slow second or third step).
   A cut in the very middle is rejected, since a longer search would cut later, unless both halves
   of the whole series are at one level: then noise put it there, and the first quarter is searched.
2. The rest is steady if the medians of its halves differ by at most a hundredth, or by no more
   than their spread explains. A drift or an endless warm-up fails this.

Sources: White, "An effective truncation heuristic for bias reduction in simulation output",
Simulation 69(6), 1997, and White, Cobb & Spratt, "A comparison of five steady-state truncation
heuristics for simulation", WSC 2000 (MSER-5). Each process must reach its own steady state, and
some never do: Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013.
"""

import math
from array import array
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.ma  # the first median imports it
from numpy.typing import NDArray

from harness.records import MeasureSettings, OverSteps

MIN_STEADY = 4
"""Two readings in each half; fewer cannot show a drift."""
TOLERANCE = 0.01
"""Difference of the halves, as a share of the median, that does not matter."""
STANDARD_ERRORS = 3.0
"""Difference of the halves, in standard errors, that counts as noise."""
CLIP_SIGMAS = 3.0
"""Distance from the level of the second half at which readings are clipped."""
EVERY_READING = 50
"""Readings after each of which the series is divided; then after every twentieth more."""
MIN_SAMPLES_WHEN_CUT = 2
"""Samples needed to end a series at the deadline instead of in a timeout."""
OVERRUN = 1.1
"""Assumed longest time of the next step, relative to the last."""

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_OVER_MEAN = 1.2533  # standard error of the median over that of the mean, likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A series divided into warm-up and samples."""

    start: int
    """Index of the first sample; the number of readings if there is none yet."""
    steady: bool
    """Whether the samples are steady by rule, or only the last ones taken."""


class StepSeries:
    """The step times of one process, divided anew as they arrive."""

    def __init__(self, settings: MeasureSettings, *, first: int) -> None:
        """`first`: index of the earliest reading that can be a sample."""
        self._settings = settings
        self._first = first
        self._next_look = 1
        self.warm_at: float | None = None
        self.began_at = array("d")
        self.time_s = array("d")
        self.host_s = array("d")
        self.division = Division(start=first, steady=False)

    def append(self, began_at: float, time_s: float, host_s: float) -> None:
        self.began_at.append(began_at)
        self.time_s.append(time_s)
        self.host_s.append(host_s)

    @property
    def count(self) -> int:
        return len(self.time_s)

    @property
    def enough(self) -> bool:
        """Whether there are `max_samples`, or `min_samples` that took `sample_s` in total."""
        samples, settings = self.count - self.division.start, self._settings
        if samples >= settings.max_samples:
            return True
        host_s = self.host_s[self.division.start :]
        return samples >= settings.min_samples and sum(host_s) >= settings.sample_s

    def must_end(self, now: float, deadline: float) -> bool:
        """Whether the next step may end past the deadline, and there are samples to keep."""
        if self.count - self._first < MIN_SAMPLES_WHEN_CUT:
            return False
        return now + OVERRUN * self.host_s[-1] > deadline

    def look(self) -> Division:
        """The present division; computed anew if enough readings have come."""
        if self.count >= self._next_look or self.enough:
            self._next_look = self.count + max(1, (self.count - EVERY_READING) // 20)
            self.division = self._divided()
        return self.division

    def finish(self, *, fewest: int = 1) -> Division:
        """The last division. With fewer samples than `fewest`, the last `min_samples` readings are
        the samples; of more than `max_samples`, the last are."""
        found, settings = self._divided(), self._settings
        if self.count - found.start < fewest:
            start = max(self._first, self.count - settings.min_samples)
            found = Division(start=start, steady=False)
        newest = max(found.start, self.count - settings.max_samples)
        return Division(start=newest, steady=found.steady)

    def _divided(self) -> Division:
        """By the rule; without a steady state, at the end of the time allowed for warm-up."""
        start = steady_start(np.asarray(self.time_s[self._first :]))
        if start is not None:
            return Division(start=self._first + start, steady=True)
        until = (self.warm_at or 0.0) + self._settings.warmup_s
        return Division(start=max(self._first, bisect_left(self.began_at, until)), steady=False)


class StepLog:
    """What each step of one process reported, until the parent has it."""

    def __init__(self, launched_at: float) -> None:
        self._launched_at = launched_at
        self._rows: list[tuple[int, float, float, Mapping[str, float]]] = []
        self._not_finite: dict[str, list[int]] = {}

    def add(self, step: int, step_s: float, end_at: float, values: Mapping[str, float]) -> None:
        """A finished step, by its own number; `end_at` as time.monotonic."""
        self.note(step, values)
        self._rows.append((step, step_s, end_at - self._launched_at, values))

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Keep which values are NaN or infinite, also of a step that does not finish."""
        for name in (n for n, v in values.items() if not math.isfinite(v)):
            self._not_finite.setdefault(name, []).append(step)

    def take(self) -> OverSteps | None:
        """The steps since the last call, in seven digits; None if there are none."""
        (rows, self._rows), (bad, self._not_finite) = (self._rows, []), (self._not_finite, {})
        if not rows and not bad:
            return None
        names = dict.fromkeys(name for *_, values in rows for name in values)
        return OverSteps(
            step=tuple(step for step, *_ in rows),
            step_s=tuple(float(f"{s:.7g}") for _, s, _, _ in rows),
            end_s=tuple(round(end, 4) for _, _, end, _ in rows),
            values={n: tuple(_short(values.get(n)) for *_, values in rows) for n in names},
            not_finite={name: tuple(steps) for name, steps in bad.items()},
        )


def _short(value: float | None) -> float | None:
    return float(f"{value:.7g}") if value is not None and math.isfinite(value) else None


def steady_start(readings_s: NDArray[np.float64]) -> int | None:
    """Index of the first steady one of N step times, under N / 2; None without a steady state."""
    cuts = len(readings_s) // 2
    if cuts == 0:
        return None
    errors = _squared_standard_errors(_clipped(readings_s))
    start = int(np.argmin(errors[: cuts + 1]))
    if start == cuts and _apart(readings_s) <= TOLERANCE * float(np.median(readings_s)):
        start = int(np.argmin(errors[: cuts // 2 + 1]))
    return start if start < cuts and is_steady(readings_s[start:]) else None


def is_steady(readings_s: NDArray[np.float64]) -> bool:
    """Whether N >= MIN_STEADY and both halves of the readings, shape [N], have the same median."""
    if len(readings_s) < MIN_STEADY:
        return False
    first, second = np.array_split(readings_s, 2)
    spread = max(_sigma(first), _sigma(second))
    error = _MEDIAN_OVER_MEAN * spread * (1 / len(first) + 1 / len(second)) ** 0.5
    allowed = max(TOLERANCE * float(np.median(readings_s)), STANDARD_ERRORS * error)
    return bool(_apart(readings_s) <= allowed)


def _apart(readings_s: NDArray[np.float64]) -> float:
    """Distance between the medians of both halves, seconds."""
    first, second = np.array_split(readings_s, 2)
    return abs(float(np.median(second) - np.median(first)))


def _clipped(readings_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Deviations from the level of the second half, clipped at CLIP_SIGMAS."""
    level = readings_s[len(readings_s) // 2 :]
    centre = float(np.median(level))
    reach = CLIP_SIGMAS * max(_sigma(level), TOLERANCE * centre)
    deviations: NDArray[np.float64] = np.clip(readings_s - centre, -reach, reach)
    return deviations


def _squared_standard_errors(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """s^2(d) / (n - d) of deviations[d:] for every d; shape [N]."""
    remaining = np.arange(len(deviations), 0, -1)
    total = np.cumsum(deviations[::-1])[::-1]
    squares = np.cumsum(deviations[::-1] ** 2)[::-1]
    result: NDArray[np.float64] = (squares - total**2 / remaining) / remaining**2
    return result


def _sigma(values: NDArray[np.float64]) -> float:
    """Standard deviation, estimated by the median absolute deviation."""
    return _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
