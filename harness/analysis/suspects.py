"""What explains a gap: the effect of each suspect against the difference between seen and expected.

A suspect is ruled out if four effects of its size together would not do. It is enough if its whole
interval lies beyond the gap. If the case with it does far better than was expected, by more than
another GPU is assumed to explain, it is undecided. "Enough" is no proof: that needs a run in which
removing it closes the gap on the machine of the gap.

Below: two axes that change the speed only together.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import combinations, product

from harness.analysis.effects import (
    axes_of,
    mean_ratio,
    per_token,
    ratio_ends,
    shared_levels,
    value_at,
    values_of,
)
from harness.analysis.scaling import groups_along
from harness.records import (
    METRICS,
    Case,
    CaseSummary,
    Estimate,
    Gap,
    Match,
    Outcome,
    Scalar,
    Suite,
    Suspect,
    equal_pairs,
)

LEAST_GAP = 1.03
"""A gap below this factor is too small for one run to explain."""
SHOWN = 1.02
"""Least effect that counts as a contribution."""
RULING_OUT = 4
"""How many effects of this size may not explain the gap together."""
FASTER_GPU = 4.0
"""Assumed: how many times as fast as the GPU of the gap another one may be."""
LARGE = 1.2
"""By more than this a case with two values of axes that act together differs from those without."""


class Conclusion(StrEnum):
    """What a run says of a suspect."""

    RULED_OUT = "ruled out"
    CONTRIBUTES = "contributes"
    UNDECIDED = "undecided"
    ENOUGH = "enough by itself"
    APART = "does not reproduce it"
    WAS_OFF = "cannot be the cause: it was off"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """The case with the settings of that day that comes nearest to what was seen."""

    case_id: str
    here: float
    """The metric of the gap."""
    times: float
    """Of what was seen: above one is more."""

    @property
    def reproduced(self) -> bool:
        """Whether it is no farther away than another GPU is assumed to explain."""
        return 1 / FASTER_GPU <= self.times <= FASTER_GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """One suspect with its effect and the conclusion."""

    name: str
    conclusion: Conclusion
    effect: Estimate | None = None
    """Step time per token with the suspect over that without: above one is slower. For a control,
    the metric of the gap."""
    is_control: bool = False
    then: str = "unknown"
    """Whether it was on, or off, in the run of the gap."""
    share: tuple[float, float] | None = None
    """Least and greatest share of the gap, on logarithms, that it contributes."""
    reached: float | None = None
    """The metric of the gap in the slowest case with the suspect, to compare with what was seen."""
    remedy: str = ""
    undecided: tuple[str, ...] = ()
    """Ids of the cases of which more processes may decide it."""


def diagnose(suite: Suite, summaries: Sequence[CaseSummary]) -> tuple[Diagnosis, ...]:
    """A conclusion for each suspect of the suite, the ruled out ones first; none without suspects
    or if the gap is too small to explain.

    What was off is no cause. If the settings of that day do not reproduce what was seen, nothing
    here explains it, whatever it costs.
    """
    if suite.suspects is None or suite.suspects.gap.factor < LEAST_GAP:
        return ()
    gap, again = suite.suspects.gap, reproduction(suite, summaries)
    found = []
    for s in suite.suspects.tested:
        d = _control(s, gap, summaries) if s.control else _effect(s, gap, summaries)
        if s.then == "off":
            d = replace(d, conclusion=Conclusion.WAS_OFF, share=None)
        elif again and not again.reproduced and _accused(d, s):
            d = replace(d, conclusion=Conclusion.APART, share=None)
        found.append(replace(d, then=s.then))
    untested = (
        Diagnosis(name=name, conclusion=Conclusion.NOT_TESTED) for name in suite.suspects.not_tested
    )
    order = [*Conclusion]
    return tuple(sorted((*found, *untested), key=lambda d: order.index(d.conclusion)))


def _accused(d: Diagnosis, suspect: Suspect) -> bool:
    """Whether it may be a cause, or is undecided but was on."""
    if d.is_control or d.conclusion is Conclusion.UNDECIDED:
        return suspect.then == "on" and not d.is_control
    return d.conclusion in (Conclusion.CONTRIBUTES, Conclusion.ENOUGH)


def reproduction(suite: Suite, summaries: Sequence[CaseSummary]) -> Reproduction | None:
    """How near the settings of that day come to what was seen; None without a case of them."""
    gap = suite.suspects.gap if suite.suspects else None
    if gap is None or gap.then is None:
        return None
    cases = [s for s in summaries if gap.then.accepts(s.case) and _there(gap.where, s.case)]
    here = {s.case.case_id: e.value for s in cases if (e := s.metrics.get(gap.metric))}
    if not here:
        return None
    nearest = min(here, key=lambda i: abs(math.log(here[i] / gap.seen)))
    return Reproduction(case_id=nearest, here=here[nearest], times=here[nearest] / gap.seen)


def _control(suspect: Suspect, gap: Gap, summaries: Sequence[CaseSummary]) -> Diagnosis:
    """What the subject shares with a case that lacks it is ruled out if that case does as well as
    was expected."""
    assert suspect.control is not None
    cases = [s for s in summaries if suspect.control.accepts(s.case) and _there(gap.where, s.case)]
    values = [e for s in cases if s.outcome is Outcome.OK and (e := s.metrics.get(gap.metric))]
    higher = METRICS[gap.metric].higher_is_better
    worst = (min if higher else max)(values, key=lambda e: e.value, default=None)
    loose = tuple(s.case.case_id for s in cases if s.metrics.get(gap.metric) is worst)
    if worst is None or worst.low is None or worst.high is None:
        return Diagnosis(
            name=suspect.name,
            conclusion=Conclusion.NOT_TESTED,
            is_control=True,
            undecided=loose if worst else (),
        )
    low, high, limit = worst.low, worst.high, gap.expected
    if not higher:
        low, high, limit = -high, -low, -limit
    conclusion = Conclusion.UNDECIDED
    if low >= limit:
        conclusion = Conclusion.RULED_OUT
    elif high < limit:
        conclusion = Conclusion.CONTRIBUTES
    return Diagnosis(
        name=suspect.name,
        conclusion=conclusion,
        effect=worst,
        is_control=True,
        undecided=loose if conclusion is Conclusion.UNDECIDED else (),
    )


def _effect(suspect: Suspect, gap: Gap, summaries: Sequence[CaseSummary]) -> Diagnosis:
    pairs = list(_pairs(suspect, gap.where, summaries))
    effect = _spanning(pairs) if pairs else None
    loose = tuple(s.case.case_id for pair in pairs for s in pair)
    if effect is None or effect.low is None or effect.high is None:
        return Diagnosis(
            name=suspect.name, conclusion=Conclusion.NOT_TESTED, effect=effect, undecided=loose
        )
    low, high, factor = effect.low, effect.high, gap.factor
    higher = METRICS[gap.metric].higher_is_better
    reached = [e.value for _, b in pairs if (e := b.metrics.get(gap.metric))]
    worst = (min if higher else max)(reached, default=gap.seen)
    share = None
    faster, slower = (worst, gap.expected) if higher else (gap.expected, worst)
    far = faster >= FASTER_GPU * slower
    if high**RULING_OUT < factor:
        conclusion = Conclusion.RULED_OUT
    elif low >= factor and not far:
        conclusion = Conclusion.ENOUGH
    elif SHOWN < low < factor and not far:
        conclusion = Conclusion.CONTRIBUTES
        share = math.log(low) / math.log(factor), min(1.0, math.log(high) / math.log(factor))
    else:
        conclusion = Conclusion.UNDECIDED
    return Diagnosis(
        name=suspect.name,
        conclusion=conclusion,
        effect=effect,
        share=share,
        reached=worst if reached else None,
        remedy=suspect.remedy,
        undecided=loose if conclusion is Conclusion.UNDECIDED and low < factor else (),
    )


def _pairs(
    suspect: Suspect, where: Match, summaries: Sequence[CaseSummary]
) -> Iterator[tuple[CaseSummary, CaseSummary]]:
    """Summaries of `sides` that have a step time."""
    timed = {
        s.case.case_id: s for s in summaries if s.outcome is Outcome.OK and "step_s" in s.metrics
    }
    for a, b in sides(suspect, where, [s.case for s in timed.values()]):
        yield timed[a.case_id], timed[b.case_id]


def sides(suspect: Suspect, where: Match, cases: Iterable[Case]) -> list[tuple[Case, Case]]:
    """Cases without and with the suspect that are equal in every axis that neither side names."""
    there = [c for c in cases if _there(where, c)]
    without, with_ = (filter(m.accepts, there) for m in (suspect.without, suspect.with_))
    return equal_pairs(without, with_, *suspect.without.criteria, *suspect.with_.criteria)


def _there(where: Match, case: Case) -> bool:
    """Whether a case is in the configuration of the gap; an axis that it lacks does not count."""
    return all(case.get(name) in (*values, None) for name, values in where.criteria.items())


def _spanning(pairs: Sequence[tuple[CaseSummary, CaseSummary]]) -> Estimate:
    """The mean effect. Where the pairs disagree, its interval spans all of them."""
    steps = [(per_token(a), per_token(b)) for a, b in pairs]
    mean, ratios = mean_ratio(steps), [b.value / a.value for a, b in steps]
    if len(steps) == 1 or mean.low is None or mean.high is None:
        return mean
    return replace(mean, low=min(mean.low, *ratios), high=max(mean.high, *ratios))


# --- two axes that act only together ------------------------------------------------------

Square = Mapping[tuple[Scalar | None, ...], CaseSummary]
"""Four cases by the values of two axes, equal in all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """Step time per token with both values over that with neither: above one is slower."""

    workload: str
    values: Mapping[str, Scalar]
    """The two axes, joined as those of an Effect, and the value of each."""
    within: Mapping[str, Scalar] = field(default_factory=dict)
    """The level of other axes in which they act, if they do not act in all."""
    ratio: float
    low: float | None = None
    high: float | None = None
    at_least: bool = False
    """Whether cases timed out: the ratio is the bound nearest to 1."""
    squares: int
    """In how many groups of cases that are equal in all other axes they act."""
    of: int
    """Of so many."""


