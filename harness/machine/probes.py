"""The probes that the parent reads while a worker runs: NVML and CPU."""

from collections.abc import Mapping
from typing import Protocol

from harness.machine.cpu import CpuProbe
from harness.machine.nvml import NvmlProbe
from harness.records import Gpu


class Probe(Protocol):
    """Reads some channels of records.Telemetry, ten times a second or more: a reading is cheap."""

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Channels that this probe should read but cannot, and why."""

    def attach(self, pid: int) -> None:
        """Watch a worker from now on: `pid` and its descendants are ours, others are foreign."""

    def read(self) -> Mapping[str, float | None]:
        """One reading of every available channel; None where it failed."""

    def close(self) -> None:
        """Release what the probe uses."""


def open_probes(gpu: Gpu | None, *, why: str = "no GPU is used") -> tuple[Probe, ...]:
    """All probes; close each when the run ends.

    Args:
        gpu: The GPU that the workers use.
        why: Why there is none; the channels of the GPU are then unavailable for this reason.
    """
    return NvmlProbe(gpu.uuid if gpu else None, why=why), CpuProbe()
