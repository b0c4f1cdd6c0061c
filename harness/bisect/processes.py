"""What every search measures with: the locked machine, fresh processes and the journal."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from harness.bisect.journal import BisectRequest, Journal, Measured, Note
from harness.errors import HarnessError
from harness.machine import drift, requirements
from harness.records import Case, Measurement, Outcome
from harness.runner.rig import Rig
from harness.runner.run import run_one
from harness.store.writer import now


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
class Processes:
    journal: Journal
    rig: Rig
    started: float
    """Monotonic time."""
    resources: Resources

    @property
    def measured(self) -> tuple[Measured, ...]:
        return tuple(line for line in self.journal.lines if isinstance(line, Measured))

    def say(self, text: str) -> None:
        self.resources.say(text)

    def measure(self, case: Case, roots: Sequence[Path], *, first: bool) -> Measurement:
        """Measure one fresh process, the first of this code and case or a later one; Stopped if the
        budget is spent, or if the machine is not fit."""
        budget_s = self.resources.budget_s
        if budget_s is not None and time.monotonic() >= self.started + budget_s:
            raise Stopped("the time budget is spent")
        if not first:  # accuracy is checked once for each commit
            case = replace(case, settings=replace(case.settings, accuracy=False))
        launcher = self.rig.launcher.at(roots)
        measured = run_one(case, len(self.measured), launcher, self.journal.log_path, self.rig)
        if measured.outcome is Outcome.INVALID_ENVIRONMENT:
            raise Stopped(f"the machine is not fit: {measured.detail}")
        return measured


def opened(
    stack: ExitStack,
    start: BisectRequest | Journal,
    resources: Resources,
    other_trees: Sequence[Path] = (),
) -> Processes:
    """Lock the machine, and create the journal of a request or continue a journal; a HarnessError
    on a machine other than the journal's or the suite's. The code must not come from
    `other_trees`."""
    started = time.monotonic()
    journal = stack.enter_context(start) if isinstance(start, Journal) else None
    request = start.request if isinstance(start, Journal) else start
    timed = not request.criterion.exact  # exact counts need no GPU of their own
    rig = stack.enter_context(
        Rig(request.suite.device, wait_s=resources.wait_s, say=resources.say, alone=timed)
    )
    rig.start(elsewhere=other_trees)
    suite = request.suite
    here = rig.describe(suite, command=request.command, repository=None)
    before = request.environment if journal else None
    if before is not None and here.device_name != before.device_name:
        raise HarnessError(
            f"this search started on {before.device_name}, but this machine has {here.device_name}",
            "Resume it on that device, or start a new search.",
        )
    requirements.require(suite, here)
    if journal is None:
        created = Journal.create(resources.state, replace(request, environment=here))
        journal = stack.enter_context(created)
    else:
        journal.write(Note(text=f"resumed at {now()}"))
        for difference in drift.differences(before, here) if before else ():
            journal.write(Note(text=f"resumed with {difference}"))
    rig.measures(journal.folder.name)
    rig.observe(here)
    return Processes(journal=journal, rig=rig, started=started, resources=resources)
