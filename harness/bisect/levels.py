"""Whether the levels of the measured commits show one step, or scatter so far that it may be luck.

A build can be faster or slower by where its code lands, alike in all its processes. The posterior
of the search knows no such luck. Here each measured commit has a level of its own,

    reading = level of the block + level of the commit + noise of the process
    level of a commit = step * (is it bad) + luck of its build

and the probability of each first bad commit is summed over the size of that luck.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from harness.analysis.statistics import Floats
from harness.bisect.posterior import FREEDOM, LEAST_SCALE, ProcessReading

Ints = NDArray[np.int64]

ROUNDS = 20
"""Of the robust fit, after which its weights have settled."""
SIZES = np.geomspace(1e-4, 0.1, 40)
"""Standard deviations of builds that are considered."""
TAIL = 3.0
"""Degrees of freedom of their prior, the positive half of Student's t: ten times the expected luck
is not ruled out."""


def one_step(
    blocks: Sequence[tuple[object, Sequence[ProcessReading]]], bad: int, build_cv: float
) -> tuple[float, float]:
    """The probability that the step is between `bad` and the measured commit before it, and the
    standard deviation of the luck of builds.

    Args:
        blocks: Everything that was measured, with its stage.
        build_cv: The luck that is expected.
    """
    readings = [(b, r) for b, (_, block) in enumerate(blocks) for r in block]
    places, of_place = np.unique([r.position for _, r in readings], return_inverse=True)
    level, noise = _levels(np.array([b for b, _ in readings]), of_place, [r for _, r in readings])
    # Contrasts of the levels: what all have in common is unknown.
    contrasts = np.linalg.svd(np.ones((1, len(places))))[2][1:]
    noise, seen = contrasts @ noise @ contrasts.T, contrasts @ level
    steps = contrasts @ (places[:, None] >= places[None, 1:]).astype(float)
    logs = np.array([_log_likelihoods(noise, size, seen, steps) for size in SIZES])
    prior = np.log(SIZES) - (TAIL + 1) / 2 * np.log1p((SIZES / build_cv) ** 2 / TAIL)
    logs += prior[:, None] + np.log(np.diff(places))  # each commit is as likely as another
    weights = np.exp(logs - logs.max())
    weights /= weights.sum()
    scatter = float(np.exp(weights.sum(axis=1) @ np.log(SIZES)))
    return float(weights[:, places[1:] == bad].sum()), scatter


def _levels(
    of_block: Ints, of_place: Ints, readings: Sequence[ProcessReading]
) -> tuple[Floats, Floats]:
    """Logarithms of the commits' levels and their covariance, by a fit in which disturbed processes
    weigh little."""
    logs = np.log([r.value for r in readings])
    blocks, count = int(of_block.max()) + 1, int(of_place.max()) + 1
    design = np.hstack([np.eye(blocks)[of_block], np.eye(count)[of_place]])
    free = max(1, len(logs) - blocks - count + 1)
    weights = np.ones(len(logs))
    for _ in range(ROUNDS):
        inverse = np.linalg.pinv(design.T @ (weights[:, None] * design), hermitian=True)
        found = inverse @ (design.T @ (weights * logs))
        residuals = logs - design @ found
        scale = max(float(np.sqrt((weights * residuals**2).sum() / free)), LEAST_SCALE)
        weights = (FREEDOM + 1) / (FREEDOM + (residuals / scale) ** 2)
    return found[blocks:], inverse[blocks:, blocks:] * scale**2


def _log_likelihoods(noise: Floats, size: float, seen: Floats, steps: Floats) -> Floats:
    """Of each place of the step, summed over its height, for one size of luck."""
    precision = np.linalg.inv(noise + size**2 * np.eye(len(seen)))
    along, across = steps.T @ precision @ seen, np.einsum("ij,ik,kj->j", steps, precision, steps)
    misfit = seen @ precision @ seen - along**2 / across
    return np.asarray(np.linalg.slogdet(precision)[1] / 2 - np.log(across) / 2 - misfit / 2)
