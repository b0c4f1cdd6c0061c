"""Errors that the person at the keyboard can fix.

HarnessError            exit 2, one message, no traceback
    SuiteError          a suite file does not describe something runnable
        CaseRefused     a workload refuses a case before it runs
    StoreError          a run is absent, unwritable, or was written by another schema
        AmbiguousRun    a name is the beginning of several runs' ids
    ProbeError          an instrument the suite requires is not readable
    ReportError         a report cannot be written

Anything else that escapes is a defect in the harness and keeps its traceback.
"""

from pathlib import Path


class HarnessError(Exception):
    """Base of every error the CLI prints without a traceback."""

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)
        self.problem = problem


class SuiteError(HarnessError):
    """A suite file does not describe something runnable."""

    def __init__(
        self,
        path: Path | str,
        problem: str,
        remedy: str = "",
        *,
        line: int = 0,
        column: int = 0,
    ) -> None:
        """`line` and `column` count from 1; 0 where the problem is the whole file."""
        place = f"{path}:{line}:{column}" if line else f"{path}"
        super().__init__(f"{place}: {problem}", remedy)


class CaseRefused(SuiteError):
    """A workload refuses a case before it runs."""

    def __init__(
        self,
        path: Path | str,
        case_id: str,
        reason: str,
        remedy: str = "",
        *,
        line: int = 0,
        column: int = 0,
    ) -> None:
        super().__init__(path, f"case {case_id}: {reason}", remedy, line=line, column=column)
        self.reason = reason


class StoreError(HarnessError):
    """A run is absent, unwritable, or was written by another schema."""


class AmbiguousRun(StoreError):
    """A name is the beginning of several runs' ids."""


class ProbeError(HarnessError):
    """An instrument the suite requires is not readable."""


class ReportError(HarnessError):
    """A report cannot be written."""
