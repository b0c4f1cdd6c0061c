"""What a process does that finishes no step, by samples of its activity: whether it hangs.

Three samples are two windows. A process *hangs* if over both its CPU time, I/O and memory
stood still and the GPU was idle; or if they stood still but for a host that polls, while a kernel
that computes nothing kept the GPU busy. Otherwise it is *busy*, and only its time limit ends it: an
endless loop looks like a long step.

How long a silence must be before it is judged is the process's own: six times its slowest recent
step, but at least the suite's `stall_s`; three times that if it is busy. The first step may compile
and does not count.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise

from harness import units
from harness.records import ActivitySample, MeasureSettings

TIMES_SLOWEST = 6.0
"""A silence of this many times the slowest recent step is judged."""
BUSY_TIMES = 3.0
"""How many times `stall_s` a busy process may be silent, at least."""
RECENT = 20
"""Reports of finished steps that are recent."""
LEAST_WINDOW_S, WINDOW_S = 0.5, 3.0
"""Time between two samples before a time limit that is near, and at most."""
WINDOWS = 2
"""Windows in a row that a judgement needs."""
IDLE_CORES, IDLE_IO_BYTES_S, IDLE_RSS_BYTES = 0.05, 4096.0, 2**20
"""CPU cores, bytes read and written each second, and change of memory below which a process stands
still: it may poll, and print "still waiting"."""
IDLE_GPU, FULL_GPU = 0.05, 0.99
"""GPU utilisation below which the GPU is idle, and from which no kernel is seen to end."""
SPINNING_POWER, POWER_VARIES = 0.35, 0.05
"""A GPU that is always busy computes nothing if it draws less than this share of its power limit
(at rest a sixth, in a computation or copy over a half), and the power varies by less than this."""


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
    def limits(self) -> tuple[float, float]:
        """The silence allowed now if the process is idle, and if it is busy; seconds."""
        least_s, own_s = self._settings.stall_s, TIMES_SLOWEST * self.slowest_s
        return max(least_s, own_s), max(BUSY_TIMES * least_s, own_s)


class Activity(StrEnum):
    """What a silent process does."""

    IDLE = "idle"
    SPINNING_KERNEL = "spinning kernel"
    BUSY = "busy"


class Silence:
    """Samples a process that is silent for longer than an idle one may be."""

    def __init__(self, take: Callable[[], ActivitySample]) -> None:
        self._take = take
        self._since = self._next_at = 0.0
        self._window_s = WINDOW_S
        self.limit_s = 0.0
        """The silence that is allowed."""
        self.samples: tuple[ActivitySample, ...] = ()
        self.seen: Activity | None = None
        """What it does; None as long as that is not known."""

    def look(self, now: float, since: float, ends_at: float, limits: tuple[float, float]) -> None:
        """Take a sample if one is due, by time.monotonic: another last sign of life, `since`,
        begins a new silence; shortly before `ends_at`, when its time ends, a look is due too."""
        idle_s, busy_s = limits
        if since != self._since:
            left_s = ends_at - since  # enough for all samples, if a window may be so short
            self._window_s = min(WINDOW_S, max(LEAST_WINDOW_S, left_s / (WINDOWS + 2)))
            late_s = ends_at - (WINDOWS + 1) * self._window_s
            self._next_at = min(since + idle_s, max(since + self._window_s, late_s))
            self._since, self.samples, self.seen = since, (), None
        if now > self._next_at:
            self._next_at = now + min(self._window_s, idle_s / (2 * WINDOWS))
            self.samples = (*self.samples[-WINDOWS:], self._take())
            self.seen = judge(self.samples)
        is_still = self.seen is None or self.seen is Activity.IDLE
        self.limit_s = idle_s if is_still else busy_s


def judge(samples: Sequence[ActivitySample]) -> Activity | None:
    """What a process does, by the last samples of one silence; None if they are too few."""
    last = samples[-1 - WINDOWS :]
    if len(last) <= WINDOWS:
        return None
    windows = list(pairwise(last))
    if not all(_is_still(*w) for w in windows):
        return Activity.BUSY
    powers, gpu = [s.gpu_power or 1.0 for s in last], [s.gpu_utilisation or 0.0 for s in last]
    varies = max(powers) - min(powers) > POWER_VARIES * max(powers)
    if min(gpu) >= FULL_GPU and max(powers) < SPINNING_POWER and not varies:
        return Activity.SPINNING_KERNEL
    runs = any("running" in s.states for s in last) or max(gpu) >= IDLE_GPU
    works = runs or any(_cores(*w) >= IDLE_CORES for w in windows)
    return Activity.BUSY if works else Activity.IDLE


def reason(seen: Activity, samples: Sequence[ActivitySample]) -> str:
    """What the samples of a silence show, in words: `it stands still`."""
    last = samples[-1]
    if seen is Activity.BUSY:
        use = last.gpu_utilisation
        gpu = f" and the GPU to {units.percent(use)}" if use else ""
        return f"it uses {_cores(samples[0], last):.1f} CPU cores{gpu}"
    if seen is Activity.SPINNING_KERNEL:
        return "one kernel keeps the GPU busy at low power"
    return "a signal stopped it" if "stopped" in last.states else "it stands still"


def _is_still(before: ActivitySample, after: ActivitySample) -> bool:
    """Whether neither I/O nor memory moved between two samples."""
    return (
        abs(after.io_bytes - before.io_bytes) < IDLE_IO_BYTES_S * (after.at_s - before.at_s)
        and abs(after.rss_bytes - before.rss_bytes) < IDLE_RSS_BYTES
        and "disk-sleep" not in after.states
    )


def _cores(before: ActivitySample, after: ActivitySample) -> float:
    return abs(after.cpu_s - before.cpu_s) / max(after.at_s - before.at_s, 1e-6)
