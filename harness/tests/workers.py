"""What tests that run workers share: quick fake cases, a writer in memory, a silent observer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from harness.machine.probes import Probe
from harness.records import Case, Measurement, MeasureSettings, Scalar, Suite
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.run import Agenda, run_suite
from harness.runner.watchdog import RunObserver
from harness.store.writer import RunWriter

GPU = Path("/dev/nvidiactl").exists()  # asked without torch, as the parent must
QUICK = MeasureSettings(
    processes=1,
    min_samples=3,
    max_samples=20,
    sample_s=0.01,
    warmup_s=0.2,
    timeout_s=60.0,
    profile=False,
)


def make_case(
    fake: str,
    *,
    settings: MeasureSettings = QUICK,
    axes: Mapping[str, Scalar] | None = None,
    env: Mapping[str, str] | None = None,
) -> Case:
    return Case(
        case_id=fake,
        workload=fake,
        factory=f"harness.tests.fake_workloads:{fake}",
        provider="fake",
        axes={"head_dim": 7} if axes is None else axes,
        env=env or {},
        settings=settings,
    )


def make_suite(*cases: Case) -> Suite:
    return Suite(
        name="fake", title="", subject="", question="", path="", text="", sha256="", cases=cases
    )


class Memory(RunWriter):
    """A writer that keeps measurements in a list."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measurements: list[Measurement] = []

    def append(self, *found: object) -> None:
        self.measurements += [m for m in found if isinstance(m, Measurement)]


class Quiet(RunObserver):
    """Keeps the totals, phases and steps of a run."""

    def __init__(self) -> None:
        self.totals: list[int] = []
        self.phases: list[str] = []
        self.said: list[str] = []
        self.steps = 0

    def planned(self, total: int) -> None:
        self.totals.append(total)

    def phase(self, case: Case, process: int, name: str) -> None:
        self.phases.append(name)

    def busy(self, case: Case, process: int, what: str) -> None:
        self.said.append(what)

    def progressed(self, case: Case, process: int, steps: int) -> None:
        self.steps = steps


class Counter:
    """A probe that counts its readings, and fails every other one."""

    unavailable: Mapping[str, str] = {"gpu_power_w": "no GPU in this test"}

    def __init__(self) -> None:
        self.readings = 0
        self.pids: list[int] = []

    def attach(self, pid: int) -> None:
        self.pids.append(pid)

    def read(self) -> Mapping[str, float | None]:
        self.readings += 1
        return {"rss_bytes": 1.0 if self.readings % 2 else None}

    def close(self) -> None:
        pass


def rig_of(
    launcher: Launcher, probes: Sequence[Probe] = (), observer: RunObserver | None = None
) -> Rig:
    """A rig that reserves nothing."""
    rig = Rig(say=print)
    rig.launcher, rig.probes, rig.observer = launcher, (*probes,), observer or Quiet()
    return rig


def run(
    warm: Launcher,
    folder: Path,
    *cases: Case,
    observer: RunObserver | None = None,
    probes: Sequence[Probe] = (),
) -> list[Measurement]:
    writer = Memory(folder)
    run_suite(Agenda(make_suite(*cases)), rig_of(warm, probes, observer), writer)
    return writer.measurements


def descendants() -> list[psutil.Process]:
    """Workers and their children; forkservers do not count."""
    forkservers = psutil.Process().children()
    return [p for forkserver in forkservers for p in forkserver.children(recursive=True)]
