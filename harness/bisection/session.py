"""Carries a bisection out: trees, processes, journal, and what came of it.

What is decided is decided by harness.analysis.search, of what the journal holds; so a search that
was killed goes on where it stood. The harness and the suite stay as they are here; what comes from
each commit's worktree is the code that the suite's factory names, and all that it imports.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from harness import drift, environment
from harness.analysis.search import (
    Ask,
    Conclusion,
    ExactSearch,
    Look,
    NoisySearch,
    Search,
)
from harness.bisection import criteria, history
from harness.bisection.criteria import Unreadable
from harness.bisection.history import Commit
from harness.bisection.journal import Begun, Entered, Journal, LeftOut, Noted, Taken
from harness.bisection.trees import NotBuilt, Trees, standing
from harness.errors import HarnessError, SuiteError
from harness.execution import gpu_lock, vacancy
from harness.execution.launcher import Launcher
from harness.execution.runner import Silent, run_one
from harness.execution.vacancy import Vacancy, watch_over
from harness.gating.interleave import clock, verified
from harness.gating.worktrees import Repository
from harness.probes import Probe
from harness.probes.open import open_probes
from harness.records import Environment, Measurement, Outcome, Suite

Say = Callable[[str], None]
TRIES = 3
"""Processes of one commit that may say nothing, before it counts as one that cannot be measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One history that was searched."""

    history: tuple[Commit, ...]
    conclusion: Conclusion
    probabilities: tuple[float, ...]
    left_out: tuple[LeftOut, ...]
    values: tuple[tuple[float, ...], ...]
    """What was read of each commit, in the order taken."""
    step: float | None = None
    """Bad over good, as a ratio; None where the criterion is exact."""
    noise: float | None = None
    """Of one process, as a fraction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a bisection came to."""

    begun: Begun
    folder: Path
    levels: tuple[Level, ...]
    processes: int
    wall_s: float
    """Of this command; one that was resumed took longer in all."""
    notes: tuple[str, ...] = ()
    resumable: bool = False
    summaries: tuple[str, ...] = field(default=())
    """Of each level's culprit: which files it changed; empty where it has none."""

    @property
    def found(self) -> bool:
        """Whether a commit is named."""
        return self.levels[0].conclusion.found

    @property
    def culprit(self) -> Commit | None:
        """The commit; of a merge that was entered, the one on its side, where it was found."""
        found = [v for v in self.levels if v.conclusion.found]
        if not self.found:
            return None
        return found[-1].history[found[-1].conclusion.culprits[0]]


class Stopped(Exception):
    """The search cannot go on now, and may later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What a search has at its disposal."""

    state: Path
    """Folder of the journals."""
    budget_s: float | None = None
    wait_s: float = 0.0
    """How long to wait for a GPU that is in use."""
    say: Say


