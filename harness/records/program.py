"""Records of a program that is measured as it is: the `command:` of a suite, bound to one case.

Parts of harness.records, which every stage knows; apart because only they speak of programs.
"""

from dataclasses import dataclass

REPORTED = ("step_s", "tokens_per_s", "mfu", "peak_memory_bytes")
"""The metrics of the harness that a program may tell of itself; it may name others freely."""
INTERPRETER = "{python}"
"""As the first word of a command: the interpreter that runs the harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSource:
    """Where a metric is read: from lines by `line`, from JSON lines by `json`, or from a file."""

    metric: str
    unit: str = ""
    """Of a free metric; those of the harness have theirs."""
    higher_is_better: bool = False
    """Likewise."""
    line: str = ""
    """Regular expression with a group `value`, searched for in every line of output."""
    json: str = ""
    """Keys with dots between them, into a JSON object: one a line of output, or in `file`."""
    prefix: str = ""
    """What a JSON line begins with, before the object."""
    file: str = ""
    """Read when the program has ended, from its folder; it must be written anew by then."""
    csv: str = ""
    """Column of `file`."""
    scale: float = 1.0
    """What is read times this is the value in the metric's unit."""
    last: bool = False
    """Only the last value counts; otherwise the median of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """By which lines of output a program tells that it goes on."""

    step: str
    """Regular expression of a line that means: a step is finished. Groups: `step` is how many
    are by now, `step_s` or `step_ms` what it took."""
    alive: str = ""
    """Lines that are a sign of life, though no step."""
    setup_steps: int = 1
    """Steps that are setup: they compile or fill caches, and are neither warm-up nor samples."""
    until_sampled: bool = False
    """End the program when there are enough samples; otherwise it runs to its own end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run, and how to read it."""

    argv: tuple[str, ...]
    cwd: str = "."
    """Seen from the folder the harness was started in, or from the root of the tree under test."""
    steps: Steps | None = None
    """None: one run of the whole program is one sample, unless it tells `step_s`."""
    readings: tuple[MetricSource, ...] = ()
    tokens: int | None = None
    """Tokens of one step."""
    flops: int | None = None
    """Floating-point operations of one step."""
