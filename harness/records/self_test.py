"""What the harness found when it tested its own clocks and probes."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofCheck:
    """One question put to the instrument before a run."""

    name: str
    """host_clock, cuda_events, spin_kernel, gpu_sampler, cpu_sampler, l2_flush."""
    holds: bool | None
    """None where it could not be asked; that neither proves nor refutes."""
    fact: str
    """What was seen, with the number that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the machine was measured to reach, moments before the run: no data sheet's numbers."""

    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Precision (bf16, fp16, tf32, fp32) -> FLOP/s of a large matrix product."""
    bytes_per_s: float | None = None
    """Bytes read and written by a large copy."""
    launch_s: float | None = None
    """The cheapest kernel launch from PyTorch, many in a row; None without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the instrument showed of itself before the first measurement."""

    at: str
    """ISO 8601, UTC."""
    device: str
    """The GPU's UUID, or `cpu`."""
    checks: tuple[ProofCheck, ...] = ()
    peaks: Peaks = field(default_factory=Peaks)
    wall_s: float = 0.0
    skipped: str = ""
    """Why nothing was asked: the option that said so."""

    @property
    def refuted(self) -> tuple[ProofCheck, ...]:
        """The checks that failed. With one of them nothing may be measured."""
        return tuple(check for check in self.checks if check.holds is False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestReadings:
    """What a worker read of itself; the phases `rest` and `burn` are in the telemetry as well."""

    waits_s: tuple[float, float]
    """Two busy waits, by a clock of the system's that no stopwatch uses."""
    host_s: tuple[float, float]
    """The same on the host stopwatch."""
    burn_cpu_s: float
    """CPU time the worker used in `burn`, by its own account."""
    spin_cycles: tuple[int, int] | None = None
    """Two numbers of cycles that a kernel counted on the SM. None without a GPU, as below."""
    spin_event_s: tuple[float, float] | None = None
    spin_host_s: tuple[float, float] | None = None
    """The same on both clocks of the CUDA stopwatch; medians of several."""
    resident_s: float | None = None
    flushed_s: float | None = None
    """A copy that finds its data in the L2 cache, and one after the flush."""
    peaks: Peaks = field(default_factory=Peaks)
