"""Whether only we use the GPUs, and whether they run at their own speed; read before every process.

A worker is killed with everything it started; here the harness verifies that its memory is free
again. If another process uses the GPU, or it is throttled, the next case is not started: its
outcome is `invalid_environment` and names the process.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import psutil
import pynvml

from harness.errors import ProbeError
from harness.machine import nvml
from harness.records import Case, Environment, Evidence, Gpu, Measurement, Outcome

FREE_S = 10.0
"""Longest wait for a free GPU: the driver frees the memory of a dead process with a delay."""
AGAIN_S = 0.5
"""Longest wait if the wait before failed."""
SLACK_BYTES = 256 * 2**20
"""Memory that may be in use beyond the first reading; a CUDA context alone takes more."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Who uses a GPU while no worker of ours runs. None: could not be read."""

    used_bytes: float | None = None
    processes: Mapping[int, str] | None = None
    """Process id -> name, user and memory, for every process that computes on the GPU."""
    throttled_by: Sequence[str] = ()
    """Reasons for a lower clock, except those that a person has set."""


GpuMeter = Callable[[], GpuUse]
"""Reads the use of one GPU."""


@contextmanager
def nvml_meter(uuid: str) -> Iterator[GpuMeter]:
    """A meter of the GPU with this UUID.

    Raises:
        ProbeError: NVML does not work here, or does not know the GPU.
    """
    with nvml.session():
        yield partial(_use, nvml.handle(uuid))


def _use(device: object) -> GpuUse:
    """The use of a GPU now, by its handle of NVML."""
    memory = nvml.optional(
        lambda: pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).used
    )
    found = None
    if nvml.sees_host_ids():
        found = nvml.optional(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(device))
    mask = nvml.optional(lambda: nvml.throttle_reasons(device)) or 0
    return GpuUse(
        used_bytes=memory,
        processes=None
        if found is None
        else {p.pid: _describe(p.pid, p.usedGpuMemory) for p in found},
        throttled_by=nvml.throttle_words(mask & ~(nvml.IDLE | nvml.SETTINGS)),
    )


def _describe(pid: int, used_bytes: int | None) -> str:
    try:
        with (process := psutil.Process(pid)).oneshot():
            what = f"{process.name()} of {process.username()}"
    except psutil.Error:  # it belongs to another user, or has ended
        what = "name and user cannot be read"
    memory = "" if used_bytes is None else f", {used_bytes / 1e9:.2f} GB"
    return f"process {pid} ({what}){memory}"


class IdleCheck:
    """Waits before each process of a run until no other process uses its GPUs."""

    def __init__(self, *meters: GpuMeter, wait_s: float = 0.0) -> None:
        """Read the use before any worker starts.

        Args:
            meters: Read the GPU, and those of further ranks.
            wait_s: Longest wait before the first process; at least FREE_S.
        """
        self._limit_s = max(wait_s, FREE_S)
        # Without a list of processes, only the memory in use shows that others are there.
        self._gpus = [
            (meter, (before.used_bytes if before.processes == {} else None) or 0.0)
            for meter, before in ((meter, meter()) for meter in meters)
        ]

    def problem(self, gpus: int = 1) -> tuple[str, tuple[str, ...]]:
        """Wait until this many GPUs are free.

        Returns:
            Why one is not fit to measure on, and the processes that use it; both empty if all are.
        """
        deadline = time.monotonic() + self._limit_s
        while True:
            for rank, (meter, level_bytes) in enumerate(self._gpus[:gpus]):
                name = f"the GPU of rank {rank}" if gpus > 1 else "the GPU"
                why, holders = _judge(meter(), level_bytes, name)
                if why:
                    break
            if not why:
                self._limit_s = FREE_S
                return "", ()
            if time.monotonic() >= deadline:
                waited, self._limit_s = self._limit_s, AGAIN_S
                return f"{why}, after {waited:g} s of waiting", holders
            time.sleep(POLL_S)


def _judge(use: GpuUse, level_bytes: float, name: str) -> tuple[str, tuple[str, ...]]:
    holders = tuple(use.processes.values()) if use.processes else ()
    if holders:
        return f"{name} is shared: {'; '.join(holders)}", holders
    if use.used_bytes is not None and use.used_bytes > level_bytes + SLACK_BYTES:
        more = (use.used_bytes - level_bytes) / 1e9
        who = "an unknown process (NVML lists none here)"
        return f"{more:.1f} GB of {name} are in use with no worker of ours: {who}", (who,)
    if use.throttled_by:
        return f"{name} is throttled at the start: {', '.join(use.throttled_by)}", ()
    return "", ()


def watch_over(
    held: ExitStack,
    here: Environment,
    others: Sequence[Gpu] = (),
    *,
    wait_s: float,
    say: Callable[[str], None],
) -> IdleCheck | None:
    """The check of the run's GPU and those of further ranks, until `held` is closed.

    None without a GPU, and with a note to `say` if NVML cannot read it.
    """
    if here.gpu is None:
        return None
    try:
        meters = [held.enter_context(nvml_meter(gpu.uuid)) for gpu in (here.gpu, *others)]
    except ProbeError as error:
        say(f"cannot check whether others use the GPU: {error}")
        return None
    return IdleCheck(*meters, wait_s=wait_s)


def refused(case: Case, process: int, why: str, holders: tuple[str, ...]) -> Measurement:
    """The record of a process that was not started."""
    return Measurement(
        case_id=case.case_id,
        process=process,
        outcome=Outcome.INVALID_ENVIRONMENT,
        detail=why,
        evidence=Evidence(phase="before start", holders=holders),
    )
