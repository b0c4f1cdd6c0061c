"""Which of several differences between two configurations move a number. Pure.

A configuration is a set of differences, written as a bit mask: 0 is the first one, all bits the
second. Delta debugging finds a smallest set of differences that moves the number from where the
first configuration has it to where the second has it. If the two still differ once that set is
applied, another set is looked for among the rest, and so on.

Source: Zeller & Hildebrandt, Simplifying and isolating failure-inducing input, IEEE TSE 28 (2002),
the algorithm ddmin.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis import compare
from harness.analysis.compare import Change, Comparison
from harness.analysis.posterior import Grid, Posterior, Reading
from harness.analysis.search import (
    Ask,
    Block,
    Look,
    Stage,
    confirmation,
    differ,
    first_logs,
    pairs_of,
    pairs_to_confirm,
    thresholds_for,
)

SURE = 0.99
"""Probability at which a set counts as moving the number, or as not."""
MAX_BLOCKS = 10
"""Of one set. One that is undecided by then moves the number in part, and is not the set."""
FEWEST_LOGS = 3
"""Blocks from which the step of a set is guessed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A smallest set of differences that moves the number."""

    base: int
    """Mask of what was applied before."""
    mask: int
    """The set."""
    confirmed: bool
    comparison: Comparison | None = None
    """With the set against without it; None where the criterion is exact."""

    @property
    def items(self) -> tuple[int, ...]:
        return members(self.mask)


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The end of a search."""

    reason: str
    parts: tuple[Part, ...] = ()
    whole: bool = False
    """Whether nothing of the difference is left once all parts are applied."""

    @property
    def found(self) -> bool:
        return self.whole and bool(self.parts) and all(p.confirmed for p in self.parts)


