"""Errors that a user can fix: exit 2, one message, no traceback.

Any other exception that escapes is a defect in the harness: exit 4, with its traceback.
"""

from pathlib import Path


class HarnessError(Exception):
    """Base of every error the CLI prints without a traceback."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem


class SuiteError(HarnessError):
    """A suite cannot be run as written."""

    def __init__(
        self, path: Path | str, problem: str, remedy: str = "", *, line: int = 0, column: int = 0
    ) -> None:
        """`line` and `column` count from 1; 0 if the problem is the whole file."""
        place = f"{path}:{line}:{column}" if line else f"{path}"
        super().__init__(f"{place}: {problem}", remedy)
        self.fact = problem
        """The problem without its place."""


class CaseRefused(SuiteError):
    """A workload refuses a case before it runs."""

    def __init__(
        self, path: Path | str, case_id: str, reason: str, remedy: str = "", **place: int
    ) -> None:
        super().__init__(path, f"case {case_id}: {reason}", remedy, **place)
        self.reason = reason


class StoreError(HarnessError):
    """A run is absent, cannot be written, or has another schema."""


class ProbeError(HarnessError):
    """A probe that the suite requires cannot be read."""
