"""Records of what a workload ran, as against what it was asked to run.

Parts of harness.records, which every stage knows; apart because they answer one question. All
counts and times are those of one run of the workload ("step") after its last sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRule:
    """What must, and what must not, be among the names that ran; patterns (fnmatch)."""

    must: tuple[str, ...] = ()
    """Each must fit at least one name."""
    must_not: tuple[str, ...] = ()
    """None may fit any name."""

    def __bool__(self) -> bool:
        return bool(self.must or self.must_not)

    def broken_by(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """What is wrong with these names: `no name fits X`, `Y fits X`."""
        absent = [p for p in self.must if not any(fnmatchcase(name, p) for name in names)]
        unwanted = [(p, name) for p in self.must_not for name in names if fnmatchcase(name, p)]
        return (
            *(f"nothing that ran fits {p!r}, which must run" for p in absent),
            *(f"{name!r} ran, and {p!r} must not" for p, name in unwanted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Exact counts of one step. None: unknown, and `unknown` says why."""

    dispatched_ops: int | None = None
    """Operators that reached PyTorch's dispatcher below autograd, backward pass included. Of a
    compiled function those that its code still calls; of a CUDA graph, whose replay dispatches
    nothing, only those around it."""
    host_syncs: int | None = None
    """Operators that hand a value to the host: item, nonzero, equal, a boolean mask as an index.
    On a GPU those of a tensor that lies there. Without one all of them, for nobody can tell which
    tensors would lie there."""
    allocations: int | None = None
    """Requests to the allocator: the GPU's where there is one, else the CPU's."""
    kernel_launches: int | None = None
    """Calls that launch kernels; that of a whole CUDA graph is one."""
    device_waits: int | None = None
    """Calls in which the host waits for the device, whoever makes them."""
    host_device_copies: int | None = None
    """Copies between host and device, both ways."""
    steps: int = 0
    """How many steps were counted, at least, by each way of counting."""
    differing: tuple[str, ...] = ()
    """Counters of which two steps gave two values; the first one's is kept."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Counter -> why it is None."""
    hidden: tuple[str, ...] = ()
    """What kept operators from the dispatcher, so that dispatched_ops does not mean all."""

    @property
    def exact(self) -> bool:
        """Two steps were counted, and every counter was the same in both."""
        return self.steps >= 2 and not self.differing


COUNTERS = (
    "dispatched_ops",
    "host_syncs",
    "allocations",
    "kernel_launches",
    "device_waits",
    "host_device_copies",
)
"""The counts of Counters, by name; each is a metric too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A kernel, or an operator, that ran within one range."""

    name: str
    where: str = ""
    """Innermost range around the call, as the workload names it; empty outside all ranges."""
    calls: float
    """Per step; whole where all steps are alike."""
    time_s: float
    """Per step. Of a kernel on the device; of an operator on the host, without those it calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A Python function in which the host was seen."""

    function: str
    """`nsa/selected.py:120 gather`: the innermost that is neither PyTorch's nor the library's."""
    where: str = ""
    """The range it was seen in."""
    share: float
    """Of all times the host was looked at, or, on a GPU, of those while the device was idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of a step goes. Shares come from profiled steps, which are slower."""

    step_s: float
    """Median of the process's samples, by their clock; until 2026-11-22 by the host's."""
    profiled_step_s: float
    """Mean step under the profiler."""
    device_busy_s: float | None = None
    """Time of a step in which the device works; None without one."""
    gap_by_range: Mapping[str, float] = field(default_factory=dict)
    """Range -> its share of the time in which the device was idle: that before its kernels."""
    host_by_range: Mapping[str, float] = field(default_factory=dict)
    """Range -> share of the host's time within it, ranges inside it apart; "" is the rest."""
    frames: tuple[Frame, ...] = ()
    """The most frequent first."""
    looks: int = 0
    """How often the host was looked at, for `frames`."""

    @property
    def launch_gap(self) -> float | None:
        """Share of the step in which the device waits for the host; None without a device."""
        if self.device_busy_s is None:
            return None
        return max(0.0, 1 - self.device_busy_s / self.step_s)


MAX_USES = 24
"""Kernels, and operators, that a record keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What ran, by name: from a short pass under the profiler, outside all timed regions."""

    kernels: tuple[Use, ...] = ()
    """The MAX_USES with most time, the longest first."""
    operators: tuple[Use, ...] = ()
    """Likewise."""
    fingerprint: str = ""
    """Hash of all kernels and operators with their ranges and calls, times aside: two cases that
    ran the same have the same."""
    runtime: Mapping[str, float] = field(default_factory=dict)
    """Calls of the CUDA runtime and driver per step, and copies by kind."""
    breakdown: Breakdown | None = None
    steps: int = 0
    """How many steps were profiled."""
    wall_s: float = 0.0
    """What the pass cost."""
    skipped: str = ""
    """Why there is no profile; empty when there is one."""
    no_kernels: str = ""
    """Why nothing can be said of kernels; empty when `kernels` is all that ran."""


LINES = "progress lines"
OPTIMIZER = "steps of its optimizer"
"""What a step of a program is counted by: `counted_by` of its effective configuration."""
