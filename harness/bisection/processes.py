"""What every search measures with: the machine held for it, workers, and the journal."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness import drift, environment
from harness.bisection.journal import Begun, CausesBegun, Journal, Noted, Request, Taken
from harness.errors import HarnessError
from harness.execution import gpu_lock, machine, vacancy
from harness.execution.launcher import Launcher
from harness.execution.runner import Silent, run_one
from harness.execution.vacancy import Vacancy, watch_over
from harness.gating.interleave import verified
from harness.probes import Probe
from harness.probes.open import open_probes
from harness.records import Case, Environment, Measurement, Outcome

Say = Callable[[str], None]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All that a process is measured with."""

    journal: Journal
    launcher: Launcher
    probes: Sequence[Probe]
    gpu: Vacancy | None
    ends: float | None
    say: Say

    @property
    def blocks(self) -> int:
        """How many were begun."""
        return max((x.block for x in self.journal.lines if isinstance(x, Taken)), default=-1) + 1

    def tell(self, text: str) -> None:
        """Say a thing to the person, and to the log."""
        self.journal.log(text)
        self.say(text)

    def measure(self, case: Case, roots: Sequence[Path], *, first: bool) -> Measurement:
        """One fresh process.

        Args:
            case: What to measure.
            roots: Where its code comes from; empty where that is not asked for.
            first: Whether this is the first process of this code and case.

        Raises:
            Stopped: The budget is spent, or the machine is not fit.
        """
        if self.ends is not None and time.monotonic() >= self.ends:
            raise Stopped("the budget is spent")
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


def opened(
    held: ExitStack,
    begun: Begun | CausesBegun,
    journal: Journal | None,
    means: Means,
    elsewhere: Sequence[Path] = (),
) -> Bench:
    """Take hold of the machine, and begin the journal or go on with it.

    Args:
        held: Closes what is opened here.
        begun: What is asked; its environment is filled in here.
        journal: Of a search that goes on; None begins one.
        means: What may be used up.
        elsewhere: Working trees of the repository, which the code must not come from.

    Raises:
        HarnessError: The machine is not the one the search began on, or does not fit the suite.
    """
    began = time.monotonic()
    if journal is not None:
        held.enter_context(journal)
    lock = gpu_lock.lock_first(held, wait_s=means.wait_s, say=means.say)
    launcher = held.enter_context(Launcher(elsewhere=elsewhere))
    here = environment.capture(
        launcher.describe(), command=begun.command, repository=None, cases=[begun.case]
    )
    lock = gpu_lock.lock_only(held, lock, here.gpu, wait_s=means.wait_s, say=means.say)
    _require_fit(begun, here, resumed=journal is not None)
    if journal is None:
        journal = held.enter_context(Journal.create(means.state, replace(begun, environment=here)))
    else:
        journal.write(Noted(at=now(), text=f"resumed at {now()}"))
        for difference in drift.differences(begun.environment, here) if begun.environment else ():
            journal.write(Noted(at=now(), text=f"resumed with {difference}"))
    if lock is not None:
        lock.describe(journal.folder.name)
    probes = open_probes(here.gpu, why=here.gpu_unavailable)
    for probe in probes:
        held.callback(probe.close)
    return Bench(
        journal=journal,
        launcher=launcher,
        probes=probes,
        gpu=watch_over(held, here, wait_s=means.wait_s, say=means.say),
        ends=None if means.budget_s is None else began + means.budget_s,
        say=means.say,
    )


def _require_fit(begun: Request, here: Environment, *, resumed: bool) -> None:
    then = begun.environment
    if resumed and then is not None and here.device_name != then.device_name:
        raise HarnessError(
            f"this search began on {then.device_name}, and here is {here.device_name}",
            "Resume it there, or begin anew.",
        )
    machine.require_gpu(begun.suite, here)
    if unfit := vacancy.mismatch(begun.suite.requires, here):
        raise HarnessError(f"this machine is not the one the suite requires: {unfit}")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
