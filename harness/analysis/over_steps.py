"""How a training run goes over its steps: trends, slow steps, losses.

What follows the first eighth of the run is divided into blocks, whose medians one slow step does
not move. A process counts once: the t-interval is over the processes' own values, and holds each of
them. One process has its blocks alone, which are not independent: it is widened.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from harness.analysis import statistics
from harness.records import Estimate, Measurement

BLOCKS, QUARTER, PER_BLOCK, WIDER = 8, 2, 2, 3.0
"""Blocks of a trend and of a quarter, the fewest steps in one, and what widens the t-interval over
blocks: of single processes with correlated noise, 0 to 6 % then sink or rise, in place of 30 %."""
DRIFTS = 0.05
"""Change of tokens/s over the run within which it is steady."""
LEAKS, LEAKS_BYTES, EVENLY = 0.01, 8 * 2**20, 0.5
"""Growth of memory that is a leak: as a share, in bytes, and of the mean growth in every block."""
SLOW, SLOW_S, AROUND, START = 3.0, 0.05, 15, 2
"""A slow step: its factor to the median around it, the least delay that matters, steps around on
each side, and the first steps, which compile and allocate."""
LOSSES = ("loss", "bits_per_byte")

Values = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How a training run went over its steps, by all processes of a case, also failed ones."""

    steps: int
    """The last step; of several processes the least."""
    first: Mapping[str, float]
    last: Mapping[str, float]
    """loss and bits_per_byte: of the first step, and the mean of the last tenth."""
    speed: tuple[float, float] | None
    """Tokens/s in the first quarter after the start, and in the last: medians of blocks, their
    geometric mean over the processes that are not much shorter than the longest."""
    drift: Estimate | None
    """The second over the first, less 1: -0.1 is a tenth slower at the end."""
    growth: Estimate | None
    """Of memory, in bytes a step: the median from block to block, so that a jump does not count."""
    leaked: float
    """How far memory grew, in bytes, if that is a leak; else 0."""
    slow: Mapping[int, float] = field(default_factory=dict)
    """Slow step -> how many times as long as those around it, the slowest first."""
    slow_in: Mapping[int, int] = field(default_factory=dict)
    """Slow step -> in how many processes."""
    not_finite: Mapping[str, int] = field(default_factory=dict)
    """Name -> the first step at which it was NaN or infinite."""

    @property
    def trend(self) -> str:
        """steady, sinking, rising or not decided; empty if the steps are too few."""
        if self.drift is None or self.drift.low is None or self.drift.high is None:
            return ""
        if self.drift.high < -DRIFTS or self.drift.low > DRIFTS:
            return "sinking" if self.drift.high < 0 else "rising"
        inside = self.drift.low >= -DRIFTS and self.drift.high <= DRIFTS
        return "steady" if inside else "not decided"


def course(measurements: Sequence[Measurement]) -> Course | None:
    """How one case went over its steps; None if no step of it was recorded."""
    seen = [(m, m.over_steps) for m in measurements if m.over_steps]
    if not seen:
        return None
    slow, slow_in = dict[int, float](), dict[int, int]()
    not_finite: dict[str, int] = {}
    for _, s in seen:
        for step, factor in slow_steps(s.step, s.step_s):
            slow[step] = max(factor, slow.get(step, 0.0))
            slow_in[step] = slow_in.get(step, 0) + 1
        for name, steps in s.not_finite.items():
            not_finite[name] = min(steps[0], not_finite.get(name, steps[0]))
    longest = max(len(s.step) for _, s in seen)
    whole = [(m, s.step) for m, s in seen if 2 * len(s.step) >= longest]
    memory = [(steps, of) for m, steps in whole if blocks(of := _memory(m))]
    quarters, changes = [], list[tuple[float, float]]()
    for m, _ in whole:
        if y := [x for *_, x in blocks([math.log(v) if v else None for v in speeds_of(m)])]:
            quarters.append((np.mean(y[:QUARTER]), np.mean(y[-QUARTER:])))
            changes.append(_change(y))
    samples = sum(len(steps) for _, steps in whole)
    drift = _over_processes(changes, samples)
    speed = [float(v) for v in np.exp(np.mean(quarters, axis=0))] if quarters else []
    ends = {n: v for n in LOSSES if (v := _ends(measurements, n))}
    return Course(
        steps=min(max(s.step, default=0) for _, s in seen),
        first={n: _first(measurements, n) for n in ends},
        last={n: float(np.mean(v)) for n, v in ends.items()},
        speed=(speed[0], speed[1]) if speed else None,
        drift=drift and statistics.mapped(drift, math.expm1),
        growth=_over_processes([g for one in memory if (g := _growth(*one))], samples),
        leaked=min((leaked(of) for _, of in memory), default=0.0),
        slow=dict(sorted(slow.items(), key=lambda one: -one[1])),
        slow_in=slow_in,
        not_finite=not_finite,
    )


