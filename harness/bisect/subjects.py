"""The two subjects of a search: the commits of a history, and the differences of two runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Generic, TypeVar

from harness import units
from harness.bisect import criteria
from harness.bisect.builds import BuiltTrees
from harness.bisect.criteria import CriterionKind, Unreadable
from harness.bisect.history import Commit
from harness.bisect.journal import CommitsRequest, Measured, Skipped
from harness.bisect.posterior import ProcessReading
from harness.bisect.processes import Processes
from harness.bisect.search import CommitsConclusion, ExactSearch, NoisySearch, Search
from harness.errors import CaseRefused, HarnessError
from harness.records import Case
from harness.runner.interleave import clock

TRIES = 3
"""Processes of one place without a reading, after which it counts as not measurable."""
SHOWN_CASES = 5

End = TypeVar("End", covariant=True)


class Subject(ABC, Generic[End]):
    """What a session searches, and the readings of its processes by the criterion.

    A place is a commit's position or the mask of a set of differences.
    """

    search: Search[End]
    conclusion: Callable[..., End]
    """Makes the conclusion of a search that ends without an answer, of its reason."""

    def __init__(
        self, processes: Processes, level: int, search: Search[End], ends: tuple[str, str]
    ) -> None:
        """Give a new search everything that the journal has. `ends` are the names of the first and
        the last place; both must be measurable."""
        self._journal = processes.journal
        self._launcher = processes.launcher
        self.level = level
        self.search = search
        self.ends = ((0, ends[0]), (search.last, ends[1]))
        self.values: dict[int, list[float]] = {}
        """Place -> the values read there, in the order measured."""
        self._unreadable: dict[int, int] = {}
        search.skipped |= {x.position for x in self.skipped}
        blocks: dict[int, list[Measured]] = {}
        for line in self._journal.lines:
            if isinstance(line, Measured) and line.level == level and line.block >= 0:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            found = [self.read(line) for line in block]
            search.add(block[0].stage, [r for r in found if isinstance(r, ProcessReading)])

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        lines = self._journal.lines
        return tuple(x for x in lines if isinstance(x, Skipped) and x.level == self.level)

    def read(self, measured: Measured) -> ProcessReading | Unreadable:
        """The reading of a process; or why it has none, and whether another one may have."""
        place, measurement = measured.position, measured.measurement
        request = self._journal.request
        try:
            least = request.case.settings.min_samples
            value = criteria.read(request.criterion, measurement, least)
        except Unreadable as error:
            count = self._unreadable[place] = self._unreadable.get(place, 0) + 1
            error.again &= count < TRIES * max(1, len(self.values.get(place, ())))
            return error
        self.values.setdefault(place, []).append(value)
        wall_s = measurement.wall_s or None
        return ProcessReading(position=place, value=value, hz=clock(measurement), wall_s=wall_s)

    def first(self, place: int) -> bool:
        """Whether no process of a place was measured yet."""
        return place not in self.values and place not in self._unreadable

    @abstractmethod
    def prepare(self, place: int, block: Sequence[int]) -> tuple[Case, tuple[Path, ...]]:
        """The case and the folders of the code to measure at a place, while all places of the block
        stay prepared.

        Raises:
            BuildFailed: The code cannot be built.
            Unreadable: The code does not have the case.
        """

    @abstractmethod
    def commit(self, place: int) -> str: ...

    @abstractmethod
    def name(self, place: int) -> str:
        """For a line of the log."""

    def remark(self) -> str:
        """What the log adds after each process."""
        return ""


class Commits(Subject[CommitsConclusion]):
    """A history of commits; a place is a position in it."""

    search: ExactSearch | NoisySearch
    conclusion = CommitsConclusion

    def __init__(
        self,
        request: CommitsRequest,
        processes: Processes,
        trees: BuiltTrees,
        level: int,
        history: tuple[Commit, ...],
    ) -> None:
        """`level` is 0 for the requested history, 1 for the merged side of its culprit, ..."""
        self._request = request
        self._trees = trees
        self.history = history
        last = len(history) - 1
        exact = request.criterion.exact
        search = ExactSearch(last) if exact else NoisySearch(last, request.effect)
        super().__init__(processes, level, search, ("the good commit", "the bad commit"))

    def prepare(self, place: int, block: Sequence[int]) -> tuple[Case, tuple[Path, ...]]:
        request = self._request
        keep = [self.commit(p) for p in {0, self.search.last, *block}]
        tree = self._trees.of(self.commit(place), keep)
        roots = tuple((tree / root).resolve() for root in request.roots)
        if self.first(place):
            try:
                self._launcher.at(roots).check(replace(request.suite, cases=(request.case,)))
            except CaseRefused as error:
                raise Unreadable(f"it does not have the case: {error.reason}") from None
            except HarnessError as error:
                if request.criterion.kind is not CriterionKind.OUTCOME:
                    raise Unreadable(error.problem) from None
        return request.case, roots

    def commit(self, place: int) -> str:
        return self.history[place].sha

    def name(self, place: int) -> str:
        return self.history[place].short

    def remark(self) -> str:
        if len(self.history) == 2:
            return ""
        chances = self.search.probabilities()
        best = int(chances.argmax())
        return f"; {self.name(best)} {units.percent(chances[best])} likely"
