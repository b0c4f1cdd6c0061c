"""Carries out a search for the differences of two runs that moved a number."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness import drift, environment, store
from harness.analysis.minimal import Causes, ExactCauses, NoisyCauses, members
from harness.analysis.search import Ask
from harness.bisection import causes as differing
from harness.bisection import criteria
from harness.bisection.bench import Bench, Means, Stopped, now, opened
from harness.bisection.causes import Cause, Fixed
from harness.bisection.journal import Build, CausesBegun, Journal, LeftOut, Noted, Taken
from harness.bisection.readings import Readings
from harness.bisection.trees import NotBuilt, standing
from harness.errors import HarnessError, StoreError, SuiteError
from harness.gating.worktrees import Repository
from harness.records import Case, Outcome, Run
from harness.suite import fits, shipped_roots

SHOWN_CASES = 5
FEW = 3
"""Differences of a set that a line of the log names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausesResult:
    """What a search came to."""

    begun: CausesBegun
    folder: Path
    causes: Causes
    values: Mapping[int, tuple[float, ...]]
    """Set of differences, as a mask -> what was read with them applied, in the order taken."""
    decided: Mapping[int, bool]
    """Set -> whether it moves the number."""
    left_out: tuple[LeftOut, ...]
    fixed: tuple[Fixed, ...]
    """What differs between the runs and was not varied."""
    processes: int
    wall_s: float
    notes: tuple[str, ...] = ()
    resumable: bool = False

    @property
    def found(self) -> bool:
        return self.causes.found

    def named(self, mask: int) -> tuple[Cause, ...]:
        return tuple(self.begun.causes[i] for i in members(mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a command line asks for."""

    pattern: str
    metric: str | None = None
    counter: str | None = None
    outcome: str | None = None
    kernel: str | None = None
    effect: float
    build: Build
    roots: tuple[str, ...] = (".",)
    command: tuple[str, ...] = ()


def request(
    runs: Path, names: tuple[str, str], repository: Repository | None, asked: Asked
) -> CausesBegun:
    """What is to be searched for, from two stored runs.

    Args:
        runs: Folder of the stored runs.
        names: Of the first run and of the second, which is the one that is off.
        repository: Holds the commit of both; None where they are of none.
        asked: The rest.

    Raises:
        HarnessError: A run or its case is not there, or the runs' code is not one and the same, or
            cannot be had again.
    """
    first, second = (store.load(runs, name) for name in names)
    commit = _one_code(first, second, repository)
    one, other = (_case(run, asked.pattern) for run in (first, second))
    criterion = criteria.chosen(
        one,
        metric=asked.metric,
        counter=asked.counter,
        outcome=asked.outcome,
        kernel=asked.kernel,
    )
    around = [dict(run.environment.variables) for run in (first, second)]
    for variables, more in zip(
        around, differing.threads(first.environment, second.environment), strict=True
    ):
        variables.update(more)
    inherited = differing.alike(*around)
    cases = [
        criteria.prepared(differing.complete(case, variables, inherited), criterion)
        for case, variables in zip((one, other), around, strict=True)
    ]
    found = differing.of_cases(*cases)
    if not found:
        told = drift.differences(first.environment, second.environment)
        listed = "".join(f"\n  {d}" for d in told) or " nothing that is recorded"
        raise HarnessError(
            f"{first.run_id} and {second.run_id} differ in nothing that can be varied here",
            f"They differ in:{listed}",
        )
    return CausesBegun(
        started_at=now(),
        suite=replace(first.suite, cases=(one,)),
        case=cases[0],
        other=cases[1],
        runs=(first.run_id, second.run_id),
        causes=found,
        environments=(first.environment, second.environment),
        criterion=criterion,
        effect=asked.effect,
        build=asked.build,
        roots=asked.roots,
        inherited=inherited,
        commit=commit,
        repository=str(repository.root) if repository else "",
        command=asked.command,
    )


def carry_out(
    begun: CausesBegun, journal: Journal | None, repository: Repository | None, means: Means
) -> CausesResult:
    """Search until there is a conclusion, or the budget is spent.

    Args:
        begun: What is asked; its environment is filled in here.
        journal: Of a search that goes on; None begins one.
        repository: Holds the commit; may be None where there is none.
        means: What may be used up.

    Raises:
        HarnessError: The machine is not the one the search began on, or nothing can be measured.
        KeyboardInterrupt: Ctrl-C, or SIGTERM; what was measured is kept, the tree is gone.
    """
    began = time.monotonic()
    with ExitStack() as held:
        held.enter_context(differing.around(begun.inherited))
        elsewhere = repository.worktrees() if repository else ()
        bench = opened(held, begun, journal, means, elsewhere)
        journal = bench.journal
        request = journal.request
        if not isinstance(request, CausesBegun):
            raise HarnessError(f"{journal.folder.name} looks for no differences")
        begun = request
        count = len(begun.causes)
        means.say(f"{journal.folder.name}: {count} differences, by {begun.criterion}")
        roots = shipped_roots(begun.suite)
        if begun.commit and repository is not None:
            trees = standing(repository, begun.build, journal.folder / "logs")
            try:
                tree = held.enter_context(trees).of(begun.commit)
            except NotBuilt as error:
                raise HarnessError(f"{begun.commit[:10]} cannot be built: {error}") from None
            roots = tuple((tree / root).resolve() for root in begun.roots)
        hunt = CauseHunt(begun, bench, roots)
        try:
            causes, resumable = hunt.conclude(), False
        except Stopped as stop:
            causes, resumable = Causes(reason=str(stop)), True
    here = begun.environment
    return CausesResult(
        begun=begun,
        folder=journal.folder,
        causes=causes,
        values={mask: tuple(v) for mask, v in hunt.readings.values.items()},
        decided={m: d for m in hunt.readings.values if (d := hunt.search.decided(m)) is not None},
        left_out=tuple(hunt.readings.left_out),
        fixed=differing.fixed(*begun.environments, here, begun.causes) if here else (),
        processes=sum(isinstance(line, Taken) for line in journal.lines),
        wall_s=time.monotonic() - began,
        notes=tuple(line.text for line in journal.lines if isinstance(line, Noted)),
        resumable=resumable,
    )


class CauseHunt:
    """The search being carried out: what the journal holds of it, and what is asked next."""

    def __init__(self, begun: CausesBegun, bench: Bench, roots: Sequence[Path]) -> None:
        self._begun = begun
        self._bench = bench
        self._roots = roots
        self.readings = Readings(bench.journal, 0)
        count = len(begun.causes)
        self.search: ExactCauses | NoisyCauses = (
            ExactCauses(count) if begun.criterion.exact else NoisyCauses(count, begun.effect)
        )
        self.readings.retell(self.search)

    def conclude(self) -> Causes:
        """Measure until the search concludes.

        Raises:
            Stopped: It cannot go on now.
        """
        while True:
            for mask, run in ((0, 0), (self.search.full, 1)):
                for left in (x for x in self.readings.left_out if x.position == mask):
                    name = self._begun.runs[run]
                    return Causes(reason=f"{name} cannot be measured again: {left.reason}")
            asked = self.search.next()
            if isinstance(asked, Causes):
                return asked
            self._carry_out(asked)

    def _carry_out(self, asked: Ask) -> None:
        block, looks = self._bench.blocks, []
        for mask in asked.positions:
            chosen = [self._begun.causes[i] for i in members(mask)]
            case = differing.applied(self._begun.case, self._begun.other, chosen)
            if self.readings.first(mask) and (why := self._refused(case)):
                self._leave_out(mask, why)
                return
            taken = Taken(
                level=0,
                block=block,
                stage=asked.stage,
                position=mask,
                commit=self._begun.commit,
                measurement=self._bench.measure(case, self._roots, first=self.readings.first(mask)),
            )
            self._bench.journal.write(taken)
            look = self.readings.look(taken)
            self._say(asked, taken)
            if look is not None:
                looks.append(look)
            elif reason := self.readings.hopeless(taken):
                self._leave_out(mask, reason)
                return
        self.search.add(asked.stage, looks)

    def _refused(self, case: Case) -> str:
        """Why a workload refuses a configuration before it runs; empty where it does not."""
        suite = replace(self._begun.suite, cases=(case,))
        try:
            self._bench.launcher.at(self._roots).check(suite)
        except SuiteError as error:
            return str(error).partition("\n")[0]
        return ""

    def _leave_out(self, mask: int, reason: str) -> None:
        line = LeftOut(level=0, position=mask, commit=self._begun.commit, reason=reason)
        self._bench.journal.write(line)
        self.search.skipped.add(mask)
        self._bench.tell(f"{self._name(mask)} left out: {reason}")

    def _say(self, asked: Ask, taken: Taken) -> None:
        values, m = self.readings.values.get(taken.position), taken.measurement
        read = f"{values[-1]:.6g}" if values and m.outcome is Outcome.OK else str(m.outcome)
        name = self._name(taken.position)
        self._bench.tell(f"{asked.stage} {taken.block}: {name} {read} ({asked.why})")

    def _name(self, mask: int) -> str:
        if mask == 0:
            return "the first run's"
        if mask == self.search.full:
            return "the second run's"
        names = [self._begun.causes[i].name for i in members(mask)]
        more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
        return f"with {', '.join(names[:FEW])}{more}"


def _one_code(first: Run, second: Run, repository: Repository | None) -> str:
    """The commit of both runs; empty where their code is that of the working tree as it is."""
    gits = [run.environment.git for run in (first, second)]
    one, other = gits
    if one is None or other is None:
        if one is not other:
            raise StoreError(f"one of {first.run_id} and {second.run_id} is of no commit")
        return ""
    if one.commit != other.commit:
        raise HarnessError(
            f"the runs are of two commits, {one.commit[:10]} and {other.commit[:10]}",
            f"Which commit it was: harness bisect SUITE --good {one.commit[:10]} "
            f"--bad {other.commit[:10]}",
        )
    if not (one.dirty_sha256 or other.dirty_sha256):
        if repository is None:
            raise HarnessError(
                f"{one.commit[:10]} is in no repository here", "Change to its clone."
            )
        return repository.commit(one.commit)
    here = environment.read_git(repository.root) if repository else None
    same = one.dirty_sha256 == other.dirty_sha256
    if (
        not same
        or here is None
        or (here.commit, here.dirty_sha256)
        != (
            one.commit,
            one.dirty_sha256,
        )
    ):
        raise HarnessError(
            "the runs' code was not committed, and cannot be had again",
            "Commit it, and run both again.",
        )
    return ""


def _case(run: Run, pattern: str) -> Case:
    """The one case of a run that a pattern fits."""
    found = [c for c in run.suite.cases if c.case_id == pattern]
    if not found:
        found = [c for c in run.suite.cases if fits(c.case_id, pattern)]
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in found[:SHOWN_CASES])
        raise HarnessError(
            f"--case {pattern or '(none)'} fits {len(found)} cases of {run.run_id}, and a search "
            "takes one",
            f"Some of them:\n  {ids}" if ids else f"harness show {run.run_id} lists them.",
        )
    return found[0]
