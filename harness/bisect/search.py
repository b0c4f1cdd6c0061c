"""Decides what to measure next in the search for the first bad commit, and when to stop. Pure.

A search receives blocks and skipped commits; it requests the next block or concludes. The same
input in the same order gives the same request, so replaying a journal resumes a search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import Literal

import numpy as np

from harness import units
from harness.analysis import comparison as compare
from harness.analysis.statistics import Floats, hodges_lehmann, t_factor
from harness.bisect.posterior import (
    CommitGroup,
    Grid,
    Posterior,
    ProcessReading,
    groups,
    mistaken,
    most_informative,
)
from harness.records import Change, Comparison, Pair, Thresholds

SURE = 0.95
"""Probability at which the search stops and the culprit is confirmed."""
ANCHOR_PAIRS = 6
"""Pairs of the anchors (the good and the bad commit) measured first: three A B B A blocks."""
MORE_PAIRS = 20
"""New pairs if the first ones do not show a difference; also the most that confirm a culprit."""
MAX_BLOCKS = 400
"""Of the search stage. Readings that still disagree by then do not fit a single step."""
EARLY_PAIRS, MOST_PAIRS = 5, 300
"""Pairs after which noise is judged, and the most that a search may need. On a noisy node (2.5 %)
1 in 200 searches ends so, of those with 15 % of noise 4 in 5."""
UP, DOWN = "bad over good", "good over bad"
"""Case ids of a comparison: which side is the candidate."""


class BisectStage(StrEnum):
    ANCHORS = "anchors"
    SEARCH = "search"
    CONFIRM = "confirm"
    PROFILE = "profile"
    """Of the culprit and the commit before it, once found; not part of the search."""


Block = tuple[BisectStage, tuple[ProcessReading, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NextBlock:
    """A block to measure: one fresh process per position, in this order."""

    stage: BisectStage
    positions: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitsConclusion:
    """The result of a search for a commit."""

    reason: str
    culprits: tuple[int, ...] = ()
    """The first bad commit; several if some cannot be measured; empty if no commit was found."""
    good: int | None = None
    """The nearest measured commit before the culprit."""
    probability: float | None = None
    comparison: Comparison | None = None
    """Of the culprit with `good`."""
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
        )
        self.blocks: list[Block] = []
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
                wall_s=a.wall_s + b.wall_s if a.wall_s and b.wall_s else None,
                swapped=block[0].position == candidate,
            )
            found.append(pair)
        return tuple(found)

    def first_logs(self, baseline: int, candidate: int) -> list[float]:
        """Log ratios of the first ANCHOR_PAIRS; empty until all of them are measured."""
        pairs = self.pairs(BisectStage.ANCHORS, baseline, candidate)
        found = [math.log(p.candidate_s / p.baseline_s) for p in pairs]
        return found[:ANCHOR_PAIRS] if len(found) >= ANCHOR_PAIRS else []

    def confirm(
        self, baseline: int, candidate: int, logs: Sequence[float], sign: float, why: str
    ) -> Comparison | NextBlock:
        """The gate's test of new pairs, repeated once if it does not confirm; or the next pair.

        A step as large as `logs`, those of the anchors, fails the test once in a hundred. `sign`
        is negative for a step down.
        """
        pairs = self.pairs(BisectStage.CONFIRM, baseline, candidate)
        values = np.array(logs)
        centre = abs(float(hodges_lehmann(values)))
        needed = compare.pairs_needed(centre, float(values.std(ddof=1)), 1, self.thresholds)
        enough = min(math.ceil(1.6 * (needed or MORE_PAIRS)), MORE_PAIRS)
        for start, count in ((0, enough), (enough, enough + MORE_PAIRS)):
            if len(pairs) < count:
                why = f"{why}, {count} pairs"
                return in_turns(BisectStage.CONFIRM, (baseline, candidate), len(pairs), why)
            found = judged(pairs[start:count], self.thresholds, sign=sign)
            if found.change is Change.SLOWER:
                break
        return found

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
            likely = units.percent(best.probability)
            reason = f"after {searched} blocks no commit is more than {likely} likely"
            return CommitsConclusion(reason=reason)
        position, bits = chosen
        why = f"most informative: {bits:.2f} bits expected"
        return in_turns(BisectStage.SEARCH, (0, position, self.last), searched, why)

    def probabilities(self) -> Floats:
        if posterior := self.posterior():
            return posterior.probabilities
        return np.concatenate(([0.0], np.full(self.last, 1 / self.last)))

    def posterior(self) -> Posterior | None:
        """What all blocks say; None before the anchors are measured."""
        logs = self.first_logs(0, self.last)
        if self._posterior is None and logs:
            self._posterior = Posterior(self.last, Grid.around(logs))
        if self._posterior is not None:
            for _, block in self.blocks[self._taken :]:
                self._posterior.add(block)
            self._taken = len(self.blocks)
        return self._posterior

    def _anchors(self) -> NextBlock | CommitsConclusion | None:
        """The next block of the anchors, or that they do not differ; None once they differ."""
        pairs = self.pairs(BisectStage.ANCHORS, 0, self.last)
        if why := hopeless(pairs, self.thresholds):
            return CommitsConclusion(reason=why)
        found = differ(pairs, self.thresholds)
        if found is True:
            return None
        if found is not None:
            reason = f"good and bad do not differ on this machine: {found.reason}"
            if found.smallest_effect is not None:
                least = units.percent(found.smallest_effect)
                reason += f"; a change of {least} would have been seen"
            return CommitsConclusion(reason=reason, comparison=found)
        why = "do good and bad differ on this machine?"
        return in_turns(BisectStage.ANCHORS, (0, self.last), len(pairs), why)

    def _confirm(self, cell: CommitGroup, step: float) -> NextBlock | CommitsConclusion:
        why = f"{units.percent(cell.probability)} sure: with the commit before it"
        logs = self.first_logs(0, self.last)
        found = self.confirm(cell.good, cell.bad, logs, step, why)
        if isinstance(found, NextBlock):
            return found
        confirmed = found.change is Change.SLOWER
        reason = f"{found.reason}, in {found.pairs} new pairs with the commit before it"
        if not confirmed:
            reason = f"{units.percent(cell.probability)} likely but not confirmed: {reason}"
        return CommitsConclusion(
            reason=reason,
            culprits=cell.positions,
            good=cell.good,
            probability=cell.probability,
            comparison=found,
            confirmed=confirmed,
        )


# --- comparisons of two positions --------------------------------------------------------


def in_turns(stage: BisectStage, positions: tuple[int, ...], taken: int, why: str) -> NextBlock:
    """The next block of some positions, forwards and backwards in turns."""
    order = positions if taken % 2 == 0 else positions[::-1]
    return NextBlock(stage=stage, positions=order, why=why)


def hopeless(pairs: Sequence[Pair], thresholds: Thresholds) -> str:
    """After EARLY_PAIRS of the anchors that do not differ clearly: why noise hides the effect."""
    if len(pairs) != EARLY_PAIRS:
        return ""
    logs, effect = compare.time_logs(pairs), math.log1p(thresholds.tolerance)
    centre = float(np.median(logs))
    # The largest deviation but one: a disturbed pair is none, and of five normal ones it is 0.9 sd.
    spread = float(np.sort(np.abs(logs - centre))[-2]) / 0.9
    # Shown nine times in ten, with the error that the confirmation allows.
    shown = spread * (NormalDist().inv_cdf(1 - thresholds.alpha) + NormalDist().inv_cdf(0.9))
    apart = abs(centre) > 1.25 * t_factor(EARLY_PAIRS - 1) * spread / EARLY_PAIRS**0.5
    if apart or (needed := math.ceil((shown / effect) ** 2)) <= MOST_PAIRS:
        return ""
    least = min(1.0, math.expm1(shown / MORE_PAIRS**0.5))
    return (
        f"processes scatter by {units.percent(spread / 2**0.5)}; {2 * needed:,} of them would "
        f"show a change of {units.percent(thresholds.tolerance)}. Use a quieter machine, or "
        f"--effect {least:.2g}"
    )


def differ(pairs: Sequence[Pair], thresholds: Thresholds) -> Literal[True] | Comparison | None:
    """Whether two positions differ: True, or the comparison that denies it; None requests another
    pair."""
    if len(pairs) < ANCHOR_PAIRS:
        return None
    first, order = compare.time_logs(pairs[:ANCHOR_PAIRS]), compare.swapped(pairs[:ANCHOR_PAIRS])
    low, high = compare.student_bounds(first, order, thresholds)
    apart = low > 0 or high < 0
    if apart and abs(float(hodges_lehmann(first))) > math.log1p(thresholds.practical):
        return True
    rest = pairs[ANCHOR_PAIRS:]
    if len(rest) < MORE_PAIRS:
        return None
    found = judged(rest, thresholds, sign=float(hodges_lehmann(compare.time_logs(rest))))
    return True if found.change is Change.SLOWER else found


def judged(pairs: Sequence[Pair], thresholds: Thresholds, *, sign: float) -> Comparison:
    """The gate's test; for a step down (`sign` < 0) with the two sides exchanged."""
    if sign < 0:
        pairs = [
            Pair(
                baseline_s=p.candidate_s,
                candidate_s=p.baseline_s,
                baseline_hz=p.candidate_hz,
                candidate_hz=p.baseline_hz,
                wall_s=p.wall_s,
                swapped=not p.swapped,
            )
            for p in pairs
        ]
    name = DOWN if sign < 0 else UP
    found = {name: compare.statistics(pairs, thresholds)}
    return compare.judge(found, {name: thresholds})[name]


