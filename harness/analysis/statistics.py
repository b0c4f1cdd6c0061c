"""Estimates over processes, and rank tests.

The unit of replication is the fresh process. Samples inside one process share its memory layout and
clocks: they make its median precise, but say nothing about the next process. Each process counts
once.

Few processes know little of their own scatter: two give a t-interval that may span decades. The
other cases of a run scatter alike, so the variance of a case is shrunk to theirs (moderated t).

Sources: Kalibera & Jones, "Rigorous benchmarking in reasonable time", ISMM 2013, section 6:
repetition at the highest level that varies, and a t-interval over its means; Smyth, "Linear models
and empirical Bayes methods", Stat. Appl. Genet. Mol. Biol. 3 (2004), section 6.2: the moderated t.
reports/studies/README.md has the coverage.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import geometric_mean
from typing import TypeVar

import numpy as np
import scipy
from numpy.typing import NDArray

from harness.records import Estimate, Interval, Ratio

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]
Side = TypeVar("Side")
Number = TypeVar("Number", bound=Interval)

CONFIDENCE = 0.95
CONFIDENCE_OF_TWO = 0.975
"""Nominal confidence of a moderated interval of two processes: where the scatter differs from case
to case, 95 % would cover 91 %."""
CLEAR = 4.0
"""Ranges of the processes by which a limit must be away to be clear of all of them. For two normal
processes this is a one-sided t-test at 3.5 %; for three, at 0.2 %."""
BEYOND = 0.76
"""Usual standard deviations by which every process must be beyond a limit: at the limit, 5 % of two
processes are, and fewer of more."""
SURE = 3.3
"""Standard errors by which a limit must be away for a decision of few processes, or a NO-GO, to
stand: of 30 rules that are met none is NO-GO in 95 % of the runs, looks allowed for
(reports/studies/README.md, "Looks")."""
RANGES = {2: 0.954, 3: 1.588, 4: 1.978, 5: 2.257, 6: 2.472}
"""Median range of normal processes in standard deviations; more than six are taken for six."""
MIN_ALIKE = 3
"""Fewer cases of a kind do not tell what its usual scatter is."""
GUARD = 0.05
"""Least uncertainty of a ratio in which one side is a single process."""
MIN_CASES = 6
"""Fewer cases do not tell how alike their variances are."""
LEAST_VARIANCE = 1e-5
"""Of the median variance: a smaller one, as of equal readings, would dominate the logarithms."""


# --- estimates over processes -----------------------------------------------------------


@lru_cache(maxsize=1024)
def t_factor(freedom: float, probability: float = 0.5 + CONFIDENCE / 2) -> float:
    """A quantile of Student's t; as default, half a 95 % interval in standard errors."""
    return float(scipy.special.stdtrit(freedom, probability))


def factor_of(estimate: Estimate) -> float:
    """Half the interval of an estimate in standard errors."""
    freedom = estimate.freedom or estimate.n - 1
    return t_factor(freedom, 0.5 + confidence_of(estimate) / 2)


def confidence_of(estimate: Estimate) -> float:
    """The nominal confidence of an estimate's interval."""
    moderated = estimate.freedom is not None
    return CONFIDENCE_OF_TWO if moderated and estimate.n == 2 else CONFIDENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class VariancePrior:
    """What the cases of a run say about the variance of any of them, before its own processes."""

    variance: float
    freedom: float
    """How many degrees of freedom it is worth; infinite if the cases scatter alike."""
    pooled: int
    """Degrees of freedom of all cases: no interval has more."""


def variance_prior(cases: Iterable[Sequence[float]]) -> VariancePrior | None:
    """The prior of the variance of logarithms, from the values of each case's processes.

    The method of moments on the logarithms of the variances, which scatter as log F does: their
    mean gives the prior's variance, and what they scatter beyond chi-square gives its freedom.
    None with fewer than MIN_CASES cases of two processes, or if most of them do not scatter.
    """
    several = [np.log(np.asarray(values, dtype=float)) for values in cases if len(values) > 1]
    if len(several) < MIN_CASES:
        return None
    variances = np.array([logs.var(ddof=1) for logs in several])
    if (usual := float(np.median(variances))) == 0:
        return None
    own = np.array([len(logs) - 1 for logs in several])
    seen = np.maximum(variances, LEAST_VARIANCE * usual) * own / 2
    z = np.log(seen) - scipy.special.digamma(own / 2)
    excess = float(z.var(ddof=1) - scipy.special.polygamma(1, own / 2).mean())
    if excess <= 0:
        return VariancePrior(variance=math.exp(z.mean()), freedom=math.inf, pooled=int(own.sum()))
    freedom = 2 * _inverse_trigamma(excess)
    shift = float(scipy.special.digamma(freedom / 2)) - math.log(freedom / 2)
    return VariancePrior(
        variance=math.exp(z.mean() + shift), freedom=freedom, pooled=int(own.sum())
    )


