"""How a case ended, on which clock, and what an axis may hold."""

from enum import StrEnum

Scalar = bool | int | float | str


class Outcome(StrEnum):
    """How a case ended. Only OK carries samples: a wrong kernel has no latency."""

    OK = "ok"
    INCORRECT = "incorrect"  # output differs from the reference beyond its bound
    NON_FINITE = "non_finite"  # NaN or Inf where a number belongs
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"  # no progress for many expected steps
    TIMEOUT = "timeout"  # slow: progress, but not done in timeout_s; a censored observation
    CRASH = "crash"  # exception, signal, or exit without a result
    UNSUPPORTED = "unsupported"  # the provider declined these axes
    PATH_MISMATCH = "path_mismatch"  # something else ran than was asked for
    INVALID_ENVIRONMENT = "invalid_environment"


FAILURES = frozenset(
    {
        Outcome.INCORRECT,
        Outcome.NON_FINITE,
        Outcome.HANG,
        Outcome.CRASH,
        Outcome.PATH_MISMATCH,
    }
)
"""Outcomes that say the code under test is wrong, whatever its speed."""


class Clock(StrEnum):
    """Which clock a sample was read from."""

    CUDA_EVENT = "cuda_event"
    HOST = "host"
