"""A baseline and a candidate, compared by fresh processes that ran in pairs.

A pair is one process of the baseline and one of the candidate, one after the other, in alternating
order (A B, B A, A B, ...), so that slow drift of the machine affects both alike. What the order
itself does, up to several percent, cancels too: tests and bounds compare the pairs of one order
with those of the other. Two commits are two builds, which may differ by luck in all their processes
alike: the variance of that enters every bound and p-value. All arithmetic is on logarithms of time
ratios, candidate over baseline: above one is slower.

The decision has two stages. `screen` passes a case on a few pairs, or asks for more. The rest is
judged by all of its pairs at up to four looks, each of which spends a share of `alpha`: a case that
is decided takes no more pairs, and the looks together keep the promised error. Holm's procedure
over all cases keeps the chance that a clean change has any case called slower below `alpha`, for
any number of cases. The error rates are in reports/studies/README.md.

Sources: Kalibera & Jones, ISMM 2013 (processes, not samples); Holm, Scand. J. Stat. 6 (1979).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import scipy

from harness.analysis.statistics import (
    Flags,
    Floats,
    exact_bounds,
    hodges_lehmann,
    order_free_p,
    t_factor,
)
from harness.records import ByCase, Change, Comparison, Pair, Ratio, Thresholds, least_pairs

_quantile = NormalDist().inv_cdf  # a hundred times faster than scipy's norm.ppf

BOUNDLESS = math.log(100)
"""A bound beyond this factor is not used: two processes on a side may give one of any size."""
SLOW = 0.05
"""Slowdown that a confirmation still has to find where pairs scatter far."""
NEARLY_ALWAYS = 0.99
EARLY = 0.3
"""Share of what is left of alpha that each look before the last spends. The first can then call one
of one, 12 or 60 cases slower by 12, 16 or 18 pairs, also if one order has two pairs more."""
LAST = (1 - EARLY) ** 2
"""Share of alpha that is left after two looks."""
CLEARLY = 1.2
"""Times `practical` of a change that is called before the last look: few pairs estimate badly."""
POWER = 0.9
"""Probability of finding a change of the stated smallest effect."""

# --- the screen --------------------------------------------------------------------------


def screen(pairs: Sequence[Pair], thresholds: Thresholds) -> bool:
    """Whether a case passes on its first pairs; False asks for a confirmation.

    It passes if the Hodges-Lehmann ratio is at most `screen_ratio` and Student's upper bound is
    below the tolerance. Without the second condition a slowdown would pass on a noisy node. A case
    that seems faster is confirmed too: only `judge` corrects for the number of cases.
    """
    if len(pairs) < thresholds.screen_pairs:
        return False
    return bool(screened_done(time_logs(pairs), swapped(pairs), thresholds))


def screened_done(logs: Floats, order: Flags, thresholds: Thresholds) -> Flags:
    """`screen` on log ratios of shape [..., pairs]."""
    _, high = student_bounds(logs, order, thresholds)
    centre = hodges_lehmann(logs, order)
    near = centre <= math.log(thresholds.screen_ratio)
    faster = (high < 0) & (centre < -math.log1p(thresholds.practical))
    return np.asarray(near & (high < math.log1p(thresholds.tolerance)) & ~faster)


def time_logs(pairs: Sequence[Pair]) -> Floats:
    """Log ratios of time, candidate over baseline."""
    return np.array([math.log(p.candidate_s / p.baseline_s) for p in pairs])


def swapped(pairs: Sequence[Pair]) -> Flags:
    """In which pairs the candidate ran first."""
    return np.array([p.swapped for p in pairs], dtype=bool)


def student_bounds(logs: Floats, order: Flags, thresholds: Thresholds) -> tuple[Floats, Floats]:
    """Bounds on the mean, each wrong with probability `alpha` if the noise is normal; infinite
    without pairs of both orders, or with fewer than three.

    The exact test has no bounds at 0.5 % with fewer than ten pairs. A disturbed process widens
    Student's bounds, which sends the case to its confirmation.
    """
    sides = [logs[..., ~order], logs[..., order]]
    centre, counts = hodges_lehmann(logs, order), [x.shape[-1] for x in sides]
    if min(counts) < 1 or len(order) < 3:
        return centre - np.inf, centre + np.inf
    mean = (sides[0].mean(axis=-1) + sides[1].mean(axis=-1)) / 2
    se = pair_sd(logs, order) * math.sqrt(sum(1 / n for n in counts)) / 2
    error = thresholds.alpha
    half = _widened(scipy.special.stdtrit(len(order) - 2, 1 - error) * se, thresholds, error)
    return mean - half, mean + half


def _widened(half: Floats, thresholds: Thresholds, error: float) -> Floats:
    """The distance from the centre to a bound, with the luck of the two builds."""
    return np.hypot(half, _quantile(1 - error) * thresholds.of_builds)


def pair_sd(logs: Floats, order: Flags) -> Floats:
    """Standard deviation of pairs of one order, from three or more pairs: [...]."""
    parts = [x for x in (logs[..., ~order], logs[..., order]) if x.shape[-1]]
    squares = sum(((x - x.mean(axis=-1, keepdims=True)) ** 2).sum(axis=-1) for x in parts)
    return np.asarray(np.sqrt(squares / (len(order) - len(parts))))


# --- the confirmation --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the rules need to know about one case at a look."""

    ratio: Ratio
    """`p`, as `p_faster`, is divided by the share of alpha of the look: compare with alpha."""
    p_faster: float
    error: float
    """Of each bound: the share of alpha that the look spends."""
    se: float
    """Of the logarithm, from the width of the interval: robust to outliers; infinite without."""
    cycles: float | None = None
    """The logarithm in cycles (time x clock); None if the clocks were not read."""
    freedom: float
    """Degrees of freedom of the spread: few pairs estimate their own noise badly."""
    pair_s: float | None = None
    """GPU time of one pair."""


