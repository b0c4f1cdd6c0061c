"""What ran: kernels, operators and counters of one step, taken after the last sample."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

PLACES = re.compile(r"^#loc.*\n?|\s*loc\(.*\)$|#loc\d*", re.M)
"""What TTGIR says of places in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRule:
    """Required and forbidden names of kernels or operators; patterns (fnmatch)."""

    must: tuple[str, ...] = ()
    """Each must match at least one name."""
    must_not: tuple[str, ...] = ()
    """None may match a name."""

    def __bool__(self) -> bool:
        return bool(self.must or self.must_not)

    def broken_by(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """How these names violate the rule."""
        absent = [p for p in self.must if not any(fnmatchcase(name, p) for name in names)]
        unwanted = [(p, name) for p in self.must_not for name in names if fnmatchcase(name, p)]
        return (
            *(f"nothing that ran fits {p!r}, which must run" for p in absent),
            *(f"{name!r} ran, and {p!r} must not" for p, name in unwanted),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Exact counts of one step; None if unknown, with the reason in `unknown`."""

    dispatched_ops: int | None = None
    """Operators that reached PyTorch's dispatcher below autograd, of the backward pass too."""
    host_syncs: int | None = None
    """Operators that give a value to the host: item, nonzero, equal; on a GPU, of its tensors."""
    allocations: int | None = None
    """Requests to the allocator: of the GPU if there is one, otherwise of the CPU."""
    kernel_launches: int | None = None
    """Calls that launch kernels; a whole CUDA graph is one."""
    device_waits: int | None = None
    """Calls in which the host waits for the device."""
    host_device_copies: int | None = None
    """Copies between host and device, both ways."""
    steps: int = 0
    """Steps that were counted, at least, by each way of counting."""
    series: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Counter with different values in two steps -> its value in every step, the first its own."""
    unknown: Mapping[str, str] = field(default_factory=dict)
    """Counter -> why it is None."""
    hidden: tuple[str, ...] = ()
    """What hides operators from the dispatcher, so that dispatched_ops is not complete."""

    @property
    def exact(self) -> bool:
        """Whether two steps were counted and agree."""
        return self.steps >= 2 and not self.series


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A kernel or operator that ran within one range."""

    name: str
    where: str = ""
    """Innermost range around the call, named by the workload; empty outside all ranges."""
    calls: float
    """Per step; a whole number if all steps are alike."""
    time_s: float
    """Per step: of a kernel on the device, of an operator on the host without those it calls."""


def by_range(uses: Iterable[Use]) -> dict[str, float]:
    """Seconds of a step by range."""
    found: dict[str, float] = {}
    for use in uses:
        found[use.where] = found.get(use.where, 0.0) + use.time_s
    return found


SAME_STEP = "kernels of the CUDA graph count to the ranges that launch them without replay"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of a step goes. Shares are from profiled steps, which are slower."""

    step_s: float
    """Median of the process's samples; see Measurement.breakdown."""
    device_busy_s: float | None = None
    """Time of a step in which the device works; None without a device."""
    communication_s: float | None = None
    """Time of a step in which kernels of NCCL run; None without any, and in earlier records."""
    exposed_s: float = 0.0
    """That of it in which no other kernel runs."""
    gap_by_range: Mapping[str, float] = field(default_factory=dict)
    """Range -> its share of the device's idle time: that before the range's kernels."""
    kernels_by_range: Mapping[str, float] = field(default_factory=dict)
    """Range -> device time of all its kernels in a step; "" is the rest. Empty in runs that were
    stored before this was recorded."""
    ranges: str = ""
    """Of a replayed CUDA graph whose kernels carry no ranges: SAME_STEP, or why they have none."""
    host_by_range: Mapping[str, float] = field(default_factory=dict)
    """Range -> share of the host's time in it, without inner ranges; "" is the rest."""

    @property
    def launch_gap(self) -> float | None:
        """Share of the step in which the device waits for the host; None without a device."""
        if self.device_busy_s is None:
            return None
        return max(0.0, 1 - self.device_busy_s / self.step_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A kernel as compiled for the GPU at hand; instructions are counted in its PTX."""

    name: str
    code: str
    """Hash of its instructions (SASS); in records before 2026-11-30, of its PTX without places."""
    registers: int
    """Of a thread."""
    local_bytes: int
    """Of a thread: spilled registers and its stack."""
    shared_bytes: int
    warps: int
    mma: int
    """Matrix instructions."""
    loads: int
    """From global memory."""
    barriers: int
    ir: str = field(default="", compare=False)
    """Folder of its IR in Triton's cache."""
    ttgir: str = field(default="", compare=False)
    """Hash of its TTGIR without places: the same with other PTX is another version of Triton."""


MAX_USES = 24
"""Number of kernels, and of operators, that a record keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Kernels and operators by name, from a few steps under the profiler, outside all timing."""

    kernels: tuple[Use, ...] = ()
    """The MAX_USES with the most time, the longest first."""
    operators: tuple[Use, ...] = ()
    """Likewise."""
    fingerprint: str = ""
    """Hash of all kernels and operators with their ranges and calls, without times."""
    compiled: tuple[CompiledKernel, ...] = ()
    """Triton and Gluon kernels of the process, launched in the step or before it."""
    unknown: tuple[str, ...] | None = None
    """Names of kernels of the step that are neither among these nor a library's, so that their code
    is not known; None in earlier records."""
    breakdown: Breakdown | None = None
    steps: int = 0
    """Number of profiled steps."""
    wall_s: float = 0.0
    """Time that the profile took."""
    skipped: str = ""
    """Why there is no profile; empty if there is one."""
    no_kernels: str = ""
    """Why the kernels are unknown; empty if they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelChange:
    """A kernel that compiles to other machine code; None on a side without it."""

    name: str
    before: CompiledKernel | None
    after: CompiledKernel | None
    ir: tuple[str, ...] = field(default=(), compare=False)
    """The lines of TTGIR that differ first; empty if not known."""


LINES = "progress lines"
OPTIMIZER = "steps of its optimizer"
"""How the steps of a program are counted: `counted_by` of its effective configuration."""