def _inverse_trigamma(y: float) -> float:
    """x with trigamma(x) = y > 0, by Newton's method on 1 / trigamma (Smyth, appendix)."""
    x = 0.5 + 1 / y
    for _ in range(50):
        value = float(scipy.special.polygamma(1, x))
        step = value * (1 - value / y) / float(scipy.special.polygamma(2, x))
        x += step
        if abs(step) < 1e-8 * x:
            break
    return x


def geometric(
    values: Sequence[float], *, samples: int, prior: VariancePrior | None = None
) -> Estimate:
    """Geometric mean over processes, with a t-interval on the logarithms: moderated by a prior. On
    logarithms, because times are skewed, and because tokens/s, the inverse of a time, then has
    exactly the inverse interval. `samples` readings are behind the values. A ValueError without
    values, or with one that is not positive and finite."""
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(f"values must be positive and finite, one per process: {list(values)}")
    logs = _with_t([math.log(v) for v in values], samples, prior)
    return replace(mapped(logs, math.exp), each=tuple(values))


def arithmetic(values: Sequence[float], *, samples: int) -> Estimate:
    """Mean over processes with a t-interval; one process has no interval. A ValueError without
    values, or with one that is not finite."""
    if not values or not all(map(math.isfinite, values)):
        raise ValueError(f"values must be finite, one per process: {list(values)}")
    return replace(_with_t(values, samples), each=tuple(values))


def mapped(number: Number, rising: Callable[[float], float]) -> Number:
    """That of an increasing function of the value."""
    low, high = (None if e is None else rising(e) for e in (number.low, number.high))
    each = tuple(map(rising, number.each))
    return replace(number, value=rising(number.value), low=low, high=high, each=each)


def usual_scatter(cases: Iterable[Estimate]) -> float | None:
    """The standard deviation of a process by the median case, on logarithms; None with too few
    cases that scatter."""
    found = [*filter(None, map(scatter, cases))]
    return float(np.median(found)) if len(found) >= MIN_ALIKE else None


def scatter(estimate: Interval) -> float:
    """The standard deviation of a process by the range of all, on logarithms; 0 if unknown."""
    if estimate.ends is None or estimate.ends[0] <= 0 or estimate.n < 2:
        return 0.0
    low, high = estimate.ends
    return math.log(high / low) / RANGES[min(estimate.n, max(RANGES))]


def span(estimate: Interval, *, linear: bool) -> tuple[float, float] | None:
    """Where the value can be: a limit outside of it is decided. None with one process. All
    processes are inside, with a margin around them: CLEAR times their range, or BEYOND times the
    usual scatter (at least their range) if that is less; on logarithms, unless `linear`: the value
    may be 0 or negative. From three processes on, their interval bounds it too. Where the values of
    the processes are not known, or are a count, it is the interval."""
    low, high = estimate.low, estimate.high
    if estimate.ends is None:
        return None if low is None or high is None else (low, high)
    if estimate.n < 2:
        return None
    linear = linear or estimate.ends[0] <= 0
    first, last = estimate.ends if linear else map(math.log, estimate.ends)
    margin = CLEAR * (last - first)
    if estimate.usual is not None:
        margin = min(margin, max(last - first, BEYOND * estimate.usual))
    bottom, top = first - margin, last + margin
    if not linear:
        bottom, top = math.exp(bottom), math.exp(top)
    if estimate.n > 2 and low is not None and high is not None:
        bottom, top = max(bottom, low), min(top, high)
    return bottom, top


