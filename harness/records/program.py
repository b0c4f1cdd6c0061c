"""A program that is measured as it is: the `command:` of a suite, bound to one case."""

from collections.abc import Mapping
from dataclasses import dataclass, field

REPORTED = ("step_s", "tokens_per_s", "mfu", "peak_memory_bytes")
"""Metrics of the harness that a program may report itself; it may also report its own."""
INTERPRETER = "{python}"
"""First word of a command: the interpreter that runs the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """Where a metric of a program is read: `line` or `json`."""

    metric: str = ""
    line: str = ""
    """Regular expression with a group `value`, searched in every line of output."""
    json: str = ""
    """Key of a JSON object in a line of output: `train.loss`."""
    prefix: str = ""
    """Text before the object in a JSON line."""
    scale: float = 1.0
    """Factor from the number to the value: 0.001 for milliseconds."""
    take: str = "all"
    """`last`: the last value counts; `all`: the median. Default all."""
    unit: str = ""
    """Only for a metric that the harness does not know."""
    better: str = ""
    """Likewise: which direction is good, `higher` or `lower`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Lines of output that show the progress of a program."""

    step: str
    """Regular expression of the line after each step, with optional groups `step`, the number of
    finished steps, and `step_s` or `step_ms`, the duration of this one."""
    setup_steps: int = 1
    """Steps that compile or fill caches; neither warm-up nor samples."""
    until: str = "exit"
    """`sampled`: end the program after enough samples. `exit`: let it run to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A command, and how to read its output."""

    argv: tuple[str, ...]
    cwd: str = "."
    """Relative to the folder in which the harness was started, or to the root under test."""
    steps: Steps | None = None
    """None: the whole program is one sample, unless it reports `step_s`."""
    readings: tuple[MetricSource, ...] = ()
    tokens: int | None = None
    """Tokens of one step."""
    gpus: int = field(default=0, compare=False)
    """GPUs that it needs, or it is unsupported; a single one may be missing."""
    world_size: int = 0
    """Ranks of a distributed program; 0: one process, which may start others itself."""
    carried: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Axis -> the option of the command that alone carries it, if recorded."""
    work_axes: tuple[str, ...] = field(default=(), compare=False)
    """Axes from which tokens are computed."""

    def needs_gpus(self, device: str) -> int:
        """GPUs that it needs on `cpu` or `cuda`."""
        return self.gpus or (self.world_size if device == "cuda" else 0)

    @property
    def ranks(self) -> int:
        """Ranks whose output is read apart; 0 for a single process."""
        return self.world_size if self.world_size > 1 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One process of a distributed program. Times and means are of its sampling phase."""

    rank: int
    steps: int | None = None
    """Steps that it finished, by its lines; None unless every rank prints them."""
    step_s: float | None = None
    """Mean step by its own clock. Under DDP all ranks wait for the slowest, so it is alike."""
    gpu_utilisation: float | None = None
    """Mean, 0 to 1. NCCL waits in a kernel, so a GPU that waits for another is busy too."""
    gpu_power_w: float | None = None
    """Mean. A GPU that waits draws less."""
    ended: str = ""
    """`killed by SIGKILL`, `did not end`; empty if it had finished, or need not go on."""
