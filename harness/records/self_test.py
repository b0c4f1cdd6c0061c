"""The self-test of the harness: its clocks, its probes, and the peaks of the machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestCheck:
    name: str
    """host_clock, cuda_events, spin_kernel, gpu_sampler, cpu_sampler."""
    holds: bool | None
    """None if the check could not be made."""
    fact: str
    """The measured and the expected numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Peaks of the machine, measured just before the run."""

    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Precision (bf16, fp16, tf32, fp32) -> FLOP/s of a large matrix product."""
    bytes_per_s: float | None = None
    """Bytes read and written by a large copy, per second."""
    launch_s: float | None = None
    """Cheapest kernel launch from PyTorch, in a long sequence; None without a GPU."""
    sync_s: float | None = None
    """One host sync: a value read from an idle GPU, with its launch; None if not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """The result of the self-test before the first measurement."""

    at: str
    """ISO 8601, UTC."""
    device: str
    """The GPU's UUID, or `cpu`."""
    checks: tuple[SelfTestCheck, ...] = ()
    peaks: Peaks = field(default_factory=Peaks)
    wall_s: float = 0.0
    skipped: str = ""
    """The option that turned the self-test off."""

    @property
    def refuted(self) -> tuple[SelfTestCheck, ...]:
        """The checks that failed; after one, nothing may be measured."""
        return tuple(check for check in self.checks if check.holds is False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReadings:
    """A worker's readings; the telemetry covers its phases `rest`, `burn` and `spin`."""

    waits_s: tuple[float, float]
    """Two busy waits, by a system clock that no stopwatch uses."""
    host_s: tuple[float, float]
    """The same waits by the host stopwatch."""
    burn_cpu_s: float
    """CPU time of the worker in `burn`."""
    spin_cycles: tuple[int, int] | None = None
    """Cycles that a kernel counted on the SM, twice; None without a GPU, as below."""
    spin_event_s: tuple[float, float] | None = None
    spin_host_s: tuple[float, float] | None = None
    """The same kernels by both clocks of the CUDA stopwatch; medians."""
    peaks: Peaks = field(default_factory=Peaks)