def together(summaries: Sequence[CaseSummary]) -> tuple[Together, ...]:
    """Every two axes with two values each that act only together.

    The case with both values is faster than each of the three others, and neither value alone is
    shown to be faster than none; the same for slower. A case that timed out has its bound.
    """
    found: list[Together] = []
    for workload in dict.fromkeys(s.case.workload for s in summaries):
        cases = [s for s in summaries if s.case.workload == workload]
        values = {axis: values_of(cases, axis) for axis in axes_of(cases)}
        for axes in combinations([axis for axis, two in values.items() if two], 2):
            squares = [*_squares(cases, axes)]
            for both in product(*(values[axis] for axis in axes)):
                found += _acting(workload, squares, dict(zip(axes, both, strict=True)))
    return tuple(found)


def _squares(cases: Sequence[CaseSummary], axes: Sequence[str]) -> Iterator[Square]:
    for group in groups_along(cases, *"/".join(axes).split("/")):
        square = {tuple(value_at(s, axis) for axis in axes): s for s in group}
        if len(square) == 4 and len({bool(s.tokens) for s in group}) == 1:
            yield square


def _acting(
    workload: str, squares: Sequence[Square], values: Mapping[str, Scalar]
) -> Iterator[Together]:
    """What two values do together in the squares in which they act, if they act in any."""
    both = tuple(values.values())
    for way in (-1, 1):
        acting = [square for square in squares if _act(square, both, way)]
        if not acting:
            continue
        pairs = [_opposite(square, both) for square in acting]
        ends = [ratio_ends(*pair) for pair in pairs]
        at_least = any(s.outcome is not Outcome.OK for pair in pairs for s in pair)
        nearest = max(high for _, high in ends) if way < 0 else min(low for low, _ in ends)
        mean = None if at_least else mean_ratio([(per_token(a), per_token(b)) for a, b in pairs])
        yield Together(
            workload=workload,
            values=values,
            within=shared_levels([b for _, b in pairs], [_opposite(s, both)[1] for s in squares]),
            ratio=mean.value if mean else nearest,
            low=mean.low if mean else None,
            high=mean.high if mean else None,
            at_least=at_least,
            squares=len(acting),
            of=len(squares),
        )


def _opposite(square: Square, both: tuple[Scalar, ...]) -> tuple[CaseSummary, CaseSummary]:
    """The case with neither value and the one with both."""
    neither = next(at for at in square if at[0] != both[0] and at[1] != both[1])
    return square[neither], square[both]


def _act(square: Square, both: tuple[Scalar, ...], way: int) -> bool:
    """Whether only the case with both values is faster, or slower with a `way` of 1."""
    neither, whole = _opposite(square, both)
    alone = [s for s in square.values() if s is not neither and s is not whole]
    return all(_differs(s, whole, way, LARGE) for s in (neither, *alone)) and not any(
        _differs(neither, s, way, 1.0) for s in alone
    )


def _differs(base: CaseSummary, value: CaseSummary, way: int, factor: float) -> bool:
    """Whether a case is shown to be faster than the base by more than a factor, or slower."""
    low, high = ratio_ends(base, value)
    return low > factor if way > 0 else high < 1 / factor
