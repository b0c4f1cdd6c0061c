"""Whether only we use the GPUs, and whether they run at their own speed; read before every process.

A worker is killed with everything it started; here the harness verifies that its memory is free
again. If another process uses the GPU, or it is throttled, the next case is not started: its
outcome is `invalid_environment` and names the process.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psutil

from harness.machine import nvml

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
    throttle_mask: int | None = None
    """Bits of nvml.THROTTLE_REASONS that apply."""

    @property
    def throttled_by(self) -> tuple[str, ...]:
        """Reasons for a lower clock, except those that a person has set."""
        return nvml.throttle_words((self.throttle_mask or 0) & ~(nvml.IDLE | nvml.SETTINGS))

    def others(self, name: str = "the GPU", level_bytes: float = 0.0) -> tuple[str, Sequence[str]]:
        """That others use it, and their processes; both empty if none do as far as is known. Where
        NVML lists no processes, memory in use beyond a level shows that there are some."""
        if self.processes:
            holders = tuple(self.processes.values())
            return f"{name} is shared: {'; '.join(holders)}", holders
        more = (self.used_bytes or 0.0) - level_bytes
        if more > SLACK_BYTES:
            who = "an unknown process (NVML lists none here)"
            return f"{more / 1e9:.1f} GB of {name} are in use with no worker of ours: {who}", (who,)
        return "", ()


GpuMeter = Callable[[], GpuUse]
"""Reads the use of one GPU."""


@contextmanager
def nvml_meter(uuid: str) -> Iterator[GpuMeter]:
    """A meter of the GPU with this UUID; a ProbeError if NVML cannot read it."""
    with nvml.session():
        yield partial(_use, nvml.handle(uuid))


def _use(device: object) -> GpuUse:
    """The use of a GPU now, by its handle of NVML."""
    listed = nvml.optional(lambda: nvml.processes(device))
    named = {p.pid: _describe(p.pid, p.usedGpuMemory) for p in listed or ()}
    return GpuUse(
        used_bytes=nvml.optional(lambda: nvml.used_bytes(device)),
        processes=None if listed is None else named,
        throttle_mask=nvml.optional(lambda: nvml.throttle_reasons(device)),
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
        """Read the use of the GPU, and of those of further ranks, before any worker starts. The
        first process may wait longer than FREE_S, up to `wait_s`."""
        self._limit_s = max(wait_s, FREE_S)
        self._gpus: list[tuple[GpuMeter, float]] = []
        for meter in meters:
            before = meter()
            # Without a list of processes, the memory in use may be that of others.
            level_bytes = before.used_bytes if before.processes == {} else None
            self._gpus.append((meter, level_bytes or 0.0))

    def problem(self, gpus: int = 1) -> tuple[str, Sequence[str]]:
        """Wait until this many GPUs are free; why one is not, and who uses it, or nothing."""
        deadline = time.monotonic() + self._limit_s
        while True:
            for rank, (meter, level_bytes) in enumerate(self._gpus[:gpus]):
                name = f"the GPU of rank {rank}" if gpus > 1 else "the GPU"
                use = meter()
                why, holders = use.others(name, level_bytes)
                if not why and use.throttled_by:
                    why = f"{name} is throttled at the start: {', '.join(use.throttled_by)}"
                if why:
                    break
            if not why:
                self._limit_s = FREE_S
                return "", ()
            if time.monotonic() >= deadline:
                waited, self._limit_s = self._limit_s, AGAIN_S
                return f"{why}, after {waited:g} s of waiting", holders
            time.sleep(POLL_S)
