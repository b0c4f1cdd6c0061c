"""What the processes of a case recorded beside their times: telemetry, and counters.

Telemetry says which samples another process or a throttled GPU spoiled. A counter is a number, the
range over its steps, or no number.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from statistics import median

import numpy as np

from harness.records import (
    COUNTERS,
    Case,
    Counters,
    Estimate,
    Facts,
    Measurement,
    Outcome,
    Phase,
    Telemetry,
    of_rank,
)

EXACT_STEPS = 2
"""Steps that each process must count; all must agree."""
MAX_LISTED = 8
"""Values of a counter that varies, and names of what varies, in a note."""
MIN_READINGS = 5
"""Fewer telemetry readings do not make a reliable mean utilisation."""
ENERGY_S = 2.0
"""Shortest time over which NVML's counter of energy, with steps of up to 0.1 s, says a power."""
TIMED = ("warmup", "sampling")
"""Phases in which the worker only runs the workload; utilisation is averaged over them."""
LAG_S = {"gpu_utilisation": 0.4}
"""Time after which a channel no longer describes what came before a phase. NVML's utilisation is
the mean of a past window: 0.2 s on an H200, renewed every 0.2 s."""
COLD = 2.0
"""A warm-up step that takes longer than this many median samples compiled, tuned or allocated.
Until the last such step ends, the workload does not yet run as in production."""

