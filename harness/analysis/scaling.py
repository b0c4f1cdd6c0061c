"""How the step time grows along an axis.

step_s = c * axis^exponent, fitted on logarithms: each point weighs by its relative error, so the
longest sequence does not dominate. A case that timed out has no point; if its bound is above the
curve of the others, there is no fit. A curve that bends, as from a fixed cost to growth, has one
exponent per segment.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from harness.analysis.statistics import Floats, mapped, t_factor, times_better
from harness.records import Case, CaseSummary, Estimate, Facts, Interval, Outcome, as_text, pairs

MIN_POINTS = 3
"""Fewer uncensored, distinct points leave no residual."""
FLAT = 0.1
"""Absolute exponent below which the axis may not have reached the workload."""
UNKNOWN = 1.0
"""Width of the interval above which an exponent is not known: 1 to 2 is linear to quadratic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One case on the curve, with a time, a lower bound, or (not measured) neither."""

    case_id: str
    x: float
    step_s: Estimate | None = None
    lower_bound_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of the curve with one exponent: that between its ends."""

    begin: ScalingPoint
    end: ScalingPoint
    exponent: Interval

    @property
    def flat(self) -> bool:
        return abs(self.exponent.value) < FLAT


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFit:
    """The power law of a group of cases that differ in one axis."""

    axis: str
    group: str
    """Workload, provider and the other swept axes: the case id without this axis."""
    workload: str
    points: tuple[ScalingPoint, ...]
    """In the order of the axis."""
    exponent: Estimate | None = None
    """None if there is no fit; then the facts say why."""
    slope: Estimate | None = None
    """The least-squares exponent without an interval, with that of each round of processes. None if
    a case has no time."""
    facts: Facts = field(default_factory=dict, hash=False)
    """Why there is no fit, and what is suspicious. With several `gpus` no rule judges it."""
    last: Interval | None = None
    """The exponent between the two longest cases; None if one of them has no time."""
    steepens: bool = False
    """Whether the last octave shows that no power law holds, so that only `last` is true."""
    kernels: Estimate | None = None
    """The slope of the kernels' time, if the GPU waits for the host in a case: that of the steps
    may be the host's. None if a case has no profile."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The curve in as few stretches as its octaves allow, which agree within each stretch.

        Two exponents agree if their intervals overlap or they differ by less than FLAT.
        """
        found: list[Segment] = []
        for before, end in pairwise(p for p in self.points if p.step_s is not None):
            if (octave := _slope(before, end)) is None:
                continue
            one = Segment(begin=before, end=end, exponent=octave)
            if found and _agree(found[-1].exponent, octave):
                begin = found.pop().begin
                one = replace(one, begin=begin, exponent=_slope(begin, end) or octave)
            found.append(one)
        return tuple(found)

    @property
    def last_ends(self) -> tuple[float, float]:
        """Where the last octave begins and ends."""
        return self.points[-2].x, self.points[-1].x

    @property
    def censored(self) -> int:
        return sum(p.step_s is None and p.lower_bound_s is not None for p in self.points)


def fit(summaries: Sequence[CaseSummary]) -> tuple[ScalingFit, ...]:
    """Fit every group of cases along every numeric axis that has three values in it.

    A group with too few measured cases has no exponent. A HANG is not used as a
    bound: it makes no progress.
    """
    axes = dict.fromkeys(name for s in summaries for name in s.case.swept)
    return tuple(
        _fit(axis, members)
        for axis in axes
        for members in pairs([s for s in summaries if positive(s, axis)], axis)
        if len({s.case.axes[axis] for s in members}) >= MIN_POINTS
    )


def by_workload(summaries: Iterable[CaseSummary]) -> dict[str, list[CaseSummary]]:
    """The cases of each workload, in the suite's order."""
    groups: dict[str, list[CaseSummary]] = {}
    for s in summaries:
        groups.setdefault(s.case.workload, []).append(s)
    return groups


def group_of(case: Case, axis: str) -> str:
    """The case id without one axis: the name of the group along it."""
    others = {name: case.axes[name] for name in case.swept if name != axis}
    named = (f"{name}={as_text(value)}" for name, value in others.items())
    return "/".join([case.workload, case.provider, *named])


def positive(summary: CaseSummary, axis: str) -> float:
    """The value of an axis if it is a positive number, which has a logarithm; otherwise 0."""
    value = summary.case.axes.get(axis)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0.0
    return float(value)


