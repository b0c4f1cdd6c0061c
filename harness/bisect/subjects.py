"""The two subjects of a search: the commits of a history, and the differences of two runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from harness import units
from harness.bisect import criteria, differences
from harness.bisect.builds import BuiltTrees
from harness.bisect.criteria import CriterionKind, Unreadable
from harness.bisect.ddmin import DifferencesConclusion, ExactDdmin, NoisyDdmin, members
from harness.bisect.history import Commit
from harness.bisect.journal import CommitsRequest, DifferencesRequest, Measured, Skipped
from harness.bisect.posterior import ProcessReading
from harness.bisect.processes import Processes
from harness.bisect.search import CommitsConclusion, ExactSearch, NoisySearch, Search
from harness.errors import CaseRefused, HarnessError
from harness.git.repository import Repository, read_git
from harness.machine import drift
from harness.records import Case, Run, Suite
from harness.runner.interleave import clock
from harness.store.writer import now
from harness.suite.choice import fits

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


class Differences(Subject[DifferencesConclusion]):
    """The differences of two runs; a place is the mask of those applied to the first run's case."""

    search: ExactDdmin | NoisyDdmin
    conclusion = DifferencesConclusion

    def __init__(
        self, request: DifferencesRequest, processes: Processes, roots: tuple[Path, ...]
    ) -> None:
        """`roots` are the folders of the code."""
        self._request = request
        self._roots = roots
        count, exact = len(request.causes), request.criterion.exact
        search = ExactDdmin(count) if exact else NoisyDdmin(count, request.effect)
        super().__init__(processes, 0, search, request.runs)

    def prepare(self, place: int, block: Sequence[int]) -> tuple[Case, tuple[Path, ...]]:
        request = self._request
        chosen = [request.causes[i] for i in members(place)]
        case = differences.applied(request.case, request.other, chosen)
        if self.first(place):
            try:
                self._launcher.at(self._roots).check(replace(request.suite, cases=(case,)))
            except CaseRefused as error:
                raise Unreadable(error.reason) from None
        return case, self._roots

    def commit(self, place: int) -> str:
        return self._request.commit

    def name(self, place: int) -> str:
        if place in (0, self.search.last):
            return "first run" if place == 0 else "second run"
        return "with " + ", ".join(self._request.causes[i].name for i in members(place))


def of_runs(
    first: Run,
    second: Run,
    repository: Repository | None,
    *,
    pattern: str,
    criterion: Mapping[str, str | None],
    **common: Any,
) -> DifferencesRequest:
    """The request to search the differences of two stored runs; with these fields of every request.

    Raises:
        HarnessError: A case is missing, the runs' code differs or cannot be reproduced, or nothing
            that differs can be varied.
    """
    commit = _common_commit(first, second, repository)
    cases = [one_case(run.suite, pattern, run.run_id) for run in (first, second)]
    chosen = criteria.chosen(cases[0], criterion)
    variables = differences.variables(first.environment, second.environment)
    inherited = differences.inherited(*variables)
    one, other = (
        criteria.prepared(differences.complete(case, around, inherited), chosen)
        for case, around in zip(cases, variables, strict=True)
    )
    varied = tuple(differences.of_cases(one, other))
    if not varied:
        known = drift.differences(first.environment, second.environment)
        listed = "".join(f"\n  {d}" for d in known) or " nothing that is recorded"
        raise HarnessError(
            f"{first.run_id} and {second.run_id} do not differ in anything that can be varied here",
            f"They differ in:{listed}",
        )
    return DifferencesRequest(
        started_at=now(),
        suite=replace(first.suite, cases=(cases[0],)),
        case=one,
        other=other,
        runs=(first.run_id, second.run_id),
        causes=varied,
        environments=(first.environment, second.environment),
        criterion=chosen,
        inherited=inherited,
        commit=commit,
        repository=str(repository.root) if repository else "",
        **common,
    )


def one_case(suite: Suite, pattern: str, origin: str) -> Case:
    """The only case that matches a pattern; `origin` names the suite in a message.

    Raises:
        HarnessError: No case matches, or several do.
    """
    found = [c for c in suite.cases if c.case_id == pattern]
    found = found or [c for c in suite.cases if fits(c.case_id, pattern)]
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in (found or suite.cases)[:SHOWN_CASES])
        raise HarnessError(
            f"--case {pattern or '(none)'} matches {len(found)} cases of {origin}; a bisection "
            "needs exactly one",
            f"Some of the {'matches' if found else 'cases'}:\n  {ids}",
        )
    return found[0]


def _common_commit(first: Run, second: Run, repository: Repository | None) -> str:
    """The commit of both runs; empty if their code is that of the working tree as it is."""
    one, other = (run.environment.git for run in (first, second))
    if one is None or other is None:
        if one is not other:
            raise HarnessError(f"only one of {first.run_id} and {second.run_id} has a commit")
        return ""
    if one.commit != other.commit:
        good, bad = one.commit[:10], other.commit[:10]
        raise HarnessError(
            f"the runs have two commits, {good} and {bad}",
            f"Find the commit instead: harness bisect SUITE --good {good} --bad {bad}",
        )
    if not (one.dirty_sha256 or other.dirty_sha256):
        if repository is None:
            raise HarnessError(
                f"no repository with {one.commit[:10]} here", "Run this inside its clone."
            )
        return repository.commit(one.commit)
    here = read_git(repository.root) if repository else None
    code = {(git.commit, git.dirty_sha256) for git in (one, other, here) if git}
    if here is None or len(code) > 1:
        raise HarnessError(
            "the runs used uncommitted code, so they cannot be reproduced",
            "Commit the code, then repeat both runs.",
        )
    return ""
