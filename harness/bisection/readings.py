"""What a journal holds of one search, as the search is told it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from harness.analysis.search import Look, Stage
from harness.bisection import criteria
from harness.bisection.criteria import Criterion, Unreadable
from harness.bisection.journal import Journal, LeftOut, Taken
from harness.gating.interleave import clock

TRIES = 3
"""Processes of one place that may say nothing, before it counts as one that cannot be measured."""


class Searching(Protocol):
    """What a search is told. A place is a commit's position, or a set of differences."""

    skipped: set[int]

    def add(self, stage: Stage, block: Sequence[Look]) -> None: ...


class Readings:
    """Reads processes by one criterion, and counts those that say nothing."""

    def __init__(
        self,
        journal: Journal,
        level: int,
        judged: Callable[[int, float], float] = lambda place, value: value,
    ) -> None:
        """`judged` makes of a place and what was read what the search is told."""
        self._journal = journal
        self._level = level
        self._judged = judged
        self.values: dict[int, list[float]] = {}
        """Place -> what was read there, in the order taken."""

        self._mute: dict[int, int] = {}

    @property
    def _criterion(self) -> Criterion:
        return self._journal.request.criterion

    @property
    def left_out(self) -> list[LeftOut]:
        lines = self._journal.lines
        return [x for x in lines if isinstance(x, LeftOut) and x.level == self._level]

    def retell(self, search: Searching) -> None:
        """Tell a fresh search all that was learnt before."""
        search.skipped |= {x.position for x in self.left_out}
        blocks: dict[int, list[Taken]] = {}
        for line in self._journal.lines:
            if isinstance(line, Taken) and line.level == self._level:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            looks = [k for line in block if (k := self.look(line)) is not None]
            search.add(block[0].stage, looks)

    def look(self, taken: Taken) -> Look | None:
        """What a process says; None, and counted, where it says nothing."""
        try:
            value = self._read(taken)
        except Unreadable:
            self._mute[taken.position] = self._mute.get(taken.position, 0) + 1
            return None
        self.values.setdefault(taken.position, []).append(value)
        return Look(
            position=taken.position,
            value=self._judged(taken.position, value),
            hz=clock(taken.measurement),
            wall_s=taken.measurement.wall_s or None,
        )

    def hopeless(self, taken: Taken) -> str:
        """Why a place whose process said nothing cannot be measured; empty where another process
        may say something."""
        try:
            self._read(taken)
        except Unreadable as error:
            tries = TRIES * max(1, len(self.values.get(taken.position, ())))
            if not (error.again and self._mute[taken.position] < tries):
                return str(error)
        return ""

    def first(self, place: int) -> bool:
        """Whether no process has been there."""
        return place not in self.values and place not in self._mute

    def _read(self, taken: Taken) -> float:
        least = self._journal.request.case.settings.min_samples
        return criteria.read(self._criterion, taken.measurement, least)
