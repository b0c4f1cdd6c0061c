"""What each axis does: a table of every two values, with the cases that are equal otherwise.

From it: the effect of the provider, or of an axis with two values, on speed. If the whole interval
of one pair of cases is below that of another, their mean describes neither: the effect is then that
in each level of the axis that separates the pairs. Below: the first provider against the others.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import pvariance
from typing import Any

from harness import units
from harness.analysis.bounds import timeout_bound
from harness.analysis.scaling import by_workload, positive
from harness.analysis.statistics import mapped, ratio_of, times_better, times_beyond
from harness.records import CaseSummary, Estimate, Outcome, Ratio, Scalar, pairs

LARGE = 1.2
"""Two axes act together if the effect of each is beyond this at the value of the other one."""
NO_EFFECT = 0.02
"""If the whole interval is within this of 1, the effect is reported as no effect."""
APART = 0.03
"""Effects whose intervals are nearer to each other than this count as one."""
MAX_LEVELS = 6
"""Levels that one effect is split into; beyond that, its range is reported."""

PROVIDER = ("provider",)
SidePair = tuple[CaseSummary, CaseSummary]
Level = tuple[Scalar | None, ...]
"""The value of an axis, or of each of the axes that only change together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """A value of an axis and another one: a row of the table of what each axis does."""

    workload: str
    axes: tuple[str, ...]
    """The axis, or `provider`; or axes that the suite only changes together."""
    base: Level
    value: Level
    pairs: tuple[SidePair, ...]
    """Cases at the base and at the value that are equal otherwise, measured on one GPU."""

    @property
    def alike(self) -> list[SidePair]:
        """Pairs of which both cases count tokens, or none."""
        return [(a, b) for a, b in self.pairs if bool(a.tokens) == bool(b.tokens)]

    @property
    def timed(self) -> list[SidePair]:
        """Those of which both have a speed."""
        return [(a, b) for a, b in self.alike if has_a_speed(a) and has_a_speed(b)]


def contrasts(summaries: Iterable[CaseSummary]) -> list[Contrast]:
    """The table: a row for every two values of the provider, and of each swept axis."""
    found = []
    for workload, cases in by_workload(summaries).items():
        for axes in (PROVIDER, *_axes(cases)):
            groups = pairs(cases, *axes, one_gpu=True)
            sides = [{_level(s, axes): s for s in group} for group in groups]
            for base, value in combinations(dict.fromkeys(_level(s, axes) for s in cases), 2):
                row = Contrast(
                    workload=workload,
                    axes=axes,
                    base=base,
                    value=value,
                    pairs=tuple((s[base], s[value]) for s in sides if {base, value} <= s.keys()),
                )
                found.append(row)
    return found


def _axes(cases: Sequence[CaseSummary]) -> list[tuple[str, ...]]:
    """The swept axes in declared order; those that only change together are one."""
    joined: dict[object, list[str]] = {}
    for name in dict.fromkeys(name for s in cases for name in s.case.swept):
        column = [s.case.get(name) for s in cases]
        firsts = tuple(column.index(x) for x in column)
        joined.setdefault(firsts if any(firsts) else name, []).append(name)
    return [tuple(names) for names in joined.values()]