def settle(
    estimate: Interval, side: Callable[[float, float], Side | None], *, linear: bool
) -> tuple[Side | None, bool]:
    """The side of its limits on which a value is, and whether that is decided: of rules, ratios,
    exponents and expectations alike. `side` is that of all values between two ends; None if they
    are not on one. Not decided is what one process says, or several that are on one side but near.
    No side means processes on both sides. `linear` as in `span`."""
    where = span(estimate, linear=linear)
    found = side(*where) if where and all(map(math.isfinite, where)) else None
    if found is not None:
        return found, True
    ends = estimate.ends or (estimate.value, estimate.value)
    single = estimate.n < 2 or estimate.ends is not None
    return side(*ends) if single and all(map(math.isfinite, ends)) else None, False


def near(e: Interval, *limits: float | None, least: float = 0.0) -> bool:
    """Whether a limit is so near that the processes may be on its wrong side by chance: by their
    scatter, the usual one, or `least`, whichever is most. Two of which the usual scatter is unknown
    are near within a factor of two; equal ones are exact."""
    exact = e.usual is None and len({*e.each}) < 2
    if e.n < 2 or exact or e.ends is None or e.ends[0] <= 0:
        return False
    far = SURE * max(scatter(e), e.usual or 0.0, least) / math.sqrt(e.n)
    if e.usual is None and e.n == 2:
        far = math.log(2)
    return any(abs(math.log(e.value / at)) < far for at in limits if at and 0 < at < math.inf)


def _with_t(values: Sequence[float], samples: int, prior: VariancePrior | None = None) -> Estimate:
    x = np.asarray(values, dtype=float)
    mean, n = float(x.mean()), len(x)
    found = Estimate(value=mean, n=n, samples=samples)
    if n < 2:
        return found
    variance, own = float(x.var(ddof=1)), n - 1
    if prior is not None:
        found = replace(found, freedom=min(own + prior.freedom, prior.pooled))
        weight = own / (own + prior.freedom)
        variance = weight * variance + (1 - weight) * prior.variance
    half = factor_of(found) * math.sqrt(variance / n)
    return replace(found, low=mean - half, high=mean + half)


# --- rank tests of pairs in two orders --------------------------------------------------
#
# A pair's difference is that of its two sides, plus an effect of the order in which they ran,
# which changes its sign with the order. Without a difference of the sides, the pairs of one order
# and the negated ones of the other have the same distribution, whatever it is: the rank-sum test of
# the two is exact (Koch, Biometrics 28, 1972, on crossover trials).


def averages(differences: Floats, swapped: Flags) -> Floats:
    """Means of every pair of one order with every pair of the other, ascending: [..., m n]. Effects
    of the order cancel in them."""
    x, y = differences[..., ~swapped, None], differences[..., None, swapped]
    means = (x + y) / 2
    return np.sort(means.reshape(*means.shape[:-2], -1), axis=-1)


def hodges_lehmann(differences: Floats, swapped: Flags | None = None) -> Floats:
    """An estimate of the differences' centre: the median of their averages, [...]; of all averages
    of two if the orders are unknown, or only one occurs."""
    if swapped is not None and swapped.any() and not swapped.all():
        return np.asarray(np.median(averages(differences, swapped), axis=-1))
    i, j = np.triu_indices(differences.shape[-1])
    return np.asarray(np.median((differences[..., i] + differences[..., j]) / 2, axis=-1))


def exact_bounds(differences: Floats, swapped: Flags, error: float) -> tuple[Floats, Floats] | None:
    """Lower and upper bound on the centre, [...] each; each is wrong at most as often as `error`.

    Between them are the centres that the exact test does not reject at that level. None if there
    are too few pairs to bound the centre at this error.
    """
    n, first = len(swapped), int((~swapped).sum())
    density = _null_distribution(tuple(range(2, 2 * n + 1, 2)), first)[first * (first + 1) :: 2]
    cut = int(np.searchsorted(np.cumsum(density), error, side="right"))
    if cut == 0:
        return None
    means = averages(differences, swapped)
    return means[..., cut - 1], means[..., -cut]


def order_free_p(differences: Floats, swapped: Flags) -> Floats:
    """Exact p-values of the test that the centre is above zero: [...]; 1 if all have one order.

    Ties get their mean rank, and the distribution is taken over these ranks.
    """
    flat = differences.reshape(-1, differences.shape[-1])
    order = scipy.stats.rankdata(np.where(swapped, -flat, flat), axis=-1)
    doubled = np.rint(2 * order).astype(np.int64)
    statistic = doubled[:, ~swapped].sum(axis=-1)
    first = int((~swapped).sum())
    ranks = np.sort(doubled, axis=-1)
    p = [
        _upper_tail(tuple(map(int, own)), first)[w] for own, w in zip(ranks, statistic, strict=True)
    ]
    return np.array(p).reshape(differences.shape[:-1])


