"""Parent side of the self-test: do clocks and probes read known quantities correctly?

A worker runs it while the parent reads the probes. Each clock reads two lengths, so that its
constant overhead cancels: the slope between them is its scale. A check that could not be made
neither passes nor fails, and says why.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from harness import units
from harness.analysis.recorded import between
from harness.machine.probes import Probe
from harness.messages import PhaseBegan, SelfTested
from harness.processes import last_line
from harness.records import Gpu, SelfTest, SelfTestCheck, SelfTestReadings, Telemetry
from harness.runner.launcher import Launcher
from harness.runner.telemetry import Recorder

Spans = Mapping[str, tuple[float, float]]
"""Phase of the worker -> its begin and end, in seconds since the launch."""

LIMIT_S = 60.0
"""Longest time for the self-test; it takes under 4 s."""
SCALE = 0.02
"""Largest error of a clock's scale."""
ADDED_S = 1e-3
"""Largest overhead of a reading."""
SM_CLOCK = 0.05
"""Largest difference between a kernel's cycles per measured time and NVML's SM clock."""
CPU_SHARE = 0.15
"""Largest difference, in cores, between the sampler and the CPU time of the worker itself."""
LEAST_CPU = 0.25
"""With fewer cores the load is too small to see."""
RISE = 0.3
"""Smallest rise of GPU utilisation in one second of load."""
SETTLED_S = 0.5
"""NVML's utilisation, the mean of a past window, is that of a phase alone from this time on."""
GPU_BURN = 0.8
"""Smallest GPU utilisation in one second of back-to-back kernels."""


def run_self_test(
    launcher: Launcher, probes: Sequence[Probe], gpu: Gpu | None, *, skip: str = ""
) -> SelfTest:
    """Run the self-test in a worker, with the probes, unless a reason says to `skip` it; nothing
    else may run at the same time."""
    began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    device = gpu.uuid if gpu else "cpu"
    if skip:
        return SelfTest(at=at, device=device, skipped=skip)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        worker = launcher.self_test(log)
        recorder = Recorder(probes, worker)
        received = worker.converse(LIMIT_S, recorder.read_if_due)
        said = last_line(log)
    wall_s = time.monotonic() - began
    readings = next((m.readings for m in received if isinstance(m, SelfTested)), None)
    if readings is None:
        silent = SelfTestCheck(name="worker", holds=False, fact=f"it did not answer: {said}")
        return SelfTest(at=at, device=device, checks=(silent,), wall_s=wall_s)
    begins = [m for m in received if isinstance(m, PhaseBegan)]
    since = worker.launched_at
    spans = {one.name: (one.at - since, two.at - since) for one, two in pairwise(begins)}
    checks = judge(readings, spans, recorder.telemetry(), cuda=gpu is not None)
    return SelfTest(at=at, device=device, checks=checks, peaks=readings.peaks, wall_s=wall_s)


# --- the checks --------------------------------------------------------------------------


def judge(
    readings: SelfTestReadings, spans: Spans, telemetry: Telemetry, *, cuda: bool
) -> tuple[SelfTestCheck, ...]:
    """All checks with their results, from a worker with the phases `rest`, `burn` and `spin`;
    `cuda` if the run measures on a GPU."""
    checks = [_host_clock(readings)]
    if not cuda:
        checks.append(_cpu_sampler(readings, spans, telemetry))
    elif readings.spin_cycles is None:
        fact = "the worker ran no spinning kernel"
        checks.append(SelfTestCheck(name="cuda_events", holds=False, fact=fact))
    else:
        checks += [_cuda_events(readings), _spin_kernel(readings, spans, telemetry)]
    if cuda:
        checks.append(_gpu_sampler(spans, telemetry))
    return tuple(checks)


def _host_clock(r: SelfTestReadings) -> SelfTestCheck:
    added_s = r.host_s[0] - r.waits_s[0]
    return SelfTestCheck(
        name="host_clock",
        holds=abs(_slope(r.waits_s, r.host_s) - 1) <= SCALE and abs(added_s) < ADDED_S,
        fact=f"busy waits of {_ms(r.waits_s)} were measured as {_ms(r.host_s)}",
    )


