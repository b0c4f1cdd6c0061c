"""NVML and CPU, sampled from the parent while the child works."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.machine.cpu import CpuProbe
from harness.machine.nvml import NvmlProbe
from harness.records import Gpu


class Probe(Protocol):
    """One instrument. Reading must be cheap: it happens ten times a second and more."""

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Channels (see records.Telemetry) this probe should read but cannot, and why."""

    def attach(self, pid: int) -> None:
        """Begin to watch a worker: `pid` and its descendants are ours, others are foreign."""

    def read(self) -> Mapping[str, float | None]:
        """One reading of every available channel; None where a single reading failed."""

    def close(self) -> None:
        """Let go of the instrument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuUse:
    """Who uses a GPU at one moment, with no worker of ours alive. None: could not be read."""

    used_bytes: float | None = None
    processes: Mapping[int, str] | None = None
    """Process id -> what it is and holds, in words, for all that compute on it."""
    throttled_by: Sequence[str] = ()
    """Reasons for which it is slowed down that no person has set."""


class GpuMeter(Protocol):
    """Reads a GPU's use; harness.machine.occupancy.NvmlMeter is one."""

    def use(self) -> GpuUse:
        """What is seen now."""


def open_probes(gpu: Gpu | None, *, why: str = "no GPU is used") -> tuple[Probe, ...]:
    """One probe per instrument; close each when the run ends.

    Args:
        gpu: The GPU the workers use.
        why: Why there is none, for the channels that are then unavailable.
    """
    return NvmlProbe(gpu.uuid if gpu else None, why=why), CpuProbe()
