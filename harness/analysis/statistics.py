"""Estimates with their uncertainty, and what weakens them.

The unit of replication is the fresh process. Samples inside one process are pseudo-replicates:
they share its memory layout, its clocks and its luck, so they make a process's median precise
and say nothing of how far the next process will lie. Each process therefore counts once.

Source: Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013, section 6:
repetition at the highest level that varies, and a t-interval over its means.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from harness.records import Estimate, Measurement, Outcome

CONFIDENCE = 0.95

LARGE_SPREAD = 0.10
"""Interquartile range over median inside one process from which a reader must know of it."""
LARGE_DISAGREEMENT = 0.10
"""Slowest process over fastest, less one, from which a reader must know of it."""
MIN_READINGS = 5
"""Telemetry readings under which a mean utilisation says little."""

TIMED = ("warmup", "sampling")
"""Phases in which the workload runs as it does in production; utilisation is taken there."""

LAG_S = {"gpu_utilisation": 0.4}
"""How long a channel still speaks of what came before a phase. NVML's utilisation is the mean of
a window that has ended: on an H200 one of 0.2 s, renewed every 0.2 s."""
COLD = 2.0
"""A warm-up run of more than so many median samples compiled, tuned or allocated: until the last
such run ends, the workload does not yet run as it does in production."""

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


@lru_cache(maxsize=1024)
def t_factor(degrees_of_freedom: float) -> float:
    """Half-width of a 95 % t-interval in standard errors."""
    return float(stdtrit(degrees_of_freedom, 0.5 + CONFIDENCE / 2))


def geometric(values: Sequence[float], *, samples: int) -> Estimate:
    """Geometric mean over processes, with a 95 % t-interval on the logarithms.

    Logarithms because a time is skewed and because tokens/s, its inverse, then has exactly the
    inverse interval.

    Args:
        values: One positive value per process.
        samples: How many readings stand behind them, for the record.

    Raises:
        ValueError: Without values, or with one that is not positive and finite.
    """
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"{list(values)} are not positive, finite values of processes")
    logs = arithmetic([math.log(v) for v in values], samples=samples)
    low, high = (None if b is None else math.exp(b) for b in (logs.low, logs.high))
    return Estimate(
        value=math.exp(logs.value), low=low, high=high, processes=len(values), samples=samples
    )


def arithmetic(values: Sequence[float], *, samples: int) -> Estimate:
    """Mean over processes with a 95 % t-interval; one process has no interval.

    Raises:
        ValueError: Without values, or with one that is not finite.
    """
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"{list(values)} are not finite values of processes")
    x = np.asarray(values, dtype=float)
    mean, n = float(x.mean()), len(x)
    if n < 2:
        return Estimate(value=mean, low=None, high=None, processes=n, samples=samples)
    half = t_factor(n - 1) * float(x.std(ddof=1)) / math.sqrt(n)
    return Estimate(value=mean, low=mean - half, high=mean + half, processes=n, samples=samples)


def readings(measurement: Measurement, channel: str, phases: Iterable[str]) -> list[float]:
    """Telemetry of a channel from the first of these phases to the last. Left out are failed
    readings, those during cold runs, and those that lag so far that they speak of what came before.

    Empty where the measurement has no telemetry, no such channel or no such phase; and where a
    channel that lags has fewer than MIN_READINGS left, which may all be of one window.
    """
    if measurement.telemetry is None:
        return []
    wanted = set(phases)
    cold_s = {"warmup": _cold_s(measurement)}
    spans = [
        (p.start_s + cold_s.get(p.name, 0.0), p.end_s)
        for p in measurement.phases
        if p.name in wanted
    ]
    if not spans:
        return []
    start = min(s for s, _ in spans) + LAG_S.get(channel, 0.0)
    end = max(e for _, e in spans)
    channel_values = measurement.telemetry.channels.get(channel, ())
    found = [
        value
        for t, value in zip(measurement.telemetry.t_s, channel_values, strict=False)
        if value is not None and start <= t <= end
    ]
    return [] if channel in LAG_S and len(found) < MIN_READINGS else found


def _cold_s(measurement: Measurement) -> float:
    """From the beginning of the warm-up to the end of its last cold run."""
    if not measurement.samples_s:
        return 0.0
    limit = COLD * float(np.median(measurement.samples_s))
    cold = [i for i, s in enumerate(measurement.warmup_s) if s > limit]
    return sum(measurement.warmup_s[: cold[-1] + 1]) if cold else 0.0


def discards(m: Measurement) -> str:
    """`14 of 20 samples discarded (10 throttled, 4 shared)`; empty where none was."""
    if not m.discarded:
        return ""
    count = sum(map(len, m.discarded.values()))
    reasons = ", ".join(f"{len(i)} {why.replace('_', ' ')}" for why, i in m.discarded.items())
    return f"{count} of {len(m.samples_s)} samples discarded ({reasons})"


def weaknesses(
    measurements: Sequence[Measurement], *, asked: int, min_samples: int
) -> tuple[str, ...]:
    """Sentences on what a reader must know before trusting the numbers of one case.

    Args:
        measurements: All processes of the case, whatever their outcome.
        asked: How many processes the suite asked for.
        min_samples: How many samples a process must have left to be evidence.
    """
    ok = [m for m in measurements if m.outcome is Outcome.OK]
    if not ok:
        return ()
    notes = []
    if len(ok) < len(measurements):
        notes.append(f"numbers from the {len(ok)} of {len(measurements)} processes that ended ok")
    elif len(ok) < asked:
        notes.append(f"{len(ok)} of {asked} processes ran")
    for m in ok:
        if m.discarded:
            alone = "" if m.is_evidence(min_samples) else "; it is not evidence, and is left out"
            notes.append(f"process {m.process}: {discards(m)}{alone}")
    ok = [m for m in ok if m.is_evidence(min_samples)]
    if not ok:
        return tuple(notes)
    if unsteady := [m.process for m in ok if m.steady is False]:
        notes.append(f"no steady state found in {_processes(unsteady)}")
    notes += _spread(ok)
    notes += _telemetry(ok)
    if len({m.tokens for m in ok}) > 1 or len({m.flops for m in ok}) > 1:
        notes.append("processes counted different tokens or FLOPs for one run")
    return tuple(notes)


def _spread(ok: Sequence[Measurement]) -> list[str]:
    notes = []
    medians = []
    widest, widest_process = 0.0, 0
    for m in ok:
        lower, median, upper = np.quantile(m.kept_s, (0.25, 0.5, 0.75))
        medians.append(median)
        if (spread := float((upper - lower) / median)) > widest:
            widest, widest_process = spread, m.process
    if widest > LARGE_SPREAD:
        notes.append(
            f"samples spread widely: interquartile range {widest:.0%} of the median "
            f"in process {widest_process}"
        )
    if (gap := max(medians) / min(medians) - 1) > LARGE_DISAGREEMENT:
        notes.append(f"processes disagree: the slowest is {gap:.0%} slower than the fastest")
    return notes


def _telemetry(ok: Sequence[Measurement]) -> list[str]:
    notes = []
    masks = [int(x) for m in ok for x in readings(m, "gpu_throttle_reasons", ("sampling",))]
    for kind, reasons in (("throttled", THROTTLE), ("clock limited", POWER_CAP)):
        if hit := [mask for mask in masks if any(mask & bit for bit in reasons)]:
            named = ", ".join(r for bit, r in reasons.items() if any(mask & bit for mask in hit))
            notes.append(f"GPU {kind} in {len(hit)} of {len(masks)} readings: {named}")
    foreign = [x for m in ok for x in readings(m, "gpu_foreign_processes", TIMED)]
    if shared := sum(x > 0 for x in foreign):
        notes.append(f"other processes on the GPU in {shared} of {len(foreign)} readings")
    for channel, name in (("gpu_utilisation", "GPU"), ("cpu_utilisation", "CPU")):
        counts = [n for m in ok if (n := len(readings(m, channel, TIMED)))]
        if counts and min(counts) < MIN_READINGS:
            noun = "reading" if min(counts) == 1 else "readings"
            notes.append(f"{name} utilisation rests on {min(counts)} {noun} in one process")
    return notes


def _processes(numbers: Sequence[int]) -> str:
    noun = "process" if len(numbers) == 1 else "processes"
    return f"{noun} {', '.join(map(str, numbers))}"


Floats = NDArray[np.float64]


def walsh(differences: Floats) -> Floats:
    """Means of all pairs of differences, each with itself included, in ascending order.

    Returns:
        [..., n (n + 1) / 2].
    """
    i, j = np.triu_indices(differences.shape[-1])
    return np.sort((differences[..., i] + differences[..., j]) / 2, axis=-1)


def hodges_lehmann(differences: Floats) -> Floats:
    """The median of the Walsh averages: where the differences are centred, [...]."""
    return np.asarray(np.median(walsh(differences), axis=-1))


def exact_bounds(differences: Floats, error: float) -> tuple[Floats, Floats] | None:
    """Bounds on the centre, each of which errs at most as often as `error`.

    They are the centres that the exact signed-rank test does not reject at that level.

    Returns:
        Lower and upper bound, [...] each; None where so few pairs bound nothing at this error.
    """
    n = differences.shape[-1]
    below = np.cumsum(_null_distribution(tuple(range(2, 2 * n + 1, 2))))[::2]  # P(W <= w)
    cut = int(np.searchsorted(below, error, side="right"))  # P(W <= cut - 1) <= error
    if cut == 0:
        return None
    averages = walsh(differences)
    return averages[..., cut - 1], averages[..., -cut]


def signed_rank_p(differences: Floats) -> Floats:
    """Exact p-values of Wilcoxon's signed-rank test that the centre lies above zero, [...].

    Ties get their mean rank and the distribution over these very ranks; a zero takes its rank and
    speaks for neither side. With nothing but zeros the p-value is 1.
    """
    from scipy.stats import rankdata  # takes longer to import than the rest of the command line

    flat = differences.reshape(-1, differences.shape[-1])
    magnitudes = np.abs(flat)
    doubled = np.rint(2 * rankdata(magnitudes, axis=-1)).astype(np.int64)  # midranks are whole
    statistic = np.where(flat > 0, doubled, 0).sum(axis=-1)
    n = flat.shape[-1]
    plain = np.arange(2, 2 * n + 1, 2)
    regular = (np.sort(doubled, axis=-1) == plain).all(axis=-1) & (magnitudes > 0).all(axis=-1)
    p = np.empty(len(flat))
    p[regular] = _upper_tail(tuple(map(int, plain)))[statistic[regular]]
    for row in np.flatnonzero(~regular):
        ranks = tuple(sorted(int(r) for r in doubled[row][magnitudes[row] > 0]))
        p[row] = _upper_tail(ranks)[statistic[row]]
    return p.reshape(differences.shape[:-1])


@lru_cache(maxsize=256)
def _upper_tail(ranks: tuple[int, ...]) -> Floats:
    """P(W >= w) for every w from 0 to the sum of the ranks."""
    tail: Floats = np.cumsum(_null_distribution(ranks)[::-1])[::-1]
    return np.minimum(tail, 1.0)


@lru_cache(maxsize=256)
def _null_distribution(ranks: tuple[int, ...]) -> Floats:
    """P(W = w) where each rank is counted or not with probability one half, by convolution."""
    density = np.zeros(sum(ranks) + 1)
    density[0] = 1.0
    for rank in ranks:
        moved = np.zeros_like(density)
        moved[rank:] = density[: len(density) - rank]
        density = (density + moved) / 2
    return density
