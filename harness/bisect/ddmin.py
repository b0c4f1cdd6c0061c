"""Finds which of several differences between two configurations move a number. Pure.

A configuration is a set of differences, written as a bit mask: 0 is the first one, all bits the
second. Delta debugging finds a smallest set of differences that moves the number from its value
in the first configuration to its value in the second. If the two still differ after that set is
applied, the search continues among the rest.

Source: Zeller & Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28 (2002),
the algorithm ddmin.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from harness.analysis import comparison as compare
from harness.bisect.posterior import Grid, Posterior
from harness.bisect.search import (
    BisectStage,
    Block,
    ExactValues,
    NextBlock,
    NoisyBlocks,
    differ,
    hopeless,
    in_turns,
    judged,
)
from harness.records import Change, Comparison

SURE = 0.99
"""Probability at which a set is decided to move the number, or not to."""
MAX_BLOCKS = 10
"""Of one set. A set that is undecided by then moves the number in part and is not the answer."""
FEWEST_LOGS = 3
"""Blocks needed to estimate the step of a set."""
AGAIN = "measured again, the two configurations"


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingSet:
    """A smallest set of differences that moves the number."""

    base: int
    """Mask of the differences applied before."""
    mask: int
    """The set itself."""
    confirmed: bool
    comparison: Comparison | None = None
    """With the set against without it; None if the criterion is exact."""

    @property
    def items(self) -> tuple[int, ...]:
        return members(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferencesConclusion:
    """The result of a search for differences."""

    reason: str
    parts: tuple[MovingSet, ...] = ()
    whole: bool = False
    """Whether the configurations are equal after all parts are applied."""

    @property
    def found(self) -> bool:
        return self.whole and bool(self.parts) and all(p.confirmed for p in self.parts)


class NotMeasured(Exception):
    """A set must be measured before it is known whether it moves the number."""

    def __init__(self, mask: int, whole: int) -> None:
        """`whole` is the set to compare it with."""
        super().__init__(mask, whole)
        self.mask = mask
        self.whole = whole


def members(mask: int) -> tuple[int, ...]:
    """The differences in a set, by number."""
    return tuple(i for i in range(mask.bit_length()) if mask >> i & 1)


def mask_of(items: Sequence[int]) -> int:
    """The set of these differences."""
    return sum(1 << i for i in items)


def minimal(items: Sequence[int], moves: Callable[[int], bool]) -> int:
    """ddmin: a set that no difference can be removed from.

    Args:
        items: Differences that together move the number; the most suspect first.
        moves: Whether a set does. It may raise; the next call asks in the same order.
    """
    left, parts = tuple(items), 2
    while len(left) > 1:
        pieces = [left[i * len(left) // parts : (i + 1) * len(left) // parts] for i in range(parts)]
        piece = next((p for p in pieces if moves(mask_of(p))), None)
        if piece is not None:
            left, parts = piece, 2
            continue
        rests = [tuple(i for i in left if i not in p) for p in pieces] if parts > 2 else []
        rest = next((r for r in rests if moves(mask_of(r))), None)
        if rest is not None:
            left, parts = rest, max(parts - 1, 2)
        elif parts < len(left):
            parts = min(2 * parts, len(left))
        else:
            break
    return mask_of(left)


class ExactDdmin(ExactValues):
    """Finds differences by an exact criterion: one process per configuration."""

    def __init__(self, count: int) -> None:
        super().__init__((1 << count) - 1)

    def next(self) -> NextBlock | DifferencesConclusion:
        if asked := self.anchor("first configuration", "second configuration"):
            return asked
        if self.values[0] == self.values[self.last]:
            return DifferencesConclusion(reason=f"{AGAIN} do not differ")
        base, parts = 0, []
        while self.values[base] != self.values[self.last]:
            rest = [i for i in members(self.last) if not base >> i & 1]
            try:
                mask = minimal(rest, lambda m, base=base: self._moves(base, m))  # type: ignore[misc]
                self._value(base | mask)
            except NotMeasured as need:
                why = f"do {len(members(need.mask & ~base))} of {len(rest)} differences move it?"
                return NextBlock(stage=BisectStage.SEARCH, positions=(need.mask,), why=why)
            parts.append(MovingSet(base=base, mask=mask, confirmed=True))
            base |= mask
        reason = "each set was measured with and without"
        return DifferencesConclusion(reason=reason, parts=tuple(parts), whole=True)

    def decided(self, mask: int) -> bool | None:
        """Whether a configuration is nearer to the second; None if it was not measured."""
        return None if mask not in self.values else self._moves(0, mask)

    def _moves(self, base: int, mask: int) -> bool:
        together = base | mask
        if together in self.skipped:
            return False
        value = self._value(together)
        return abs(value - self.values[self.last]) < abs(value - self.values[base])

    def _value(self, mask: int) -> float:
        if mask not in self.values:
            raise NotMeasured(mask, self.last)
        return self.values[mask]


class NoisyDdmin(NoisyBlocks):
    """Finds differences by readings with noise, in blocks of three configurations: the base, the
    base with a set, and the second one."""

    def __init__(self, count: int, effect: float) -> None:
        super().__init__((1 << count) - 1, effect)
        self.thresholds = replace(self.thresholds, build_cv=0.0)  # all are of one commit
        self._chances: dict[tuple[int, int, int, int], float] = {}

    def next(self) -> NextBlock | DifferencesConclusion:
        base, parts = 0, list[MovingSet]()
        while base != self.last:
            ends = self.pairs(BisectStage.ANCHORS, base, self.last)
            if not base and (hidden := hopeless(ends, self.thresholds)):
                return DifferencesConclusion(reason=hidden)
            if isinstance(asked := self._ends(base), NextBlock):
                return asked
            if asked is not None:
                reason = asked.reason
                if not parts:
                    reason = f"{AGAIN} do not differ: {reason}"
                return DifferencesConclusion(reason=reason, parts=tuple(parts), whole=bool(parts))
            rest = [i for i in members(self.last) if not base >> i & 1]
            try:
                mask = self._smallest(base, rest)
            except NotMeasured as need:
                some, all_ = (len(members(m & ~base)) for m in (need.mask, need.whole))
                positions = (base, base | need.mask, base | need.whole)
                taken = len(self._tests(base, need.mask, need.whole))
                why = f"do {some} of {all_} differences move it?"
                return in_turns(BisectStage.SEARCH, positions, taken, why)
            logs, why = self.first_logs(base, self.last), "with the set against without it"
            found = self.confirm(base, base | mask, logs, sum(logs), why)
            if isinstance(found, NextBlock):
                return found
            confirmed = found.change is Change.SLOWER
            parts.append(MovingSet(base=base, mask=mask, confirmed=confirmed, comparison=found))
            if not confirmed:
                reason = f"not confirmed: {found.reason}"
                return DifferencesConclusion(reason=reason, parts=tuple(parts))
            base |= mask
        reason = "all differences that can be varied"
        return DifferencesConclusion(reason=reason, parts=tuple(parts), whole=True)

    def decided(self, mask: int) -> bool | None:
        """Whether a configuration moves the number; None if it was not measured."""
        chance = self._probability(0, mask, self.last)
        return None if chance is None else chance >= 0.5

    def _probability(self, base: int, mask: int, whole: int) -> float | None:
        """Probability that a set moves the number as far as a larger set does, from what was
        measured until the two were last compared."""
        tests = self._tests(base, mask, whole)
        if not tests:
            return None
        key = base, mask, whole, tests[-1]
        if key not in self._chances:
            known = self.blocks[: tests[-1] + 1]
            grid = self._grid(base, whole, known)
            if grid is None:
                return 0.5
            posterior = Posterior(2, grid)
            place = {base: 0, base | mask: 1, base | whole: 2}
            for _, block in known:
                compared = [k for k in block if k.position in place]
                posterior.add([replace(k, position=place[k.position]) for k in compared])
            self._chances[key] = float(posterior.probabilities[1])
        return self._chances[key]

    # --- the next block ---

    def _ends(self, base: int) -> NextBlock | Comparison | None:
        """The next block of the base and the second configuration, or the comparison that shows
        no difference; None once they differ."""
        pairs = self.pairs(BisectStage.ANCHORS, base, self.last)
        if base and (logs := self.first_logs(base, self.last)):
            order = compare.swapped(pairs)
            times = compare.time_logs(pairs)
            low, high = compare.student_bounds(times, order, self.thresholds)
            if max(abs(low), abs(high)) < math.log1p(self.thresholds.tolerance) and abs(
                sum(logs) / len(logs)
            ) < math.log1p(self.thresholds.practical):
                return judged(pairs, self.thresholds, sign=1.0)
        found = differ(pairs, self.thresholds)
        if found is not None:
            return None if found is True else found
        why = "does a difference remain?" if base else "do the configurations differ here?"
        return in_turns(BisectStage.ANCHORS, (base, self.last), len(pairs), why)

    def _smallest(self, base: int, rest: Sequence[int]) -> int:
        """A smallest set that moves the number as far as all differences do, without members that
        add nothing to the set; those matter if the set is only a part of the difference."""
        mask = minimal(rest, lambda m: self._moves(base, m, self.last))
        return minimal(members(mask), lambda m: self._moves(base, m, mask))

    def _moves(self, base: int, mask: int, whole: int) -> bool:
        if base | mask in self.skipped:
            return False
        if base | mask == base | whole:
            return True
        chance = self._probability(base, mask, whole)
        tests = len(self._tests(base, mask, whole))
        if chance is None or (1 - SURE < chance < SURE and tests < MAX_BLOCKS):
            raise NotMeasured(mask, whole)
        return chance >= SURE

    def _tests(self, base: int, mask: int, whole: int) -> list[int]:
        """The numbers of the blocks in which a set was compared with a larger one."""
        wanted = {base, base | mask, base | whole}
        return [
            n
            for n, (stage, block) in enumerate(self.blocks)
            if stage is BisectStage.SEARCH and {k.position for k in block} == wanted
        ]

    def _grid(self, base: int, whole: int, blocks: Sequence[Block]) -> Grid | None:
        """Steps and noise to consider; None if too little is known of the step."""
        ends = Grid.around(self.first_logs(base, self.last))
        if base | whole == self.last:
            return ends
        logs = []
        for _, block in blocks:
            by = {k.position: k.value for k in block}
            if base in by and base | whole in by:
                logs.append(math.log(by[base | whole] / by[base]))
        return Grid(Grid.around(logs).steps, ends.scales) if len(logs) >= FEWEST_LOGS else None
