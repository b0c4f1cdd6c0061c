"""Outcomes, what is known of a process that did not end ok, clocks, and the values of an axis."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

Scalar = bool | int | float | str


def as_text(value: Scalar | None) -> str:
    """A value in a case id, in an argument and in the environment: `true`, `512`, `off`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class Outcome(StrEnum):
    """How a case ended. Only OK has samples."""

    OK = "ok"
    INCORRECT = "incorrect"  # output differs from the reference by more than its bound
    NON_FINITE = "non_finite"  # NaN or Inf in an output
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"  # no progress for many expected steps, and it stands still
    TIMEOUT = "timeout"  # slow or busy: not finished in timeout_s; a lower bound
    CRASH = "crash"  # exception, signal, or exit without a result
    UNSUPPORTED = "unsupported"  # the provider declined, or nothing could be read of a program
    PATH_MISMATCH = "path_mismatch"  # other code, kernels or operators ran than the suite requires
    INVALID_ENVIRONMENT = "invalid_environment"
    IMPOSSIBLE = "impossible"  # faster than the roofline allows with a cold cache


FAILURES = frozenset(
    {Outcome.INCORRECT, Outcome.NON_FINITE, Outcome.HANG, Outcome.CRASH, Outcome.PATH_MISMATCH}
)
"""Outcomes that mean the code under test is wrong."""
NOT_OF_THE_CODE = (Outcome.INVALID_ENVIRONMENT, Outcome.IMPOSSIBLE)
"""Outcomes that say nothing about the code under test."""


class Clock(StrEnum):
    CUDA_EVENT = "cuda_event"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a run ended before all of its processes: a rule decided it, or its time was spent."""

    rule: str = ""
    """The rule with `abort_early` that is NO-GO; empty for a budget."""
    budget_s: float | None = None


def require_inside(path: str) -> None:
    """Raise ValueError if a path leaves the folder of its run."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError(f"{path!r} is not a path in the folder of the run")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOrigin:
    """Where NaN or Inf first appeared when a computation was repeated under observation."""

    computation: str
    """run or check; in earlier records also eager and reference."""
    precision: str
    """Dtype of the tensor in which it appeared, or of the outputs if all are finite."""
    value: str = ""
    """NaN or Inf; empty if every value is finite."""
    step: int | None = None
    """For `run`: the step, counted from 0."""
    tensor: str = ""
    """`output 0 of aten.div`, `input 1 of aten.mul`."""
    operator: str = ""
    """The first operator with such a value in its result but not in its arguments."""
    module: str = ""
    """The innermost running module: `Model.layers.3`."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivitySample:
    """What a silent process and its descendants have used so far, and what they do."""

    at_s: float
    """Since the launch."""
    cpu_s: float
    io_bytes: int
    """Read and written by system calls; not all of those on sockets count."""
    rss_bytes: int
    states: tuple[str, ...] = ()
    """Of the main threads, as psutil names them."""
    gpu_utilisation: float | None = None
    """None without a GPU or if unknown, as the next one."""
    gpu_power: float | None = None
    """As a share of the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about a process that did not end OK; None if unknown."""

    phase: str = ""
    """Phase of its last message."""
    steps: int | None = None
    """Steps finished by then, at least: not all quick steps are reported."""
    last_step: int | None = None
    """A program's own number of its last step, if it prints one."""
    silent_s: float | None = None
    """Time from its last sign of life to the decision."""
    working: bool | None = None
    """At a timeout: whether it was seen to work, by steps, output, CPU or GPU; None if unknown."""
    signal: str = ""
    """Name of the signal that ended it."""
    frame: str = ""
    """The innermost Python frame: `function (file:line)`."""
    activity: tuple[ActivitySample, ...] = ()
    """The samples by which a silence was judged, oldest first."""
    origins: tuple[NonFiniteOrigin, ...] = ()
    rank: int | None = None
    """Of a program with several ranks: the one that failed first."""
    holders: tuple[str, ...] = ()
    """For INVALID_ENVIRONMENT: who else used the GPU."""
