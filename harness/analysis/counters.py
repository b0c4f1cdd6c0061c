"""Counts over the processes of a case: a number, the range over its steps, or no number."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

from harness.records import COUNTERS, METRICS, Case, Counters, Estimate, Measurement, Outcome

EXACT_STEPS = 2
"""Steps that each process must count; all must agree."""
MAX_LISTED = 8
"""Values of a counter that varies, and names of what varies, in a note."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCounters:
    """The exact counters of a case, and why the others are not exact."""

    counts: Mapping[str, int]
    absent: Mapping[str, str]
    """Counter -> why it has no value."""
    disagreeing: tuple[str, ...]
    """Counters with different values in two steps or two processes."""
    processes: int
    """Number of processes that counted."""
    steps: int
    """Number of steps that they counted."""


def exact_counters(measurements: Sequence[Measurement]) -> ExactCounters:
    """The exact counts, for reports, gates and comparisons.

    A counter is exact if every process that counted has counted two steps, and all steps of all
    processes agree. One step in each of two processes is not enough. A process that did not end ok,
    or whose counters are all unknown, did not count.
    """
    ok = [m.counters for m in measurements if m.outcome is Outcome.OK and m.counters]
    counted = [c for c in ok if any(getattr(c, name) is not None for name in COUNTERS)]
    absent = {name: why for name in COUNTERS if (why := _why_absent(counted or ok, name))}
    return ExactCounters(
        counts={name: getattr(counted[0], name) for name in COUNTERS if name not in absent},
        absent=absent,
        disagreeing=tuple(
            name
            for name in COUNTERS
            if any(name in c.differing for c in counted) or len(_values(counted, name)) > 1
        ),
        processes=len(counted),
        steps=sum(c.steps for c in counted),
    )


def by_step(measurements: Sequence[Measurement], name: str) -> Sequence[tuple[int, ...]]:
    """A counter of every step of each process that has it; empty if one did not record them."""
    ok = [m.counters for m in measurements if m.outcome is Outcome.OK and m.counters]
    counted = [c for c in ok if getattr(c, name) is not None]
    if any(name in c.differing and name not in c.series for c in counted):
        return ()
    return [c.series.get(name) or (getattr(c, name),) * c.steps for c in counted]


def _why_absent(counted: Sequence[Counters], name: str) -> str:
    for c in counted:
        if name in c.unknown:
            return c.unknown[name]
        if getattr(c, name) is None:
            return "not counted"
        if name in c.differing:
            return "two steps counted differently"
        if c.steps < EXACT_STEPS:
            return f"only {c.steps} step was counted; {EXACT_STEPS} are needed"
    if len(_values(counted, name)) > 1:
        return "processes counted differently"
    return "" if counted else "not counted"


def _values(counted: Sequence[Counters], name: str) -> list[int]:
    return sorted({value for c in counted if (value := getattr(c, name)) is not None})


def estimates(ok: Sequence[Measurement]) -> Mapping[str, Estimate]:
    """The counters as metrics. A count has no noise, so its interval has no width; that of one that
    varies from step to step is its range."""
    exact = exact_counters(ok)
    varying = {name for m in ok if m.counters for name in m.counters.series}
    steps = {n: [*chain(*by_step(ok, n))] for n in COUNTERS if n in exact.counts or n in varying}
    return {
        name: Estimate(
            value=float(median(values)),
            low=float(min(values)),
            high=float(max(values)),
            processes=exact.processes,
            samples=len(values),
        )
        for name, values in steps.items()
        if values
    }


def disagreements(ok: Sequence[Measurement]) -> tuple[str, ...]:
    """One sentence for each counter whose values differ."""
    notes = []
    for name in exact_counters(ok).disagreeing:
        title = METRICS[name].title
        steps = by_step(ok, name)
        if any(len({*own}) > 1 for own in steps):
            every = [*chain(*steps)]
            shown = ", ".join(map(str, every[:MAX_LISTED]))
            uses = [u for m in ok if m.profile for u in (*m.profile.kernels, *m.profile.operators)]
            names = [*dict.fromkeys(u.name for u in uses if u.calls % 1)][:MAX_LISTED]
            what = f"; not in every step alike: {', '.join(names)}" if names else ""
            ends = f"{min(every):,} to {max(every):,} in {len(every)} steps"
            notes.append(f"{title}: {ends} ({shown}){what}")
        elif within := [m.process for m in ok if m.counters and name in m.counters.differing]:
            notes.append(f"{title} differ from step to step in process {within[0]}")
        else:
            values = _values([m.counters for m in ok if m.counters], name)
            notes.append(f"{title} differ between processes: {values[0]:,} to {values[-1]:,}")
    return tuple(notes)


def launches(m: Measurement) -> int | None:
    """Kernel launches by the host in one step; None if unknown, or if a CUDA graph replays kernels
    that the host does not launch."""
    if m.counters is None or "CUDA graph" in m.counters.hidden:
        return None
    return m.counters.kernel_launches


def unattested(case: Case, ok: Sequence[Measurement], *, gpu: bool) -> str:
    """Why it is unknown whether these processes ran the kernels and operators of the suite's rules.

    Empty if it is known, or if no rule can be checked here: without a GPU, operators can be seen,
    but kernels cannot. A violation of a rule is the outcome path_mismatch.
    """
    kernels = case.kernels if gpu else None
    for m in ok if kernels or case.operators else ():
        if m.profile is None:
            return "no profile was taken"
        if m.profile.skipped:
            return m.profile.skipped
        if kernels and m.profile.no_kernels:
            return m.profile.no_kernels
    return ""