def change(found: Comparison) -> tuple[float, float | None, float | None]:
    """Ratio of bad over good and its bounds, also if the sides were exchanged."""
    if found.case_id != DOWN:
        return found.ratio, found.low, found.high
    low, high = (None if bound is None else 1 / bound for bound in (found.high, found.low))
    return 1 / found.ratio, low, high


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
        for position in (0, self.last):
            if position not in self.values:
                why = f"value of the {'bad' if position else 'good'} commit on this machine"
                return NextBlock(stage=BisectStage.ANCHORS, positions=(position,), why=why)
        if self.values[0] == self.values[self.last]:
            return CommitsConclusion(reason="good and bad do not differ on this machine")
        low, high = self._bounds()
        chosen = most_informative(self.probabilities(), self.skipped, 0.0)
        if chosen is not None:
            left = high - low - 1
            why = f"the middle of {left} possible commit{'s'[: left != 1]}"
            return NextBlock(stage=BisectStage.SEARCH, positions=(chosen[0],), why=why)
        return CommitsConclusion(
            reason="the commit before it is good",
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
        bad = {p for p in self.values if self._is_bad(p)}
        high = min(bad, default=self.last)
        low = max((p for p in self.values if p < high), default=0)
        return low, max(high, low + 1)

    def _is_bad(self, position: int) -> bool:
        value, good = self.values[position], self.values[0]
        bad = self.values.get(self.last, good)
        return abs(value - bad) < abs(value - good)