def _fit(axis: str, members: Sequence[CaseSummary]) -> ScalingFit:
    listed = [
        ScalingPoint(
            case_id=s.case.case_id,
            x=positive(s, axis),
            step_s=s.metrics.get("step_s") if s.outcome is Outcome.OK else None,
            lower_bound_s=s.lower_bound_s if s.outcome is Outcome.TIMEOUT else None,
        )
        for s in members
    ]
    points = tuple(sorted(listed, key=lambda p: p.x))
    case = members[0].case
    gpus = len({s.card for s in members if s.card})
    facts: dict[str, Any] = {"gpus": gpus} if gpus > 1 else {}
    found = ScalingFit(axis=axis, group=group_of(case, axis), workload=case.workload, points=points)
    octave, every = _slope(*points[-2:]), _any_slope(axis, members)
    found = replace(found, facts=facts, last=octave, slope=every)
    if any(s.waits for s in members):
        found = replace(found, kernels=_any_slope(axis, members, "kernel_s"))
    timed = [(p.x, p.step_s.value) for p in points if p.step_s is not None]
    bounds = [
        (p.x, p.lower_bound_s) for p in points if p.step_s is None and p.lower_bound_s is not None
    ]
    distinct = len({x for x, _ in timed})
    if distinct < MIN_POINTS:
        few = {"distinct": distinct, "axis": axis, "least": MIN_POINTS}
        return replace(found, facts=facts | few)
    x, y = (np.log(np.array(column)) for column in zip(*timed, strict=True))
    slope, low, high = _least_squares(x, y)
    for at, bound_s in bounds:
        if math.log(bound_s) > y.mean() + high * (math.log(at) - x.mean()):
            return replace(found, facts=facts | {"beyond": at})
    ends = [(a, b) for a, b in pairwise(zip(x, y, strict=True)) if b[0] > a[0]]
    octaves = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in ends]
    rises = all(b > a - FLAT for a, b in pairwise(octaves))
    if high - low > UNKNOWN:
        end = found.last.low if found.last else None
        return replace(
            found,
            facts=facts | {"unsure": len(timed)},
            steepens=rises and end is not None and end > slope + FLAT,
        )
    exponent = Estimate(
        value=slope,
        low=low,
        high=high,
        n=min(p.step_s.n for p in points if p.step_s is not None),
        samples=len(timed),
        each=found.slope.each if found.slope else (),
        usual=found.slope.usual if found.slope else None,
    )
    steepens = rises and abs(slope) >= FLAT and octaves[-1] > max(high, slope + FLAT)
    if steepens:
        facts["bends"] = True
    elif abs(slope) < FLAT:
        ok = [s for s in members if s.outcome is Outcome.OK]
        used = all(s.effective.get(axis) == s.case.axes[axis] for s in ok)
        facts["used" if used else "unused"] = axis
    return replace(found, exponent=exponent, facts=facts, steepens=steepens)


def _any_slope(
    axis: str, members: Sequence[CaseSummary], metric: str = "step_s"
) -> Estimate | None:
    """The slope of all processes, also of cases in which they are apart."""
    steps = [s.known(metric) for s in members]
    timed = [e for e in steps if e and e.each]
    x = np.log([positive(s, axis) for s in members])
    if len(timed) < len(members) or len({*x}) < 2:
        return None
    weights = (x - x.mean()) / ((x - x.mean()) ** 2).sum()
    rounds = zip(*(e.each for e in timed), strict=False)
    usual = [e.usual for e in timed if e.usual is not None]
    return Estimate(
        value=float(weights @ np.log([e.value for e in timed])),
        n=min(e.n for e in timed),
        samples=len(timed),
        each=tuple(float(weights @ np.log(one)) for one in rounds),
        usual=float(np.linalg.norm(weights * usual)) if len(usual) == len(timed) else None,
    )


def _slope(before: ScalingPoint, end: ScalingPoint) -> Interval | None:
    """The exponent between two points, with the interval of their ratio; None without a time."""
    if before.step_s is None or end.step_s is None or not end.x > before.x:
        return None
    ratio = times_better(end.step_s, before.step_s, higher_is_better=True)
    octave = math.log(end.x / before.x)
    exponent = mapped(ratio, lambda times: math.log(times) / octave)
    return replace(exponent, usual=ratio.usual and ratio.usual / octave)


def _agree(a: Interval, b: Interval) -> bool:
    if abs(a.value - b.value) < FLAT:
        return True
    ends = a.low, a.high, b.low, b.high
    low_a, high_a, low_b, high_b = (math.nan if end is None else end for end in ends)
    return low_a <= high_b and low_b <= high_a


def _least_squares(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Slope of y on x and its 95 % t-interval, for at least three points."""
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    residual = y - y.mean() - slope * dx
    variance = float(residual @ residual) / (len(x) - 2)
    half = t_factor(len(x) - 2) * math.sqrt(variance / float(dx @ dx))
    return slope, slope - half, slope + half
