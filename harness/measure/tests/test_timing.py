"""The loop that takes readings, driven by planted step times; and the two stopwatches."""

import gc
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch

from harness.measure import timing
from harness.measure.timing import HostStopwatch, TimedStep, Timing, take
from harness.records import MeasureSettings

SETTINGS = MeasureSettings(min_samples=5, max_samples=200, sample_s=2.0, warmup_s=20.0)


class Planted(HostStopwatch):
    """A stopwatch with planted times, which advance time.monotonic; collections are skipped."""

    def __init__(self, times_s: Iterable[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self._times = iter(times_s)
        self.now = 1000.0
        monkeypatch.setattr("harness.measure.timing.monotonic", lambda: self.now)
        monkeypatch.setattr("harness.measure.timing.gc.collect", int)

    def read(self, run: Callable[[], Any]) -> TimedStep:
        began_at, seconds = self.now, next(self._times)
        self.now += seconds
        return TimedStep(began_at, seconds, seconds, run())


def jitter(seconds: float) -> Iterator[float]:
    """Endless step times within a thousandth of `seconds`."""
    while True:
        for part in (0.0, 0.7, -0.4, 0.2, -0.8, 0.5, -0.2):
            yield seconds * (1 + part / 1000)


def measure(monkeypatch: pytest.MonkeyPatch, times_s: Iterable[float], **rest: Any) -> Timing:
    return take(lambda: "out", SETTINGS, Planted(times_s, monkeypatch), **rest)


def test_samples_begin_after_the_warm_up_and_every_step_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sampling, steps, times_s = list[float](), list[float](), chain([9.0, 3.0, 1.0], jitter(0.1))

    def inspect(reading: TimedStep, _: int) -> None:
        steps.append(reading.host_s)

    taken = measure(monkeypatch, times_s, sampling=sampling.append, inspect=inspect)

    assert taken.warmup_s[:3] == (9.0, 3.0, 1.0)
    assert taken.samples_s == taken.host_samples_s
    assert taken.output == "out"
    assert sampling[-1] == pytest.approx(1000.0 + math.fsum(taken.warmup_s))
    assert tuple(steps) == taken.warmup_s + taken.samples_s


@pytest.mark.parametrize(
    ("times_s", "is_steady", "samples", "longest_s"),
    [
        pytest.param(chain([9.0, 3.0, 1.0], jitter(0.1)), True, (20, 30), 0.101, id="warm-up"),
        pytest.param(jitter(1e-4), True, (200, 200), 1.01e-4, id="fast: max_samples"),
        pytest.param(
            chain((0.01 * (2 - i / 300) for i in range(300)), jitter(0.01)),
            True, (200, 200), 0.0101, id="late: max_samples",
        ),
        # The time for warm-up ends after two of these steps, which are steady nevertheless.
        pytest.param(chain([30.0], jitter(10.0)), True, (5, 7), 10.1, id="slow: min_samples"),
        pytest.param((0.1 * 1.02**i for i in range(1000)), False, (5, 200), 9.9, id="drift"),
    ],
)  # fmt: skip
def test_the_samples_are_steady_or_follow_the_time_for_warm_up(
    times_s: Iterable[float], is_steady: bool, samples: tuple[int, int], longest_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    taken = measure(monkeypatch, times_s)

    assert taken.steady is is_steady
    assert samples[0] <= len(taken.samples_s) <= samples[1]
    assert max(taken.samples_s) < longest_s
    assert taken.warmup_s
    if is_steady:
        assert sum(taken.samples_s) >= SETTINGS.sample_s or len(taken.samples_s) == 200
    else:
        assert sum(taken.warmup_s) >= SETTINGS.warmup_s


@pytest.mark.parametrize(("deadline", "samples"), [(1060.0, 3), (1001.0, 2)])
def test_no_step_starts_that_would_end_past_the_deadline(
    deadline: float, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the two samples that a measurement needs."""
    taken = measure(monkeypatch, chain([20.0], jitter(12.0)), deadline=deadline)

    assert (taken.cut, taken.steady) == (True, False)
    assert taken.warmup_s == (20.0,)
    assert len(taken.samples_s) == samples


def test_only_one_output_is_alive_and_the_collector_runs_between_steps_only() -> None:
    alive: set[int] = set()
    garbage: set[int] = set()

    class Node:
        def __init__(self, kept: set[int]) -> None:
            self.kept = kept
            kept.add(id(self))

        def __del__(self) -> None:
            self.kept.discard(id(self))

    def run() -> Node:
        assert not gc.isenabled()
        assert not alive, "the previous output is alive"
        assert len(garbage) <= 1, "that of earlier steps was not collected"
        cycle = Node(garbage)
        cycle.itself = cycle  # type: ignore[attr-defined]
        return Node(alive)

    take(run, replace(SETTINGS, sample_s=0.0), HostStopwatch())

    assert gc.isenabled()


def test_objects_of_the_first_step_are_collected_only_once() -> None:
    left: list[list[int]] = []
    walked: list[int] = []

    def run() -> None:
        if not left:  # like a compiler
            left.extend([] for _ in range(20_000))
        else:
            walked.append(len(gc.get_objects()))

    take(run, replace(SETTINGS, sample_s=0.0), HostStopwatch())

    assert max(walked) < len(left)


@pytest.mark.gpu
@pytest.mark.parametrize("flush_l2", [False, True])
def test_cuda_events_and_the_host_agree_on_a_long_kernel(flush_l2: bool) -> None:
    x = torch.randn(8192, 8192, device="cuda")
    stopwatch = timing.CudaStopwatch(flush_l2=flush_l2)
    stopwatch.read(lambda: x @ x)

    reading = stopwatch.read(lambda: x @ x)

    assert 0 < reading.time_s <= reading.host_s
    assert reading.host_s < 1.2 * reading.time_s + 1e-3


@pytest.mark.gpu
def test_the_flush_of_the_cache_is_in_neither_reading() -> None:
    """A flush takes over 20 us on an A100 or H100; an empty run takes under 10."""
    stopwatch = timing.CudaStopwatch(flush_l2=True)

    readings = [stopwatch.read(lambda: None) for _ in range(21)]

    assert sorted(r.time_s for r in readings)[10] < 15e-6
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    assert stopwatch.own_bytes == 4 * l2_bytes > 0  # the bytes written, and their source