# NVML clocksEventReasons, nvml.h. Idle (0x1), application clocks (0x2) and display clocks
# (0x100) are settings, not symptoms, and are left out.
POWER_CAP = {0x4: "power cap"}
THROTTLE = {
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
LIMITED = 0.5
"""Share of the readings from which a limit of the clock counts."""
FULL_CLOCK = 0.95
"""Share of the GPU's largest clock below which a limit costs something."""
_LIMITS = {"thermal": 0x8 | 0x20 | 0x40, "power": 0x4 | 0x80}
"""NVML's reasons, as THROTTLE and POWER_CAP name them."""
CLOCK_DROP = 0.85
"""An SM clock below this share of the process's median while sampling has dropped."""
FOREIGN_REACH_S = 1.0
"""Other processes are counted once a second, so one may have started this long before."""


def readings(measurement: Measurement, channel: str, phases: Collection[str]) -> list[float]:
    """Telemetry of a channel from the first of these phases to the last, without failed readings,
    readings during cold steps, and readings that still describe what came before.

    Empty if the measurement has no telemetry, channel or phase of this name, or if a channel that
    lags has fewer than MIN_READINGS left: these may all come from one window.
    """
    if measurement.telemetry is None or channel not in measurement.telemetry.channels:
        return []
    spans = [
        (p.start_s + (_cold_s(measurement) if p.name == "warmup" else 0.0), p.end_s)
        for p in measurement.phases
        if p.name in phases
    ]
    if not spans:
        return []
    start = min(s for s, _ in spans) + LAG_S.get(channel, 0.0)
    end = max(e for _, e in spans)
    found = between(measurement.telemetry, channel, start, end)
    return [] if channel in LAG_S and len(found) < MIN_READINGS else found


def of_ranks(channel: str, processes: Sequence[Measurement]) -> list[str]:
    """The names of a channel for the GPU of each rank of a case; one if it has no ranks."""
    return [
        of_rank(channel, r) for r in range(max((len(m.ranks) for m in processes), default=0) or 1)
    ]


def between(telemetry: Telemetry, channel: str, start_s: float, end_s: float) -> list[float]:
    """The readings of a channel in a time, without failed ones."""
    values = telemetry.channels.get(channel, ())
    return [
        value
        for t, value in zip(telemetry.t_s, values, strict=False)
        if value is not None and start_s <= t <= end_s
    ]


def _cold_s(measurement: Measurement) -> float:
    """Time from the start of the warm-up to the end of its last cold step."""
    if not measurement.samples_s:
        return 0.0
    limit = COLD * float(np.median(measurement.samples_s))
    cold = [i for i, s in enumerate(measurement.warmup_s) if s > limit]
    return sum(measurement.warmup_s[: cold[-1] + 1]) if cold else 0.0


# --- samples to discard -----------------------------------------------------------------
# A sample is discarded if it overlaps a time in which the GPU was throttled, another process used
# it, or its clock had dropped. A bad reading covers the time from the reading before it to the one
# after. Failed and missing readings discard nothing; the telemetry lists the missing channels. The
# power cap is not a reason: a card under load stays at its limit. Its clock varies, which
# step_cycles shows.


def unfit(
    measurement: Measurement, telemetry: Telemetry | None, phases: Sequence[Phase]
) -> Mapping[str, tuple[int, ...]]:
    """Reason -> indices of the samples to discard; each sample is under its first reason. The clock
    of each GPU is compared with its median while the process sampled."""
    if telemetry is None or not measurement.samples_at_s:
        return {}
    begins = np.asarray(measurement.samples_at_s)
    ends = begins + np.asarray(measurement.host_samples_s)
    reasons: tuple[tuple[str, str, float, Callable[[float, float], bool]], ...] = (
        ("throttled", "gpu_throttle_reasons", 0.0, lambda mask, _: int(mask) & sum(THROTTLE) > 0),
        ("shared", "gpu_foreign_processes", FOREIGN_REACH_S, lambda count, _: count > 0),
        ("clock_dropped", "gpu_sm_clock_hz", 0.0, lambda hertz, slow_hz: hertz < slow_hz),
    )
    found: dict[str, tuple[int, ...]] = {}
    taken = np.zeros(len(begins), dtype=bool)
    for reason, channel, reach_s, is_bad in reasons:
        hit = np.zeros(len(begins), dtype=bool)
        for name in telemetry.channels:
            if re.sub(r"^gpu\d+_", "gpu_", name) != channel:
                continue
            slow_hz = CLOCK_DROP * (median_clock_hz(telemetry, phases, name) or 0.0)
            for start, end in _windows(telemetry, name, reach_s, is_bad, slow_hz):
                hit |= (begins < end) & (ends > start)
        hit &= ~taken
        taken |= hit
        if hit.any():
            found[reason] = tuple(int(i) for i in np.flatnonzero(hit))
    return found


def median_clock_hz(
    telemetry: Telemetry | None, phases: Sequence[Phase], channel: str = "gpu_sm_clock_hz"
) -> float | None:
    """Median SM clock, or other channel, while a process sampled; None if it was not read."""
    sampling = next((p for p in phases if p.name == "sampling"), None)
    if telemetry is None or sampling is None:
        return None
    inside = between(telemetry, channel, sampling.start_s, sampling.end_s)
    return float(np.median(inside)) if inside else None


def _windows(
    telemetry: Telemetry,
    channel: str,
    reach_s: float,
    is_bad: Callable[[float, float], bool],
    slow_hz: float,
) -> list[tuple[float, float]]:
    """The times that the bad readings of a channel cover."""
    t_s, last = telemetry.t_s, len(telemetry.t_s) - 1
    return [
        (
            min(t_s[i - 1] if i else float("-inf"), t - reach_s),
            t_s[i + 1] if i < last else float("inf"),
        )
        for i, (t, value) in enumerate(zip(t_s, telemetry.channels.get(channel, ()), strict=False))
        if value is not None and is_bad(value, slow_hz)
    ]


# --- clocks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLimit:
    """A GPU that cannot keep its clock while a case is sampled."""

    by: str
    """power or thermal."""
    limited: int
    readings: int
    clock_hz: float
    """Median while sampling."""
    max_hz: float

    @property
    def lost(self) -> float:
        """Share of the step that full clock would save, at most."""
        return 1 - self.clock_hz / self.max_hz

    @property
    def facts(self) -> Facts:
        """The numbers by name, clocks in MHz."""
        clocks = {"clock": self.clock_hz / 1e6, "full": self.max_hz / 1e6}
        return {**clocks, "limiter": self.by, "limited": self.limited, "readings": self.readings}


def clock_limit(ok: Sequence[Measurement], max_hz: float | None) -> ClockLimit | None:
    """The limit in force in half of the readings of a GPU while sampling, if it costs clock; of
    several such GPUs, that of the slowest."""
    names = (of_ranks(name, ok) for name in ("gpu_throttle_reasons", "gpu_sm_clock_hz"))
    limits = (_limit_of(ok, reasons, clock, max_hz) for reasons, clock in zip(*names, strict=True))
    return min(filter(None, limits), key=lambda limit: limit.clock_hz, default=None)


def _limit_of(
    ok: Sequence[Measurement], reasons: str, clock: str, max_hz: float | None
) -> ClockLimit | None:
    masks = [int(x) for m in ok for x in readings(m, reasons, ("sampling",))]
    clocks = [hz for m in ok if (hz := median_clock_hz(m.telemetry, m.phases, clock))]
    if not masks or not clocks or not max_hz or median(clocks) >= FULL_CLOCK * max_hz:
        return None
    limited = {by: sum(bool(mask & bits) for mask in masks) for by, bits in _LIMITS.items()}
    by = max(limited, key=lambda name: limited[name])
    if limited[by] < LIMITED * len(masks):
        return None
    return ClockLimit(
        by=by, limited=limited[by], readings=len(masks), clock_hz=median(clocks), max_hz=max_hz
    )


def power_w(m: Measurement) -> float | None:
    """Mean power of the GPU while sampling, by NVML's counter of energy; None for less than
    ENERGY_S, or if several GPUs share the step."""
    counter, sampling = (m.telemetry, next((p for p in m.phases if p.name == "sampling"), None))
    if not counter or not sampling or m.ranks:
        return None
    read = zip(counter.t_s, counter.channels.get("gpu_energy_j", ()), strict=False)
    within = [(t, e) for t, e in read if e is not None and sampling.start_s <= t <= sampling.end_s]
    if not within or within[-1][0] - within[0][0] < ENERGY_S:
        return None
    (began_s, begin), (ended_s, end) = within[0], within[-1]
    rises = all(a <= b for (_, a), (_, b) in pairwise(within))  # else the counter began anew
    return (end - begin) / (ended_s - began_s) if rises and end > begin else None


# --- counters ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCounters:
    """The exact counters of a case, and why the others are not exact."""

    counts: Mapping[str, int]
    absent: Mapping[str, str]
    """Counter -> why it has no value."""
    disagreeing: tuple[str, ...]
    """Counters with different values in two steps or two processes."""
    processes: int
    """Number of processes that counted."""


def exact_counters(measurements: Sequence[Measurement]) -> ExactCounters:
    """The exact counts, for reports, gates and comparisons.

    A counter is exact if every process that counted has counted two steps, and all steps of all
    processes agree. One step in each of two processes is not enough. A process that did not end ok,
    or whose counters are all unknown, did not count.
    """
    ok = [m.counters for m in measurements if m.outcome is Outcome.OK and m.counters]
    counted = [c for c in ok if any(getattr(c, name) is not None for name in COUNTERS)]
    absent = {name: why for name in COUNTERS if (why := _why_absent(counted or ok, name))}
    return ExactCounters(
        counts={name: getattr(counted[0], name) for name in COUNTERS if name not in absent},
        absent=absent,
        disagreeing=tuple(
            name
            for name in COUNTERS
            if any(name in c.series for c in counted) or len(_values(counted, name)) > 1
        ),
        processes=len(counted),
    )


def by_step(measurements: Sequence[Measurement], name: str) -> Sequence[tuple[int, ...]]:
    """A counter of every step of each process that has it."""
    ok = [m.counters for m in measurements if m.outcome is Outcome.OK and m.counters]
    counted = [c for c in ok if getattr(c, name) is not None]
    return [c.series.get(name) or (getattr(c, name),) * c.steps for c in counted]


def _why_absent(counted: Sequence[Counters], name: str) -> str:
    for c in counted:
        if name in c.unknown:
            return c.unknown[name]
        if getattr(c, name) is None:
            return "not counted"
        if name in c.series:
            return "two steps counted differently"
        if c.steps < EXACT_STEPS:
            return f"only {c.steps} step was counted; {EXACT_STEPS} are needed"
    if len(_values(counted, name)) > 1:
        return "processes counted differently"
    return "" if counted else "not counted"


def _values(counted: Sequence[Counters], name: str) -> list[int]:
    return sorted({value for c in counted if (value := getattr(c, name)) is not None})


def estimates(ok: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """The counters as metrics. A count has no noise, so its interval has no width; that of one that
    varies from step to step is its range."""
    exact = exact_counters(ok)
    varying = {name for m in ok if m.counters for name in m.counters.series}
    steps = {n: [*chain(*by_step(ok, n))] for n in COUNTERS if n in exact.counts or n in varying}
    return {
        name: Estimate(
            value=float(median(values)),
            low=float(min(values)),
            high=float(max(values)),
            n=exact.processes,
            samples=len(values),
        )
        for name, values in steps.items()
        if values
    }


def largest_error(m: Measurement) -> tuple[float, str]:
    """Of the outputs of a process that have a bound: error over bound, and the output's name."""
    tensors = m.accuracy.tensors if m.accuracy else ()
    return max(((t.error / t.bound, t.name) for t in tensors if t.bound > 0), default=(0.0, ""))


def error_of_bound(ok: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """The largest error of each process as a share of its bound, if every one was compared."""
    if not ok or not all(m.accuracy and m.accuracy.tensors for m in ok):
        return {}
    shares = [largest_error(m)[0] for m in ok]
    low, high = min(shares), max(shares)
    of = Estimate(value=high, low=low, high=high, n=len(ok), samples=len(ok))
    return {"error_of_bound": of}


def disagreements(ok: Sequence[Measurement]) -> Iterator[Facts]:
    """One note for each counter whose values differ."""
    for name in exact_counters(ok).disagreeing:
        steps = by_step(ok, name)
        if any(len({*own}) > 1 for own in steps):
            every = [*chain(*steps)]
            uses = [u for m in ok if m.profile for u in (*m.profile.kernels, *m.profile.operators)]
            names = [*dict.fromkeys(u.name for u in uses if u.calls % 1)][:MAX_LISTED]
            ends = {"low": min(every), "high": max(every), "steps": len(every)}
            shown = {"by_step": every[:MAX_LISTED], "uneven": names or None}
            yield {"counter": name, **ends, **shown}
        else:
            values = _values([m.counters for m in ok if m.counters], name)
            yield {"counter": name, "least": values[0], "most": values[-1]}


def launches(m: Measurement) -> int | None:
    """Kernel launches by the host in one step; None if unknown, or if a CUDA graph replays kernels
    that the host does not launch."""
    if m.counters is None or "CUDA graph" in m.counters.hidden:
        return None
    return m.counters.kernel_launches


def unattested(case: Case, ok: Sequence[Measurement], *, gpu: bool) -> str:
    """Why it is unknown whether these processes ran the kernels and operators of the suite's rules.

    Empty if it is known, or if no rule can be checked here: without a GPU, operators can be seen,
    but kernels cannot. A violation of a rule is the outcome path_mismatch.
    """
    kernels = case.kernels if gpu else None
    for m in ok if kernels or case.operators else ():
        if m.profile is None:
            return "no profile was taken"
        if m.profile.skipped:
            return m.profile.skipped
        if kernels and m.profile.no_kernels:
            return m.profile.no_kernels
    return ""
