"""Kernels and operators that ran, against what the suite states of them."""

from collections.abc import Callable
from typing import Any

from harness.measure import census
from harness.measure.census import WhatRan
from harness.measure.path import PathMismatch
from harness.records import Case
from harness.what_ran import PathRule

SHOWN = 6
"""Names of what ran that a mismatch lists, those with most time."""


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
            nothing is known of them there is no mismatch, and harness.gate finds no pass either.
    """
    ran = census.take(
        run,
        step_s=step_s,
        time_left_s=time_left_s,
        profiling=case.settings.census,
        profile_s=min(census.PROFILE_S, case.settings.sample_s),
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
