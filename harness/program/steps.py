"""The steps of a program, as they become known from its output, divided into setup, warm-up and
samples by the rule that workloads are divided by (harness.measure.steady)."""

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.measure import steady
from harness.program.reported import Step
from harness.records import MeasureSettings

LOOK_EVERY = 50
"""So many steps are judged one by one; after that, whenever a twentieth more have come."""
MIN_SAMPLES_WHEN_CUT = 2
"""Samples that are worth more than a timeout, when the deadline leaves no time for all."""
OVERRUN = 1.1
"""How much longer than the last one the next step may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    start: int
    """Index of the first sample; the number of readings where there is none yet."""
    steady: bool


class Series:
    """The readings after setup: one a line. Where a line speaks of ten steps, the mean of ten."""

    def __init__(self, settings: MeasureSettings, *, setup_steps: int) -> None:
        self._settings = settings
        self._setup_steps = setup_steps
        self._marked_at: float | None = None
        self._told: int | None = None
        self._next_look = 1
        self.finished = 0
        """Steps, setup included."""
        self.together = 0
        """Readings of lines that arrived at once: each is the mean of them."""
        self.by_the_step = True
        """Whether each line speaks of one step."""
        self.warm_at: float | None = None
        """time.monotonic at the end of setup."""
        self.began_at = array("d")
        self.time_s = array("d")
        self.division = Division(start=0, steady=False)

    def add(self, steps: Sequence[Step], at: float) -> list[float]:
        """Lines that arrived together, at one time; what each step after setup took."""
        took: list[float] = []
        untold: list[int] = []
        is_setup = anew = False
        for step in steps:
            advance = self._advance(step)
            self.finished += advance
            if self.finished <= self._setup_steps:
                is_setup = True
            elif step.time_s is not None:
                self._keep(step.time_s, at - step.time_s)
                took += [step.time_s] * min(advance, LOOK_EVERY)
            anew |= advance == 0
            untold += [advance] if step.time_s is None else []
        if untold and self._marked_at is not None and not (is_setup or anew):
            each_s = (at - self._marked_at) / sum(untold)
            done = 0
            for advance in untold:
                self._keep(each_s, self._marked_at + done * each_s)
                done += advance
            took += [each_s] * min(done, LOOK_EVERY)
            self.together += len(untold) if len(untold) > 1 else 0
        if steps:
            self._marked_at = at
            if self.warm_at is None and self.finished >= self._setup_steps:
                self.warm_at = min(self.began_at[0], at) if self.began_at else at
        return took

    def _advance(self, step: Step) -> int:
        """How many steps a line finishes; none where the program counts anew."""
        if step.count is None:
            return 1
        before, self._told = self._told, step.count
        advance = 1 if before is None else max(0, step.count - before)
        self.by_the_step &= advance <= 1
        return advance

    def _keep(self, time_s: float, began_at: float) -> None:
        if time_s > 0:
            self.time_s.append(time_s)
            self.began_at.append(began_at)

    @property
    def count(self) -> int:
        """Readings."""
        return len(self.time_s)

    def look(self, *, last: bool = False) -> Division:
        """Divide what there is, if it is time to; at the end, also where the rule cannot."""
        if last or self.count >= self._next_look or self._enough(self.division.start):
            self._next_look = self.count + max(1, (self.count - LOOK_EVERY) // 20)
            self.division = self._divide()
        if last:
            start = self.division.start
            if start >= self.count:
                start = max(0, self.count - self._settings.min_samples)
                self.division = Division(start=start, steady=False)
            newest = max(start, self.count - self._settings.max_samples)
            self.division = Division(start=newest, steady=self.division.steady)
        return self.division

    @property
    def enough(self) -> bool:
        """Whether there are the samples that the settings ask for."""
        return self._enough(self.division.start)

    def must_end(self, now: float, deadline: float) -> bool:
        """Whether the next step may end past the deadline, and there is something to keep."""
        late = bool(self.time_s) and now + OVERRUN * self.time_s[-1] > deadline
        return late and self.count >= MIN_SAMPLES_WHEN_CUT

    def _divide(self) -> Division:
        """By the rule; without a steady state, at the end of the time allowed for finding one."""
        start = steady.steady_start(np.asarray(self.time_s))
        if start is not None:
            return Division(start=start, steady=True)
        until = (self.warm_at or 0.0) + self._settings.warmup_s
        return Division(start=bisect_left(self.began_at, until), steady=False)

    def _enough(self, start: int) -> bool:
        samples = self.count - start
        if samples >= self._settings.max_samples:
            return True
        if samples < self._settings.min_samples:
            return False
        return sum(self.time_s[start:]) >= self._settings.sample_s
