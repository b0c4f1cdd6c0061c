"""What to measure next when a commit is looked for, and when to stop. Pure.

A search is told blocks and skipped commits, and asks for the next block or concludes. The same
words in the same order lead to the same question, so that a search is resumed by telling it again
what its journal holds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np

from harness.analysis import compare
from harness.analysis.compare import Change, Comparison, Pair, Thresholds
from harness.analysis.posterior import (
    Cell,
    Grid,
    Posterior,
    Reading,
    cells,
    mistaken,
    most_informative,
)
from harness.analysis.rank import Floats, hodges_lehmann

SURE = 0.95
"""Probability at which the search stops and the culprit is confirmed."""
ANCHOR_PAIRS = 6
"""Of the anchors, before anything else: three whole A B B A blocks."""
MORE_PAIRS = 20
"""New ones, where those leave open whether the anchors differ; and at most for a culprit."""
MAX_BLOCKS = 400
"""Of the search. Readings that still do not agree by then fit no single step."""


class Stage(StrEnum):
    ANCHORS = "anchors"
    SEARCH = "search"
    CONFIRM = "confirm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One process of one commit."""

    position: int
    value: float
    """What was read, positive; for an exact criterion 1 where it holds, 0 where it does not."""
    hz: float | None = None
    """Mean SM clock meanwhile."""
    wall_s: float | None = None


