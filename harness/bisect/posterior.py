"""The probability of each commit of a history to be the first bad one, from noisy readings.

The history is a row of positions: 0 is good, the last is bad, and every commit from the first bad
one on is bad. A block is a few fresh processes measured in a row, of different commits. Its log
readings are

    level of the block + step * (is this commit bad) + noise of the process

with an arbitrary level, so that slow drift of the machine has no influence, and Student noise, so
that a disturbed process has little. Step and scale of the noise are unknown too; both are summed
over, on grids around the estimates from the anchors, which are measured first.

Sources: Bayesian search as in Burnashev & Zigangirov, Problems Inform. Transmission 10 (1974), and
Ben-Or & Hassidim, FOCS 2008; Student noise as in Lange, Little & Taylor, JASA 84 (1989).
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from harness.analysis.statistics import Floats, hodges_lehmann

FREEDOM = 4.0
"""Degrees of freedom of the Student noise; the usual choice for few, unmarked outliers."""
STEPS = 15
SCALES = 15
"""Points of the grids of step and scale."""
LEAST_SCALE = 2e-4
"""Smallest assumed noise, as a fraction: a few equal readings do not prove that noise is zero."""
_Z = np.sinh(np.linspace(-3.5, 3.5, 17))  # nodes around each reading, in scales, up to 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReading:
    position: int
    """Of a commit in the history."""
    value: float
    """Positive if the criterion has noise."""
    hz: float | None = None
    """Mean SM clock during the process."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The steps and the scales of noise that are considered."""

    steps: Floats
    """Log of bad over good, [STEPS]; all of one sign."""
    scales: Floats
    """[SCALES], evenly spaced in their logarithm."""

    @classmethod
    def around(cls, differences: Sequence[float]) -> "Grid":
        """Lay the grids around the estimates from two or more pairs of the anchors, each the log of
        bad over good."""
        d = np.asarray(differences, dtype=np.float64)
        step = float(hodges_lehmann(d))
        # A pair has the noise of two processes. The middle half of few pairs may agree by chance.
        middle = 1.4826 * float(np.median(np.abs(d - step)))
        scale = max(middle, float(d.std(ddof=1)) / 3, 1e-12) / math.sqrt(2)
        scale = max(scale, LEAST_SCALE)
        reach = 5 * scale * math.sqrt(2 / len(d))
        near, far = abs(step) - reach, abs(step) + reach
        steps = math.copysign(1.0, step) * np.linspace(max(near, abs(step) / 10), far, STEPS)
        return cls(steps, np.maximum(scale * np.geomspace(0.2, 5.0, SCALES), LEAST_SCALE / 4))


class Posterior:
    """The probability of each position to be the first bad one, given the blocks so far."""

    def __init__(self, last: int, grid: Grid) -> None:
        """`last` is the position of the bad anchor; at first all are equally likely."""
        self.last = last
        self._grid = grid
        # [culprit, step, scale]; culprits 1 .. last
        self._log = np.zeros((last, len(grid.steps), len(grid.scales)))

    def add(self, block: Sequence[ProcessReading]) -> None:
        """Take in a block. A single reading is ignored: it has nothing to be compared with."""
        if len(block) < 2:
            return
        places = np.unique([r.position for r in block])
        # The likelihood depends only on how many of the block's commits precede the first bad one.
        before = np.searchsorted(places, np.arange(1, self.last + 1), side="left")
        bad = np.array([[r.position in places[n:] for r in block] for n in range(len(places) + 1)])
        logs = np.array([math.log(r.value) for r in block])
        self._log += _log_likelihood(logs, bad, self._grid)[before]
        self._log -= self._log.max()

    @property
    def probabilities(self) -> Floats:
        """[last + 1]; position 0 is good by definition and has probability 0."""
        by_culprit = np.exp(self._log - self._log.max()).sum(axis=(1, 2))
        return np.concatenate(([0.0], by_culprit / by_culprit.sum()))

    @property
    def step(self) -> float:
        """Mean of the step's logarithm."""
        weights = np.exp(self._log - self._log.max()).sum(axis=(0, 2))
        return float((weights * self._grid.steps).sum() / weights.sum())

    @property
    def scale(self) -> float:
        """Geometric mean of the noise of one process."""
        weights = np.exp(self._log - self._log.max()).sum(axis=(0, 1))
        return math.exp(float((weights * np.log(self._grid.scales)).sum() / weights.sum()))


def _log_likelihood(logs: Floats, bad: Floats, grid: Grid) -> Floats:
    """Log likelihood of one block, summed over its level, without the terms that are equal for all:
    [cases, STEPS, SCALES]. `logs` is [readings]; `bad`, [cases, readings], says which are of bad
    commits, for each number of commits before the first bad one."""
    # The level if one reading had no noise, [cases, steps, 1, readings].
    levels = (logs - bad[:, None, :] * grid.steps[None, :, None])[:, :, None, :]
    scales = grid.scales[:, None]
    nodes = levels[..., None] + scales[..., None] * _Z
    nodes = np.sort(nodes.reshape(*nodes.shape[:-2], -1), axis=-1)
    residuals = (levels[..., None] - nodes[..., None, :]) / scales[..., None]
    terms = -(FREEDOM + 1) / 2 * np.log1p(residuals**2 / FREEDOM)
    density = terms.sum(axis=-2) - len(logs) * np.log(scales)
    peak = density.max(axis=-1, keepdims=True)
    summed = np.trapezoid(np.exp(density - peak), nodes, axis=-1)
    return np.asarray(np.log(summed) + peak[..., 0])


# --- what to measure next ----------------------------------------------------------------


def mistaken(step: float, scale: float) -> float:
    """How often a process, compared with the two anchors of its block, is on the wrong side."""
    return float(scipy.special.ndtr(-abs(step) / 2 / (scale * math.sqrt(1.5))))


def most_informative(
    probabilities: Floats, skipped: Collection[int], error: float
) -> tuple[int, float] | None:
    """The commit of which one process reduces the entropy most, and by how many nats it is expected
    to; None if none does.

    A process is treated as a yes or no that is wrong with probability `error`. The posterior uses
    the full reading.
    """
    last = len(probabilities) - 1
    bad = np.cumsum(probabilities).clip(0, 1)
    seen_bad = bad * (1 - error) + (1 - bad) * error
    entropy = scipy.special.entr
    nats = entropy(seen_bad) + entropy(1 - seen_bad) - entropy(error) - entropy(1 - error)
    open_ = [p for p in range(1, last) if p not in skipped and nats[p] > 1e-9]
    best = max(open_, key=lambda p: (round(float(nats[p]), 9), -abs(p - last / 2)), default=None)
    return None if best is None else (best, float(nats[best]))


@dataclass(frozen=True, slots=True)
class CommitGroup:
    """Commits that cannot be distinguished: all but the last of them cannot be measured."""

    positions: tuple[int, ...]
    probability: float

    @property
    def bad(self) -> int:
        """The last one, which can be measured."""
        return self.positions[-1]

    @property
    def good(self) -> int:
        """The nearest measurable one before them."""
        return self.positions[0] - 1


def groups(probabilities: Floats, skipped: Collection[int]) -> tuple[CommitGroup, ...]:
    """The history in order; commits that cannot be measured are grouped with the next one."""
    found, waiting = [], []
    for position in range(1, len(probabilities)):
        waiting.append(position)
        if position not in skipped:
            share = float(probabilities[waiting].sum())
            found.append(CommitGroup(tuple(waiting), share))
            waiting = []
    return tuple(found)
