"""Whether the levels of the measured commits show one step, or scatter so far that it may be luck.

A build can be faster or slower by where its code lands, alike in all its processes. The posterior
of the search knows no such luck: it takes every difference of two commits for the step, or for
noise of processes. Here each measured commit has a level of its own,

    reading = level of the block + level of the commit + noise of the process
    level of a commit = step * (is it bad) + luck of its build

and the probability of each first bad commit is summed over the size of that luck. Nothing is
measured for it: the processes of the search, of the anchors and of the confirmation are enough
where builds are quiet.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.analysis.statistics import Floats
from harness.bisect.posterior import FREEDOM, LEAST_SCALE, ProcessReading

ROUNDS = 20
"""Of the robust fit, after which its weights have settled."""
SIZES = np.geomspace(1e-4, 0.1, 40)
"""Standard deviations of builds that are considered."""
UNLINKED = 1e-3
"""Information on a commit that no block links with the others: practically none."""
TAIL = 3.0
"""Degrees of freedom of their prior, the positive half of Student's t."""


@dataclass(frozen=True, slots=True)
class OneStep:
    """What the levels of the commits say."""

    probability: float
    """Of the step to be between two neighbouring measured commits."""
    scatter: float
    """Standard deviation of the luck of builds."""


def one_step(
    blocks: Sequence[tuple[object, Sequence[ProcessReading]]], good: int, bad: int, build_cv: float
) -> OneStep:
    """Judge a step between two measured commits.

    Args:
        blocks: Everything that was measured, with its stage.
        good: The last position before the step, and `bad` the first after it.
        build_cv: Luck of builds that is expected; ten times as much is not ruled out.
    """
    compared = [block for _, block in blocks if len({r.position for r in block}) > 1]
    places = np.unique([r.position for block in compared for r in block])
    level, information = _levels(compared, places)
    # Contrasts of the levels: what all have in common is unknown.
    count = len(places)
    contrasts = np.linalg.svd(np.ones((1, count)))[2][1:]
    noise = np.linalg.inv(contrasts @ information @ contrasts.T + UNLINKED * np.eye(count - 1))
    seen = contrasts @ level
    steps = contrasts @ (places[:, None] >= places[None, 1:]).astype(float)
    logs = np.array([_log_likelihoods(noise, size, seen, steps) for size in SIZES])
    prior = np.log(SIZES) - (TAIL + 1) / 2 * np.log1p((SIZES / build_cv) ** 2 / TAIL)
    logs += prior[:, None] + np.log(np.diff(places))  # each commit is as likely as another
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    (here,) = np.flatnonzero(places[1:] == bad)
    assert places[here] == good
    return OneStep(
        probability=float(weights[:, here].sum()),
        scatter=float(np.exp(weights.sum(axis=1) @ np.log(SIZES))),
    )


def _levels(blocks: Sequence[Sequence[ProcessReading]], places: Floats) -> tuple[Floats, Floats]:
    """The logarithms of the commits' levels and their information matrix, from a fit in which
    disturbed processes weigh little."""
    rows = [(b, r) for b, block in enumerate(blocks) for r in block]
    of_block = np.array([b for b, _ in rows])
    of_place = np.searchsorted(places, [r.position for _, r in rows])
    logs = np.log([r.value for _, r in rows])
    at = np.zeros((len(rows), len(places)))
    at[np.arange(len(rows)), of_place] = 1.0
    weights, scale = np.ones(len(rows)), 0.0
    for _ in range(ROUNDS):
        sums = np.bincount(of_block, weights)[:, None]
        means = np.zeros((len(blocks), len(places)))
        np.add.at(means, of_block, weights[:, None] * at)
        means /= sums
        inner = at - means[of_block]
        centred = logs - (np.bincount(of_block, weights * logs) / sums[:, 0])[of_block]
        matrix = inner.T @ (weights[:, None] * inner)
        level = np.linalg.pinv(matrix, hermitian=True) @ (inner.T @ (weights * centred))
        residuals = centred - inner @ level
        free = max(1, len(rows) - len(blocks) - len(places) + 1)
        scale = max(float(np.sqrt((weights * residuals**2).sum() / free)), LEAST_SCALE)
        weights = (FREEDOM + 1) / (FREEDOM + (residuals / scale) ** 2)
    return level, matrix / scale**2


def _log_likelihoods(noise: Floats, size: float, seen: Floats, steps: Floats) -> Floats:
    """Of each place of the step, summed over its size, for one size of luck."""
    precision = np.linalg.inv(noise + size**2 * np.eye(len(seen)))
    along, across = steps.T @ precision @ seen, np.einsum("ij,ik,kj->j", steps, precision, steps)
    misfit = seen @ precision @ seen - along**2 / across
    return np.asarray(np.linalg.slogdet(precision)[1] / 2 - np.log(across) / 2 - misfit / 2)
