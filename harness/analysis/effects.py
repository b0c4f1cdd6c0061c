"""Effect of the provider, or of an axis with two values, on the speed of otherwise equal cases."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.analysis.scaling import groups_along, positive
from harness.analysis.statistics import half_width, times_better
from harness.records import CaseSummary, Estimate, Outcome, Scalar

NO_EFFECT = 0.02
"""If the whole interval is within this of 1, the effect is reported as no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Step time per token at `value` over that at `base`: above one is slower."""

    workload: str
    axis: str
    base: Scalar
    value: Scalar
    ratio: float
    """Geometric mean over the pairs."""
    low: float | None
    high: float | None
    """95 % interval over processes, for exactly these pairs; None with one process per case."""
    smallest: float
    largest: float
    """Ratios of the pairs that the axis slows least and most."""
    pairs: int

    @property
    def negligible(self) -> bool:
        return (
            self.low is not None
            and self.high is not None
            and self.low > 1 / (1 + NO_EFFECT)
            and self.high < 1 + NO_EFFECT
        )


def effects(summaries: Sequence[CaseSummary]) -> tuple[Effect, ...]:
    """One effect per workload and swept axis with exactly two values, and per provider.

    A pair counts if both cases are ok and all other axes are equal, so axes that change together
    have no effect of their own. The base is the first value in the suite, or the first provider
    with an ok case.
    """
    found = []
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        cases = [s for s in summaries if s.case.workload == workload]
        names = dict.fromkeys(name for s in cases for name in s.case.swept)
        for axis in ["provider", *names]:
            base, *others = _values(cases, axis) or [""]
            ok = [s for s in cases if _has_a_speed(s)]
            groups = [{s.case.get(axis): s for s in group} for group in groups_along(ok, axis)]
            for value in others:
                both = [group for group in groups if {base, value} <= group.keys()]
                both = [g for g in both if bool(g[base].tokens) == bool(g[value].tokens)]
                pairs = [(per_token(group[base]), per_token(group[value])) for group in both]
                if pairs:
                    found.append(_effect(workload, axis, base, value, pairs))
    return tuple(found)


def _values(cases: Sequence[CaseSummary], axis: str) -> list[Scalar]:
    """The values to compare, the base first; none for an axis with more than two values."""
    if axis == "provider":
        return [*dict.fromkeys(s.case.provider for s in cases if _has_a_speed(s))]
    values = [*dict.fromkeys(s.case.get(axis) for s in cases)]
    known = [v for v in values if v is not None]
    return known if len(known) == len(values) == 2 else []


def _has_a_speed(summary: CaseSummary) -> bool:
    return summary.outcome is Outcome.OK and "step_s" in summary.metrics


def per_token(summary: CaseSummary) -> Estimate:
    """Step time per token, or per step if the workload does not count tokens."""
    step = summary.metrics["step_s"]
    tokens = summary.tokens or 1
    low, high = (None if end is None else end / tokens for end in (step.low, step.high))
    return replace(step, value=step.value / tokens, low=low, high=high)


def _effect(
    workload: str,
    axis: str,
    base: Scalar,
    value: Scalar,
    pairs: Sequence[tuple[Estimate, Estimate]],
) -> Effect:
    mean, ratios = mean_ratio(pairs), [b.value / a.value for a, b in pairs]
    return Effect(
        workload=workload,
        axis=axis,
        base=base,
        value=value,
        ratio=mean.value,
        low=mean.low,
        high=mean.high,
        smallest=min(ratios),
        largest=max(ratios),
        pairs=len(pairs),
    )


def mean_ratio(pairs: Sequence[tuple[Estimate, Estimate]]) -> Estimate:
    """Geometric mean of second over first, with the interval of exactly these pairs (Welch)."""
    every = [estimate for pair in pairs for estimate in pair]
    mean = sum(math.log(b.value / a.value) for a, b in pairs) / len(pairs)
    half = half_width(every, len(pairs))
    return Estimate(
        value=math.exp(mean),
        low=None if half is None else math.exp(mean - half),
        high=None if half is None else math.exp(mean + half),
        processes=min(e.processes for e in every),
        samples=sum(e.samples for e in every),
    )


# --- the first provider against each other one -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """How many times as fast the first provider is as another, along a numeric axis."""

    workload: str
    ours: str
    theirs: str
    axis: str
    """Empty if no numeric axis has two values; there is then one point."""
    first: CaseSummary
    """Ours at the first point: it names the group."""
    points: tuple[tuple[float, Estimate], ...]
    """Value of the axis, ascending, and the ratio."""

    @property
    def crossover(self) -> tuple[float, float] | None:
        """The last value at which ours is slower and the first from which on it is faster."""
        faster = [x for x, r in self.points if r.processes > 1 and r.low is not None and r.low > 1]
        slower = [
            x for x, r in self.points if r.processes > 1 and r.high is not None and r.high < 1
        ]
        since = [x for x in faster if x > max(slower, default=-math.inf)]
        return (slower[-1], since[0]) if slower and since else None


def versus(summaries: Sequence[CaseSummary]) -> tuple[Versus, ...]:
    """The first provider of each workload against its others, where cases are equal otherwise."""
    found = []
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        cases = [s for s in summaries if s.case.workload == workload]
        ours, *others = dict.fromkeys(s.case.provider for s in cases)
        axis = longest(cases)
        for theirs in others:
            for group in groups_along(cases, "provider", axis):
                sides = [
                    {
                        positive(s, axis): s
                        for s in group
                        if s.case.provider == p and _has_a_speed(s)
                    }
                    for p in (ours, theirs)
                ]
                both = sorted(sides[0].keys() & sides[1].keys())
                if both:
                    steps = [[of[x].metrics["step_s"] for of in sides] for x in both]
                    ratios = [times_better(a, b, higher_is_better=False) for a, b in steps]
                    points = tuple(zip(both, ratios, strict=True))
                    known = {"workload": workload, "ours": ours, "theirs": theirs, "axis": axis}
                    found.append(Versus(first=sides[0][both[0]], points=points, **known))
    return tuple(found)


def longest(cases: Sequence[CaseSummary]) -> str:
    """The swept numeric axis with the most values; empty if none has two."""
    names = dict.fromkeys(name for s in cases for name in s.case.swept)
    count = {n: len({x for s in cases if (x := positive(s, n))}) for n in names}
    best = max(count, key=lambda n: count[n], default="")
    return best if count.get(best, 0) > 1 else ""
