"""The self-test of clocks and probes: it passes here, and fails for every wrong reading."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.machine.nvml import NvmlProbe, gpus
from harness.machine.probes import CpuProbe
from harness.measure import self_test
from harness.measure.timing import HostStopwatch, TimedStep
from harness.records import SelfTest, SelfTestReadings, Telemetry
from harness.runner.launcher import Launcher
from harness.runner.self_test import judge, run_self_test

GPU = Path("/dev/nvidiactl").exists()
SPANS = {"rest": (1.0, 2.0), "burn": (2.0, 3.0), "spin": (3.0, 3.4)}
CHECKS = {"host_clock", "cuda_events", "spin_kernel", "gpu_sampler"}
CLOCK_HZ = 1.98e9
RIGHT = SelfTestReadings(
    waits_s=(0.004, 0.02),
    host_s=(0.004_01, 0.020_01),
    burn_cpu_s=0.99,
    spin_cycles=(5_000_000, 40_000_000),
    spin_event_s=(5e6 / CLOCK_HZ + 4e-6, 4e7 / CLOCK_HZ + 4e-6),
    spin_host_s=(5e6 / CLOCK_HZ + 3e-5, 4e7 / CLOCK_HZ + 3e-5),
)


def telemetry(**levels: Mapping[str, float]) -> Telemetry:
    """Channels that hold one level in each phase; a reading every 50 ms."""
    t_s = tuple(0.05 * i for i in range(80))
    return Telemetry(
        t_s=t_s,
        channels={
            channel: tuple(
                next((level[n] for n, (since, end) in SPANS.items() if since <= t <= end), 0.0)
                for t in t_s
            )
            for channel, level in levels.items()
        },
    )


ON_GPU = telemetry(
    gpu_utilisation={"rest": 0.0, "burn": 1.0, "spin": 1.0},
    gpu_sm_clock_hz={"rest": 345e6, "burn": 1.7e9, "spin": CLOCK_HZ},
)
ON_CPU = telemetry(cpu_utilisation={"rest": 0.01, "burn": 0.98, "spin": 1.0})


def answers(
    readings: SelfTestReadings, seen: Telemetry, *, cuda: bool = True
) -> dict[str, bool | None]:
    return {c.name: c.holds for c in judge(readings, SPANS, seen, cuda=cuda)}


def test_right_readings_pass_every_check() -> None:
    assert answers(RIGHT, ON_GPU) == dict.fromkeys(CHECKS, True)
    assert answers(RIGHT, ON_CPU, cuda=False) == {"host_clock": True, "cpu_sampler": True}


def used(rest: float, burn: float) -> Telemetry:
    return telemetry(gpu_utilisation={"rest": rest, "burn": burn, "spin": burn})


@pytest.mark.parametrize(
    ("check", "changes", "seen"),
    [
        ("host_clock", {"host_s": (0.009, 0.025)}, ON_GPU),  # 5 ms too long each
        ("cuda_events", {"spin_event_s": (2.4e-3, 19.2e-3)}, ON_GPU),  # 5 % off
        ("cuda_events", {"spin_host_s": (1e-5, 2e-5)}, ON_GPU),  # not synchronised
        ("cuda_events", {"spin_cycles": None}, ON_GPU),
        ("spin_kernel", {"spin_cycles": (5_000_000, 30_000_000)}, ON_GPU),
        ("gpu_sampler", {}, used(0.0, 0.1)),  # blind
        ("gpu_sampler", {}, used(0.9, 1.0)),  # busy before
        ("gpu_sampler", {}, used(0.0, 0.6)),
    ],
)
def test_wrong_readings_fail_a_check(check: str, changes: dict[str, Any], seen: Telemetry) -> None:
    assert answers(replace(RIGHT, **changes), seen)[check] is False


def test_the_cpu_probe_is_compared_with_the_worker_s_own_cpu_time() -> None:
    """On a busy machine a burn gets half a core, and then half a core is right."""
    half = telemetry(cpu_utilisation={"rest": 0.0, "burn": 0.5, "spin": 0.5})

    crowded = answers(replace(RIGHT, burn_cpu_s=0.5), half, cuda=False)
    blind = answers(RIGHT, half, cuda=False)
    starved = answers(replace(RIGHT, burn_cpu_s=0.1), half, cuda=False)

    assert [a["cpu_sampler"] for a in (crowded, blind, starved)] == [True, False, None]


def test_a_missing_channel_neither_passes_nor_fails() -> None:
    missing = Telemetry(unavailable={"gpu_utilisation": "a MIG slice"})

    found = judge(RIGHT, SPANS, missing, cuda=True)

    unknown = {c.name: c.fact for c in found if c.holds is None}
    assert unknown.keys() == {"gpu_sampler", "spin_kernel"}
    assert "a MIG slice" in unknown["gpu_sampler"]
    assert SelfTest(at="", device="", checks=found).refuted == ()


@pytest.mark.skipif(GPU, reason="the self-test of a GPU is below")
def test_the_self_test_passes_here(warm: Launcher) -> None:
    """In a worker, sampled by the real probes."""
    proof = run_self_test(warm, [CpuProbe()], None)

    holds = {c.name: c.holds for c in proof.checks}
    assert holds["host_clock"] is True, proof
    assert holds["cpu_sampler"] in (True, None), proof  # None: other tests take the cores
    assert proof.refuted == ()
    assert proof.peaks.flops_per_s["fp32"] > 1e8
    assert proof.peaks.bytes_per_s is not None
    assert proof.peaks.launch_s is proof.peaks.sync_s is None


def test_a_fast_stopwatch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits end by another clock than the stopwatch's."""
    read = HostStopwatch.read

    def fast(self: HostStopwatch, run: Any) -> TimedStep:
        return replace(true := read(self, run), time_s=1.05 * true.time_s)

    monkeypatch.setattr(HostStopwatch, "read", fast)

    short, long = map(self_test.read_wait, self_test.WAITS_S)
    pairs: dict[str, Any] = {
        "waits_s": (short.output, long.output),
        "host_s": (short.time_s, long.time_s),
    }

    assert answers(replace(RIGHT, **pairs), ON_GPU)["host_clock"] is False


