"""Does the instrument read right? Judged from what it read of things whose size was known.

Two lengths each, so that what a reading adds of its own drops out: the slope between them is the
scale of the clock. What could not be read is neither proved nor refuted, and is said to be so.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from harness.records import Phase, ProofCheck, SelfTestReadings, Telemetry

SCALE = 0.02
"""How far a clock's scale may be off."""
ADDED_S = 1e-3
"""The most a reading may add of its own."""
SM_CLOCK = 0.05
"""How far the cycles a kernel spun, over the time that was read, may be from NVML's SM clock."""
CPU_SHARE = 0.15
"""How far, in cores, the sampler may be from what the worker's own account says it used."""
LEAST_CPU = 0.25
"""A burn that was given fewer cores is too little to see."""
RISE = 0.3
"""The least by which one second of burning must raise the GPU's utilisation."""
GPU_BURN = 0.8
"""The least GPU utilisation that one second of back-to-back kernels must show."""
LAG_S = 0.5
"""NVML's utilisation is of a window that has passed: so long after a beginning it speaks of it."""
SLOWER_WHEN_FLUSHED = 1.05
"""A copy that must come from memory takes at least so many times one that is in the cache."""


def judge(
    readings: SelfTestReadings, phases: Sequence[Phase], telemetry: Telemetry, *, cuda: bool
) -> tuple[ProofCheck, ...]:
    """Every question with its answer.

    Args:
        readings: From the worker.
        phases: Of the worker: `rest`, `burn` and `spin` among them.
        telemetry: Read by the parent meanwhile.
        cuda: Whether the run measures on a GPU.
    """
    checks = [_host_clock(readings)]
    if cuda:
        checks += [*_spin(readings, phases, telemetry), _gpu_sampler(phases, telemetry)]
    else:
        checks.append(_cpu_sampler(readings, phases, telemetry))
    if readings.resident_s is not None and readings.flushed_s is not None:
        checks.append(_flush(readings.resident_s, readings.flushed_s))
    return tuple(checks)


def _host_clock(r: SelfTestReadings) -> ProofCheck:
    scale = _slope(r.waits_s, r.host_s)
    added_s = r.host_s[0] - r.waits_s[0]
    return ProofCheck(
        name="host_clock",
        holds=abs(scale - 1) <= SCALE and -ADDED_S < added_s < ADDED_S,
        fact=f"busy waits of {r.waits_s[0] * 1e3:.3g} and {r.waits_s[1] * 1e3:.3g} ms were read as "
        f"{r.host_s[0] * 1e3:.4g} and {r.host_s[1] * 1e3:.4g} ms",
    )


def _spin(
    r: SelfTestReadings, phases: Sequence[Phase], telemetry: Telemetry
) -> Iterator[ProofCheck]:
    if r.spin_cycles is None or r.spin_event_s is None or r.spin_host_s is None:
        yield ProofCheck(name="cuda_events", holds=False, fact="the worker spun no kernel")
        return
    clocks = _slope(r.spin_host_s, r.spin_event_s)
    yield ProofCheck(
        name="cuda_events",
        holds=abs(clocks - 1) <= SCALE and r.spin_event_s[0] <= r.spin_host_s[0] + ADDED_S,
        fact=f"of a spinning kernel {r.spin_event_s[0] * 1e3:.4g} and "
        f"{r.spin_event_s[1] * 1e3:.4g} ms by CUDA events, {r.spin_host_s[0] * 1e3:.4g} and "
        f"{r.spin_host_s[1] * 1e3:.4g} ms by the host's clock",
    )
    lengths = (float(r.spin_cycles[0]), float(r.spin_cycles[1]))
    per_cycle_s = _slope(lengths, r.spin_event_s)
    implied = 1 / per_cycle_s if per_cycle_s > 0 else float("inf")
    seen = _within(telemetry, "gpu_sm_clock_hz", phases, "spin")
    if not seen:
        yield _unread("spin_kernel", telemetry, "gpu_sm_clock_hz")
        return
    # Just out of the burn, whose power is capped, the clock climbs while it is read.
    said = min(seen, key=lambda hz: abs(hz - implied))
    yield ProofCheck(
        name="spin_kernel",
        holds=abs(implied / said - 1) <= SM_CLOCK,
        fact=f"{r.spin_cycles[1] - r.spin_cycles[0]:,} cycles more took "
        f"{(r.spin_event_s[1] - r.spin_event_s[0]) * 1e3:.4g} ms: {implied / 1e6:,.0f} MHz, where "
        f"NVML read {said / 1e6:,.0f} MHz",
    )