def carry_out(
    begun: Begun, journal: Journal | None, repository: Repository, means: Means
) -> Result:
    """Search until there is a conclusion, or the budget is spent.

    Args:
        begun: What is asked; its environment is filled in here.
        journal: Of a search that goes on; None begins one.
        repository: Holds the commits.
        means: What may be used up.

    Raises:
        HarnessError: The machine is not the one the search began on, or nothing can be measured.
        KeyboardInterrupt: Ctrl-C, or SIGTERM; what was measured is kept, trees are gone.
    """
    began = time.monotonic()
    wait_s, say = means.wait_s, means.say
    with ExitStack() as held:
        lock = gpu_lock.lock_first(held, wait_s=wait_s, say=say)
        launcher = held.enter_context(Launcher())
        here = environment.capture(
            launcher.describe(), command=begun.command, repository=None, cases=[begun.case]
        )
        lock = gpu_lock.lock_only(held, lock, here.gpu, wait_s=wait_s, say=say)
        _require_fit(begun, here, resumed=journal is not None)
        if journal is None:
            begun = replace(begun, environment=here)
            journal = held.enter_context(Journal.create(means.state, begun))
        else:
            held.enter_context(journal)
            for difference in (
                drift.differences(begun.environment, here) if begun.environment else ()
            ):
                journal.write(Noted(at=_now(), text=f"resumed with {difference}"))
        if lock is not None:
            lock.describe(journal.folder.name)
        say(f"{journal.folder.name}: {len(begun.history) - 1} commits, by {begun.criterion}")
        probes = open_probes(here.gpu, why=here.gpu_unavailable)
        for probe in probes:
            held.callback(probe.close)
        bench = _Bench(
            journal=journal,
            launcher=launcher,
            trees=held.enter_context(standing(repository, begun.build, journal.folder / "logs")),
            probes=probes,
            gpu=watch_over(held, here, wait_s=wait_s, say=say),
            ends=None if means.budget_s is None else began + means.budget_s,
            tell=_Teller(journal, say),
        )
        levels, resumable = _levels(bench, repository)
    return Result(
        begun=begun,
        folder=journal.folder,
        levels=levels,
        processes=sum(isinstance(line, Taken) for line in journal.lines),
        wall_s=time.monotonic() - began,
        notes=tuple(line.text for line in journal.lines if isinstance(line, Noted)),
        resumable=resumable,
        summaries=tuple(
            "".join(history.summary(repository, v.history[c]) for c in v.conclusion.culprits[-1:])
            for v in levels
        ),
    )


def _require_fit(begun: Begun, here: Environment, *, resumed: bool) -> None:
    then = begun.environment
    if resumed and then is not None and here.device_name != then.device_name:
        raise HarnessError(
            f"this search began on {then.device_name}, and here is {here.device_name}",
            "Resume it there, or begin anew.",
        )
    if begun.suite.device == "cuda" and here.gpu is None:
        raise SuiteError(
            begun.suite.path,
            f"this suite needs an NVIDIA GPU, and none is here: {here.gpu_unavailable}",
        )
    if unfit := vacancy.mismatch(begun.suite.requires, here):
        raise HarnessError(f"this machine is not the one the suite requires: {unfit}")


class _Teller:
    """Says a thing to the person, and to the log."""

    def __init__(self, journal: Journal, say: Say) -> None:
        self._journal = journal
        self._say = say

    def __call__(self, text: str) -> None:
        self._journal.log(text)
        self._say(text)


def _levels(bench: "_Bench", repository: Repository) -> tuple[tuple[Level, ...], bool]:
    """Search the history and, where asked, the merged side of its culprit, and so on."""
    begun = bench.journal.begun
    commits = begun.history
    levels: list[Level] = []
    while True:
        hunt = Hunt(bench, len(levels), commits)
        try:
            conclusion = hunt.conclude()
        except Stopped as stop:
            return (*levels, hunt.level(Conclusion(reason=str(stop)))), True
        levels.append(hunt.level(conclusion))
        if not (conclusion.found and begun.enter_merges):
            return tuple(levels), False
        culprit = commits[conclusion.culprits[0]]
        entered = [x for x in bench.journal.lines if isinstance(x, Entered)]
        if len(entered) >= len(levels):
            commits = entered[len(levels) - 1].history
            continue
        commits = history.merged_side(repository, culprit) if culprit.merge else ()
        if not commits:
            return tuple(levels), False
        bench.journal.write(Entered(merge=culprit.sha, history=commits))
        bench.tell(f"{culprit.short} is a merge: its other side, {len(commits) - 1} commits")


