"""The pace of a worker's steps, and how long a silence must be before it is judged.

The limit is the process's own: six times its slowest recent step, but at least the suite's
`stall_s`; three times that if it is busy. The first step may compile and does not count.
"""

from collections import deque

from harness.records import MeasureSettings

TIMES_SLOWEST = 6.0
"""A silence of this many times the slowest recent step is judged."""
BUSY_TIMES = 3.0
"""How many times `stall_s` a busy process may be silent, at least."""
RECENT = 20
"""Reports of finished steps that are recent."""


class Pace:
    """The step times of one worker, from its reports."""

    def __init__(self, settings: MeasureSettings) -> None:
        self._settings = settings
        self._recent_s: deque[float] = deque(maxlen=RECENT)
        self.steps = 0
        self.spent_s = 0.0
        self.shortest_s = 0.0

    def ran(self, steps: int, spent_s: float, shortest_s: float) -> None:
        """Take in a report: steps finished, their total time, and the shortest of them."""
        if steps > self.steps > 0:
            self._recent_s.append((spent_s - self.spent_s) / (steps - self.steps))
        self.steps, self.spent_s, self.shortest_s = steps, spent_s, shortest_s

    @property
    def mean_s(self) -> float | None:
        """Mean time of a finished step."""
        return self.spent_s / self.steps if self.steps else None

    @property
    def slowest_s(self) -> float:
        """The slowest recent step; 0 as long as only the first is known."""
        return max(self._recent_s, default=0.0)

    @property
    def limits_s(self) -> tuple[float, float]:
        """The silence allowed now to an idle process, and to a busy one."""
        least_s = self._settings.stall_s
        own_s = TIMES_SLOWEST * self.slowest_s
        return max(least_s, own_s), max(BUSY_TIMES * least_s, own_s)

    @property
    def needed_s(self) -> float | None:
        """Time for a first step and `min_samples` samples at this pace."""
        mean_s = self.mean_s
        return None if mean_s is None else (1 + self._settings.min_samples) * mean_s
