"""Outcomes, clocks, and the values of an axis."""

from dataclasses import dataclass
from enum import StrEnum

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


FAILURES = frozenset(
    {Outcome.INCORRECT, Outcome.NON_FINITE, Outcome.HANG, Outcome.CRASH, Outcome.PATH_MISMATCH}
)
"""Outcomes that mean the code under test is wrong."""


class Clock(StrEnum):
    CUDA_EVENT = "cuda_event"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why a run ended before all of its processes: a rule decided it, or its time was spent."""

    rule: str = ""
    """The rule with `abort_early` that is NO-GO; empty for a budget."""
    budget_s: float | None = None
