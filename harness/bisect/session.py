"""Carries a search out: prepares, measures and records block after block until it concludes.

The searches decide from what the journal has, so a search that was killed resumes from its journal.
The harness and the suite are those of this checkout; a commit's worktree supplies the code that the
suite's factory names, and all that it imports.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness import units
from harness.bisect import criteria, history
from harness.bisect.builds import BuildFailed, BuiltTrees
from harness.bisect.criteria import CriterionKind, Unreadable
from harness.bisect.culprit import Explained, ProfileChange, explained, profile_change, profiled
from harness.bisect.history import Commit
from harness.bisect.journal import BisectRequest, Journal, Measured, MergeEntered, Note, Skipped
from harness.bisect.posterior import ProcessReading
from harness.bisect.processes import Processes, Resources, Stopped, opened
from harness.bisect.search import (
    BisectStage,
    CommitsConclusion,
    ExactSearch,
    NextBlock,
    NoisySearch,
)
from harness.errors import CaseRefused, HarnessError
from harness.git.repository import Repository
from harness.git.worktrees import workplace
from harness.records import Case, Measurement, Outcome
from harness.runner.interleave import clock

TITLES = {
    BisectStage.ANCHORS: "Do the good and the bad commit differ on this machine?",
    BisectStage.SEARCH: "Which commits between them are bad?",
    BisectStage.CONFIRM: "New pairs of the most likely commit and the one before it:",
    BisectStage.PROFILE: "What the commit changed: a profile of it and of the one before it",
}
TRIES = 3
"""Processes of one place without a reading, after which it counts as not measurable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedHistory:
    """One history that was searched."""

    history: tuple[Commit, ...]
    conclusion: CommitsConclusion
    probabilities: tuple[float, ...]
    skipped: tuple[Skipped, ...]
    values: tuple[tuple[float, ...], ...]
    """Of each commit, in the order measured."""
    step: float | None = None
    """Bad over good, as a ratio; None if the criterion is exact."""
    noise: float | None = None
    """Of one process, as a fraction."""
    summary: str = ""
    """Which files the culprit changed; empty without a culprit."""
    explained: Explained | None = None
    profile: ProfileChange | None = None
    """Of the culprit against the commit before it; None without a culprit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectResult:
    """What a search found, or why it ended without a commit."""

    folder: Path
    request: BisectRequest
    levels: tuple[SearchedHistory, ...]
    processes: int
    wall_s: float
    """Of this command, without those that it resumes."""
    notes: tuple[str, ...] = ()
    resumable: bool = False

    @property
    def found(self) -> bool:
        return self.levels[0].conclusion.found

    @property
    def culprit(self) -> Commit | None:
        """The first bad commit; for a merge that was entered, the one on its side if found."""
        found = [v for v in self.levels if v.conclusion.found]
        if not self.found:
            return None
        return found[-1].history[found[-1].conclusion.culprits[0]]


class SearchLevel:
    """One history that is searched; its places are positions of commits."""

    def __init__(
        self, processes: Processes, trees: BuiltTrees, number: int, history: tuple[Commit, ...]
    ) -> None:
        """Give a new search everything that the journal has. `number` is 0 for the requested
        history, 1 for the merged side of its culprit, and so on."""
        self._journal = processes.journal
        self._launcher = processes.rig.launcher
        self._trees = trees
        self.number = number
        self.history = history
        request, last = self._journal.request, len(history) - 1
        exact = request.criterion.exact
        self.search = ExactSearch(last) if exact else NoisySearch(last, request.effect)
        self.values: dict[int, list[float]] = {}
        """Place -> the values read there, in the order measured."""
        self._unreadable: dict[int, int] = {}
        self.search.skipped |= {x.position for x in self.skipped}
        blocks: dict[int, list[Measured]] = {}
        for line in self._journal.lines:
            if isinstance(line, Measured) and line.level == number and line.block >= 0:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            found = [self.read(line) for line in block]
            self.search.add(block[0].stage, [r for r in found if isinstance(r, ProcessReading)])

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        lines = self._journal.lines
        return tuple(x for x in lines if isinstance(x, Skipped) and x.level == self.number)

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

    def prepare(self, place: int, block: Sequence[int]) -> tuple[Case, tuple[Path, ...]]:
        """The case and the folders of the code to measure at a place, while all places of the block
        stay prepared.

        Raises:
            BuildFailed: The code cannot be built.
            Unreadable: The code does not have the case.
        """
        request = self._journal.request
        keep = [self.history[p].sha for p in {0, self.search.last, *block}]
        tree = self._trees.of(self.history[place].sha, keep)
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

    def remark(self) -> str:
        """What the log adds after each process."""
        if len(self.history) == 2:
            return ""
        chances = self.search.probabilities()
        best = int(chances.argmax())
        return f"; {self.history[best].short} {units.percent(chances[best])} likely"


def run(start: BisectRequest | Journal, resources: Resources) -> BisectResult:
    """Start a search or resume the one of a journal, until it concludes or the budget is spent.

    Raises:
        HarnessError: The machine is not the one of the journal, or nothing can be measured.
        KeyboardInterrupt: Ctrl-C or SIGTERM; measurements are kept, worktrees are removed.
    """
    request = start.request if isinstance(start, Journal) else start
    repository = Repository.around(Path(request.repository))
    with ExitStack() as stack:
        processes = opened(stack, start, resources, repository.worktrees())
        request = processes.journal.request
        resources.say(f"{processes.journal.folder.name}: {request}")
        folder = stack.enter_context(workplace(repository))
        trees = BuiltTrees(repository, folder, request.build, processes.journal.folder / "logs")
        return _commits(request, processes, repository, trees)


def _commits(
    request: BisectRequest, processes: Processes, repository: Repository, trees: BuiltTrees
) -> BisectResult:
    """Search the history and, if requested, the merged side of its culprit, and so on."""
    commits, levels, resumable = request.history, list[SearchedHistory](), False
    while commits:
        level = SearchLevel(processes, trees, len(levels), commits)
        conclusion, resumable = _conclude(processes, level)
        levels.append(_searched(processes, level, conclusion, repository))
        commits = ()
        if conclusion.found and request.enter_merges:
            culprit = level.history[conclusion.culprits[0]]
            commits = _merged_side(processes, repository, culprit, len(levels))
    wall_s = time.monotonic() - processes.started
    taken = len(processes.measured)
    processes.log(f"ended after {taken} processes, {units.duration(wall_s)} in this command")
    return BisectResult(
        folder=processes.journal.folder,
        request=request,
        levels=tuple(levels),
        processes=taken,
        wall_s=wall_s,
        notes=tuple(x.text for x in processes.journal.lines if isinstance(x, Note)),
        resumable=resumable,
    )


def _merged_side(
    processes: Processes, repository: Repository, culprit: Commit, level: int
) -> tuple[Commit, ...]:
    """The history to search next; empty if the culprit is not a merge of another history."""
    entered = [x for x in processes.journal.lines if isinstance(x, MergeEntered)]
    if level <= len(entered):
        return entered[level - 1].history
    commits = history.merged_side(repository, culprit) if culprit.merge else ()
    if commits:
        processes.journal.write(MergeEntered(merge=culprit.sha, history=commits))
        processes.log(f"{culprit.short} is a merge of {len(commits) - 1} commits; searching them")
    return commits


def _searched(
    processes: Processes,
    level: SearchLevel,
    conclusion: CommitsConclusion,
    repository: Repository,
) -> SearchedHistory:
    search, values = level.search, level.values
    learnt = search.posterior() if isinstance(search, NoisySearch) else None
    culprits = [level.history[c] for c in conclusion.culprits]
    read = tuple(tuple(values.get(p, ())) for p in range(len(level.history)))
    return SearchedHistory(
        history=level.history,
        conclusion=conclusion,
        probabilities=tuple(map(float, search.probabilities())),
        skipped=level.skipped,
        values=read,
        step=math.exp(learnt.step) if learnt else None,
        noise=learnt.scale if learnt else None,
        summary=history.summary(repository, culprits[-1]) if culprits else "",
        explained=explained(search, conclusion, read),
        profile=_profile_change(processes, level, conclusion) if conclusion.found else None,
    )


def _profile_change(
    processes: Processes, level: SearchLevel, conclusion: CommitsConclusion
) -> ProfileChange:
    """Of the culprit and the commit before it, from the journal or a new process of each."""
    assert conclusion.good is not None
    ends = (conclusion.good, conclusion.culprits[-1])

    def known() -> dict[int, Measurement]:
        ours = [m for m in processes.measured if m.level == level.number]
        ours.sort(key=lambda m: profiled(m.measurement))
        return {m.position: m.measurement for m in ours}

    missing = tuple(place for place in ends if not profiled(known()[place]))
    block = NextBlock(stage=BisectStage.PROFILE, positions=missing)
    if missing:
        processes.log(TITLES[block.stage])
    try:
        _measure(processes, level, block)
    except Stopped as stop:
        return ProfileChange(unknown=str(stop))
    return profile_change(*(known()[place] for place in ends))


# --- blocks of processes ------------------------------------------------------------------


def _conclude(processes: Processes, level: SearchLevel) -> tuple[CommitsConclusion, bool]:
    """Measure until the search concludes, or stops and can be resumed (True)."""
    stage = None
    try:
        while True:
            skipped = {x.position: x.reason for x in level.skipped}
            for place, name in ((0, "the good commit"), (level.search.last, "the bad commit")):
                if place in skipped:
                    reason = f"{name} cannot be measured: {skipped[place]}"
                    return CommitsConclusion(reason=reason), False
            block = level.search.next()
            if not isinstance(block, NextBlock):
                return block, False
            if block.stage is not stage:
                stage = block.stage
                processes.log(TITLES[stage])
            _measure(processes, level, block)
    except Stopped as stop:
        return CommitsConclusion(reason=str(stop)), True


def _measure(processes: Processes, level: SearchLevel, block: NextBlock) -> None:
    prepared, apart = {}, block.stage is BisectStage.PROFILE
    for place in block.positions:
        try:
            prepared[place] = level.prepare(place, block.positions)
        except (BuildFailed, Unreadable) as error:
            if not apart:
                _skip(processes, level, place, str(error))
            return
    number, readings = max((m.block for m in processes.measured), default=-1) + 1, []
    for place in block.positions:
        case, roots = prepared[place]
        case = criteria.prepared(case, criteria.PROFILED) if apart else case
        measured = Measured(
            level=level.number,
            block=-1 if apart else number,
            stage=block.stage,
            position=place,
            commit=level.history[place].sha,
            measurement=processes.measure(case, roots, first=level.first(place)),
        )
        processes.journal.write(measured)
        if apart:
            continue
        reading, outcome = level.read(measured), measured.measurement.outcome
        if isinstance(reading, ProcessReading):
            readings.append(reading)
            value = units.plain(processes.journal.request.criterion.name, reading.value)
        else:
            value = str(reading)
        if outcome is not Outcome.OK:
            value = str(outcome)
        about = "about " if block.stage is BisectStage.SEARCH else ""
        name, turn = level.history[place].short, f"{block.number} of {about}{block.of}"
        processes.log(f"{block.stage} {turn}: {name} {value}{level.remark()}")
        if isinstance(reading, Unreadable) and not reading.again:
            _skip(processes, level, place, str(reading))
            return
    level.search.add(block.stage, readings)


def _skip(processes: Processes, level: SearchLevel, place: int, reason: str) -> None:
    commit = level.history[place].sha
    skipped = Skipped(level=level.number, position=place, commit=commit, reason=reason)
    processes.journal.write(skipped)
    level.search.skipped.add(place)
    processes.log(f"{level.history[place].short} skipped: {reason}")
