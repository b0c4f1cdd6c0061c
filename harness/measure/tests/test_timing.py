"""The loop that takes readings, driven by planted ones; and the two stopwatches."""

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import chain, repeat
from typing import Any

import pytest
import torch

from harness.measure import timing
from harness.measure.timing import HostStopwatch, TimedStep, Timing, take
from harness.records import Clock, MeasureSettings

SETTINGS = MeasureSettings(min_samples=5, max_samples=200, sample_s=2.0, warmup_s=20.0)


class Planted:
    """A stopwatch that shows planted times, and moves time.monotonic by them."""

    clock = Clock.HOST
    own_bytes = 0

    def __init__(self, times_s: Iterable[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self._times = iter(times_s)
        self.now = 1000.0
        monkeypatch.setattr("harness.measure.timing.time.monotonic", lambda: self.now)

    def read(self, run: Callable[[], Any]) -> TimedStep:
        began_at, seconds = self.now, next(self._times)
        self.now += seconds
        return TimedStep(began_at, seconds, seconds, run())


def jitter(seconds: float) -> Iterator[float]:
    """Forever about so many seconds, within a thousandth."""
    while True:
        for part in (0.0, 0.7, -0.4, 0.2, -0.8, 0.5, -0.2):
            yield seconds * (1 + part / 1000)


def measure(
    monkeypatch: pytest.MonkeyPatch,
    times_s: Iterable[float],
    *,
    settings: MeasureSettings = SETTINGS,
    **rest: Any,
) -> Timing:
    return take(lambda: "out", settings, Planted(times_s, monkeypatch), **rest)


def test_samples_begin_after_the_warm_up_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = measure(monkeypatch, chain([9.0, 3.0, 1.0], jitter(0.1)))

    assert taken.steady
    assert taken.warmup_s[:3] == (9.0, 3.0, 1.0)
    assert max(taken.samples_s) < 0.101
    assert taken.samples_s == taken.host_samples_s
    assert sum(taken.samples_s) >= 2.0
    assert taken.output == "out"


def test_the_first_reading_is_never_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure(monkeypatch, jitter(0.1)).warmup_s != ()


def test_fast_runs_stop_at_max_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(measure(monkeypatch, jitter(1e-4)).samples_s) == 200


def test_a_late_steady_state_leaves_no_more_than_max_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    falling = (0.01 * (2 - i / 300) for i in range(300))

    taken = measure(monkeypatch, chain(falling, jitter(0.01)))

    assert taken.steady
    assert len(taken.samples_s) == 200
    assert max(taken.samples_s) < 0.0101


def test_slow_runs_stop_at_min_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds a step: the warm-up's budget is spent after two, and steady all the same."""
    taken = measure(monkeypatch, chain([30.0], jitter(10.0)))

    assert taken.steady
    assert 5 <= len(taken.samples_s) <= 7
    assert taken.warmup_s[0] == 30.0


def test_what_never_settles_is_sampled_after_the_warm_up_and_marked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drifting = (0.1 * 1.02**i for i in range(1000))

    taken = measure(monkeypatch, drifting)

    assert not taken.steady
    assert sum(taken.warmup_s) >= 20.0
    assert len(taken.samples_s) >= 5
    assert taken.samples_s[0] > taken.warmup_s[-1]


def test_no_run_is_begun_that_would_end_past_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = measure(monkeypatch, chain([20.0], jitter(12.0)), deadline=1060.0)

    assert taken.cut
    assert not taken.steady
    assert taken.warmup_s == (20.0,)
    assert len(taken.samples_s) == 3


def test_a_deadline_does_not_cut_before_there_are_two_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = measure(monkeypatch, repeat(12.0), deadline=1001.0)

    assert (taken.cut, len(taken.samples_s)) == (True, 2)


def test_sampling_is_announced_where_the_first_sample_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    announced: list[float] = []

    taken = measure(monkeypatch, chain([9.0, 3.0], jitter(0.1)), sampling=announced.append)

    assert announced[-1] == pytest.approx(1000.0 + math.fsum(taken.warmup_s))


def test_every_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[float] = []

    taken = measure(monkeypatch, jitter(0.1), progress=reported.append)

    assert tuple(reported) == taken.warmup_s + taken.samples_s


def test_only_one_output_is_alive_at_a_time() -> None:
    """Two would double the peak memory of a workload whose output is large."""
    alive: set[int] = set()

    class Output:
        def __init__(self) -> None:
            assert not alive, "the previous output is still held"
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    take(Output, replace(SETTINGS, sample_s=0.0), HostStopwatch())


def test_the_garbage_collector_rests_during_a_run_and_is_put_back() -> None:
    was_on: list[bool] = []

    take(lambda: was_on.append(gc.isenabled()), replace(SETTINGS, sample_s=0.0), HostStopwatch())

    assert not any(was_on)
    assert gc.isenabled()


def test_garbage_does_not_pile_up_between_runs() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    most = 0

    def run() -> None:
        nonlocal most
        Node()
        most = max(most, Node.alive)

    take(run, replace(SETTINGS, sample_s=0.0), HostStopwatch())

    assert most <= 2


def test_what_the_first_run_leaves_behind_is_not_walked_before_each_of_the_others() -> None:
    left: list[list[int]] = []
    walked: list[int] = []

    def run() -> None:
        if not left:  # as a compiler does
            left.extend([] for _ in range(20_000))
        else:
            walked.append(len(gc.get_objects()))

    take(run, replace(SETTINGS, sample_s=0.0), HostStopwatch())

    assert max(walked) < len(left)


def test_the_host_stopwatch_times_the_run_and_only_that() -> None:
    reading = HostStopwatch().read(lambda: time.sleep(0.02))

    assert 0.02 <= reading.time_s == reading.host_s


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("flush_l2", [False, True])
def test_cuda_events_and_the_host_agree_on_a_long_kernel(flush_l2: bool) -> None:
    x = torch.randn(8192, 8192, device="cuda")
    stopwatch = timing.CudaStopwatch(flush_l2=flush_l2)
    stopwatch.read(lambda: x @ x)

    reading = stopwatch.read(lambda: x @ x)

    assert 0 < reading.time_s <= reading.host_s
    assert reading.host_s < 1.2 * reading.time_s + 1e-3


@pytest.mark.gpu
@gpu
def test_the_flush_of_the_cache_is_in_neither_reading() -> None:
    """Writing twice the L2 takes over 20 us on an A100 or H100; an empty run takes under 10."""
    stopwatch = timing.CudaStopwatch(flush_l2=True)

    readings = [stopwatch.read(lambda: None) for _ in range(21)]

    assert sorted(r.time_s for r in readings)[10] < 15e-6
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    assert stopwatch.own_bytes == 2 * l2_bytes > 0
