"""Carries a bisection out: trees, processes, journal, and what came of it.

What is decided is decided by harness.analysis.search, of what the journal holds; so a search that
was killed goes on where it stood. The harness and the suite stay as they are here; what comes from
each commit's worktree is the code that the suite's factory names, and all that it imports.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.analysis.search import (
    Ask,
    Conclusion,
    ExactSearch,
    NoisySearch,
    Search,
)
from harness.bisection import criteria, history
from harness.bisection.bench import Bench, Means, Stopped, opened
from harness.bisection.criteria import Unreadable
from harness.bisection.history import Commit
from harness.bisection.journal import Begun, Entered, Journal, LeftOut, Noted, Taken
from harness.bisection.readings import Readings
from harness.bisection.trees import NotBuilt, Trees, standing
from harness.errors import HarnessError, SuiteError
from harness.gating.worktrees import Repository
from harness.records import Outcome, Suite


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
    with ExitStack() as held:
        bench = opened(held, begun, journal, means, repository.worktrees())
        journal = bench.journal
        request = journal.request
        if not isinstance(request, Begun):
            raise HarnessError(f"{journal.folder.name} looks for no commit")
        begun = request
        means.say(f"{journal.folder.name}: {len(begun.history) - 1} commits, by {begun.criterion}")
        trees = held.enter_context(standing(repository, begun.build, journal.folder / "logs"))
        levels, resumable = _levels(_Ground(begun, bench, trees), repository)
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


def _levels(ground: "_Ground", repository: Repository) -> tuple[tuple[Level, ...], bool]:
    """Search the history and, where asked, the merged side of its culprit, and so on."""
    bench, commits = ground.bench, ground.begun.history
    levels: list[Level] = []
    while True:
        hunt = Hunt(ground, len(levels), commits)
        try:
            conclusion = hunt.conclude()
        except Stopped as stop:
            return (*levels, hunt.level(Conclusion(reason=str(stop)))), True
        levels.append(hunt.level(conclusion))
        if not (conclusion.found and ground.begun.enter_merges):
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


@dataclass(slots=True)
class _Ground:
    """The bench, and the trees of the commits that are measured on it."""

    begun: Begun
    bench: Bench
    trees: Trees
    checked: set[str] = field(default_factory=set)
    """Commits that have answered that they know the case."""

    def ready(self, commit: Commit, keep: Sequence[str]) -> tuple[Path, ...]:
        """The roots of a commit's worktree, which is built and has the case.

        Raises:
            NotBuilt: It cannot be built.
            Unreadable: It does not have the case.
        """
        begun = self.begun
        tree = self.trees.of(commit.sha, keep)
        roots = tuple((tree / root).resolve() for root in begun.roots)
        if commit.sha not in self.checked:
            suite: Suite = replace(begun.suite, cases=(begun.case,))
            try:
                self.bench.launcher.at(roots).check(suite)
            except SuiteError as error:
                said = error.refusal or str(error)
                raise Unreadable(
                    f"it does not have the case: {said.partition(chr(10))[0]}"
                ) from None
            except HarnessError as error:
                if begun.criterion.kind is not criteria.Kind.OUTCOME:
                    raise Unreadable(str(error).partition("\n")[0]) from None
            self.checked.add(commit.sha)
        return roots


class Hunt:
    """One history being searched: what the journal holds of it, and what is asked next."""

    def __init__(self, ground: _Ground, number: int, commits: tuple[Commit, ...]) -> None:
        begun = ground.begun
        self._ground = ground
        self._bench = ground.bench
        self._number = number
        self._commits = commits
        self._criterion = begun.criterion
        self._last = len(commits) - 1
        self._readings = Readings(ground.bench.journal, number, self._judged)
        self._search: Search = (
            ExactSearch(self._last)
            if begun.criterion.exact
            else NoisySearch(self._last, begun.effect)
        )
        self._readings.retell(self._search)

    def conclude(self) -> Conclusion:
        """Measure until the search concludes.

        Raises:
            Stopped: It cannot go on now.
        """
        while True:
            for anchor, name in ((0, "good"), (self._last, "bad")):
                for left in (x for x in self._readings.left_out if x.position == anchor):
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
            left_out=tuple(self._readings.left_out),
            values=tuple(
                tuple(self._readings.values.get(p, ())) for p in range(len(self._commits))
            ),
            step=None if step is None else math.exp(step),
            noise=noisy.scale if noisy else None,
        )

    # --- what the journal holds ---

    def _judged(self, position: int, value: float) -> float:
        """1 where an exact value is nearer to the bad anchor's than to the good one's."""
        if not self._criterion.exact:
            return value
        values = self._readings.values
        good = values[0][0] if 0 in values else value
        if position == self._last:
            return float(value != good)
        bad = values[self._last][0] if self._last in values else good
        return float(abs(value - bad) < abs(value - good))

    # --- one block ---

    def _carry_out(self, asked: Ask) -> None:
        roots = {}
        for position in asked.positions:
            keep = [self._commits[p].sha for p in {0, self._last, *asked.positions}]
            try:
                roots[position] = self._ground.ready(self._commits[position], keep)
            except (NotBuilt, Unreadable) as error:
                self._leave_out(position, str(error))
                return
        block, looks = self._bench.blocks, []
        for position in asked.positions:
            commit, first = self._commits[position], self._readings.first(position)
            measured = self._bench.measure(self._ground.begun.case, roots[position], first=first)
            taken = Taken(
                level=self._number,
                block=block,
                stage=asked.stage,
                position=position,
                commit=commit.sha,
                measurement=measured,
            )
            self._bench.journal.write(taken)
            look = self._readings.look(taken)
            self._say(asked, taken)
            if look is not None:
                looks.append(look)
            elif reason := self._readings.hopeless(taken):
                self._leave_out(position, reason)
                return
        self._search.add(asked.stage, looks)

    def _leave_out(self, position: int, reason: str) -> None:
        commit = self._commits[position]
        line = LeftOut(level=self._number, position=position, commit=commit.sha, reason=reason)
        self._bench.journal.write(line)
        self._search.skipped.add(position)
        self._bench.tell(f"{commit.short} left out: {reason}")

    def _say(self, asked: Ask, taken: Taken) -> None:
        values = self._readings.values.get(taken.position)
        m = taken.measurement
        read = f"{values[-1]:.6g}" if values and m.outcome is Outcome.OK else str(m.outcome)
        chances = self._search.probabilities()
        best = int(chances.argmax())
        self._bench.tell(
            f"{asked.stage} {taken.block}: {self._commits[taken.position].short} {read}"
            f" ({asked.why}; {self._commits[best].short} {chances[best]:.0%} likely)"
        )