@lru_cache(maxsize=256)
def _upper_tail(ranks: tuple[int, ...], taken: int) -> Floats:
    """P(W >= w) for every w from 0 to the sum of the ranks."""
    tail: Floats = np.cumsum(_null_distribution(ranks, taken)[::-1])[::-1]
    return np.minimum(tail, 1.0)


@lru_cache(maxsize=256)
def _null_distribution(ranks: tuple[int, ...], taken: int) -> Floats:
    """P(W = w) if W is the sum of so many of the ranks, drawn at random."""
    counts = np.zeros((taken + 1, sum(ranks) + 1))
    counts[0, 0] = 1.0
    for rank in ranks:
        counts[1:, rank:] += counts[:-1, : counts.shape[1] - rank]
    return np.asarray(counts[taken] / counts[taken].sum())


# --- ratios ------------------------------------------------------------------------------


def ratio_of(*pairs: tuple[Estimate, Estimate]) -> Ratio:
    """The first of each pair over the second: of several, their geometric mean, for exactly these
    pairs. With the interval of the ratio (Welch), unless a side is a single process."""
    every = [estimate for pair in pairs for estimate in pair]
    value, n = geometric_mean(a.value / b.value for a, b in pairs), min(e.n for e in every)
    known = n if all(len(e.each) == n for e in every) else 0
    rounds = ([a.each[i] / b.each[i] for a, b in pairs] for i in range(known))
    found = Ratio(value=value, n=n, each=tuple(map(geometric_mean, rounds)))
    half = half_width(every, len(pairs))
    return found if half is None else _within(found, half)


def _within(found: Ratio, half: float) -> Ratio:
    """The ratio with an interval of this half-width, on logarithms."""
    return replace(found, low=found.value / math.exp(half), high=found.value * math.exp(half))


def times_better(ours: Estimate, theirs: Estimate, *, higher_is_better: bool) -> Ratio:
    """How many times better the first is: `ratio_of`, by the processes of one round.

    One process has no scatter. Its interval is then a guard band: twice the disagreement between
    the other's processes, and at least GUARD.
    """
    above, below = (ours, theirs) if higher_is_better else (theirs, ours)
    found = ratio_of((above, below))
    if found.low is None:
        spread = max((e.high / e.low for e in (ours, theirs) if e.low and e.high), default=1.0)
        found = _within(found, math.log1p(max(GUARD, 2 * (spread - 1))))
    each = found.each
    if not each and above.ends and below.ends:
        each = above.ends[0] / below.ends[1], above.ends[1] / below.ends[0]
    known = ours.usual is not None and theirs.usual is not None
    usual = math.hypot(ours.usual or 0.0, theirs.usual or 0.0) if known else None
    return replace(found, each=each, usual=usual)


def times_beyond(ours: Estimate, bound: float, *, higher_is_better: bool) -> float:
    """How many times better an estimate is than a bound, at least: by its interval, or by all of
    its processes, if these are clear of less."""
    low, high = (end and bound for end in (ours.low, ours.high))
    exact = replace(ours, value=bound, low=low, high=high, each=(bound,) * len(ours.each))
    times = times_better(ours, exact, higher_is_better=higher_is_better)
    least = span(times, linear=False)
    return max(times.low or 0.0, least[0] if least else 0.0)


def half_width(estimates: Sequence[Estimate], pairs: int) -> float | None:
    """Half-width of the mean log ratio, from those of the cases (Welch, Satterthwaite)."""
    variances, freedoms = [], []
    for e in estimates:
        if e.low is None or e.high is None:
            return None
        freedoms.append(e.freedom or e.n - 1)
        error = math.log(e.high / e.low) / 2 / factor_of(e)
        variances.append((error / pairs) ** 2)
    total = sum(variances)
    if total == 0:
        return 0.0
    freedom = total**2 / sum(v**2 / f for v, f in zip(variances, freedoms, strict=True))
    confidence = max(map(confidence_of, estimates))
    return t_factor(freedom, 0.5 + confidence / 2) * math.sqrt(total)