class Unknown(Exception):
    """Whether a set moves the number must be measured first."""

    def __init__(self, mask: int, whole: int) -> None:
        """`whole` is the set that it is compared with."""
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
    """ddmin: a set of which nothing can be left out.

    Args:
        items: Differences that together move the number; the most suspect first.
        moves: Whether a set does. It may raise: asked again, the same questions come again.
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


class ExactCauses:
    """By a criterion without noise: one process a configuration."""

    def __init__(self, count: int) -> None:
        self.full = (1 << count) - 1
        self.skipped: set[int] = set()
        self._values: dict[int, float] = {}

    def add(self, stage: Stage, block: Sequence[Look]) -> None:
        for look in block:
            self._values[look.position] = look.value

    def next(self) -> Ask | Causes:
        for mask, name in ((0, "first"), (self.full, "second")):
            if mask not in self._values:
                why = f"what is it in the {name} configuration here?"
                return Ask(stage=Stage.ANCHORS, positions=(mask,), why=why)
        if self._values[0] == self._values[self.full]:
            return Causes(reason="measured again, the two configurations do not differ in it")
        base, parts = 0, []
        while self._values[base] != self._values[self.full]:
            rest = [i for i in members(self.full) if not base >> i & 1]
            try:
                mask = minimal(rest, lambda m, base=base: self._moves(base, m))  # type: ignore[misc]
                self._value(base | mask)
            except Unknown as need:
                why = f"do {len(members(need.mask & ~base))} of {len(rest)} differences do it?"
                return Ask(stage=Stage.SEARCH, positions=(need.mask,), why=why)
            parts.append(Part(base=base, mask=mask, confirmed=True))
            base |= mask
        return Causes(reason="measured, each set with and without", parts=tuple(parts), whole=True)

    def decided(self, mask: int) -> bool | None:
        """Whether a configuration is nearer to the second; None where it was not measured."""
        return None if mask not in self._values else self._moves(0, mask)

    def _moves(self, base: int, mask: int) -> bool:
        together = base | mask
        if together in self.skipped:
            return False
        value = self._value(together)
        return abs(value - self._values[self.full]) < abs(value - self._values[base])

    def _value(self, mask: int) -> float:
        if mask not in self._values:
            raise Unknown(mask, self.full)
        return self._values[mask]


class NoisyCauses:
    """By readings with noise, in blocks: the base, the base and a set, the second configuration."""

    def __init__(self, count: int, effect: float) -> None:
        """`effect` is the smallest change worth finding, as a fraction."""
        self.full = (1 << count) - 1
        self.skipped: set[int] = set()
        self.thresholds = thresholds_for(effect)
        self._effect = effect
        self._blocks: list[Block] = []
        self._chances: dict[tuple[int, int, int, int], float] = {}

    def add(self, stage: Stage, block: Sequence[Look]) -> None:
        self._blocks.append((stage, tuple(block)))

    def next(self) -> Ask | Causes:
        base, parts = 0, list[Part]()
        while base != self.full:
            if isinstance(asked := self._ends(base), Ask):
                return asked
            if asked is not None:
                reason = asked.reason
                if not parts:
                    reason = f"measured again, the two configurations do not differ: {reason}"
                return Causes(reason=reason, parts=tuple(parts), whole=bool(parts))
            rest = [i for i in members(self.full) if not base >> i & 1]
            try:
                mask = self._smallest(base, rest)
            except Unknown as need:
                return self._search(base, need)
            found = self._confirm(base, mask)
            if isinstance(found, Ask):
                return found
            confirmed = found.change is Change.SLOWER
            parts.append(Part(base=base, mask=mask, confirmed=confirmed, comparison=found))
            if not confirmed:
                return Causes(reason=f"not confirmed: {found.reason}", parts=tuple(parts))
            base |= mask
        return Causes(reason="all that could be varied", parts=tuple(parts), whole=True)

    def decided(self, mask: int) -> bool | None:
        """Whether a configuration moves the number; None where that was not measured."""
        chance = self._probability(0, mask, self.full)
        return None if chance is None else chance >= 0.5

    def _probability(self, base: int, mask: int, whole: int) -> float | None:
        """That a set moves the number to where a larger one does, and not but to the base, by what
        had been measured when the two were last held against each other."""
        tests = self._tests(base, mask, whole)
        if not tests:
            return None
        key = base, mask, whole, tests[-1]
        if key not in self._chances:
            known = self._blocks[: tests[-1] + 1]
            grid = self._grid(base, whole, known)
            if grid is None:
                return 0.5
            posterior = Posterior(2, grid)
            place = {base: 0, base | mask: 1, base | whole: 2}
            for _, block in known:
                looks = [k for k in block if k.position in place]
                posterior.add([Reading(place[k.position], math.log(k.value)) for k in looks])
            self._chances[key] = float(posterior.probabilities[1])
        return self._chances[key]

    # --- what is asked ---

    def _ends(self, base: int) -> Ask | Comparison | None:
        """What is still to be known of the base and the second configuration; None where they
        differ."""
        pairs = pairs_of(self._blocks, base, self.full, Stage.ANCHORS)
        if base and (logs := first_logs(pairs)):
            low, high = compare.student_bounds(compare.time_logs(pairs), self.thresholds.alpha)
            if max(abs(low), abs(high)) < math.log1p(self._effect) and abs(
                sum(logs) / len(logs)
            ) < math.log1p(self.thresholds.practical):
                statistics = compare.statistics(pairs, self.thresholds)
                return compare.judge({"rest": statistics}, self.thresholds)["rest"]
        found = differ(pairs, self.thresholds)
        if found is not None:
            return None if found is True else found
        order = (base, self.full) if len(pairs) % 2 == 0 else (self.full, base)
        why = "is there more?" if base else "do the two configurations differ here?"
        return Ask(stage=Stage.ANCHORS, positions=order, why=why)

    def _smallest(self, base: int, rest: Sequence[int]) -> int:
        """A smallest set that moves the number to where all differences have it; less what adds
        nothing to the set itself, which matters where the set does a part of it."""
        mask = minimal(rest, lambda m: self._moves(base, m, self.full))
        return minimal(members(mask), lambda m: self._moves(base, m, mask))

    def _moves(self, base: int, mask: int, whole: int) -> bool:
        if base | mask in self.skipped:
            return False
        if base | mask == base | whole:
            return True
        chance = self._probability(base, mask, whole)
        tests = len(self._tests(base, mask, whole))
        if chance is None or (1 - SURE < chance < SURE and tests < MAX_BLOCKS):
            raise Unknown(mask, whole)
        return chance >= SURE

    def _search(self, base: int, need: Unknown) -> Ask:
        taken = len(self._tests(base, need.mask, need.whole))
        order = (base, base | need.mask, base | need.whole)
        some, all_ = (len(members(m & ~base)) for m in (need.mask, need.whole))
        return Ask(
            stage=Stage.SEARCH,
            positions=order if taken % 2 == 0 else order[::-1],
            why=f"do {some} of {all_} differences do it?",
        )

    def _tests(self, base: int, mask: int, whole: int) -> list[int]:
        """The blocks in which a set was held against a larger one, by number."""
        wanted = {base, base | mask, base | whole}
        return [
            n
            for n, (stage, block) in enumerate(self._blocks)
            if stage is Stage.SEARCH and {k.position for k in block} == wanted
        ]

    def _grid(self, base: int, whole: int, blocks: Sequence[Block]) -> Grid | None:
        """Steps and noise that are thought possible; None where too little is known of the step."""
        ends = Grid.around(first_logs(pairs_of(self._blocks, base, self.full, Stage.ANCHORS)))
        if base | whole == self.full:
            return ends
        logs = []
        for _, block in blocks:
            by = {k.position: k.value for k in block}
            if base in by and base | whole in by:
                logs.append(math.log(by[base | whole] / by[base]))
        return Grid(Grid.around(logs).steps, ends.scales) if len(logs) >= FEWEST_LOGS else None

    def _confirm(self, base: int, mask: int) -> Ask | Comparison:
        pairs = pairs_of(self._blocks, base, base | mask, Stage.CONFIRM)
        ends = first_logs(pairs_of(self._blocks, base, self.full, Stage.ANCHORS))
        enough = pairs_to_confirm(ends, self.thresholds)
        found = confirmation(pairs, enough, self.thresholds, sign=sum(ends))
        if isinstance(found, Comparison):
            return found
        order = (base, base | mask)
        return Ask(
            stage=Stage.CONFIRM,
            positions=order if len(pairs) % 2 == 0 else order[::-1],
            why=f"the set against the same without it, {found} pairs",
        )
