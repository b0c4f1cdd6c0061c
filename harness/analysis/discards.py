"""Samples to discard, because the telemetry shows that the machine was disturbed.

A sample is discarded if it overlaps a time in which the GPU was throttled, another process used it,
or its clock had dropped. A bad reading covers the time from the reading before it to the one after.
Failed and missing readings discard nothing; the telemetry lists the channels that are missing.

The power cap is not a reason: a card under load stays at its limit. Its clock varies, which
step_cycles shows.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from harness.analysis.statistics import THROTTLE, between
from harness.records import Measurement, Phase, Telemetry

CLOCK_DROP = 0.85
"""An SM clock below this share of the process's median while sampling has dropped."""
FOREIGN_REACH_S = 1.0
"""Other processes are counted once a second, so one may have started this long before."""

_THROTTLED = sum(THROTTLE)


def unfit(
    measurement: Measurement, telemetry: Telemetry | None, phases: Sequence[Phase]
) -> Mapping[str, tuple[int, ...]]:
    """Reason -> indices of the samples to discard; each sample is under its first reason. The clock
    is compared with its median while the process sampled."""
    if telemetry is None or not measurement.samples_at_s:
        return {}
    begins = np.asarray(measurement.samples_at_s)
    ends = begins + np.asarray(measurement.host_samples_s)
    slow_hz = CLOCK_DROP * (median_clock_hz(telemetry, phases) or 0.0)
    reasons: tuple[tuple[str, str, float, Callable[[float], bool]], ...] = (
        ("throttled", "gpu_throttle_reasons", 0.0, lambda mask: bool(int(mask) & _THROTTLED)),
        ("shared", "gpu_foreign_processes", FOREIGN_REACH_S, lambda count: count > 0),
        ("clock_dropped", "gpu_sm_clock_hz", 0.0, lambda hertz: hertz < slow_hz),
    )
    found: dict[str, tuple[int, ...]] = {}
    taken = np.zeros(len(begins), dtype=bool)
    for reason, channel, reach_s, is_bad in reasons:
        hit = np.zeros(len(begins), dtype=bool)
        for start, end in _windows(telemetry, channel, reach_s, is_bad):
            hit |= (begins < end) & (ends > start)
        hit &= ~taken
        taken |= hit
        if hit.any():
            found[reason] = tuple(int(i) for i in np.flatnonzero(hit))
    return found


def median_clock_hz(telemetry: Telemetry | None, phases: Sequence[Phase]) -> float | None:
    """Median SM clock while a process sampled; None if it was not read."""
    sampling = next((p for p in phases if p.name == "sampling"), None)
    if telemetry is None or sampling is None:
        return None
    inside = between(telemetry, "gpu_sm_clock_hz", sampling.start_s, sampling.end_s)
    return float(np.median(inside)) if inside else None


def _windows(
    telemetry: Telemetry, channel: str, reach_s: float, is_bad: Callable[[float], bool]
) -> list[tuple[float, float]]:
    """The times that the bad readings of a channel cover."""
    t_s, last = telemetry.t_s, len(telemetry.t_s) - 1
    return [
        (
            min(t_s[i - 1] if i else float("-inf"), t - reach_s),
            t_s[i + 1] if i < last else float("inf"),
        )
        for i, (t, value) in enumerate(zip(t_s, telemetry.channels.get(channel, ()), strict=False))
        if value is not None and is_bad(value)
    ]
