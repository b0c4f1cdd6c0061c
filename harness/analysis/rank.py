"""Rank statistics of paired differences, for many cases at once.

All functions take differences of shape [..., n], n pairs on the last axis, and treat every leading
entry alone. Nothing here assumes a normal distribution: a process that was disturbed moves one
rank, whatever its size.

Source: Hollander, Wolfe & Chicken, "Nonparametric Statistical Methods", 3rd edition, sections 3.1
(signed-rank test, exact distribution), 3.2 (Hodges-Lehmann estimator) and 3.3 (its interval). Zeros
are ranked and then dropped, as in Pratt, JASA 54 (1959), 655-667.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

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
