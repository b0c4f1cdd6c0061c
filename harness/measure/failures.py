"""The outcome of a failure: named where it is found, or by what it says."""

import re
from typing import Any

from harness.records import Evidence, Outcome

_OUTCOMES = {
    Outcome.OUT_OF_MEMORY: re.compile(
        r"^[\w.]*MemoryError\b|std::bad_alloc|CUDA out of memory|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|Cannot allocate memory",
        re.MULTILINE,
    ),
    Outcome.INVALID_ENVIRONMENT: re.compile(r"No space left on device|Disk quota exceeded"),
}


NOT_FINITE = re.compile(
    r"\b(loss|gradient|norm)( of ranks? (?P<rank>\d+)[\d, ]*)?"
    r" (is|became) (?P<nan>[+-]?(nan|inf))\b",
    re.IGNORECASE,
)
"""How a program says why it stops itself."""


class Failed(Exception):
    """The case ends with this outcome."""

    def __init__(self, outcome: Outcome, problem: str, **seen: Any) -> None:
        """`seen`: fields of the Measurement that show it."""
        super().__init__(problem)
        self.outcome, self.seen = outcome, seen


class NonFinite(Failed):
    """NaN or Inf, in an output or in a number that a program reports."""

    def __init__(self, problem: str, source: str, steps: int | None = None) -> None:
        """`source`: `check`, `run` or a metric; `steps`: done by then, if `run` returned it."""
        seen = {} if steps is None else {"evidence": Evidence(phase="run", steps=steps)}
        super().__init__(Outcome.NON_FINITE, problem, **seen)
        self.source, self.steps = source, steps or 0


def outcome_of(text: str) -> Outcome:
    """The outcome of a failure that says this; a crash if nothing else is known of it."""
    found = next((o for o, said in _OUTCOMES.items() if said.search(text)), Outcome.CRASH)
    return Outcome.NON_FINITE if found is Outcome.CRASH and said_not_finite(text) else found


def said_not_finite(text: str) -> re.Match[str] | None:
    """Why a program stopped itself, in its last line, or before the remedy in it."""
    return next(filter(None, map(NOT_FINITE.search, text.splitlines()[-2:])), None)
