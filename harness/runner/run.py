"""Runs a suite: fresh processes, one after the other, each stored as it ends."""

import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Protocol

from harness.machine import gpu_idle
from harness.machine.gpu_idle import IdleCheck
from harness.machine.probes import Probe
from harness.records import Case, Measurement, Stop, Suite, Verdict
from harness.runner.launcher import Launcher
from harness.runner.order import Agenda, Budget
from harness.runner.watchdog import watch


class Writer(Protocol):
    """Stores measurements, as harness.store.writer.RunWriter does."""

    @property
    def folder(self) -> Path: ...

    def append(self, measurement: Measurement) -> None: ...

    def log_path(self, case_id: str, process: int) -> Path:
        """The file for the output of one process."""


class RunObserver:
    """Follows a run, as the progress bar of the command line does. This one ignores it."""

    def planned(self, total: int) -> None:
        """The number of processes; called again, with fewer, when a case is dropped."""

    def started(self, case: Case, process: int) -> None:
        """A process is about to start."""

    def phase(self, case: Case, process: int, name: str) -> None:
        """A phase of a process begins."""

    def progressed(self, case: Case, process: int, steps: int) -> None:
        """The number of finished steps, including warm-up."""

    def busy(self, case: Case, process: int, what: str) -> None:
        """A process has finished no step for long; what it does."""

    def finished(self, measurement: Measurement) -> None:
        """One process has ended, and its measurement is stored."""


def run_suite(
    suite: Suite,
    *,
    writer: Writer,
    launcher: Launcher,
    probes: Sequence[Probe],
    observer: RunObserver,
    recorded: Iterable[Measurement] = (),
    gpu: IdleCheck | None = None,
    unfit: str = "",
    device: str = "",
    decide: Callable[[], Verdict] | None = None,
    budget: Budget | None = None,
) -> Stop | None:
    """Measure every case in its processes, and store each measurement as its process ends.

    The first process of a case that does not end OK is its last. No worker is left running,
    however this returns.

    Args:
        gpu: Checked before every process; None without a GPU.
        unfit: Why this machine must not measure this suite; then no worker is started.
        recorded, device, decide, budget: As of Agenda.

    Returns:
        Why processes are left; None if none are.

    Raises:
        KeyboardInterrupt: Ctrl-C, or SIGTERM. At most the current process is lost.
        HarnessError: A measurement cannot be stored, or no worker can be started.
    """
    agenda = Agenda(suite, recorded=recorded, device=device, decide=decide, budget=budget)
    total = agenda.left
    observer.planned(total)
    finished = 0
    with terminating_like_ctrl_c():
        while step := agenda.next():
            case, process = step
            if unfit:
                measurement = gpu_idle.refused(case, process, unfit, ())
            else:
                measurement = run_one(case, process, launcher, writer, probes, observer, gpu)
            writer.append(measurement)
            agenda.ended(measurement)
            finished += 1
            if total != finished + agenda.left:
                total = finished + agenda.left
                observer.planned(total)
            observer.finished(measurement)
    return agenda.stop


def run_one(
    case: Case,
    process: int,
    launcher: Launcher,
    writer: Writer,
    probes: Sequence[Probe],
    observer: RunObserver,
    gpu: IdleCheck | None,
) -> Measurement:
    """Measure one case in one fresh process, if the GPU is free; stores nothing and leaves no
    worker."""
    why, holders = gpu.problem() if gpu else ("", ())
    if why:
        return gpu_idle.refused(case, process, why, holders)
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
        busy=partial(observer.busy, case, process),
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
