"""Runs a suite: fresh processes, one after the other, each stored as it ends.

Process 0 of every case comes first, then process 1 in reverse order, and so on. Every case gives a
result early, and no case always follows the same one or runs on the warmer GPU.

The cases of rules with `abort_early` come before all others, rule by rule. Such a rule is judged
once, when they have all their processes: no later one can overturn it. A budget takes cases in the
order in which they decide, and as many in turns as fit into the time that is left.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol

from harness.records import (
    Case,
    Decision,
    Evidence,
    Measurement,
    Outcome,
    Stop,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
)
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.telemetry import gpus_of
from harness.runner.watchdog import watch

SIGNAL_S = 0.2
"""Longest time between the SIGTERM to a worker and that to this process, if both get one."""


class Writer(Protocol):
    """Stores measurements, as harness.store.writer.RunWriter does."""

    @property
    def folder(self) -> Path: ...

    def append(self, measurement: Measurement) -> None: ...

    def log_path(self, case_id: str, process: int) -> Path:
        """The file for the output of one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time of a run."""

    total_s: float
    ends_at: float
    """By `clock`."""
    expected_s: Mapping[str, float]
    """Case id -> expected lifetime of one process."""
    clock: Callable[[], float] = time.monotonic


class Agenda:
    """The processes of a run that are left."""

    def __init__(
        self,
        suite: Suite,
        *,
        recorded: Iterable[Measurement] = (),
        device: str = "",
        decide: Callable[[], Verdict] | None = None,
        budget: Budget | None = None,
    ) -> None:
        """Every process of the suite that what was recorded does not settle.

        Args:
            recorded: What was measured before.
            device: The GPU's name; rules for other GPUs count as absent.
            decide: The verdict on what is recorded; None: no rule may end the run.
        """
        self.suite = suite
        self.stop: Stop | None = None
        """Why processes are left; set when `next` returns None."""
        self._left = {c.case_id: [*range(c.settings.processes)] for c in suite.cases}
        self._wall_s: dict[str, float] = {}
        self._decide, self._budget = decide, budget
        rules = [r for r in suite.rules if gpu_matches(r.gpu, device) and r.needs(suite.cases)]
        self._rungs = {r.name: r.needs(suite.cases) for r in rules if decide and r.abort_early}
        deciding = [r for r in rules if budget and r.counts is not Weight.NOTE]
        deciding.sort(key=lambda r: (not r.abort_early, not r.asks))
        rest = [c for r in deciding for c in r.needs(suite.cases)]
        self._stages = [*self._rungs.values(), [*rest, *suite.cases]]
        for measurement in recorded:
            self.ended(measurement)

    @property
    def left(self) -> int:
        """The number of processes."""
        return sum(map(len, self._left.values()))

    def left_of(self, case_id: str) -> Sequence[int]:
        """The processes that a case has left."""
        return self._left[case_id]

    def ended(self, measurement: Measurement) -> None:
        """A process has ended. The first one that does not end OK is the last of its case."""
        name = measurement.case_id
        self._wall_s[name] = max(self._wall_s.get(name, 0.0), measurement.wall_s)
        failed = measurement.outcome is not Outcome.OK
        self._left[name] = [p for p in self._left[name] if not failed and p != measurement.process]

    def next(self) -> tuple[Case, int] | None:
        """The next process; None at the end of the run."""
        stage = next(filter(self._unfinished, self._stages), None)
        if stage is None:
            return None
        if broken := self._broken():
            self.stop = Stop(rule=broken)
            return None
        cases = self._affordable(stage)
        for process in range(max((c.settings.processes for c in cases), default=0)):
            for case in cases if process % 2 == 0 else cases[::-1]:
                if process in self._left[case.case_id]:
                    return case, process
        self.stop = Stop(budget_s=self._budget.total_s if self._budget else None)
        return None

    def _unfinished(self, cases: Sequence[Case]) -> bool:
        return any(self._left[c.case_id] for c in cases)

    def _broken(self) -> str:
        """The first rule that ends the run; empty if none does by now."""
        complete = [name for name, cases in self._rungs.items() if not self._unfinished(cases)]
        for name in complete:
            del self._rungs[name]
        results = self._decide().rules if complete and self._decide else ()
        no_go = {r.rule for r in results if r.applies and r.decision is Decision.NO_GO}
        return next((name for name in complete if name in no_go), "")

    def _affordable(self, stage: Sequence[Case]) -> Sequence[Case]:
        """The unfinished cases, each once, until one does not fit into the time that is left."""
        cases = [*{c.case_id: c for c in stage if self._left[c.case_id]}.values()]
        if self._budget is None:
            return cases
        left_s = self._budget.ends_at - self._budget.clock()
        for i, case in enumerate(cases):
            left_s -= self._expected_s(case, self._budget)
            if left_s < 0:
                return cases[:i]
        return cases

    def _expected_s(self, case: Case, budget: Budget) -> float:
        """How long the processes that a case has left will take: by its own processes, those of an
        earlier run, the slowest of its workload, or the slowest of this run. Without any, one
        process at its time limit: it shows how long the others take."""
        alike = [c.case_id for c in self.suite.cases if c.workload == case.workload]
        seen_s = [self._wall_s[i] for i in alike if i in self._wall_s] or self._wall_s.values()
        slowest_s = max(seen_s, default=0.0)
        one_s = self._wall_s.get(case.case_id, budget.expected_s.get(case.case_id, slowest_s))
        return len(self._left[case.case_id]) * one_s if one_s else case.settings.timeout_s


def run_suite(agenda: Agenda, rig: Rig, writer: Writer) -> None:
    """Measure what is left with the rig's launcher, and store each measurement as its process ends.

    No worker is left running, however this returns.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGTERM. At most the current process is lost.
        HarnessError: A measurement cannot be stored, or no worker can be started.
    """
    finished, observer = 0, rig.observer
    observer.planned(agenda.left)
    with terminating_like_ctrl_c():
        while step := agenda.next():
            case, process = step
            measurement = run_one(case, process, rig.launcher, writer, rig)
            if measurement.evidence and measurement.evidence.signal == "SIGTERM":
                # Slurm sends it to all processes of a job. If this process gets one, too, the
                # worker did not crash.
                time.sleep(SIGNAL_S)
            writer.append(measurement)
            agenda.ended(measurement)
            finished += 1
            observer.planned(finished + agenda.left)
            observer.finished(measurement)


def run_one(case: Case, process: int, launcher: Launcher, writer: Writer, rig: Rig) -> Measurement:
    """Measure one case in one fresh process, if its GPUs are free; stores nothing and leaves no
    worker."""
    why, holders = rig.gpu.problem(gpus_of(case)) if rig.gpu else ("", ())
    if why:
        return Measurement(
            case_id=case.case_id,
            process=process,
            outcome=Outcome.INVALID_ENVIRONMENT,
            detail=why,
            evidence=Evidence(phase="before start", holders=tuple(holders)),
        )
    rig.observer.started(case, process)
    log = writer.log_path(case.case_id, process)
    return watch(
        launcher.launch(case, process, log),
        case,
        process,
        log=log,
        run_folder=writer.folder,
        probes=rig.probes,
        observer=rig.observer,
    )


@contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, which cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