def _level(summary: CaseSummary, axes: Sequence[str]) -> Level:
    return tuple(summary.case.get(name) for name in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Step time per token at `value` over that at `base`: above one is slower."""

    workload: str
    axis: str
    """Axes that only change together are one, joined by a slash like their values."""
    base: Scalar
    value: Scalar
    within: Mapping[str, Scalar] = field(default_factory=dict)
    """The level of other axes in which the pairs are, because it changes the effect."""
    ratio: Ratio
    """Geometric mean over the pairs, of no use if they disagree."""
    by_pair: tuple[float, ...]
    cases: tuple[SidePair, ...]
    """The pairs: the case at the base, and that at the value."""
    disagree: bool = False
    """Whether another axis changes the effect and no level of it has one effect."""
    at_least: bool = False
    """Whether one side of each pair timed out: the ratio is the bound nearest to 1."""

    @property
    def pairs(self) -> int:
        return len(self.cases)

    @property
    def negligible(self) -> bool:
        low, high = self.ratio.low or 0.0, self.ratio.high or math.inf
        return low > 1 / (1 + NO_EFFECT) and high < 1 + NO_EFFECT


def effects(summaries: Sequence[CaseSummary]) -> tuple[Effect, ...]:
    """One effect per workload and swept axis with exactly two values, and per provider.

    A pair counts if both cases are ok and all other axes are equal. The base is the first value in
    the suite, or the first provider with an ok case. Where another axis changes the effect, there
    is one effect per level of it. Pairs of which one case timed out have an effect of their own,
    unless the other case is slower than its bound.
    """
    found: list[Effect] = []
    for cases in by_workload(summaries).values():
        first = next((s.case.provider for s in cases if has_a_speed(s)), "")
        table = contrasts(cases)
        for row in table:
            if row.axes == PROVIDER:
                found += _effects(row) if row.base == (first,) else ()
            elif [of.axes for of in table].count(row.axes) == 1:
                found += [*_effects(row), *_bounds(row)]
    return tuple(found)


def together(found: Sequence[Effect]) -> tuple[Effect, ...]:
    """What two axes do only together: one effect, of both, where each is shown to act at one value
    of the other and at no other. It is the smaller one of the two."""
    shown = [e for e in found if e.at_least or e.ratio.differs]
    large = [e for e in shown if abs(math.log(e.ratio.value)) > math.log(LARGE)]
    acting = []
    for pair in combinations(large, 2):
        a, b = pair
        at = {a.axis: b.within.get(a.axis), b.axis: a.within.get(b.axis)}
        rest = [{k: v for k, v in e.within.items() if k not in at} for e in pair]
        apart = a.workload != b.workload or rest[0] != rest[1]
        if apart or a.axis == b.axis or None in at.values():
            continue
        toward = [_toward(e, at) for e in pair]
        faster = toward[0].ratio.value < 1
        alone = [
            e
            for e in shown
            if e.workload == a.workload and e.axis in at
            if any(e.within.get(axis) != value for axis, value in at.items() if axis != e.axis)
            if e in large or (_toward(e, at).ratio.value < 1) == faster
        ]
        if (toward[1].ratio.value < 1) == faster and not alone:
            least = min(toward, key=lambda e: abs(math.log(e.ratio.value)))
            value = "/".join(units.scalar(v) for v in at.values() if v is not None)
            acting.append(replace(least, axis="/".join(at), base="", value=value, within=rest[0]))
    return tuple(acting)


def _toward(e: Effect, at: Mapping[str, Scalar | None]) -> Effect:
    """The effect of this value of its axis against the other one."""
    if e.value == at[e.axis]:
        return e
    return replace(e, base=e.value, value=e.base, ratio=e.ratio.inverse)


def slowdown(pair: SidePair) -> Ratio:
    """The effect in one pair, with an interval or a guard band."""
    base, value = map(per_token, pair)
    return times_better(value, base, higher_is_better=True)


def _disagree(pairs: Sequence[SidePair]) -> bool:
    """Whether the whole interval of one pair is below that of another by more than APART."""
    ratios = [slowdown(pair) for pair in pairs]
    lows = [e.low for e in ratios if e.low is not None]
    highs = [e.high for e in ratios if e.high is not None]
    return bool(lows) and min(highs) * (1 + APART) < max(lows)


def _levels(
    pairs: Sequence[SidePair], most: int
) -> list[tuple[dict[str, Scalar], Sequence[SidePair]]]:
    """The pairs by the levels of the axes that separate those that disagree: at most so many. An
    axis separates better if fewer of its levels disagree in themselves; then the provider comes
    first, and an axis that leaves less scatter in its levels."""
    splits: dict[str, dict[Scalar, list[SidePair]]] = {}
    for axis in ["provider", *dict.fromkeys(n for a, _ in pairs for n in a.case.swept)]:
        levels: dict[Scalar, list[SidePair]] = {}
        for pair in pairs:
            if (at := pair[0].case.get(axis)) is not None and at == pair[1].case.get(axis):
                levels.setdefault(at, []).append(pair)
        if 2 <= len(levels) <= most and sum(map(len, levels.values())) == len(pairs):
            splits[axis] = levels
    if not splits or not _disagree(pairs):
        return [({}, pairs)]

    def rank(axis: str) -> tuple[int, bool, float]:
        levels = splits[axis].values()
        logs = [[math.log(slowdown(pair).value) for pair in level] for level in levels]
        scatter = sum(len(level) * pvariance(level) for level in logs)
        return sum(map(_disagree, levels)), axis != "provider", scatter

    axis = min(splits, key=rank)
    return [
        ({axis: at, **within}, some)
        for at, level in splits[axis].items()
        for within, some in _levels(level, most // len(splits[axis]))
    ]


def has_a_speed(summary: CaseSummary) -> bool:
    return summary.outcome is Outcome.OK and "step_s" in summary.metrics


def per_token(summary: CaseSummary) -> Estimate:
    """Step time per token, or per step if the workload does not count tokens."""
    tokens = summary.tokens or 1
    return mapped(summary.metrics["step_s"], lambda step_s: step_s / tokens)


def _ratio_ends(base: CaseSummary, value: CaseSummary) -> tuple[float, float]:
    """The ends of the interval of the effect in a pair of which one case at most has a speed: one
    that timed out leaves one of them open, two leave both."""
    quick, late = (base, value) if has_a_speed(base) else (value, base)
    bound = timeout_bound(late, "step_s")
    if not has_a_speed(quick) or not bound:
        return 0.0, math.inf
    least = times_beyond(per_token(quick), bound / (late.tokens or 1), higher_is_better=False)
    return (least, math.inf) if quick is base else (0.0, 1 / least)


def _known(row: Contrast) -> dict[str, Any]:
    """What an effect says of the row that it is from."""
    base, value = (x[0] if len(x) == 1 else "/".join(map(str, x)) for x in (row.base, row.value))
    return {"workload": row.workload, "axis": "/".join(row.axes), "base": base, "value": value}


def _effects(row: Contrast) -> Iterator[Effect]:
    """One effect, or one per level of the axes that change it; none without pairs."""
    for within, some in _levels(row.timed, MAX_LEVELS) if row.timed else ():
        steps = [(per_token(b), per_token(a)) for a, b in some]
        yield Effect(
            within=within,
            ratio=ratio_of(*steps),
            by_pair=tuple(b.value / a.value for b, a in steps),
            cases=tuple(some),
            disagree=_disagree(some),
            **_known(row),
        )


def _bounds(row: Contrast) -> Iterator[Effect]:
    """The effect in the pairs of which one case timed out: one that is faster, one slower."""
    bounded = [(a, b) for a, b in row.alike if not (has_a_speed(a) and has_a_speed(b))]
    ends = {a.case.case_id: _ratio_ends(a, b) for a, b in bounded}
    faster = {case_id: high for case_id, (_, high) in ends.items() if high < 1}
    slower = {case_id: low for case_id, (low, _) in ends.items() if low > 1}
    for shown in filter(None, (faster, slower)):
        some = [(a, b) for a, b in bounded if a.case.case_id in shown]
        nearest = max(shown.values()) if shown is faster else min(shown.values())
        yield Effect(
            within=shared_levels([a for a, _ in some], [a for a, _ in row.alike]),
            ratio=Ratio(value=nearest, n=1),
            by_pair=tuple(shown.values()),
            cases=tuple(some),
            at_least=True,
            **_known(row),
        )


def shared_levels(some: Sequence[CaseSummary], every: Sequence[CaseSummary]) -> dict[str, Scalar]:
    """The levels that some cases share and not every one has."""
    found: dict[str, Scalar] = {}
    for name in ("provider", *dict.fromkeys(name for s in some for name in s.case.swept)):
        level, *others = {s.case.get(name) for s in some}
        if level is not None and not others and any(s.case.get(name) != level for s in every):
            found[name] = level
    return found


# --- the first provider against each other one -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Versus:
    """How many times as fast the first provider is as another, along a numeric axis."""

    workload: str
    ours: str
    theirs: str
    axis: str
    points: tuple[tuple[float, Ratio], ...]
    """Value of the axis, ascending, and the ratio."""
    cases: tuple[str, ...]
    """Ids of our cases at the points."""

    @property
    def crossover(self) -> tuple[float, float] | None:
        """The last value at which ours is slower and the first from which on it is faster."""
        shown = [(x, r) for x, r in self.points if r.n > 1]
        faster = [x for x, r in shown if r.low is not None and r.low > 1]
        slower = [x for x, r in shown if r.high is not None and r.high < 1]
        since = [x for x in faster if x > max(slower, default=-math.inf)]
        return (slower[-1], since[0]) if slower and since else None


def versus(summaries: Sequence[CaseSummary]) -> tuple[Versus, ...]:
    """The first provider of each workload against its others along the numeric axis with the most
    values, where cases are equal otherwise."""
    found = []
    for workload, cases in by_workload(summaries).items():
        ours, axis = cases[0].case.provider, longest(cases)
        for row in [of for of in contrasts(cases) if of.axes == PROVIDER and of.base == (ours,)]:
            partner = {a.case.case_id: b for a, b in row.timed}
            both = [s for s in cases if s.case.case_id in partner and positive(s, axis)]
            for group in pairs(both, axis):
                ascending = sorted(group, key=lambda s: positive(s, axis))
                points: list[tuple[float, Ratio]] = []
                for s in ascending:
                    steps = [of.metrics["step_s"] for of in (s, partner[s.case.case_id])]
                    points.append((positive(s, axis), times_better(*steps, higher_is_better=False)))
                ids = tuple(s.case.case_id for s in ascending)
                curve = Versus(
                    workload=workload,
                    ours=ours,
                    theirs=str(row.value[0]),
                    axis=axis,
                    points=tuple(points),
                    cases=ids,
                )
                found.append(curve)
    return tuple(found)


def longest(cases: Sequence[CaseSummary]) -> str:
    """The swept numeric axis along which the cases are the fewest groups; empty if each is one."""
    names = dict.fromkeys(name for s in cases for name in s.case.swept)
    several = (n for n in names if len({x for s in cases if (x := positive(s, n))}) > 1)
    groups = {n: len(pairs(cases, n, "provider")) for n in several}
    best = min(groups, key=lambda n: groups[n], default="")
    return best if groups.get(best, 0) < len(pairs(cases, "provider")) else ""