Block = tuple[Stage, tuple[Look, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A block to measure: one fresh process per position, in this order."""

    stage: Stage
    positions: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """The end of a search."""

    reason: str
    culprits: tuple[int, ...] = ()
    """The first bad commit; several where some cannot be measured; empty where none is named."""
    good: int | None = None
    """The nearest measured commit before the culprit."""
    probability: float | None = None
    comparison: Comparison | None = None
    """Of the culprit with that one before it."""
    confirmed: bool = False

    @property
    def found(self) -> bool:
        """Whether one commit is named, and held against its parent."""
        return len(self.culprits) == 1 and self.confirmed


class Search(Protocol):
    """Looks for the first bad commit."""

    last: int
    skipped: set[int]

    def add(self, stage: Stage, block: Sequence[Look]) -> None:
        """Take in a block, as far as it was measured."""

    def next(self) -> Ask | Conclusion:
        """What to measure next, or that nothing is."""

    def probabilities(self) -> Floats:
        """Of each position to be the first bad one, [last + 1]."""


# --- with noise --------------------------------------------------------------------------


class NoisySearch:
    """By readings with noise: step times, above all."""

    def __init__(self, last: int, effect: float) -> None:
        """`effect` is the smallest change worth finding, as a fraction."""
        self.last = last
        self.skipped: set[int] = set()
        self.thresholds = thresholds_for(effect)
        self._blocks: list[Block] = []
        self._posterior: Posterior | None = None
        self._taken = 0

    def add(self, stage: Stage, block: Sequence[Look]) -> None:
        self._blocks.append((stage, tuple(block)))

    def next(self) -> Ask | Conclusion:
        if (asked := self._anchors()) is not None:
            return asked
        chances = self.probabilities()
        best = max(cells(chances, self.skipped), key=lambda c: c.probability)
        if best.probability >= SURE:
            return self._confirm(best)
        assert self._posterior is not None
        error = mistaken(self._posterior.step, self._posterior.scale)
        chosen = most_informative(chances, self.skipped, error)
        searched = sum(stage is Stage.SEARCH for stage, _ in self._blocks)
        if chosen is None or searched >= MAX_BLOCKS:
            reason = f"after {searched} blocks no commit is more than {best.probability:.0%} likely"
            return Conclusion(reason=reason)
        position, bits = chosen
        order = (0, position, self.last)
        return Ask(
            stage=Stage.SEARCH,
            positions=order if searched % 2 == 0 else order[::-1],
            why=f"most informative: {bits:.2f} bits expected",
        )

    def probabilities(self) -> Floats:
        if not self._differences():
            return np.concatenate(([0.0], np.full(self.last, 1 / self.last)))
        self._learn()
        assert self._posterior is not None
        return self._posterior.probabilities

    @property
    def step(self) -> float | None:
        """Log of bad over good, as all blocks have it; None before the anchors are measured."""
        self.probabilities()
        return self._posterior.step if self._posterior else None

    @property
    def scale(self) -> float | None:
        """Noise of one process, as a fraction."""
        self.probabilities()
        return self._posterior.scale if self._posterior else None

    # --- the anchors ---

    def _differences(self) -> list[float]:
        """Log of bad over good of the first pairs; empty until there are ANCHOR_PAIRS."""
        pairs = pairs_of(self._blocks, 0, self.last, Stage.ANCHORS)
        return first_logs(pairs)

    def _anchors(self) -> Ask | Conclusion | None:
        """What is still to be known of the anchors; None where they differ."""
        pairs = pairs_of(self._blocks, 0, self.last, Stage.ANCHORS)
        found = differ(pairs, self.thresholds)
        if found is True:
            return None
        if found is not None:
            said = f"good and bad do not differ as stated: {found.reason}"
            if found.smallest_effect is not None:
                said += f"; a change of {found.smallest_effect:.1%} would have been seen"
            return Conclusion(reason=said, comparison=found)
        order = (0, self.last) if len(pairs) % 2 == 0 else (self.last, 0)
        return Ask(stage=Stage.ANCHORS, positions=order, why="do good and bad differ here?")

    def _learn(self) -> None:
        """Take the blocks in that came since."""
        if self._posterior is None:
            self._posterior = Posterior(self.last, Grid.around(self._differences()))
        for _, block in self._blocks[self._taken :]:
            self._posterior.add([Reading(k.position, math.log(k.value)) for k in block])
        self._taken = len(self._blocks)

    # --- the confirmation ---

    def _confirm(self, cell: Cell) -> Ask | Conclusion:
        pairs = pairs_of(self._blocks, cell.good, cell.bad, Stage.CONFIRM)
        enough = pairs_to_confirm(self._differences(), self.thresholds)
        found = confirmation(pairs, enough, self.thresholds, sign=self.step or 0.0)
        if isinstance(found, int):
            order = (cell.good, cell.bad)
            return Ask(
                stage=Stage.CONFIRM,
                positions=order if len(pairs) % 2 == 0 else order[::-1],
                why=f"{cell.probability:.1%} sure: against its parent, {found} pairs",
            )
        confirmed = found.change is Change.SLOWER
        reason = f"{found.reason}, in {found.pairs} new pairs with the commit before it"
        if not confirmed:
            reason = f"{cell.probability:.1%} likely, but not confirmed: {reason}"
        return Conclusion(
            reason=reason,
            culprits=cell.positions,
            good=cell.good,
            probability=cell.probability,
            comparison=found,
            confirmed=confirmed,
        )


# --- two sides ---------------------------------------------------------------------------


def thresholds_for(effect: float) -> Thresholds:
    """The gate's, for a change of this size."""
    return Thresholds(
        practical=effect / 2,
        tolerance=effect,
        stored_tolerance=max(effect, Thresholds().stored_tolerance),
        screen_ratio=1 + 0.4 * effect,
    )


def pairs_of(
    blocks: Sequence[Block], baseline: int, candidate: int, stage: Stage
) -> tuple[Pair, ...]:
    """The whole pairs of two positions that were taken in a stage, in the order taken."""
    found = []
    for at, block in blocks:
        by = {k.position: k for k in block}
        if at is not stage or by.keys() != {baseline, candidate}:
            continue
        a, b = by[baseline], by[candidate]
        wall = a.wall_s + b.wall_s if a.wall_s and b.wall_s else None
        found.append(
            Pair(
                baseline_s=a.value,
                candidate_s=b.value,
                baseline_hz=a.hz,
                candidate_hz=b.hz,
                wall_s=wall,
            )
        )
    return tuple(found)


def first_logs(pairs: Sequence[Pair]) -> list[float]:
    """Log ratios of the first ANCHOR_PAIRS; empty until there are so many."""
    found = [math.log(p.candidate_s / p.baseline_s) for p in pairs]
    return found[:ANCHOR_PAIRS] if len(found) >= ANCHOR_PAIRS else []


def differ(pairs: Sequence[Pair], thresholds: Thresholds) -> Literal[True] | Comparison | None:
    """Whether two sides differ: True, or the comparison that says they do not; None asks for
    another pair."""
    if len(pairs) < ANCHOR_PAIRS:
        return None
    first = compare.time_logs(pairs[:ANCHOR_PAIRS])
    low, high = compare.student_bounds(first, thresholds.alpha)
    apart = low > 0 or high < 0
    if apart and abs(float(hodges_lehmann(first))) > math.log1p(thresholds.practical):
        return True
    rest = pairs[ANCHOR_PAIRS:]
    if len(rest) < MORE_PAIRS:
        return None
    found = judged(rest, thresholds, sign=float(hodges_lehmann(compare.time_logs(rest))))
    return True if found.change is Change.SLOWER else found


def pairs_to_confirm(logs: Sequence[float], thresholds: Thresholds) -> int:
    """So many that a step as the anchors show it fails the test once in a hundred."""
    values = np.array(logs)
    centre = abs(float(hodges_lehmann(values)))
    needed = compare.pairs_needed(centre, float(values.std(ddof=1)), 1, thresholds)
    return min(math.ceil(1.6 * needed), MORE_PAIRS)


def confirmation(
    pairs: Sequence[Pair], enough: int, thresholds: Thresholds, *, sign: float
) -> Comparison | int:
    """The gate's test of new pairs, once more where the first does not confirm; or how many pairs
    it wants."""
    for count in (enough, enough + MORE_PAIRS):
        if len(pairs) < count:
            return count
        tested = pairs[0 if count == enough else enough : count]
        found = judged(tested, thresholds, sign=sign)
        if found.change is Change.SLOWER:
            break
    return found


def judged(pairs: Sequence[Pair], thresholds: Thresholds, *, sign: float) -> Comparison:
    """The gate's test; where the step goes down, of the sides in exchange."""
    if sign < 0:
        pairs = [
            Pair(
                baseline_s=p.candidate_s,
                candidate_s=p.baseline_s,
                baseline_hz=p.candidate_hz,
                candidate_hz=p.baseline_hz,
                wall_s=p.wall_s,
            )
            for p in pairs
        ]
    name = "good over bad" if sign < 0 else "bad over good"
    return compare.judge({name: compare.statistics(pairs, thresholds)}, thresholds)[name]


# --- without -----------------------------------------------------------------------------


class ExactSearch:
    """By a criterion without noise: plain bisection, one process a commit."""

    def __init__(self, last: int) -> None:
        self.last = last
        self.skipped: set[int] = set()
        self._bad: dict[int, bool] = {}

    def add(self, stage: Stage, block: Sequence[Look]) -> None:
        for look in block:
            self._bad[look.position] = bool(look.value)

    def next(self) -> Ask | Conclusion:
        for anchor, name, wanted in ((0, "good", False), (self.last, "bad", True)):
            if anchor not in self._bad:
                why = f"is the {name} commit {name} here?"
                return Ask(stage=Stage.ANCHORS, positions=(anchor,), why=why)
            if self._bad[anchor] is not wanted:
                return Conclusion(reason=f"the commit said to be {name} is not, by this criterion")
        low, high = self._bounds()
        chosen = most_informative(self.probabilities(), self.skipped, 0.0)
        if chosen is not None:
            left = high - low - 1
            why = f"the middle of {left} commit{'s'[: left != 1]} that may still be it"
            return Ask(stage=Stage.SEARCH, positions=(chosen[0],), why=why)
        culprits = tuple(range(low + 1, high + 1))
        return Conclusion(
            reason=f"bad, and the commit before {'it' if len(culprits) == 1 else 'them'} is good",
            culprits=culprits,
            good=low,
            probability=1.0,
            confirmed=True,
        )

    def probabilities(self) -> Floats:
        low, high = self._bounds()
        chances = np.zeros(self.last + 1)
        chances[low + 1 : high + 1] = 1 / (high - low)
        return chances

    def _bounds(self) -> tuple[int, int]:
        """The first bad commit known, and the last good one before it."""
        high = min((p for p, bad in self._bad.items() if bad), default=self.last)
        low = max((p for p, bad in self._bad.items() if not bad and p < high), default=0)
        return low, max(high, low + 1)
