"""Time a computation again and again, until it is steady and there are enough samples.

Every reading is kept, the warm-up too. The first is never a sample: it compiles, allocates and
tunes. What is published begins where harness.measure.steady says so, judged on all readings.
"""

import gc
import math
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from harness.measure import steady
from harness.records import Clock, MeasureSettings

EVERY_READING = 50
"""So many readings are judged one by one; after that, whenever a twentieth more have come."""
MIN_SAMPLES_WHEN_CUT = 2
"""Samples that are worth more than a timeout, when the deadline leaves no time for all."""
OVERRUN = 1.1
"""How much longer than the last one the next run may take."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One run, timed."""

    began_at: float
    """time.monotonic before it began."""
    time_s: float
    """On the stopwatch's clock."""
    host_s: float
    """On the host's clock, synchronised at both ends."""
    output: Any
    """What the run returned."""


class Stopwatch(Protocol):
    """Runs a computation once and times it."""

    @property
    def clock(self) -> Clock: ...

    @property
    def own_bytes(self) -> int:
        """Device memory of the stopwatch, to be taken off the computation's peak."""

    def read(self, run: Callable[[], Any]) -> TimedStep: ...


class HostStopwatch:
    """The host's clock, for computations that are done when they return."""

    clock = Clock.HOST
    own_bytes = 0

    def read(self, run: Callable[[], Any]) -> TimedStep:
        began_at, start = time.monotonic(), time.perf_counter()
        output = run()
        elapsed = time.perf_counter() - start
        return TimedStep(began_at, elapsed, elapsed, output)