@pytest.mark.parametrize(("copy_s", "sum_s", "moved"), [(1.0, 4.0, 2), (4.0, 1.0, 1)])
def test_a_peak_is_the_best_reading_and_that_of_memory_the_larger_of_copy_and_sum(
    copy_s: float, sum_s: float, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that only reads can be faster than a copy."""
    copies = [copy_s + i for i in range(self_test.BEST_OF)]
    took = iter([5.0, 3.0, 2.0, *[4.0] * 5, *copies, *[sum_s] * self_test.BEST_OF])

    def read(*_: object) -> TimedStep:
        time_s = next(took)
        return TimedStep(began_at=0.0, time_s=time_s, host_s=time_s, output=None)

    monkeypatch.setattr(HostStopwatch, "read", read)

    peaks = self_test.cpu_peaks()

    assert peaks.flops_per_s == {"fp32": self_test.CPU_SIDE**3}
    assert peaks.bytes_per_s == moved * self_test.CPU_COPY_BYTES


def test_a_card_that_comes_from_a_load_has_one_peak_for_bf16_and_fp16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its clock recovers while products are timed."""
    monkeypatch.setattr(self_test, "COOL_S", 0.0)
    hot = iter([1.2] * 8 + [1.0] * 100)

    best = self_test.best_in_turns(["bf16", "fp16"], lambda _: next(hot))

    assert best == {"bf16": 1.0, "fp16": 1.0}


def test_the_cost_of_a_call_is_the_least_mean_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch and a host sync are read so; the wait for the last one counts."""
    now, costs = [0.0], iter([9e-6] * 10 + [4e-6] * 20 + [5e-6] * 10)

    def call() -> None:
        now[0] += next(costs)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("harness.measure.self_test.time.perf_counter", lambda: now[0])

    assert self_test._least_each_s(call, 10) == pytest.approx(4e-6)


@pytest.mark.gpu
def test_the_self_test_passes_on_a_gpu() -> None:
    (gpu, *_) = gpus()
    probes = (NvmlProbe(gpu.uuid), CpuProbe())
    with Launcher() as launcher:
        launcher.describe()
        proof = run_self_test(launcher, probes, gpu)

    assert proof.refuted == (), proof
    assert {c.name for c in proof.checks} == CHECKS
    assert proof.wall_s < 5
    assert proof.peaks.flops_per_s["bf16"] > 1e14
    launch_s, sync_s = proof.peaks.launch_s or 0.0, proof.peaks.sync_s or 0.0
    assert 5e-7 < launch_s < 2e-5
    assert launch_s < sync_s < 2e-4