@dataclass(slots=True, kw_only=True)
class _Bench:
    """All that a process is measured with."""

    journal: Journal
    launcher: Launcher
    trees: Trees
    probes: Sequence[Probe]
    gpu: Vacancy | None
    ends: float | None
    tell: Say
    checked: set[str] = field(default_factory=set)
    """Commits that have answered that they know the case."""

    @property
    def blocks(self) -> int:
        return max((x.block for x in self.journal.lines if isinstance(x, Taken)), default=-1) + 1

    def ready(self, commit: Commit, keep: Sequence[str]) -> tuple[Path, ...]:
        """The roots of a commit's worktree, which is built and has the case.

        Raises:
            NotBuilt: It cannot be built.
            Unreadable: It does not have the case.
        """
        begun = self.journal.begun
        tree = self.trees.of(commit.sha, keep)
        roots = tuple((tree / root).resolve() for root in begun.roots)
        if commit.sha not in self.checked:
            suite: Suite = replace(begun.suite, cases=(begun.case,))
            try:
                self.launcher.at(roots).check(suite)
            except SuiteError as error:
                said = str(error).partition(f"case {begun.case.case_id}: ")[2] or str(error)
                raise Unreadable(
                    f"it does not have the case: {said.partition(chr(10))[0]}"
                ) from None
            except HarnessError as error:
                if begun.criterion.kind is not criteria.Kind.OUTCOME:
                    raise Unreadable(str(error).partition("\n")[0]) from None
            self.checked.add(commit.sha)
        return roots

    def measure(self, commit: Commit, roots: Sequence[Path], first: bool) -> Measurement:
        """One fresh process of a commit.

        Raises:
            Stopped: The budget is spent, or the machine is not fit.
        """
        if self.ends is not None and time.monotonic() >= self.ends:
            raise Stopped("the budget is spent")
        case = self.journal.begun.case
        if not first:  # right once is right
            case = replace(case, settings=replace(case.settings, accuracy=False))
        why, _ = self.gpu.problem() if self.gpu else ("", ())
        if why:
            raise Stopped(f"the machine is not fit: {why}")
        process = sum(isinstance(x, Taken) for x in self.journal.lines)
        launcher = self.launcher.at(roots)
        measured = run_one(case, process, launcher, self.journal, self.probes, Silent())
        measured = verified(measured, case, roots)
        if measured.outcome is Outcome.INVALID_ENVIRONMENT:
            raise Stopped(f"the machine is not fit: {measured.detail}")
        return measured


