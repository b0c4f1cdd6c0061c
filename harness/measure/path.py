"""What ran against what was asked for: axes and flags, as the workload observed them."""

from collections.abc import Mapping
from typing import Any

from harness.records import Case, Scalar
from harness.workload import Workload


class PathMismatch(Exception):
    """Something else ran than was asked for."""

    def __init__(self, problem: str, **seen: Any) -> None:
        """`seen`: fields of the Measurement that show what ran."""
        super().__init__(problem)
        self.seen = seen


def effective(workload: Workload) -> dict[str, Scalar]:
    """The configuration as the workload observed it.

    Raises:
        TypeError: It tells something that is no scalar.
    """
    observed = dict(workload.effective()) if workload.effective else {}
    for name, value in observed.items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"effective() gives {name!r} a {type(value).__name__}, not a scalar")
    return observed


def flags_read(workload: Workload) -> dict[str, bool]:
    """Each variable that is set and known to the workload, and whether anything asked for it.

    Raises:
        TypeError: It tells something else.
    """
    told = dict(workload.flags()) if workload.flags else {}
    for name, was_read in told.items():
        if not isinstance(was_read, bool):
            raise TypeError(f"flags() gives {name!r} a {type(was_read).__name__}, not a bool")
    return told


def require(case: Case, seen: Mapping[str, Scalar], read: Mapping[str, bool]) -> None:
    """Compare a case with what ran.

    A variable that the workload does not know is no mismatch: torch or CUDA may read it, and
    nobody can tell.

    Raises:
        PathMismatch: An axis was observed, under its own name, with another value; or nothing
            asked for a variable of the case.
    """
    wrong = [
        f"{name}: asked for {asked}, ran with {seen[name]}"
        for name, asked in case.axes.items()
        if seen.get(name, asked) != asked
    ]
    wrong += [
        f"{name}={value} was set, and nothing that ran asked for it"
        for name, value in case.env.items()
        if not read.get(name, True)
    ]
    if wrong:
        raise PathMismatch("; ".join(wrong), effective=dict(seen), flags_read=dict(read))
