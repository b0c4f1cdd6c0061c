"""Carries a search out: prepares, measures and records block after block until it concludes.

The searches decide from what the journal has, so a search that was killed resumes from its journal.
The harness and the suite are those of this checkout; a commit's worktree supplies the code that the
suite's factory names, and all that it imports.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness import units
from harness.bisect import criteria, history
from harness.bisect.builds import BuiltTrees
from harness.bisect.criteria import CriterionKind, Unreadable
from harness.bisect.culprit import ProfileChange, profile_change, profiled
from harness.bisect.journal import BisectRequest, Journal, Measured, Note, Skipped
from harness.bisect.posterior import ProcessReading
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
from harness.machine import drift, requirements
from harness.records import Case, Measurement, Outcome
from harness.runner.interleave import clock
from harness.runner.rig import Rig
from harness.runner.run import run_one
from harness.store.writer import now

TITLES = {
    BisectStage.ANCHORS: "Do the good and the bad commit differ on this machine?",
    BisectStage.SEARCH: "Which commits between them are bad?",
    BisectStage.CONFIRM: "New pairs of the most likely commit and the one before it:",
    BisectStage.PROFILE: "What the commit changed: a profile of it and of the one before it",
}
TRIES = 3
"""Processes of one place without a reading, after which it counts as not measurable."""


class Stopped(Exception):
    """The search cannot continue now; it can be resumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    state: Path
    """Folder of the journals."""
    budget_s: float | None = None
    wait_s: float = 0.0
    """Longest wait for a busy GPU."""
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectResult:
    """What a search found, or why it ended without a commit."""

    folder: Path
    request: BisectRequest
    conclusion: CommitsConclusion
    probabilities: tuple[float, ...]
    """Of each commit of the history."""
    values: tuple[tuple[float, ...], ...]
    """Of each commit, in the order measured."""
    skipped: tuple[Skipped, ...]
    processes: int
    wall_s: float
    """Of this command, without those that it resumes."""
    step: float | None = None
    """Bad over good, as a ratio; None if the criterion is exact."""
    noise: float | None = None
    """Of one process, as a fraction."""
    summary: str = ""
    """Which files the culprit changed; empty without a culprit."""
    profile: ProfileChange | None = None
    """Of the culprit against the commit before it; None without a culprit."""
    notes: tuple[str, ...] = ()
    resumable: bool = False

    @property
    def found(self) -> bool:
        return self.conclusion.found


def run(start: BisectRequest | Journal, resources: Resources) -> BisectResult:
    """Start a search or resume the one of a journal, until it concludes or the budget is spent; a
    HarnessError on a machine other than the journal's, or if nothing can be measured. At Ctrl-C or
    SIGTERM measurements are kept, and worktrees are removed."""
    started = time.monotonic()
    request = start.request if isinstance(start, Journal) else start
    repository = Repository.around(Path(request.repository))
    with ExitStack() as stack:
        journal, rig = _opened(stack, start, resources, repository.worktrees())
        resources.say(f"{journal.folder.name}: {request}")
        folder = stack.enter_context(workplace(repository))
        trees = BuiltTrees(repository, folder, request.build, journal.folder / "logs")
        bisection = Bisection(journal, rig, trees, resources, started)
        conclusion, resumable = bisection.conclude()
        return bisection.result(repository, conclusion, resumable)


def _opened(
    stack: ExitStack,
    start: BisectRequest | Journal,
    resources: Resources,
    other_trees: Sequence[Path],
) -> tuple[Journal, Rig]:
    """Lock the machine, and create the journal of a request or continue a journal; a HarnessError
    on a machine other than the journal's or the suite's. The code must not come from
    `other_trees`."""
    journal = stack.enter_context(start) if isinstance(start, Journal) else None
    request = start.request if isinstance(start, Journal) else start
    timed = not request.criterion.exact  # exact counts need no GPU of their own
    rig = stack.enter_context(
        Rig(request.suite.device, wait_s=resources.wait_s, say=resources.say, alone=timed)
    )
    rig.start(elsewhere=other_trees)
    here = rig.describe(request.suite, command=request.command, repository=None)
    before = request.environment if journal else None
    if before is not None and here.device_name != before.device_name:
        raise HarnessError(
            f"this search started on {before.device_name}, but this machine has {here.device_name}",
            "Resume it on that device, or start a new search.",
        )
    requirements.require(request.suite, here)
    if journal is None:
        created = Journal.create(resources.state, replace(request, environment=here))
        journal = stack.enter_context(created)
    else:
        journal.write(Note(text=f"resumed at {now()}"))
        for difference in drift.differences(before, here) if before else ():
            journal.write(Note(text=f"resumed with {difference}"))
    rig.measures(journal.folder.name)
    rig.observe(here)
    return journal, rig