class Hunt:
    """One history being searched: what the journal holds of it, and what is asked next."""

    def __init__(self, bench: _Bench, number: int, commits: tuple[Commit, ...]) -> None:
        begun = bench.journal.begun
        self._bench = bench
        self._number = number
        self._commits = commits
        self._criterion = begun.criterion
        self._last = len(commits) - 1
        self._values: dict[int, list[float]] = {}
        self._mute: dict[int, int] = {}  # processes of a commit that said nothing
        self._search: Search = (
            ExactSearch(self._last)
            if begun.criterion.exact
            else NoisySearch(self._last, begun.effect)
        )
        self._told()

    def conclude(self) -> Conclusion:
        """Measure until the search concludes.

        Raises:
            Stopped: It cannot go on now.
        """
        while True:
            for anchor, name in ((0, "good"), (self._last, "bad")):
                for left in (x for x in self._left_out() if x.position == anchor):
                    why = f"the {name} commit cannot be measured: {left.reason}"
                    return Conclusion(reason=why)
            asked = self._search.next()
            if isinstance(asked, Conclusion):
                return asked
            self._carry_out(asked)

    def level(self, conclusion: Conclusion) -> Level:
        noisy = self._search if isinstance(self._search, NoisySearch) else None
        step = noisy.step if noisy else None
        return Level(
            history=self._commits,
            conclusion=conclusion,
            probabilities=tuple(map(float, self._search.probabilities())),
            left_out=tuple(self._left_out()),
            values=tuple(tuple(self._values.get(p, ())) for p in range(len(self._commits))),
            step=None if step is None else math.exp(step),
            noise=noisy.scale if noisy else None,
        )

    # --- what the journal holds ---

    def _left_out(self) -> list[LeftOut]:
        lines = self._bench.journal.lines
        return [x for x in lines if isinstance(x, LeftOut) and x.level == self._number]

    def _told(self) -> None:
        """Tell the search what the journal holds of this history."""
        self._search.skipped |= {x.position for x in self._left_out()}
        blocks: dict[int, list[Taken]] = {}
        for line in self._bench.journal.lines:
            if isinstance(line, Taken) and line.level == self._number:
                blocks.setdefault(line.block, []).append(line)
        for block in blocks.values():
            looks = [k for line in block if (k := self._look(line)) is not None]
            self._search.add(block[0].stage, looks)

    def _look(self, taken: Taken) -> Look | None:
        """What a process says; None, and counted, where it says nothing."""
        least = self._bench.journal.begun.case.settings.min_samples
        try:
            value = criteria.read(self._criterion, taken.measurement, least)
        except Unreadable:
            self._mute[taken.position] = self._mute.get(taken.position, 0) + 1
            return None
        self._values.setdefault(taken.position, []).append(value)
        return Look(
            position=taken.position,
            value=self._judged(taken.position, value) if self._criterion.exact else value,
            hz=clock(taken.measurement),
            wall_s=taken.measurement.wall_s or None,
        )

    def _judged(self, position: int, value: float) -> float:
        """1 where an exact value is nearer to the bad anchor's than to the good one's."""
        good = self._values[0][0] if 0 in self._values else value
        if position == self._last:
            return float(value != good)
        bad = self._values[self._last][0] if self._last in self._values else good
        return float(abs(value - bad) < abs(value - good))

    # --- one block ---

    def _carry_out(self, asked: Ask) -> None:
        roots = {}
        for position in asked.positions:
            keep = [self._commits[p].sha for p in {0, self._last, *asked.positions}]
            try:
                roots[position] = self._bench.ready(self._commits[position], keep)
            except (NotBuilt, Unreadable) as error:
                self._leave_out(position, str(error))
                return
        block, looks = self._bench.blocks, []
        for position in asked.positions:
            commit = self._commits[position]
            first = not self._values.get(position) and self._mute.get(position, 0) == 0
            measured = self._bench.measure(commit, roots[position], first)
            taken = Taken(
                level=self._number,
                block=block,
                stage=asked.stage,
                position=position,
                commit=commit.sha,
                measurement=measured,
            )
            self._bench.journal.write(taken)
            look = self._look(taken)
            self._say(asked, taken)
            if look is None:
                if self._hopeless(taken):
                    return
                continue
            looks.append(look)
        self._search.add(asked.stage, looks)

    def _hopeless(self, taken: Taken) -> bool:
        """Leave a commit out whose processes say nothing, once another one would not either."""
        least = self._bench.journal.begun.case.settings.min_samples
        try:
            criteria.read(self._criterion, taken.measurement, least)
        except Unreadable as error:
            mute = self._mute[taken.position]
            if error.again and mute < TRIES * max(1, len(self._values.get(taken.position, ()))):
                return False
            self._leave_out(taken.position, str(error))
        return True

    def _leave_out(self, position: int, reason: str) -> None:
        commit = self._commits[position]
        line = LeftOut(level=self._number, position=position, commit=commit.sha, reason=reason)
        self._bench.journal.write(line)
        self._search.skipped.add(position)
        self._bench.tell(f"{commit.short} left out: {reason}")

    def _say(self, asked: Ask, taken: Taken) -> None:
        values = self._values.get(taken.position)
        m = taken.measurement
        read = f"{values[-1]:.6g}" if values and m.outcome is Outcome.OK else str(m.outcome)
        chances = self._search.probabilities()
        best = int(chances.argmax())
        self._bench.tell(
            f"{asked.stage} {taken.block}: {self._commits[taken.position].short} {read}"
            f" ({asked.why}; {self._commits[best].short} {chances[best]:.0%} likely)"
        )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
