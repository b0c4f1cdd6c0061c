"""What ran, against what was asked for: axes and flags, kernels and operators."""

from collections.abc import Callable, Mapping
from typing import Any

from harness.measure import profile
from harness.measure.profile import WhatRan
from harness.records import Case, PathRule, Scalar
from harness.workload import Workload

SHOWN = 6
"""Names of what ran that a mismatch lists, those with most time."""


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


def attest(
    case: Case,
    run: Callable[[], Any],
    *,
    step_s: float,
    time_left_s: float,
    progress: Callable[[], None] = lambda: None,
    **seen: Any,
) -> WhatRan:
    """Count and profile what was timed, and compare it with what the suite states.

    Args:
        case: What was asked for.
        run: What was timed.
        step_s: What it took, typically.
        time_left_s: Until the process must be done.
        progress: Called after every run.
        seen: Fields of the Measurement to keep, should it be a mismatch.

    Raises:
        PathMismatch: A kernel or operator that must run did not, or one that must not did. Where
            nothing is known of them there is no mismatch, and the verdict finds no pass either.
    """
    ran = profile.take(
        run,
        step_s=step_s,
        time_left_s=time_left_s,
        profiling=case.settings.census,
        profile_s=min(profile.PROFILE_S, case.settings.sample_s),
        progress=progress,
    )
    if found := breach(case, ran):
        raise PathMismatch(found, counters=ran.counters, census=ran.census, **seen)
    return ran


def breach(case: Case, ran: WhatRan) -> str:
    """What is wrong with what ran; empty where nothing is, or where nothing is known of it."""
    if ran.census.skipped:
        return ""
    found = [_broken(case.operators, ran.operators, "operators")]
    if not ran.census.no_kernels:
        found.append(_broken(case.kernels, ran.kernels, "kernels"))
    return "; ".join(filter(None, found))


def _broken(rule: PathRule, names: tuple[str, ...], what: str) -> str:
    broken = rule.broken_by(names)
    if not broken:
        return ""
    rest = len(names) - SHOWN
    more = f" and {rest} more" if rest > 0 else ""
    return f"{what}: {', '.join(broken)} (seen: {', '.join(names[:SHOWN]) or 'none'}{more})"
