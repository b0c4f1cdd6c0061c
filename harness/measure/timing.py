"""Time a computation until it is steady and there are enough samples. Every reading is kept; the
first, which compiles, allocates and tunes, is never a sample.
"""

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter  # bound before a workload could replace them
from typing import Any

import torch

from harness.measure import steady
from harness.records import Clock, MeasureSettings


@dataclass(frozen=True, slots=True)
class TimedStep:
    began_at: float
    """time.monotonic at its beginning."""
    time_s: float
    """By the stopwatch's clock."""
    host_s: float
    """By the host's clock, synchronised at both ends."""
    output: Any


class HostStopwatch:
    """The host's clock, for computations that are complete when they return."""

    clock = Clock.HOST
    own_bytes = 0

    def read(self, run: Callable[[], Any]) -> TimedStep:
        began_at, start = monotonic(), perf_counter()
        output = run()
        elapsed = perf_counter() - start
        return TimedStep(began_at, elapsed, elapsed, output)


class CudaStopwatch:
    """CUDA events around the run on the current stream, which is idle at the beginning: the time
    includes the first launch. With `flush_l2` the device still flushes its cache while the run is
    launched, so that only kernel time remains; neither reading includes the flush."""

    clock = Clock.CUDA_EVENT

    def __init__(self, *, flush_l2: bool = False) -> None:
        self._flush: torch.Tensor | None = None
        if flush_l2:
            l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
            self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
            seeded = torch.Generator("cuda").manual_seed(0)
            self._noise = torch.empty_like(self._flush).random_(generator=seeded)

    @property
    def own_bytes(self) -> int:
        """Its own device memory, which is subtracted from the computation's peak."""
        return 0 if self._flush is None else 2 * self._flush.nbytes

    def read(self, run: Callable[[], Any]) -> TimedStep:
        event: Any = torch.cuda.Event  # untyped in torch
        before, begin, end = (event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        began_at, start = monotonic(), perf_counter()
        if self._flush is not None:
            before.record()
            self._flush.copy_(self._noise)  # random bytes: a cache may compress a constant
        begin.record()
        output = run()
        end.record()
        torch.cuda.synchronize()
        host_s = perf_counter() - start
        flush_s = 0.0 if self._flush is None else before.elapsed_time(begin) / 1e3
        return TimedStep(began_at, begin.elapsed_time(end) / 1e3, host_s - flush_s, output)


Stopwatch = HostStopwatch | CudaStopwatch


def stopwatch(*, flush_l2: bool) -> Stopwatch:
    """CUDA events on a GPU machine, also for work on the CPU; else the host's clock."""
    return CudaStopwatch(flush_l2=flush_l2) if torch.cuda.is_available() else HostStopwatch()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All readings of one process, divided into warm-up and samples; seconds."""

    warmup_s: tuple[float, ...]
    samples_s: tuple[float, ...]
    host_samples_s: tuple[float, ...]
    samples_at: tuple[float, ...]
    """time.monotonic at the beginning of each sample."""
    steady: bool
    """Whether the samples are steady by rule, or only the last ones taken."""
    cut: bool
    """Whether the deadline ended the series early."""
    between_s: float
    """Time between the samples and after the last, which the harness spent itself."""
    output: Any
    """That of the last step."""

    @property
    def steps(self) -> int:
        return len(self.warmup_s) + len(self.samples_s)


def take(
    run: Callable[[], Any],
    settings: MeasureSettings,
    watch: Stopwatch,
    *,
    deadline: float = math.inf,
    sampling: Callable[[float], None] = lambda _: None,
    prepare: Callable[[int], None] = lambda _: None,
    inspect: Callable[[TimedStep, int], None] = lambda *_: None,
    steps: int | None = None,
) -> Timing:
    """Run until steady, then until there are `max_samples`, or `min_samples` that took `sample_s`;
    or, if `steps` is given, so many steps.

    Without a steady state within `warmup_s`, later readings are the samples, marked as not steady,
    unless they become steady after all. With two samples, no step starts that would probably end
    past the deadline (time.monotonic). `sampling` is called with the beginning of the first sample,
    once it is known and whenever later readings move it; `prepare` with the index of each step
    before it, `inspect` with its reading and index after it.
    """
    series = steady.StepSeries(settings, first=1)
    announced: float | None = None
    ended_at: list[float] = []
    with _collecting_only_between_steps() as collect:
        series.warm_at = monotonic()
        while True:
            prepare(series.count)
            collect()
            reading = watch.read(run)
            ended_at.append(monotonic())
            series.append(reading.began_at, reading.time_s, reading.host_s)
            inspect(reading, series.count - 1)
            start = series.look().start
            if start < series.count and series.began_at[start] != announced:
                announced = series.began_at[start]
                sampling(announced)
            if series.count == steps or (steps is None and series.enough):
                cut = False
                break
            if cut := series.must_end(monotonic(), deadline):
                break
            del reading  # so that only one output is alive at a time

    division = series.finish(fewest=steady.MIN_SAMPLES_WHEN_CUT if cut else 1)
    start = division.start
    if series.began_at[start] != announced:
        sampling(series.began_at[start])
    resumed_at = (*series.began_at[start + 1 :], monotonic())
    return Timing(
        warmup_s=tuple(series.time_s[:start]),
        samples_s=tuple(series.time_s[start:]),
        host_samples_s=tuple(series.host_s[start:]),
        samples_at=tuple(series.began_at[start:]),
        steady=division.steady,
        cut=cut,
        between_s=math.fsum(resumed_at) - math.fsum(ended_at[start:]),
        output=reading.output,
    )


@contextmanager
def _collecting_only_between_steps() -> Iterator[Callable[[], object]]:
    """Keep the garbage collector out of the readings; yields a function that collects.

    Objects that exist before the first step, and those it leaves behind, are collected only once
    and stay frozen: after torch.compile a collection took 30 ms, in which the device was idle.
    """
    was_enabled, freezes = gc.isenabled(), 2

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
        if was_enabled:
            gc.enable()
