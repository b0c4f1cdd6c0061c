"""What every measurement needs from the machine: a locked, watched GPU, launchers and probes."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from harness.errors import ProbeError
from harness.machine import doctor, environment, nvml, requirements
from harness.machine.gpu_idle import IdleCheck, nvml_meter
from harness.machine.gpu_lock import GpuLock
from harness.machine.probes import Probe, open_probes
from harness.records import Environment, Suite
from harness.runner.launcher import Launcher
from harness.runner.watchdog import RunObserver
from harness.suite.load import shipped_roots


class Rig(ExitStack):
    """Reserves the machine. A context: on exit everything is closed and unlocked. The GPUs are
    locked once a worker has named them, before any uses their memory."""

    def __init__(
        self,
        device: str = "any",
        *,
        wait_s: float = 0.0,
        say: Callable[[str], None],
        alone: bool = True,
    ) -> None:
        """Reserves nothing yet. The device `cpu` of a suite hides the GPU from workers; it is not
        locked then, nor without `alone`: exact counts do not need it. `wait_s`: for a busy GPU."""
        super().__init__()
        self._device = device
        self._locks = alone and device != "cpu"
        self._wait_s = wait_s
        self._say = say
        self._uuids: Sequence[str] = ()
        """Of the GPUs of a case: one for each rank."""
        self.locks: list[GpuLock] = []
        self.launcher: Launcher
        """The last that was started."""
        self.observer = RunObserver()
        """Follows what is measured here."""
        self.probes: tuple[Probe, ...] = ()
        """Set by `observe`."""
        self.gpu: IdleCheck | None = None
        """Set by `observe`; None without a GPU, and if NVML cannot read it."""

    def start(
        self,
        roots: Sequence[Path] = (),
        *,
        elsewhere: Sequence[Path] = (),
        around: Mapping[str, str] | None = None,
    ) -> Launcher:
        """A launcher, closed with the rig; see Launcher."""
        launcher = Launcher(roots, elsewhere=elsewhere, device=self._device, around=around)
        self.launcher = self.enter_context(launcher)
        return self.launcher

    def describe(
        self, *suites: Suite, command: Sequence[str], repository: Path | None
    ) -> Environment:
        """The environment of the launcher's workers, see harness.machine.environment.capture, with
        what the suites require. Locks the GPUs that their cases use, or raises a ProbeError if
        another harness does."""
        facts = self.launcher.describe()
        device = str(facts["torch_settings"]["device"])
        programs = (case.program for suite in suites for case in suite.cases)
        ranks = max((p.needs_gpus(device) for p in programs if p), default=1)
        required = {key for suite in suites for key in (*suite.requires, *suite.wants)}
        self._uuids = facts["gpu_uuids"][:ranks]
        held = {lock.uuid for lock in self.locks}  # both sides of a gate describe themselves
        for uuid in self._uuids if self._locks else ():
            if uuid not in held:
                lock = GpuLock(uuid, wait_s=self._wait_s, waiting=self._say)
                self.locks.append(self.enter_context(lock))
        return environment.capture(facts, command=command, repository=repository, required=required)

    def observe(self, here: Environment) -> None:
        """Open the probes of the GPUs, and watch them for other users."""
        gpus = [here.gpu, *map(nvml.find, self._uuids[1:])] if here.gpu else []
        self.probes = open_probes(gpus)
        for probe in self.probes:
            self.callback(probe.close)
        if not gpus:
            return
        try:
            meters = [self.enter_context(nvml_meter(gpu.uuid)) for gpu in gpus]
        except ProbeError as error:
            self._say(f"cannot check whether others use the GPU: {error}")
        else:
            self.gpu = IdleCheck(*meters, wait_s=self._wait_s)

    def measures(self, run_id: str) -> None:
        """Write into the lock files which run uses the GPUs."""
        for lock in self.locks:
            lock.describe(run_id)


def take(
    held: ExitStack,
    suite: Suite,
    *,
    command: Sequence[str],
    wait_s: float,
    say: Callable[[str], None],
    store: Path | None = None,
) -> tuple[Rig, Environment]:
    """A rig with a launcher for one suite, and the environment of its workers, which has what the
    suite requires. `held` closes the rig. With a store, the doctor examines the machine."""
    rig = held.enter_context(Rig(suite.device, wait_s=wait_s, say=say))
    rig.launcher = held.enter_context(Launcher.of(suite))
    home = environment.home_of(suite.cases[0].factory, shipped_roots(suite))
    here = rig.describe(suite, command=command, repository=home)
    requirements.require(suite, here)
    if store is not None:
        here = doctor.examined(here, store=store)
    return rig, here