def statistics(pairs: Sequence[Pair], thresholds: Thresholds, share: float = 1.0) -> Statistics:
    """The statistics of one case, at a look that spends this share of alpha."""
    clocked = [p for p in pairs if p.baseline_hz is not None and p.candidate_hz is not None]
    (answer,) = array_statistics(time_logs(pairs)[None], swapped(pairs), thresholds, share)
    if 2 * len(clocked) >= len(pairs):
        clocks = np.log([(p.candidate_hz or 1) / (p.baseline_hz or 1) for p in clocked])
        cycles = hodges_lehmann(time_logs(clocked) + clocks, swapped(clocked))
        answer = replace(answer, cycles=float(cycles))
    walls = [p.wall_s for p in pairs if p.wall_s is not None]
    return replace(answer, pair_s=float(np.mean(walls)) if walls else None)


def array_statistics(
    logs: Floats, order: Flags, thresholds: Thresholds, share: float = 1.0
) -> tuple[Statistics, ...]:
    """Statistics of many cases at once, without cycles, from log ratios of time, [cases, pairs]."""
    error = share * thresholds.alpha
    centre = hodges_lehmann(logs, order)
    slower, faster = order_free_p(logs, order), order_free_p(-logs, order)
    bounds = exact_bounds(logs, order, error)
    if bounds is not None and thresholds.of_builds:
        se = np.maximum((bounds[1] - bounds[0]) / 2 / _quantile(1 - error), 1e-12)
        whole = np.hypot(se, thresholds.of_builds)
        slower = _with_builds(slower, centre, se, whole, len(order))
        faster = _with_builds(faster, -centre, se, whole, len(order))
        below, above = (_widened(np.abs(bound - centre), thresholds, error) for bound in bounds)
        bounds = centre - below, centre + above
    low, high = bounds or (centre - np.inf, centre + np.inf)
    pairs = logs.shape[-1]
    return tuple(
        Statistics(
            ratio=of_logs(centre[i], low[i], high[i], n=pairs, p=float(slower[i]) / share),
            p_faster=float(faster[i]) / share,
            error=error,
            se=standard_error(low[i], high[i], error),
            freedom=pairs - 2,
        )
        for i in range(len(logs))
    )


def of_logs(centre: float, low: float, high: float, *, n: int, p: float | None = None) -> Ratio:
    """A ratio by its logarithm, without bounds that are too far away to be used."""
    ends = (None if abs(end) > BOUNDLESS else math.exp(end) for end in (low, high))
    return Ratio(value=math.exp(centre), low=next(ends), high=next(ends), n=n, p=p)


def standard_error(low: float, high: float, error: float) -> float:
    """By bounds that are each wrong with this probability."""
    return float(high - low) / 2 / _quantile(1 - error)


def _with_builds(p: Floats, centre: Floats, se: Floats, whole: Floats, pairs: int) -> Floats:
    """One-sided p-values with the standard error `whole` in place of `se`. By the exact test, whose
    smallest p-value is not small enough for a far larger error, or by Student's, which is wider for
    an equal one."""
    by_rank = scipy.special.ndtr(scipy.special.ndtri(p) * se / whole)
    freedom = (pairs - 2) * (whole / se) ** 4  # Satterthwaite, with the luck of builds known
    by_t = scipy.special.stdtr(freedom, -centre / whole)
    return np.asarray(np.maximum(p, np.minimum(by_rank, by_t)))