def course_metrics(ok: Sequence[Measurement]) -> dict[str, Estimate]:
    """The metrics of a training run, if every process has a record of its steps."""
    found = course(ok) if all(m.over_steps for m in ok) else None
    if found is None:
        return {}
    exact = {"steps_taken": found.steps, "slow_steps": len(found.slow)}
    trends = {"tokens_per_s_drift": found.drift, "memory_growth_bytes_per_step": found.growth}
    return {
        **{name: e for name, e in trends.items() if e},
        **{
            f"{name}_last": statistics.arithmetic(ends, samples=len(ends))
            for name in LOSSES
            if len(ends := _ends(ok, name)) == len(ok)
        },
        **{
            name: Estimate(value=n, low=n, high=n, n=len(ok), samples=found.steps)
            for name, n in exact.items()
        },
    }


def _known(m: Measurement, name: str) -> dict[int, float]:
    """The finite values of a series by step."""
    s = m.over_steps
    of = zip(s.step, s.values.get(name, ()), strict=False) if s else ()
    return {step: v for step, v in of if v is not None}


def _first(measurements: Sequence[Measurement], name: str) -> float:
    """The mean over the processes that recorded the earliest step; the first lines of another one
    may have come together."""
    known = [of for m in measurements if (of := _known(m, name))]
    start = min(min(of) for of in known)
    return float(np.mean([of[start] for of in known if start in of]))


