"""The pace of a worker's steps, and how long a silence must be to count as a hang.

The limit follows the finished steps: a step of 10 ms that has not ended after half a minute will
not end, but one of 10 s may be slow. Before the first steps (imports, compilation, the reference),
the limit is the suite's `stall_s`.
"""

import statistics
from collections import deque

from harness.records import MeasureSettings

STALL_STEPS = 50
"""A silence of this many median steps is a hang."""
STALL_FLOOR_S = 30.0
"""Shortest silence that is a hang: a step may compile, or wait for data."""
STALL_STEPS_KNOWN = 3
"""Finished steps before the median is used; the first is often a cold one."""

_KEPT = 1001


class Pace:
    """The step times of one worker, from its reports."""

    def __init__(self, settings: MeasureSettings) -> None:
        self._settings = settings
        self._steps_s: deque[float] = deque(maxlen=_KEPT)
        self.steps = 0
        self.spent_s = 0.0
        self.shortest_s = 0.0

    def ran(self, steps: int, spent_s: float, shortest_s: float) -> None:
        """Take in a report: steps finished, their total time, and the shortest of them."""
        if steps > self.steps:
            self._steps_s.append((spent_s - self.spent_s) / (steps - self.steps))
        self.steps, self.spent_s, self.shortest_s = steps, spent_s, shortest_s

    @property
    def mean_s(self) -> float | None:
        """Mean time of a finished step."""
        return self.spent_s / self.steps if self.steps else None

    def stall_limit_s(self, *, timed: bool) -> float:
        """The longest silence allowed now.

        Args:
            timed: The worker only steps the computation now.
        """
        if not timed or self.steps < STALL_STEPS_KNOWN:
            return self._settings.stall_s
        expected_s = STALL_STEPS * statistics.median(self._steps_s)
        return min(self._settings.stall_s, max(STALL_FLOOR_S, expected_s))

    @property
    def needed_s(self) -> float | None:
        """Time for a first step and `min_samples` samples at this pace."""
        mean_s = self.mean_s
        return None if mean_s is None else (1 + self._settings.min_samples) * mean_s