def judge(
    looked: Mapping[str, Statistics], thresholds: ByCase, *, beside: int = 0
) -> Mapping[str, Comparison]:
    """Apply the rules of a look to all of its cases together; `beside` others are shown with these
    and judged apart."""
    slower = holm({c: p for c, s in looked.items() if (p := s.ratio.p) is not None}, beside)
    faster = holm({c: s.p_faster for c, s in looked.items()}, beside)
    cases = len(looked) + beside
    return {
        c: _judge(c, s, (slower[c], faster[c]), cases, thresholds[c]) for c, s in looked.items()
    }


def holm(p_values: Mapping[str, float], beside: int = 0) -> Mapping[str, float]:
    """Adjusted p-values: rejecting those below alpha has a joint error of alpha, together with
    `beside` others that are adjusted apart."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (key, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) + beside - rank) * p))
        adjusted[key] = largest
    return adjusted


def _judge(
    case_id: str, s: Statistics, p: tuple[float, float], cases: int, thresholds: Thresholds
) -> Comparison:
    """The answer for one case, by the adjusted p-values that it is slower and that it is faster."""
    p_slower, p_faster = p
    ratio, practical = s.ratio, 1 + thresholds.practical
    clock_explained, among = False, cases if cases > 1 else None
    facts: dict[str, Any]
    if p_slower <= thresholds.alpha and ratio.value > practical:
        if s.cycles is not None and s.cycles <= math.log(practical):
            clock_explained, change = True, Change.UNDECIDED
            facts = {"in_time": ratio.value, "in_cycles": math.exp(s.cycles)}
        else:
            change = Change.SLOWER
            facts = {"shown": ratio.value, "by": {"p": p_slower, "among": among}}
            facts["unclocked"] = s.cycles is None or None
    elif p_faster <= thresholds.alpha and ratio.value < 1 / practical:
        change = Change.FASTER
        facts = {"shown": ratio.value, "by": {"p": p_faster, "among": among}}
    elif ratio.high is not None and ratio.high < 1 + thresholds.tolerance:
        change = Change.SAME
        facts = {"most": ratio.high, "below": thresholds.tolerance}
    else:
        change, facts = Change.UNDECIDED, {"most": ratio.high, "across": thresholds.tolerance}
        facts["unbounded"] = ratio.high is None or None
    needed = None
    if change is Change.UNDECIDED and not clock_explained and s.se < math.inf:
        of_pairs = math.sqrt(max(0.0, s.se**2 - thresholds.of_builds**2)) * math.sqrt(ratio.n)
        needed = pairs_needed(math.log(ratio.value), of_pairs, cases, thresholds)
        if needed is None:
            facts["builds"] = thresholds.build_cv
        else:
            needed = max(needed, ratio.n + 1)
    return Comparison(
        case_id=case_id,
        change=change,
        ratio=replace(ratio, p=p_slower),
        clock_explained=clock_explained,
        smallest_effect=_smallest_effect(s, cases, thresholds),
        pairs_needed=needed,
        minutes_needed=needed * s.pair_s / 60 if needed and s.pair_s else None,
        facts=facts,
    )


def _smallest_effect(s: Statistics, cases: int, thresholds: Thresholds) -> float | None:
    """The test must reject at Holm's strictest level, and the estimate must exceed `practical`."""
    found, strict = _quantile(POWER), t_factor(s.freedom, 1 - s.error / cases)
    log = max((strict + found) * s.se, math.log1p(thresholds.practical) + found * s.se)
    return math.expm1(log) if log <= BOUNDLESS else None


def pairs_needed(centre: float, pair_sd: float, cases: int, thresholds: Thresholds) -> int | None:
    """Fewest pairs that would show the ratio slower, or below the tolerance, nine times in ten;
    None if no number would, because builds differ too far.

    `centre` is the logarithm of the ratio, `pair_sd` the standard deviation of one pair's, and
    `cases` the number of cases that are judged together.
    """
    practical, tolerance = math.log1p(thresholds.practical), math.log1p(thresholds.tolerance)

    def pairs(distance: float, error: float) -> float:
        widest = distance / (_quantile(1 - error) + _quantile(POWER))
        left = widest**2 - thresholds.of_builds**2
        return pair_sd**2 / left if left > 0 else math.inf

    ways = []
    if centre < tolerance:
        ways.append(pairs(tolerance - centre, thresholds.alpha))
    if centre > practical:
        rejected = pairs(centre, thresholds.alpha / cases)
        ways.append(max(rejected, pairs(centre - practical, 0.5)))
    if min(ways) == math.inf:
        return None
    return max(math.ceil(min(ways)), least_pairs(cases, thresholds.alpha))


