"""The machine and the code of a run, and the self-test: clocks, probes and peaks of the machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from harness.records.outcome import Scalar

OLD_PREFIXES = ("NSA_", "CUDA_", "TORCH_", "PYTORCH_", "NCCL_", "OMP_", "TRITON_")
"""VARIABLE_PREFIXES of runs that do not record theirs."""
VARIABLE_PREFIXES = (
    *OLD_PREFIXES,
    *("CUBLAS_", "CUDNN_", "NVIDIA_TF32_OVERRIDE", "TORCHINDUCTOR_", "TORCHDYNAMO_"),
    *("GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OPENBLAS_"),
    *("PYTHONHASHSEED", "PYTHONHOME", "PYTHONMALLOC", "PYTHONOPTIMIZE", "PYTHONPATH"),
)
"""Environment variables that can change numbers, or which code runs; recorded with their values."""
CHOOSE_GPU = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Not recorded among them: `Gpu.uuid` says which GPU was chosen."""
SHOWN = 4
"""Most GPUs or hosts of a run that are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML describes it."""

    name: str
    uuid: str
    index: int
    memory_bytes: int
    driver: str
    cuda_driver: str
    compute_capability: str
    power_limit_w: float | None = None
    max_sm_clock_hz: float | None = None
    default_power_limit_w: float | None = None

    @property
    def capability(self) -> tuple[int, ...]:
        """The compute capability as numbers."""
        return tuple(map(int, self.compute_capability.split(".")))

    @property
    def power_limit_share(self) -> float | None:
        """The power limit over its default."""
        if self.power_limit_w is None or not self.default_power_limit_w:
            return None
        return self.power_limit_w / self.default_power_limit_w


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """The commit of the code under test."""

    commit: str
    branch: str
    dirty_sha256: str = ""
    """Hash of the diff from the commit and of untracked files; empty if clean."""


class Grade(StrEnum):
    OK = "ok"
    WARN = "warn"  # numbers are valid with this remark
    UNKNOWN = "unknown"  # could not be checked
    FAIL = "fail"  # numbers would be invalid


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    grade: Grade
    fact: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine, the software and the code of a run."""

    captured_at: str
    hostname: str
    os: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpu: Gpu | None
    gpu_unavailable: str = ""
    """Why `gpu` is None."""
    gpu_count: int | None = None
    """GPUs that a worker sees; None, as the next, if not recorded."""
    gpu_free_bytes: int | None = None
    """Free memory of `gpu` before the first case, beside the context of the worker that read it."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """python, torch, triton, flash-attn, numpy, harness, cuda, cudnn: None if absent."""
    torch_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """In a worker: allow_tf32_matmul, allocator, deterministic, num_threads, device and others."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The parent's environment variables with one of `prefixes`, and those that the suite requires:
    `set` for one that may be a secret."""
    prefixes: tuple[str, ...] = OLD_PREFIXES
    """VARIABLE_PREFIXES when this was recorded."""
    interpreter: str = ""
    """Python of the workers; empty if not recorded."""
    git: Git | None = None
    command: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    """What the doctor found before the run; empty if not recorded."""

    @property
    def card(self) -> str:
        """The UUID of the GPU, or the host."""
        return self.gpu.uuid if self.gpu else self.hostname

    @property
    def device_name(self) -> str:
        """The GPU's name, or `cpu`."""
        return self.gpu.name if self.gpu else "cpu"

    @property
    def commit(self) -> str:
        return self.git.commit if self.git else ""

    @property
    def uncommitted(self) -> bool:
        return bool(self.git and self.git.dirty_sha256)


def joined(environments: Sequence[Environment]) -> Environment:
    """Several alike machines as one: that with the least power limit, with the names of all."""
    found = min(environments, key=lambda e: (e.gpu.power_limit_share if e.gpu else None) or 1)
    both = [sorted({e.hostname for e in environments}), sorted({e.card for e in environments})]
    hosts, cards = (", ".join(n) if len(n) <= SHOWN else f"{len(n)} in all" for n in both)
    return replace(found, hostname=hosts, gpu=found.gpu and replace(found.gpu, uuid=cards))


def gpu_matches(pattern: str, gpu_name: str) -> bool:
    """Whether a GPU fits a pattern, ignoring case; `A100` means `*A100*`, `!A100` any other."""
    if pattern.startswith("!"):
        return not gpu_matches(pattern[1:], gpu_name)
    pattern, name = pattern.lower(), gpu_name.lower()
    return fnmatchcase(name, pattern) or (not any(c in pattern for c in "*?[") and pattern in name)


# --- the self-test -----------------------------------------------------------------------


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
