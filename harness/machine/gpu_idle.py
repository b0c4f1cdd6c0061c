"""Is the GPU ours alone, free and at its own speed? Asked before every process is started.

What a worker leaves behind is killed with it; that its memory is back is verified here. A case
whose GPU somebody else uses, or that starts throttled, would measure them: it is not started, and
its outcome says who it was.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Self

import psutil
import pynvml

from harness.errors import ProbeError
from harness.machine import nvml
from harness.machine.probes import GpuMeter, GpuUse
from harness.records import Case, Environment, Evidence, Measurement, Outcome, gpu_matches


class NvmlMeter:
    """Reads one GPU, by UUID. A context: leaving it lets go of NVML."""

    def __init__(self, uuid: str) -> None:
        """Open NVML.

        Raises:
            ProbeError: It does not work here, or knows no such GPU.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ProbeError(f"NVML: {error}") from error
        try:
            self._device = nvml.handle(uuid)
        except ProbeError:
            pynvml.nvmlShutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pynvml.nvmlShutdown()

    def use(self) -> GpuUse:
        """What is seen now; what cannot be read is left open."""
        return GpuUse(
            used_bytes=self._used_bytes(),
            processes=self._processes(),
            throttled_by=self._throttled_by(),
        )

    def _used_bytes(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetMemoryInfo(self._device, pynvml.nvmlMemory_v2).used)
        except pynvml.NVMLError:
            return None

    def _processes(self) -> dict[int, str] | None:
        if not nvml.sees_host_ids():
            return None
        try:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except pynvml.NVMLError:
            return None
        return {p.pid: _describe(p.pid, p.usedGpuMemory) for p in found}

    def _throttled_by(self) -> tuple[str, ...]:
        try:
            mask = nvml.throttle_reasons(self._device)
        except pynvml.NVMLError:
            return ()
        return nvml.throttle_words(mask & ~(nvml.IDLE | nvml.SETTINGS))


def _describe(pid: int, used_bytes: int | None) -> str:
    """A process in words. It may be another user's, or gone by now."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            what = f"{process.name()} of {process.username()}"
    except psutil.Error:
        what = "of which nothing can be read"
    holds = "" if used_bytes is None else f", {used_bytes / 1e9:.2f} GB"
    return f"process {pid} ({what}){holds}"


FREE_S = 10.0
"""Longest wait for a GPU to be free: a driver takes back a dead process's memory in its time."""
AGAIN_S = 0.5
"""Longest wait where the one before was in vain already."""
SLACK_BYTES = 256 * 2**20
"""Memory that may be in use beyond what was at first; a CUDA context alone takes more."""
POLL_S = 0.02


class Vacancy:
    """Watches over one GPU during a run."""

    def __init__(self, meter: GpuMeter, *, wait_s: float = 0.0) -> None:
        """Read what is in use before any worker is started.

        Args:
            meter: Reads the GPU.
            wait_s: Longest wait for the GPU to be free before the first process; FREE_S at least.
        """
        self._meter = meter
        self._first_s = max(wait_s, FREE_S)
        self._limit_s = self._first_s
        before = meter.use()
        # Without a list of processes, memory in use is all there is to know others by.
        known = before.processes is not None and not before.processes
        self._level_bytes = before.used_bytes if known else None

    def problem(self) -> tuple[str, tuple[str, ...]]:
        """Wait for the GPU to be free.

        Returns:
            Why it is not fit to measure on, and who holds it; both empty where it is.
        """
        deadline = time.monotonic() + self._limit_s
        while True:
            why, holders = self._judge(self._meter.use())
            if not why:
                self._limit_s = FREE_S
                return "", ()
            if time.monotonic() >= deadline:
                waited, self._limit_s = self._limit_s, AGAIN_S
                return f"{why}, {waited:g} s after the GPU should have been free", holders
            time.sleep(POLL_S)

    def _judge(self, use: GpuUse) -> tuple[str, tuple[str, ...]]:
        holders = tuple(use.processes.values()) if use.processes else ()
        if holders:
            return f"the GPU is shared: {'; '.join(holders)}", holders
        level = self._level_bytes or 0.0
        if use.used_bytes is not None and use.used_bytes > level + SLACK_BYTES:
            more = (use.used_bytes - level) / 1e9
            who = "an unknown process, for NVML lists none here"
            return f"{more:.1f} GB of the GPU are in use with no worker of ours: {who}", (who,)
        if use.throttled_by:
            return f"the GPU is throttled at the start: {', '.join(use.throttled_by)}", ()
        return "", ()


def watch_over(
    held: ExitStack, here: Environment, *, wait_s: float, say: Callable[[str], None]
) -> Vacancy | None:
    """What watches over the run's GPU until `held` is left.

    None without a GPU, and where NVML cannot be asked, which is said.
    """
    if here.gpu is None:
        return None
    try:
        meter = held.enter_context(NvmlMeter(here.gpu.uuid))
    except ProbeError as error:
        say(f"whether others use the GPU cannot be known: {error}")
        return None
    return Vacancy(meter, wait_s=wait_s)


def mismatch(requires: Mapping[str, str], environment: Environment) -> str:
    """In what the machine is another than a suite requires; empty where it is the one."""
    gpu = environment.gpu
    if not requires:
        return ""
    if gpu is None:
        wanted = ", ".join(f"{name} {pattern}" for name, pattern in requires.items())
        return f"the suite requires {wanted}, and no GPU is here: {environment.gpu_unavailable}"
    found = {
        "gpu": (gpu.name, gpu_matches(requires.get("gpu", "*"), gpu.name)),
        "driver": (gpu.driver, fnmatchcase(gpu.driver, requires.get("driver", "*"))),
    }
    return "; ".join(
        f"wrong {name}: {is_here} is here, and the suite requires {requires[name]}"
        for name, (is_here, fits) in found.items()
        if not fits
    )


def refused(case: Case, process: int, why: str, holders: tuple[str, ...]) -> Measurement:
    """The record of a process that was not started."""
    return Measurement(
        case_id=case.case_id,
        process=process,
        outcome=Outcome.INVALID_ENVIRONMENT,
        detail=why,
        evidence=Evidence(phase="before start", holders=holders),
    )