def next_look(now: int, sd: float, cases: int, thresholds: Thresholds) -> int:
    """Pairs, with those of the screen, by the look after the one by `now` pairs, which is 0 after
    the screen; the same number if that is the last. The first look has just as many as can call one
    of the cases slower. The second has half of the others up to confirm_pairs, the third all of
    them, and a fourth more if they scatter far by `sd`, of a pair; the centre has no influence:
    each test stays exact."""
    most = thresholds.screen_pairs + thresholds.confirm_pairs
    if now == most:
        return thresholds.screen_pairs + pairs_to_take(sd, cases, thresholds)
    least = max(thresholds.screen_pairs, least_pairs(cases, EARLY * thresholds.alpha))
    # Where builds differ far, all looks see the same luck, and one is stricter than several.
    early = (least, (least + most) // 4 * 2) if _enough(1e9, 0.0, cases, thresholds) else ()
    return next((n for n in early if now < n < most), max(now, most))


def look_after(
    now: int, sd: float, cases: int, spent: float, thresholds: Thresholds
) -> tuple[int, float]:
    """The pairs by the look after the one by `now` pairs, `now` if this is the last; and the share
    of alpha that this look spends: EARLY of what is left, all of it in the last."""
    after = next_look(now, sd, cases, thresholds)
    return after, (1 - spent) * (1 if after == now else EARLY)


def decided(answer: Comparison, thresholds: Thresholds) -> bool:
    """Whether a look decides the case though more pairs could be taken: it is clearly beyond
    `practical`, or as near as a case that passes the screen."""
    if answer.change in (Change.SLOWER, Change.FASTER):
        return abs(math.log(answer.ratio.value)) > CLEARLY * math.log1p(thresholds.practical)
    return answer.change is Change.SAME and answer.ratio.value <= thresholds.screen_ratio


def pairs_to_take(sd: float, cases: int, thresholds: Thresholds) -> int:
    """New pairs by the last look: as many, from confirm_pairs to most_pairs, as nearly always show
    an unchanged case below the tolerance and one that is slower by `SLOW` slower."""
    screened, last = thresholds.screen_pairs, LAST * thresholds.alpha
    # A rank test that just reaches the strict level would not survive one disturbed pair.
    least = math.ceil(1.4 * least_pairs(cases, last)) - screened
    counts = range(max(thresholds.confirm_pairs, least), thresholds.most_pairs, 2)
    most = max(thresholds.confirm_pairs, thresholds.most_pairs)
    if not _enough(1e9, 0.0, cases, thresholds):
        return min(counts.start, most)  # builds differ too far for any number of pairs
    return next((n for n in counts if _enough(n + screened, sd, cases, thresholds)), most)


def _enough(pairs: float, sd: float, cases: int, thresholds: Thresholds) -> bool:
    """Whether so many pairs nearly always show what `pairs_to_take` says."""
    tolerance, last = math.log1p(thresholds.tolerance), LAST * thresholds.alpha
    goals = (tolerance, last), (max(math.log1p(SLOW), tolerance), last / cases)
    se, found = math.hypot(sd / math.sqrt(pairs), thresholds.of_builds), _quantile(NEARLY_ALWAYS)
    return all((t_factor(pairs - 2, 1 - error) + found) * se <= size for size, error in goals)


def screened(case_id: str, pairs: Sequence[Pair], thresholds: Thresholds) -> Comparison:
    """The answer for a case that passes the screen."""
    logs, order = time_logs(pairs), swapped(pairs)
    centre = float(hodges_lehmann(logs, order))
    low, high = map(float, student_bounds(logs, order, thresholds))
    se = math.hypot(float(pair_sd(logs, order)) / math.sqrt(len(pairs)), thresholds.of_builds)
    smallest = math.log(thresholds.screen_ratio) + _quantile(POWER) * se
    return Comparison(
        case_id=case_id,
        change=Change.SAME,
        ratio=of_logs(centre, low, high, n=len(pairs)),
        smallest_effect=math.expm1(smallest) if smallest <= BOUNDLESS else None,
        facts={"most": math.exp(high), "of": len(pairs), "below": thresholds.tolerance},
    )