def _cuda_events(r: SelfTestReadings) -> SelfTestCheck:
    assert r.spin_event_s is not None
    assert r.spin_host_s is not None
    clocks = _slope(r.spin_host_s, r.spin_event_s)
    return SelfTestCheck(
        name="cuda_events",
        holds=abs(clocks - 1) <= SCALE and r.spin_event_s[0] <= r.spin_host_s[0] + ADDED_S,
        fact=f"a spinning kernel took {_ms(r.spin_event_s)} by CUDA events, "
        f"{_ms(r.spin_host_s)} by the host's clock",
    )


def _spin_kernel(r: SelfTestReadings, spans: Spans, telemetry: Telemetry) -> SelfTestCheck:
    assert r.spin_event_s is not None
    assert r.spin_cycles is not None
    cycles, took_s = r.spin_cycles[1] - r.spin_cycles[0], r.spin_event_s[1] - r.spin_event_s[0]
    implied = cycles / took_s if took_s > 0 else float("inf")
    seen = between(telemetry, "gpu_sm_clock_hz", *spans["spin"])
    if not seen:
        return _unread("spin_kernel", telemetry, "gpu_sm_clock_hz")
    # Right after the load, whose power is capped, the clock rises while it is read.
    nvml = min(seen, key=lambda hz: abs(hz - implied))
    return SelfTestCheck(
        name="spin_kernel",
        holds=abs(implied / nvml - 1) <= SM_CLOCK,
        fact=f"{cycles:,} more cycles took {took_s * 1e3:.4g} ms: {implied / 1e6:,.0f} MHz; "
        f"NVML read {nvml / 1e6:,.0f} MHz",
    )


def _gpu_sampler(spans: Spans, telemetry: Telemetry) -> SelfTestCheck:
    rest, burn = (
        between(telemetry, "gpu_utilisation", start_s + SETTLED_S, end_s)
        for start_s, end_s in (spans["rest"], spans["burn"])
    )
    if not rest or not burn:
        return _unread("gpu_sampler", telemetry, "gpu_utilisation")
    before, during = min(rest), fmean(burn)
    return SelfTestCheck(
        name="gpu_sampler",
        holds=during >= GPU_BURN and during - before >= RISE,
        fact=f"GPU utilisation {units.percent(before)} at rest, "
        f"{units.percent(during)} during one second of load",
    )


def _cpu_sampler(r: SelfTestReadings, spans: Spans, telemetry: Telemetry) -> SelfTestCheck:
    before = _mean_within(telemetry, "cpu_utilisation", spans["rest"])
    during = _mean_within(telemetry, "cpu_utilisation", spans["burn"])
    if before is None or during is None:
        return _unread("cpu_sampler", telemetry, "cpu_utilisation")
    used = r.burn_cpu_s / (spans["burn"][1] - spans["burn"][0])
    fact = (
        f"{before:.2f} cores at rest, {during:.2f} during one second of load, "
        f"{used:.2f} by the worker's own CPU time"
    )
    if used < LEAST_CPU:
        return SelfTestCheck(name="cpu_sampler", holds=None, fact=f"{fact}: the CPU is too busy")
    holds = abs(during - used) <= CPU_SHARE and before <= during / 2
    return SelfTestCheck(name="cpu_sampler", holds=holds, fact=fact)


def _slope(known: tuple[float, float], read: tuple[float, float]) -> float:
    return (read[1] - read[0]) / (known[1] - known[0])


def _ms(seconds: tuple[float, float]) -> str:
    return f"{seconds[0] * 1e3:.4g} and {seconds[1] * 1e3:.4g} ms"


def _mean_within(telemetry: Telemetry, channel: str, span: tuple[float, float]) -> float | None:
    """Mean over the time of the readings that cover one phase only."""
    values, times = telemetry.channels.get(channel, ()), telemetry.t_s
    inside = [
        (value, t - before)
        for before, t, value in zip(times, times[1:], values[1:], strict=False)
        if value is not None and span[0] <= before and t <= span[1]
    ]
    total_s = sum(s for _, s in inside)
    return sum(value * s for value, s in inside) / total_s if inside else None


def _unread(name: str, telemetry: Telemetry, channel: str) -> SelfTestCheck:
    why = telemetry.unavailable.get(channel, "no reading during its phase")
    return SelfTestCheck(name=name, holds=None, fact=f"{channel} could not be read: {why}")
