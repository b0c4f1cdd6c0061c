"""Runs a suite: fresh processes, one after the other, each stored as it ends.

Process 0 of every case comes first, then process 1 in reverse order, so that no case always runs
on the warmer GPU. The providers of a case come one after the other: a run that is resumed on
another GPU splits one comparison at most. The cases of rules with `abort_early` come before all
others; with a budget, the most decisive come first. Then come rounds: each gives one more process
to every case that leaves something open, judged by the rounds before it alone, so a resumed run
goes on with the same plan.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from harness.analysis.study import Study
from harness.records import (
    Case,
    Decision,
    Evidence,
    Measurement,
    Outcome,
    Run,
    Stop,
    Suite,
    gpu_matches,
    pairs,
)
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.telemetry import gpus_of
from harness.runner.undecided import needed, undecided
from harness.runner.watchdog import watch
from harness.store.lines import LineFile
from harness.store.writer import RunWriter

SIGNAL_S = 0.2
"""Longest time between the SIGTERM to a worker and that to this process, if both get one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time of a run."""

    total_s: float
    ends_at: float
    """By `clock`."""
    clock: Callable[[], float] = time.monotonic


class Agenda:
    """The processes of a run that are left."""

    def __init__(
        self,
        suite: Suite,
        *,
        recorded: Iterable[Measurement] = (),
        device: str = "",
        read: Callable[[], Run] | None = None,
        abort: bool = True,
        budget: Budget | None = None,
    ) -> None:
        """Every process that what was `recorded` does not settle. Rules for GPUs other than
        `device` count as absent. `read` gives the run as recorded; without it nothing is judged: no
        rule ends the run, and there are no rounds. `abort`: one with `abort_early` may end it."""
        self.suite = suite
        self.stop: Stop | None = None
        """Why processes are left; set when `next` returns None."""
        self._left = {c.case_id: [*range(c.settings.processes)] for c in suite.cases}
        self._asked = {c.case_id: c.settings.processes for c in suite.cases}
        self._why = dict[str, str]()
        self._rounds = False
        self._ended = set[tuple[str, int]]()
        self._read, self._budget = read, budget
        self._rungs = {
            r.name: r.needs(suite.cases)
            for r in suite.rules
            if read and abort and r.abort_early and gpu_matches(r.gpu, device)
            if r.needs(suite.cases)
        }
        beside = [c for group in pairs(suite.cases, "provider") for c in group]
        asked = ({c.case_id for c in cases} for cases in needed(suite, device).values())
        decisive = [c for ids in asked for c in beside if c.case_id in ids]
        first = [decisive] if budget else [*self._rungs.values()]
        stages = (*first, [*decisive, *beside])
        self._stages = [[*{c.case_id: c for c in stage}.values()] for stage in stages]
        for measurement in recorded:
            self.ended(measurement)

    @property
    def left(self) -> int:
        """The number of processes that are known to be left."""
        return sum(map(len, self._left.values()))

    def left_of(self, case: Case) -> Sequence[int]:
        """The processes that a case has left."""
        return self._left[case.case_id]

    def why(self, case: Case, process: int) -> str:
        """The question for which a process is run after the first pass; empty for one of it."""
        return self._why[case.case_id] if process >= case.settings.processes else ""

    def ended(self, measurement: Measurement) -> None:
        """A process has ended. The first one that does not end OK is the last of its case."""
        name = measurement.case_id
        self._ended.add((name, measurement.process))
        failed = measurement.outcome is not Outcome.OK
        self._left[name] = [p for p in self._left[name] if not failed and p != measurement.process]

    def next(self) -> tuple[Case, int] | None:
        """The next process; None at the end of the run."""
        while not self.left:
            if not self._begin_round():
                return None
        if broken := self._broken():
            self.stop = Stop(rule=broken)
            return None
        if self._budget and self._budget.clock() >= self._budget.ends_at:
            self.stop = Stop(budget_s=self._budget.total_s)
            return None
        for stage in self._stages:
            for process in range(max((c.settings.most for c in stage), default=0)):
                in_turn = process % 2 == 0 or self._rounds or self._budget
                for case in stage if in_turn else stage[::-1]:
                    if process in self._left[case.case_id]:
                        return case, process
        return None

    def _begin_round(self) -> bool:
        """Give one more process to each case that leaves something open; False if none may have
        one. What a resumed run has measured of the round is not measured again."""
        cases = {c.case_id: c for c in self.suite.cases}
        if self._read is None or all(self._asked[i] >= c.settings.most for i, c in cases.items()):
            return False
        run = self._read()
        known = tuple(m for m in run.measurements if m.process < self._asked[m.case_id])
        chosen = []
        for case_id, name in undecided(replace(run, measurements=known)).items():
            process = self._asked[case_id]
            if process < cases[case_id].settings.most:
                self._asked[case_id] += 1
                self._why[case_id] = name
                self._left[case_id] = [] if (case_id, process) in self._ended else [process]
                chosen.append(cases[case_id])
        self._stages, self._rounds = [chosen], True
        return bool(chosen)

    def _broken(self) -> str:
        """The first rule that ends the run; empty if none does by now."""
        complete = [n for n, cases in self._rungs.items() if not any(map(self.left_of, cases))]
        for name in complete:
            del self._rungs[name]
        if not complete or self._read is None:
            return ""
        run = self._read()
        most = {c.case_id: c.settings.processes for c in self.suite.cases}
        first = tuple(m for m in run.measurements if m.process < most[m.case_id])
        results = Study(replace(run, measurements=first)).verdict.rules
        no_go = {r.rule for r in results if r.applies and r.decision is Decision.NO_GO}
        return next((name for name in complete if name in no_go), "")


def run_suite(agenda: Agenda, rig: Rig, writer: RunWriter) -> None:
    """Measure what is left with the rig's launcher, and store each measurement as its process ends.
    No worker is left running. At Ctrl-C or SIGTERM at most the current process is lost."""
    finished, observer = 0, rig.observer
    with terminating_like_ctrl_c():
        while step := agenda.next():
            case, process = step
            observer.planned(finished + agenda.left)
            why = agenda.why(case, process)
            measurement = run_one(case, process, rig.launcher, writer, rig, why)
            if measurement.evidence and measurement.evidence.signal == "SIGTERM":
                # Slurm sends it to all processes of a job. If this process gets one, too, the
                # worker did not crash.
                time.sleep(SIGNAL_S)
            writer.append(measurement)
            agenda.ended(measurement)
            finished += 1
            observer.finished(measurement)
        observer.planned(finished)  # a case that failed has left the rest of its processes


def run_one(
    case: Case, process: int, launcher: Launcher, writer: LineFile, rig: Rig, asked_by: str = ""
) -> Measurement:
    """Measure one case in one fresh process, if its GPUs are free; leaves no worker. What it prints
    goes to a log of the `writer`, which stores nothing here."""
    known: dict[str, Any] = {"asked_by": asked_by, "card": writer.card}
    why, holders = rig.gpu.problem(gpus_of(case)) if rig.gpu else ("", ())
    if why:
        return Measurement(
            case_id=case.case_id,
            process=process,
            outcome=Outcome.INVALID_ENVIRONMENT,
            detail=why,
            evidence=Evidence(phase="before start", holders=tuple(holders)),
            **known,
        )
    rig.observer.started(case, process)
    log = writer.log_path(case.case_id, process)
    worker = launcher.launch(case, process, log)
    return watch(worker, case, process, log=log, probes=rig.probes, observer=rig.observer, **known)


@contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, which cleans up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread receives signals
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