def _gpu_sampler(phases: Sequence[Phase], telemetry: Telemetry) -> ProofCheck:
    rest = _within(telemetry, "gpu_utilisation", phases, "rest", after_s=LAG_S)
    burn = _within(telemetry, "gpu_utilisation", phases, "burn", after_s=LAG_S)
    if not rest or not burn:
        return _unread("gpu_sampler", telemetry, "gpu_utilisation")
    before, during = float(np.min(rest)), float(np.mean(burn))
    return ProofCheck(
        name="gpu_sampler",
        holds=during >= GPU_BURN and during - before >= RISE,
        fact=f"GPU utilisation {before:.0%} at rest, {during:.0%} in a burn of one second",
    )


def _cpu_sampler(r: SelfTestReadings, phases: Sequence[Phase], telemetry: Telemetry) -> ProofCheck:
    span = next((p.end_s - p.start_s for p in phases if p.name == "burn"), 0.0)
    rest = _spanning(telemetry, "cpu_utilisation", phases, "rest")
    burn = _spanning(telemetry, "cpu_utilisation", phases, "burn")
    if not rest or not burn or span <= 0:
        return _unread("cpu_sampler", telemetry, "cpu_utilisation")
    before, during, used = _mean(rest), _mean(burn), r.burn_cpu_s / span
    fact = (
        f"{before:.2f} cores at rest, {during:.2f} in a burn of one second, which by its own "
        f"account had {used:.2f}"
    )
    if used < LEAST_CPU:
        return ProofCheck(name="cpu_sampler", holds=None, fact=f"{fact}: the machine is crowded")
    return ProofCheck(
        name="cpu_sampler",
        holds=abs(during - used) <= CPU_SHARE and before <= during / 2,
        fact=fact,
    )


def _flush(resident_s: float, flushed_s: float) -> ProofCheck:
    return ProofCheck(
        name="l2_flush",
        holds=flushed_s >= SLOWER_WHEN_FLUSHED * resident_s,
        fact=f"a copy within the L2 cache took {resident_s * 1e6:.3g} µs, and "
        f"{flushed_s * 1e6:.3g} µs after the flush",
    )


def _slope(known: tuple[float, float], read: tuple[float, float]) -> float:
    return (read[1] - read[0]) / (known[1] - known[0])


def _mean(readings: Sequence[tuple[float, float]]) -> float:
    """Of readings that each speak of the time since the one before, which may have been late."""
    values, spans = zip(*readings, strict=True)
    return float(np.average(values, weights=spans))


def _spanning(
    telemetry: Telemetry, channel: str, phases: Sequence[Phase], name: str
) -> list[tuple[float, float]]:
    """(value, seconds since the reading before) of the readings that speak of a phase alone."""
    phase = next((p for p in phases if p.name == name), None)
    if phase is None:
        return []
    values = telemetry.channels.get(channel, ())
    return [
        (value, t - before)
        for before, t, value in zip(telemetry.t_s, telemetry.t_s[1:], values[1:], strict=False)
        if value is not None and phase.start_s <= before and t <= phase.end_s
    ]


def _within(
    telemetry: Telemetry, channel: str, phases: Sequence[Phase], name: str, *, after_s: float = 0.0
) -> list[float]:
    """Readings of a channel in a phase, from so long after its beginning."""
    phase = next((p for p in phases if p.name == name), None)
    if phase is None:
        return []
    return [
        value
        for t, value in zip(telemetry.t_s, telemetry.channels.get(channel, ()), strict=False)
        if value is not None and phase.start_s + after_s <= t <= phase.end_s
    ]


def _unread(name: str, telemetry: Telemetry, channel: str) -> ProofCheck:
    why = telemetry.unavailable.get(channel, "no reading fell into its phase")
    return ProofCheck(name=name, holds=None, fact=f"{channel} could not be read: {why}")
