"""Reads a journal's processes by the criterion, for the search."""

from typing import Any

from harness.bisect import criteria
from harness.bisect.criteria import Unreadable
from harness.bisect.journal import Journal, Measured, Skipped
from harness.bisect.search import ProcessReading, Search
from harness.runner.interleave import clock

TRIES = 3
"""Processes of one place without a reading, after which it counts as not measurable."""


class JournalReadings:
    """Reads processes by the criterion and counts those without a reading.

    A place is a commit's position or the mask of a set of differences.
    """

    def __init__(self, journal: Journal, level: int) -> None:
        self._journal = journal
        self._level = level
        self.values: dict[int, list[float]] = {}
        """Place -> the values read there, in the order measured."""
        self._unreadable: dict[int, int] = {}

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        lines = self._journal.lines
        return tuple(x for x in lines if isinstance(x, Skipped) and x.level == self._level)

    def replay(self, search: Search[Any]) -> None:
        """Give a new search everything that the journal has."""
        search.skipped |= {x.position for x in self.skipped}
        blocks: dict[int, list[Measured]] = {}
        for line in self._journal.lines:
            if isinstance(line, Measured) and line.level == self._level:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            readings = [r for line in block if (r := self.read(line)) is not None]
            search.add(block[0].stage, readings)

    def read(self, measured: Measured) -> ProcessReading | None:
        """The reading of a process; None, and counted, if it has none."""
        try:
            value = self._value(measured)
        except Unreadable:
            count = self._unreadable.get(measured.position, 0)
            self._unreadable[measured.position] = count + 1
            return None
        self.values.setdefault(measured.position, []).append(value)
        return ProcessReading(
            position=measured.position,
            value=value,
            hz=clock(measured.measurement),
            wall_s=measured.measurement.wall_s or None,
        )

    def why_skip(self, measured: Measured) -> str:
        """Why the place of a process without a reading cannot be measured; empty if another process
        may have one."""
        try:
            self._value(measured)
        except Unreadable as error:
            tries = TRIES * max(1, len(self.values.get(measured.position, ())))
            if not (error.again and self._unreadable[measured.position] < tries):
                return str(error)
        return ""

    def first(self, place: int) -> bool:
        """Whether no process of a place was measured yet."""
        return place not in self.values and place not in self._unreadable

    def _value(self, measured: Measured) -> float:
        request = self._journal.request
        least = request.case.settings.min_samples
        return criteria.read(request.criterion, measured.measurement, least)
