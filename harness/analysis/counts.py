"""Exact counts over the processes of a case: a number without an interval, or none at all."""

from collections.abc import Mapping, Sequence

from harness.records import METRICS, Case, Estimate, Measurement
from harness.what_ran import COUNTERS


def estimates(ok: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """Every counter that two steps of each process, and all processes, agree on.

    A count has no noise, so its interval has no width, and one process will do. A counter that
    differs anywhere is no count, and absent.

    Args:
        ok: The processes of one case that ended ok.
    """
    found = {}
    for name in COUNTERS:
        if not why_absent(ok, name):
            value = float(_values(ok, name)[0])
            found[name] = Estimate(
                value=value,
                low=value,
                high=value,
                processes=len(ok),
                samples=sum(m.counters.steps for m in ok if m.counters),
            )
    return found


def disagreements(ok: Sequence[Measurement]) -> tuple[str, ...]:
    """Sentences on counters that should be exact and are not."""
    notes = []
    for name in COUNTERS:
        title = METRICS[name].title
        if within := [m.process for m in ok if m.counters and name in m.counters.differing]:
            notes.append(f"{title} differ from step to step in process {within[0]}")
        elif len(values := sorted(set(_values(ok, name)))) > 1:
            notes.append(f"{title} differ between processes: {values[0]:,} to {values[-1]:,}")
    return tuple(notes)


def why_absent(ok: Sequence[Measurement], name: str) -> str:
    """Why a counter has no value; empty where it has one."""
    if not ok or any(m.counters is None for m in ok):
        return "not counted"
    counters = [m.counters for m in ok if m.counters]
    for c in counters:
        if name in c.unknown:
            return c.unknown[name]
        if getattr(c, name) is None:
            return "not counted"
        if name in c.differing:
            return "two steps counted differently"
        if c.steps < 2:
            return "counted once, for a step is long, so that nothing says it is exact"
    if len(set(_values(ok, name))) > 1:
        return "processes counted differently"
    return ""


def launches(m: Measurement) -> int | None:
    """Launches of kernels by the host in one step; None where unknown, or where a graph replays
    kernels that the host does not launch."""
    if m.counters is None or "CUDA graph" in m.counters.hidden:
        return None
    return m.counters.kernel_launches


def unattested(case: Case, ok: Sequence[Measurement], *, gpu: bool) -> str:
    """Why it is not known that these processes ran what the suite states and can be seen here.

    Empty where it is known, and where there is nothing of the kind. That it was breached is known
    too, and another outcome.

    Args:
        case: What was asked for.
        ok: Its processes that ended ok.
        gpu: Whether there is a GPU here. Operators are seen without one, kernels are not.
    """
    kernels = case.kernels if gpu else None
    for m in ok if kernels or case.operators else ():
        if m.census is None:
            return "no census was taken"
        if m.census.skipped:
            return m.census.skipped
        if kernels and m.census.no_kernels:
            return m.census.no_kernels
    return ""


def _values(ok: Sequence[Measurement], name: str) -> list[int]:
    found = [getattr(m.counters, name) for m in ok if m.counters]
    return [v for v in found if v is not None]
