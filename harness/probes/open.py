"""Opens the instruments of a run."""

from harness.probes import Probe
from harness.probes.cpu import CpuProbe
from harness.probes.nvml import NvmlProbe
from harness.records import Gpu


def open_probes(gpu: Gpu | None, *, why: str = "no GPU is used") -> tuple[Probe, ...]:
    """One probe per instrument; close each when the run ends.

    Args:
        gpu: The GPU the workers use.
        why: Why there is none, for the channels that are then unavailable.
    """
    return NvmlProbe(gpu.uuid if gpu else None, why=why), CpuProbe()