def _ends(measurements: Sequence[Measurement], name: str) -> list[float]:
    """The mean of the last tenth of each process that has any value."""
    known = [[*_known(m, name).values()] for m in measurements]
    return [float(np.mean(v[-max(1, len(v) // 10) :])) for v in known if v]


def speeds_of(m: Measurement) -> Values:
    """Tokens/s of each step; empty if its tokens are not known."""
    assert m.over_steps is not None
    own = m.over_steps.values.get("tokens_per_s")
    return own or [m.tokens / s for s in m.over_steps.step_s if m.tokens]


def _memory(m: Measurement) -> Values:
    """Memory after each step: as reported, or by the GPU's or the host's readings."""
    own = m.over_steps.values.get("memory_bytes") if m.over_steps else ()
    return own or at_steps(m, "gpu_memory_bytes") or at_steps(m, "rss_bytes")


def at_steps(m: Measurement, channel: str) -> Values:
    """Telemetry at the end of each step; empty if a trend would have too few readings."""
    ends, seen = m.over_steps.end_s if m.over_steps else (), m.telemetry
    if not ends or seen is None:
        return ()
    read = zip(seen.t_s, seen.channels.get(channel, ()), strict=False)
    during = [(t, v) for t, v in read if v is not None and t >= ends[0]]
    if len(during) < BLOCKS * PER_BLOCK:
        return ()
    times, values = np.transpose(during)
    return [float(v) for v in np.interp(ends, times, values)]


def blocks(values: Values) -> list[tuple[int, int, float]]:
    """Begin, end and median of each block after the start; empty if the values are too few."""
    edges = np.linspace(max(START, len(values) // 8), len(values), BLOCKS + 1).astype(int)
    known = [(a, b, [v for v in values[a:b] if v is not None]) for a, b in pairwise(edges)]
    if any(len(of) < PER_BLOCK for *_, of in known):
        return []
    return [(int(a), int(b), float(np.median(of))) for a, b, of in known]


def _over_processes(own: Sequence[tuple[float, float]], samples: int) -> Estimate | None:
    """The mean of the processes' own values; the half interval of one counts if it is alone."""
    if not own:
        return None
    values = [value for value, _ in own]
    found = statistics.arithmetic(values, samples=samples)
    if found.low is None or found.high is None:
        return replace(found, low=found.value - own[0][1], high=found.value + own[0][1])
    return replace(found, low=min(found.low, *values), high=max(found.high, *values))


def _change(medians: Sequence[float]) -> tuple[float, float]:
    """Last quarter less first quarter, and half its interval: by the scatter around the better of a
    line and of one fall, in a block that is left out."""
    y = np.array(medians)
    shapes = [(np.arange(BLOCKS) / (BLOCKS - QUARTER), y)]
    for at in range(QUARTER, BLOCKS - QUARTER):
        shapes.append((np.delete(np.arange(BLOCKS) > at, at).astype(float), np.delete(y, at)))
    halves = []
    for shape, of in shapes:
        x, off, freedom = shape - shape.mean(), of - of.mean(), len(of) - 2
        left = off - x * (x @ off / (x @ x))
        error = math.sqrt(left @ left / (x @ x) / freedom)
        halves.append(statistics.t_factor(freedom) * error)
    return float(y[-QUARTER:].mean() - y[:QUARTER].mean()), WIDER * min(halves)


def _growth(steps: Sequence[int], values: Values) -> tuple[float, float] | None:
    """The median rate from block to block, and half its interval by their median deviation, which
    covers 99 % of even noise; None if all steps have one number."""
    x, y = np.transpose([(np.mean(steps[a:b]), median) for a, b, median in blocks(values)])
    on = np.diff(x) > 0
    if not on.any():
        return None
    rates = np.diff(y)[on] / np.diff(x)[on]
    middle = float(np.median(rates))
    return middle, WIDER * float(np.median(abs(rates - middle)))


def leaked(values: Values, share: float = LEAKS, least: float = LEAKS_BYTES) -> float:
    """How far memory grew evenly, in bytes; 0 if it did not, or only at once, as by a cache."""
    medians = [median for *_, median in blocks(values)]
    grown = medians[-1] - medians[0] if medians else 0.0
    if not medians or grown <= max(share * medians[0], least):
        return 0.0
    even = all(b - a > EVENLY * grown / (BLOCKS - 1) for a, b in pairwise(medians))
    return grown if even else 0.0


def running_mean(values: Sequence[float], part: int) -> list[float]:
    """The mean of the last tenth, or another part of the length, up to each value."""
    sums, width = np.cumsum([0.0, *values]), max(1, len(values) // part)
    windows = [(max(0, end - width), end) for end in range(1, len(sums))]
    return [float(sums[end] - sums[begin]) / (end - begin) for begin, end in windows]


def mean_loss(measurements: Sequence[Measurement]) -> dict[int, float]:
    """The mean over the processes at each step that all of them have."""
    known = [of for m in measurements if (of := _known(m, "loss"))]
    common = set.intersection(*map(set, known)) if known else set()
    return {s: float(np.mean([of[s] for of in known])) for s in sorted(common)}


def slow_steps(steps: Sequence[int], times_s: Sequence[float]) -> Iterator[tuple[int, float]]:
    """Slow steps with their factor to those around them, so that a run that sinks has none."""
    least = SLOW * min(times_s, default=0.0)
    for i in (i for i in range(START, len(times_s)) if times_s[i] > least):
        near = [*times_s[max(START, i - AROUND) : i], *times_s[i + 1 : i + 1 + AROUND]]
        usual = float(np.median(near)) if len(near) >= BLOCKS else math.inf
        if times_s[i] > max(SLOW * usual, usual + SLOW_S):
            yield steps[i], times_s[i] / usual