class Bisection:
    """A search under way. A place is the position of a commit in the history."""

    def __init__(
        self, journal: Journal, rig: Rig, trees: BuiltTrees, resources: Resources, started: float
    ) -> None:
        """Give a new search everything that the journal has. `started`: time.monotonic."""
        self._journal, self._rig, self._resources = journal, rig, resources
        self._started = started
        self._tell = resources.say
        self._request = journal.request
        self._history = self._request.history
        self._trees = trees
        self._values: dict[int, list[float]] = {}  # by place, in the order measured
        self._unreadable: dict[int, int] = {}
        last = len(self._history) - 1
        exact = self._request.criterion.exact
        self._search = ExactSearch(last) if exact else NoisySearch(last, self._request.effect)
        self._search.skipped |= {x.position for x in self._skipped}
        blocks: dict[int, list[Measured]] = {}
        for line in self._measured:
            if line.stage is not BisectStage.PROFILE:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            found = [self._read(line) for line in block]
            self._search.add(block[0].stage, [r for r in found if isinstance(r, ProcessReading)])

    @property
    def _skipped(self) -> tuple[Skipped, ...]:
        return tuple(line for line in self._journal.lines if isinstance(line, Skipped))

    @property
    def _measured(self) -> tuple[Measured, ...]:
        return tuple(line for line in self._journal.lines if isinstance(line, Measured))

    def conclude(self) -> tuple[CommitsConclusion, bool]:
        """Measure until the search concludes, or stops and can be resumed (True)."""
        stage = None
        try:
            while True:
                skipped = {x.position: x.reason for x in self._skipped}
                for place, name in ((0, "the good commit"), (self._search.last, "the bad commit")):
                    if place in skipped:
                        lost = {"unmeasured": name, "because": skipped[place]}
                        return CommitsConclusion(facts=lost), False
                block = self._search.next()
                if not isinstance(block, NextBlock):
                    return block, False
                if block.stage is not stage:
                    stage = block.stage
                    self._tell(TITLES[stage])
                self._measure(block)
        except Stopped as stop:
            return CommitsConclusion(facts={"stopped": str(stop)}), True

    def result(
        self, repository: Repository, conclusion: CommitsConclusion, resumable: bool
    ) -> BisectResult:
        search = self._search
        learnt = search.posterior() if isinstance(search, NoisySearch) else None
        values = tuple(tuple(self._values.get(p, ())) for p in range(len(self._history)))
        profile = self._profile_change(conclusion) if conclusion.found else None
        last = self._history[conclusion.culprits[-1]] if conclusion.culprits else None
        taken, wall_s = len(self._measured), time.monotonic() - self._started
        self._tell(f"ended after {taken} processes, {units.duration(wall_s)} in this command")
        return BisectResult(
            folder=self._journal.folder,
            request=self._request,
            conclusion=conclusion,
            probabilities=tuple(map(float, search.probabilities())),
            values=values,
            skipped=self._skipped,
            processes=taken,
            wall_s=wall_s,
            step=math.exp(learnt.step) if learnt else None,
            noise=learnt.scale if learnt else None,
            summary=history.summary(repository, last) if last else "",
            profile=profile,
            notes=tuple(x.text for x in self._journal.lines if isinstance(x, Note)),
            resumable=resumable,
        )

    def _profile_change(self, conclusion: CommitsConclusion) -> ProfileChange:
        """Of the culprit and the commit before it, from the journal or a new process of each."""
        assert conclusion.good is not None
        ends = (conclusion.good, conclusion.culprits[-1])

        def known() -> dict[int, Measurement]:
            ours = sorted(self._measured, key=lambda m: profiled(m.measurement))
            return {m.position: m.measurement for m in ours}

        missing = tuple(place for place in ends if not profiled(known()[place]))
        if missing:
            self._tell(TITLES[BisectStage.PROFILE])
        try:
            self._measure(NextBlock(stage=BisectStage.PROFILE, positions=missing))
        except Stopped as stop:
            return ProfileChange(unknown=str(stop))
        return profile_change(*(known()[place] for place in ends))

    # --- blocks of processes --------------------------------------------------------------

    def _measure(self, block: NextBlock) -> None:
        prepared, apart = {}, block.stage is BisectStage.PROFILE
        for place in block.positions:
            try:
                prepared[place] = self._prepare(place, block.positions)
            except Unreadable as error:
                if not apart:
                    self._skip(place, str(error))
                return
        number, readings = max((m.block for m in self._measured), default=-1) + 1, []
        case = self._request.case
        case = criteria.prepared(case, criteria.PROFILED) if apart else case
        for place, roots in prepared.items():
            measured = Measured(
                block=number,
                stage=block.stage,
                position=place,
                commit=self._history[place].sha,
                measurement=self._process(case, roots, first=self._first(place)),
            )
            self._journal.write(measured)
            if apart:
                continue
            reading = self._read(measured)
            self._say(block, measured, reading)
            if isinstance(reading, ProcessReading):
                readings.append(reading)
            elif not reading.again:
                self._skip(place, str(reading))
                return
        if not apart:
            self._search.add(block.stage, readings)

    def _prepare(self, place: int, block: Collection[int]) -> tuple[Path, ...]:
        """The folders of the code to measure at a place, while all places of the block stay
        prepared; Unreadable if it cannot be built, or does not have the case."""
        request = self._request
        keep = [self._history[p].sha for p in {0, self._search.last, *block}]
        tree = self._trees.of(self._history[place].sha, keep)
        roots = tuple((tree / root).resolve() for root in request.roots)
        if self._first(place):
            try:
                suite = replace(request.suite, cases=(request.case,))
                self._rig.launcher.at(roots).check(suite)
            except CaseRefused as error:
                raise Unreadable(f"it does not have the case: {error.reason}") from None
            except HarnessError as error:
                if request.criterion.kind is not CriterionKind.OUTCOME:
                    raise Unreadable(error.problem) from None
        return roots

    def _process(self, case: Case, roots: Sequence[Path], *, first: bool) -> Measurement:
        """Measure one fresh process, the first of this code and case or a later one; Stopped if the
        budget is spent, or if the machine is not fit."""
        budget_s = self._resources.budget_s
        if budget_s is not None and time.monotonic() >= self._started + budget_s:
            raise Stopped("the time budget is spent")
        if not first:  # accuracy is checked once for each commit
            case = replace(case, settings=replace(case.settings, accuracy=False))
        launcher = self._rig.launcher.at(roots)
        measured = run_one(case, len(self._measured), launcher, self._journal, self._rig)
        if measured.outcome is Outcome.INVALID_ENVIRONMENT:
            raise Stopped(f"the machine is not fit: {measured.detail}")
        return measured

    def _first(self, place: int) -> bool:
        """Whether no process of a place was measured yet."""
        return place not in self._values and place not in self._unreadable

    def _read(self, measured: Measured) -> ProcessReading | Unreadable:
        """The reading of a process; or why it has none, and whether another one may have."""
        place, measurement = measured.position, measured.measurement
        least = self._request.case.settings.min_samples
        try:
            value = criteria.read(self._request.criterion, measurement, least)
        except Unreadable as error:
            count = self._unreadable[place] = self._unreadable.get(place, 0) + 1
            error.again &= count < TRIES * max(1, len(self._values.get(place, ())))
            return error
        self._values.setdefault(place, []).append(value)
        return ProcessReading(position=place, value=value, hz=clock(measurement))

    def _skip(self, place: int, reason: str) -> None:
        commit = self._history[place]
        self._journal.write(Skipped(position=place, commit=commit.sha, reason=reason))
        self._search.skipped.add(place)
        self._tell(f"{commit.short} skipped: {reason}")

    def _say(
        self, block: NextBlock, measured: Measured, reading: ProcessReading | Unreadable
    ) -> None:
        """`search 3 of about 12: 1a2b3c4d5e 10.2 ms; 5e4d3c2b1a 42 % likely`."""
        value, outcome = str(reading), measured.measurement.outcome
        if outcome is not Outcome.OK:
            value = str(outcome)
        elif isinstance(reading, ProcessReading):
            value = units.plain(self._request.criterion.name, reading.value)
        about = "about " if block.stage is BisectStage.SEARCH else ""
        turn = f"{block.stage} {block.number} of {about}{block.of}"
        chances, likely = self._search.probabilities(), ""
        if self._search.last > 1:
            best = int(chances.argmax())
            likely = f"; {self._history[best].short} {units.percent(chances[best])} likely"
        self._tell(f"{turn}: {self._history[measured.position].short} {value}{likely}")
