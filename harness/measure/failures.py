"""What a failure is, by the text of its exception: a worker raises it, or a program prints it."""

import re

from harness.records import Outcome

_OUTCOMES = {
    Outcome.OUT_OF_MEMORY: re.compile(
        r"^[\w.]*MemoryError\b|std::bad_alloc|CUDA out of memory|CUDA error: out of memory"
        r"|CUBLAS_STATUS_ALLOC_FAILED|can't allocate memory|Cannot allocate memory",
        re.MULTILINE,
    ),
    Outcome.INVALID_ENVIRONMENT: re.compile(r"No space left on device|Disk quota exceeded"),
}


def outcome_of(text: str) -> Outcome:
    """The outcome of a failure that says this; a crash if nothing else is known of it."""
    return next((o for o, said in _OUTCOMES.items() if said.search(text)), Outcome.CRASH)
