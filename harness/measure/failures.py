"""The outcome of a failure: named where it is found, or by the text of an exception."""

import re
from typing import Any

from harness.records import Outcome

_OUTCOMES = {
    Outcome.OUT_OF_MEMORY: re.compile(
        r"^[\w.]*MemoryError\b|std::bad_alloc|CUDA out of memory|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|Cannot allocate memory",
        re.MULTILINE,
    ),
    Outcome.INVALID_ENVIRONMENT: re.compile(r"No space left on device|Disk quota exceeded"),
}


class Failed(Exception):
    """The case ends with this outcome."""

    def __init__(self, outcome: Outcome, problem: str, **seen: Any) -> None:
        """`seen`: fields of the Measurement that show it."""
        super().__init__(problem)
        self.outcome, self.seen = outcome, seen


def outcome_of(text: str) -> Outcome:
    """The outcome of a failure that says this; a crash if nothing else is known of it."""
    return next((o for o, said in _OUTCOMES.items() if said.search(text)), Outcome.CRASH)
