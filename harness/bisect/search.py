"""Decides what to measure next in the search for the first bad commit, and when to stop. Pure.

A search receives blocks and skipped commits; it requests the next block or concludes. The same
input in the same order gives the same request, so replaying a journal resumes a search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import scipy

from harness.analysis import comparison as compare
from harness.analysis.statistics import Floats, hodges_lehmann
from harness.bisect.posterior import (
    CommitGroup,
    Grid,
    Posterior,
    ProcessReading,
    groups,
    mistaken,
    most_informative,
)
from harness.records import Change, Comparison, Facts, Pair, Thresholds

SURE = 0.95
"""Probability at which the search stops and the culprit is confirmed."""
ANCHOR_PAIRS = 6
"""Pairs of the anchors (the good and the bad commit) measured first: three A B B A blocks."""
MORE_PAIRS = 20
"""New pairs of the anchors if the first ones show no difference; twice as many confirm at most."""
MAX_BLOCKS = 400
"""Of the search stage. Readings that still disagree by then do not fit a single step."""
UP, DOWN = "bad over good", "good over bad"
"""Case ids of a comparison: which side is the candidate."""


class BisectStage(StrEnum):
    ANCHORS = "anchors"
    SEARCH = "search"
    CONFIRM = "confirm"
    PROFILE = "profile"
    """Of the culprit and the commit before it, once found; not part of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBlock:
    """A block to measure: one fresh process per position, in this order."""

    stage: BisectStage
    positions: tuple[int, ...]
    number: int = 1
    """Of the block within its stage, from 1."""
    of: int = 1
    """Blocks of the stage, if no look decides earlier; in the search stage an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsConclusion:
    facts: Facts = field(default_factory=dict)
    """Why this, or none, is the culprit."""
    culprits: tuple[int, ...] = ()
    """The first bad commit; several if some cannot be measured; empty if no commit was found."""
    good: int | None = None
    """The nearest measured commit before the culprit."""
    probability: float | None = None
    comparison: Comparison | None = None
    """Of the culprit with `good`, or, if the step is down, of `good` with it."""
    confirmed: bool = False

    @property
    def found(self) -> bool:
        """Whether exactly one commit was found and confirmed against the commit before it."""
        return len(self.culprits) == 1 and self.confirmed


# --- criteria with noise -----------------------------------------------------------------


class NoisySearch:
    """Finds the first bad commit by readings with noise, mainly step times."""

    def __init__(self, last: int, effect: float) -> None:
        """`last` is the position of the bad commit, `effect` the smallest change to find, as a
        fraction."""
        self.last = last
        self.skipped: set[int] = set()
        self.thresholds = Thresholds(
            practical=effect / 2,
            tolerance=effect,
            stored_tolerance=max(effect, Thresholds().stored_tolerance),
            screen_ratio=1 + 0.4 * effect,
            most_pairs=2 * MORE_PAIRS - Thresholds().screen_pairs,
        )
        self.blocks: list[tuple[BisectStage, tuple[ProcessReading, ...]]] = []
        self._posterior: Posterior | None = None
        self._taken = 0

    def add(self, stage: BisectStage, block: Sequence[ProcessReading]) -> None:
        self.blocks.append((stage, tuple(block)))

    def pairs(self, stage: BisectStage, baseline: int, candidate: int) -> tuple[Pair, ...]:
        """The complete pairs of two positions measured in a stage, in that order."""
        found = []
        for at, block in self.blocks:
            by = {k.position: k for k in block}
            if at is not stage or by.keys() != {baseline, candidate}:
                continue
            a, b = by[baseline], by[candidate]
            pair = Pair(
                baseline_s=a.value,
                candidate_s=b.value,
                baseline_hz=a.hz,
                candidate_hz=b.hz,
                swapped=block[0].position == candidate,
            )
            found.append(pair)
        return tuple(found)

    def first_logs(self) -> list[float]:
        """Log ratios of the first ANCHOR_PAIRS; empty until all of them are measured."""
        pairs = self.pairs(BisectStage.ANCHORS, 0, self.last)[:ANCHOR_PAIRS]
        return list(compare.time_logs(pairs)) if len(pairs) == ANCHOR_PAIRS else []

    def judged(self, pairs: Sequence[Pair], sign: float, share: float = 1) -> Comparison:
        """The gate's test of pairs at a look that spends this share of alpha; of a step down
        (`sign` < 0) the good commit is the candidate."""
        name = DOWN if sign < 0 else UP
        seen = {name: compare.statistics(pairs, self.thresholds, share)}
        return compare.judge(seen, {name: self.thresholds})[name]

    def confirm(self, baseline: int, candidate: int, sign: float) -> Comparison | NextBlock:
        """The gate's test of new pairs at its looks, until one decides; or the next pair. `sign` is
        negative for a step down."""
        ends = (candidate, baseline) if sign < 0 else (baseline, candidate)
        pairs, spent = self.pairs(BisectStage.CONFIRM, *ends), 0.0
        wanted = compare.next_look(0, math.nan, 1, self.thresholds)
        while len(pairs) >= wanted:
            looked = pairs[:wanted]
            sd = float(compare.pair_sd(compare.time_logs(looked), compare.swapped(looked)))
            more, share = compare.look_after(wanted, sd, 1, spent, self.thresholds)
            found = self.judged(looked, sign, share)
            if more == wanted or compare.decided(found, self.thresholds):
                return found
            spent, wanted = spent + share, more
        return in_turns(BisectStage.CONFIRM, (baseline, candidate), len(pairs), wanted)

    def next(self) -> NextBlock | CommitsConclusion:
        if (asked := self._anchors()) is not None:
            return asked
        chances = self.probabilities()
        best = max(groups(chances, self.skipped), key=lambda c: c.probability)
        posterior = self.posterior()
        assert posterior is not None  # the anchors are measured
        if best.probability >= SURE:
            return self._confirm(best, posterior.step)
        error = mistaken(posterior.step, posterior.scale)
        chosen = most_informative(chances, self.skipped, error)
        searched = sum(stage is BisectStage.SEARCH for stage, _ in self.blocks)
        if chosen is None or searched >= MAX_BLOCKS:
            return CommitsConclusion(facts={"blocks": searched, "no_more": best.probability})
        position, nats = chosen
        left = math.ceil(float(scipy.special.entr(chances).sum()) / nats)
        left = min(MAX_BLOCKS - searched, left)
        return in_turns(BisectStage.SEARCH, (0, position, self.last), searched, searched + left)

    def probabilities(self) -> Floats:
        if posterior := self.posterior():
            return posterior.probabilities
        return np.concatenate(([0.0], np.full(self.last, 1 / self.last)))

    def posterior(self) -> Posterior | None:
        """What all blocks say; None before the anchors are measured."""
        logs = self.first_logs()
        if self._posterior is None and logs:
            self._posterior = Posterior(self.last, Grid.around(logs))
        if self._posterior is not None:
            for _, block in self.blocks[self._taken :]:
                self._posterior.add(block)
            self._taken = len(self.blocks)
        return self._posterior

    def _anchors(self) -> NextBlock | CommitsConclusion | None:
        """The next block of the anchors, or that they do not differ; None once they differ."""
        ends = (0, self.last)
        pairs = self.pairs(BisectStage.ANCHORS, *ends)
        if len(pairs) < ANCHOR_PAIRS:
            return in_turns(BisectStage.ANCHORS, ends, len(pairs), ANCHOR_PAIRS)
        first, order = np.array(self.first_logs()), compare.swapped(pairs[:ANCHOR_PAIRS])
        low, high = compare.student_bounds(first, order, self.thresholds)
        apart = low > 0 or high < 0
        if apart and abs(float(hodges_lehmann(first))) > math.log1p(self.thresholds.practical):
            return None
        rest = pairs[ANCHOR_PAIRS:]
        if len(rest) < MORE_PAIRS:
            return in_turns(BisectStage.ANCHORS, ends, len(pairs), ANCHOR_PAIRS + MORE_PAIRS)
        sign = float(hodges_lehmann(compare.time_logs(rest)))
        new = self.pairs(BisectStage.ANCHORS, *(ends[::-1] if sign < 0 else ends))[ANCHOR_PAIRS:]
        found = self.judged(new, sign)
        if found.change is Change.SLOWER:
            return None
        said = "not_shown" if found.change is Change.UNDECIDED else "alike"
        facts = {said: found.facts, "would_see": found.smallest_effect}
        return CommitsConclusion(facts=facts, comparison=found)

    def _confirm(self, cell: CommitGroup, step: float) -> NextBlock | CommitsConclusion:
        found = self.confirm(cell.good, cell.bad, step)
        if isinstance(found, NextBlock):
            return found
        confirmed = found.change is Change.SLOWER
        likely = None if confirmed else cell.probability
        return CommitsConclusion(
            facts={"likely": likely, "found": found.facts, "new_pairs": found.ratio.n},
            culprits=cell.positions,
            good=cell.good,
            probability=cell.probability,
            comparison=found,
            confirmed=confirmed,
        )


# --- comparisons of two positions --------------------------------------------------------


def in_turns(stage: BisectStage, positions: tuple[int, ...], taken: int, most: int) -> NextBlock:
    """The next block of some positions, forwards and backwards in turns."""
    order = positions if taken % 2 == 0 else positions[::-1]
    return NextBlock(stage=stage, positions=order, number=taken + 1, of=most)


# --- exact criteria ----------------------------------------------------------------------


class ExactSearch:
    """Finds the first bad commit by an exact criterion: plain bisection, one process a commit.

    A commit is bad if its value is nearer to that of the bad anchor than to that of the good one.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.skipped: set[int] = set()
        self.values: dict[int, float] = {}

    def add(self, stage: BisectStage, block: Sequence[ProcessReading]) -> None:
        for reading in block:
            self.values[reading.position] = reading.value

    def next(self) -> NextBlock | CommitsConclusion:
        for taken, position in enumerate((0, self.last)):
            if position not in self.values:
                return in_turns(BisectStage.ANCHORS, (position,), taken, 2)
        if self.values[0] == self.values[self.last]:
            return CommitsConclusion(facts={"both_alike": True})
        low, high = self._bounds()
        chosen = most_informative(self.probabilities(), self.skipped, 0.0)
        if chosen is not None:
            searched = len(self.values) - 2
            most = searched + math.ceil(math.log2(high - low))
            return in_turns(BisectStage.SEARCH, (chosen[0],), searched, most)
        return CommitsConclusion(
            facts={"good_before": True},
            culprits=tuple(range(low + 1, high + 1)),
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
        """The last known good commit and the first known bad one after it."""
        good, bad = (self.values.get(position, 0.0) for position in (0, self.last))
        found_bad = (p for p, v in self.values.items() if abs(v - bad) < abs(v - good))
        high = min(found_bad, default=self.last)
        low = max((p for p in self.values if p < high), default=0)
        return low, max(high, low + 1)
