"""NVML and CPU, sampled from the parent while the child works."""

from collections.abc import Mapping
from typing import Protocol


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