class CudaStopwatch:
    """CUDA events around the run on the current stream, which is idle when it begins.

    The first launch is thus part of the time, as it is for whoever calls the computation once.
    With `flush_l2` the device is still emptying its cache when the run is launched, so that a
    kernel's own time remains; that of the flush is in neither reading.
    """

    clock = Clock.CUDA_EVENT

    def __init__(self, *, flush_l2: bool = False) -> None:
        self._flush: torch.Tensor | None = None
        if flush_l2:
            l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device="cuda")

    @property
    def own_bytes(self) -> int:
        return 0 if self._flush is None else self._flush.nbytes

    def flush(self) -> None:
        """Empty the L2 cache, on the current stream; nothing unless made to."""
        if self._flush is not None:
            self._flush.zero_()

    def read(self, run: Callable[[], Any]) -> TimedStep:
        event: Any = torch.cuda.Event  # untyped in torch
        before, begin, end = (event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        began_at, start = time.monotonic(), time.perf_counter()
        flush_s = 0.0
        if self._flush is not None:
            before.record()
            self.flush()
        begin.record()
        output = run()
        end.record()
        torch.cuda.synchronize()
        host_s = time.perf_counter() - start
        if self._flush is not None:
            flush_s = before.elapsed_time(begin) / 1e3
        return TimedStep(began_at, begin.elapsed_time(end) / 1e3, host_s - flush_s, output)


def stopwatch(*, flush_l2: bool) -> Stopwatch:
    """The one for this machine. CUDA events are right for work on the CPU too, if idle."""
    return CudaStopwatch(flush_l2=flush_l2) if torch.cuda.is_available() else HostStopwatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All readings of one process, divided into warm-up and samples; seconds."""

    warmup_s: tuple[float, ...]
    samples_s: tuple[float, ...]
    host_samples_s: tuple[float, ...]
    samples_at: tuple[float, ...]
    """Reading of time.monotonic before each sample."""
    steady: bool
    """Whether the samples are steady by rule, or merely the last ones taken."""
    cut: bool
    """Whether the deadline ended it before the settings would have."""
    output: Any
    """What the last run returned."""


def take(
    run: Callable[[], Any],
    settings: MeasureSettings,
    watch: Stopwatch,
    *,
    deadline: float = math.inf,
    progress: Callable[[float], None] = lambda _: None,
    sampling: Callable[[float], None] = lambda _: None,
    inspect: Callable[[Any, int], None] = lambda *_: None,
) -> Timing:
    """Run until steady, then until there are enough samples.

    Enough is `min_samples` that also took `sample_s` together, or `max_samples`. If no steady
    state shows within `warmup_s`, the readings after that are the samples, marked as not
    steady; should one show later after all, it counts. No run is begun that would, at the pace
    of the last one, end past the deadline, once there are two samples.

    Args:
        run: The computation.
        settings: How many, and for how long.
        watch: Times one run.
        deadline: Reading of time.monotonic by which the process must be done.
        progress: Called after each run with the host's seconds it took.
        sampling: Called with time.monotonic of the beginning of the first sample, when it is
            first known and whenever further readings move it.
        inspect: Called after each run with what it returned and its number, counted from 0.
    """
    series = _Series()
    division = _Division(start=1, steady=False)
    next_look = 1
    announced: float | None = None
    with _collecting_only_between_runs() as collect:
        warmup_until = time.monotonic() + settings.warmup_s
        while True:
            collect()
            reading = watch.read(run)
            series.append(reading)
            progress(reading.host_s)
            inspect(reading.output, series.count - 1)

            if series.count >= next_look or series.enough(division.start, settings):
                division = series.divide(warmup_until)
                next_look = series.count + max(1, (series.count - EVERY_READING) // 20)
                began = series.began_at[division.start : division.start + 1]
                if began and began[0] != announced:
                    announced = began[0]
                    sampling(announced)
                if series.enough(division.start, settings):
                    cut = False
                    break
            finished_by = time.monotonic() + OVERRUN * reading.host_s
            if finished_by > deadline and series.count > MIN_SAMPLES_WHEN_CUT:
                division = series.divide_in_haste(warmup_until, settings.min_samples)
                cut = True
                break
            del reading  # or its output would be alive beside the next one

    start = max(division.start, series.count - settings.max_samples)
    if series.began_at[start] != announced:
        sampling(series.began_at[start])
    return Timing(
        warmup_s=tuple(series.time_s[:start]),
        samples_s=tuple(series.time_s[start:]),
        host_samples_s=tuple(series.host_s[start:]),
        samples_at=tuple(series.began_at[start:]),
        steady=division.steady,
        cut=cut,
        output=reading.output,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Division:
    start: int
    """Index of the first sample; the number of readings where there is none yet."""
    steady: bool


class _Series:
    """The readings so far, without their outputs."""

    def __init__(self) -> None:
        self.began_at: list[float] = []
        self.time_s: list[float] = []
        self.host_s: list[float] = []

    @property
    def count(self) -> int:
        return len(self.time_s)

    def append(self, reading: TimedStep) -> None:
        self.began_at.append(reading.began_at)
        self.time_s.append(reading.time_s)
        self.host_s.append(reading.host_s)

    def enough(self, start: int, settings: MeasureSettings) -> bool:
        samples = self.count - start
        if samples >= settings.max_samples:
            return True
        return samples >= settings.min_samples and sum(self.host_s[start:]) >= settings.sample_s

    def divide(self, warmup_until: float) -> _Division:
        """By the rule; without a steady state, at the end of the time allowed for finding one."""
        start = steady.steady_start(np.asarray(self.time_s[1:]))
        if start is not None:
            return _Division(start=1 + start, steady=True)
        return _Division(start=max(1, bisect_left(self.began_at, warmup_until)), steady=False)

    def divide_in_haste(self, warmup_until: float, min_samples: int) -> _Division:
        """By the rule; without enough after that, the last readings, but never the first."""
        division = self.divide(warmup_until)
        if self.count - division.start >= MIN_SAMPLES_WHEN_CUT:
            return division
        return _Division(start=max(1, self.count - min_samples), steady=False)


@contextmanager
def _collecting_only_between_runs() -> Iterator[Callable[[], object]]:
    """Keep the garbage collector out of the readings; yields what collects between them.

    What exists before the first run, and what that run leaves behind, is not walked again before
    every other one: after torch.compile that took 30 ms, in which the device had nothing to do.
    """
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    freezes = 2

    def collect() -> None:
        nonlocal freezes
        gc.collect()
        if freezes:
            gc.freeze()
            freezes -= 1

    gc.disable()
    try:
        yield collect
    finally:
        if not was_frozen:  # else the whole heap of the forkserver would be walked and copied
            gc.unfreeze()
        if was_enabled:
            gc.enable()
