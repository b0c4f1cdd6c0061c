"""Runs a suite: a fresh process per case and repetition, one after the other, each kept at once.

Process 0 of every case comes first, then process 1 in reverse order, and so on: every case is
seen early, and no case always runs behind the same one, or on the warmer card.
"""

import signal
import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

from harness.machine import gpu_idle
from harness.machine.gpu_idle import IdleCheck
from harness.machine.probes import Probe
from harness.records import Case, Measurement, Outcome, Suite
from harness.runner.launcher import Launcher
from harness.runner.watchdog import watch


class Writer(Protocol):
    """Where measurements go; harness.store.reader.RunWriter is one."""

    @property
    def folder(self) -> Path:
        """The run's folder."""

    def append(self, measurement: Measurement) -> None:
        """Keep a measurement for good."""

    def log_path(self, case_id: str, process: int) -> Path:
        """Where one process's output goes; the file exists."""


class RunObserver(Protocol):
    """Is told how a run goes; the progress bar of the command line."""

    def planned(self, total: int) -> None:
        """So many processes in all. Said again, with fewer, when a case drops out."""

    def started(self, case: Case, process: int) -> None: ...

    def phase(self, case: Case, process: int, name: str) -> None: ...

    def progressed(self, case: Case, process: int, steps: int) -> None:
        """So many runs of the workload are finished, warm-up included."""

    def finished(self, measurement: Measurement) -> None:
        """One process has ended, and what it measured is stored."""


class Silent:
    """An observer for whom the end of a process is enough."""

    def planned(self, total: int) -> None: ...

    def started(self, case: Case, process: int) -> None: ...

    def phase(self, case: Case, process: int, name: str) -> None: ...

    def progressed(self, case: Case, process: int, steps: int) -> None: ...

    def finished(self, measurement: Measurement) -> None: ...


def run_suite(
    suite: Suite,
    *,
    writer: Writer,
    launcher: Launcher,
    probes: Sequence[Probe],
    observer: RunObserver,
    done: Container[tuple[str, int]] = (),
    gpu: IdleCheck | None = None,
    unfit: str = "",
) -> None:
    """Measure every case in its processes, and store each measurement as its process ends.

    A case is left alone after its first process that does not end OK: what would its others
    add? Nothing is recorded for them. However this returns, no worker is left running.

    Args:
        suite: What to measure.
        writer: Where measurements and logs go.
        launcher: Starts the workers.
        probes: Read while workers work.
        observer: Is told how it goes.
        done: (case id, process) pairs that need not run; see `settled`.
        gpu: Asked before every process whether the GPU is free; None without a GPU.
        unfit: Why the machine is not one to measure this suite on; then nothing is started.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGTERM. At most the process in flight is lost.
        HarnessError: A measurement cannot be stored, or no worker can be started.
    """
    plan = [step for step in _order(suite.cases) if (step[0].case_id, step[1]) not in done]
    observer.planned(len(plan))
    finished = 0
    with terminating_like_ctrl_c():
        while plan:
            case, process = plan.pop(0)
            why, holders = gpu.problem() if gpu and not unfit else (unfit, ())
            if why:
                measurement = gpu_idle.refused(case, process, why, holders)
            else:
                measurement = run_one(case, process, launcher, writer, probes, observer)
            writer.append(measurement)
            finished += 1
            if measurement.outcome is not Outcome.OK:
                plan = [step for step in plan if step[0].case_id != case.case_id]
                observer.planned(finished + len(plan))
            observer.finished(measurement)


def settled(suite: Suite, measurements: Iterable[Measurement]) -> frozenset[tuple[str, int]]:
    """The (case id, process) pairs that a resumed run need not run: `done` of run_suite.

    Those measured, and all of a case that has already ended otherwise than OK.
    """
    measurements = tuple(measurements)
    dropped = {m.case_id for m in measurements if m.outcome is not Outcome.OK}
    measured = {(m.case_id, m.process) for m in measurements}
    return frozenset(
        (case.case_id, process)
        for case, process in _order(suite.cases)
        if case.case_id in dropped or (case.case_id, process) in measured
    )


def _order(cases: Sequence[Case]) -> Iterator[tuple[Case, int]]:
    for process in range(max((case.settings.processes for case in cases), default=0)):
        for case in cases if process % 2 == 0 else reversed(cases):
            if process < case.settings.processes:
                yield case, process


def run_one(
    case: Case,
    process: int,
    launcher: Launcher,
    writer: Writer,
    probes: Sequence[Probe],
    observer: RunObserver,
) -> Measurement:
    """Measure one case in one fresh process; nothing is stored, and no worker is left."""
    observer.started(case, process)
    log = writer.log_path(case.case_id, process)
    return watch(
        launcher.launch(case, process, log),
        case,
        process,
        log=log,
        run_folder=writer.folder,
        probes=probes,
        phase=partial(observer.phase, case, process),
        progressed=partial(observer.progressed, case, process),
    )


@contextmanager
def terminating_like_ctrl_c() -> Iterator[None]:
    """Let SIGTERM take the way of Ctrl-C, on which everything is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals reach the main thread, which has its own way to end us
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt("SIGTERM")

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
