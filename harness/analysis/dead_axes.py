"""Axes that have no effect.

Two cases do the same if their counters, the names of their kernels and operators, and their outputs
agree. Outputs agree if their digests differ by no more than twice as much as those of one case's
processes, which on a GPU may add in another order; if the processes agree exactly, the outputs must
agree exactly. The metrics that a program reports stand for outputs, and agree in all digits. A pair
is not compared without counters, without such results, or if its counts vary from step to step.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from harness.analysis.effects import NO_EFFECT, PROVIDER, Contrast, Level, contrasts
from harness.analysis.over_steps import slow_steps
from harness.analysis.recorded import by_step, exact_counters
from harness.analysis.scaling import by_workload
from harness.analysis.statistics import times_better
from harness.records import CaseSummary, Measurement, Outcome, Run

TIMES = 2.0
"""Two cases agree if they differ by at most this many times what one case's processes do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadAxis:
    """An axis all values of which do the same in every pair of cases."""

    workload: str
    provider: str
    """Empty if the axis is the provider."""
    axes: tuple[str, ...]
    """The axis, or axes that the suite only changes together."""
    values: tuple[Level, ...]
    """In the suite's order."""
    pairs: int
    """Pairs of cases that were compared; they are equal in all other axes."""
    without_kernels: bool
    """Whether kernels were not compared, because there is no GPU or no profile."""
    time_differs: bool
    """Whether the step times of a pair differ by more than noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ComparedPair:
    """Two cases that differ in the examined axes only."""

    same: bool
    time_differs: bool
    without_kernels: bool


def dead_axes(run: Run, summaries: Sequence[CaseSummary]) -> tuple[DeadAxis, ...]:
    """Every axis, including the provider, with values that all do the same."""
    dead: list[DeadAxis] = []
    for ours in by_workload(s for s in summaries if s.outcome is Outcome.OK).values():
        tables = {"": [row for row in contrasts(ours) if row.axes == PROVIDER]}
        for provider in dict.fromkeys(s.case.provider for s in ours):
            tables[provider] = contrasts(s for s in ours if s.case.provider == provider)
        for provider, table in tables.items():
            for _, rows in groupby(table, key=lambda row: row.axes):
                dead += _dead(run, provider, [*rows])
    return tuple(dead)


def inert_work(run: Run, summaries: Sequence[CaseSummary]) -> Mapping[str, str]:
    """Case id -> an axis without effect from which the suite computes the work of a program."""
    programs = [s for s in summaries if s.case.program and s.outcome is Outcome.OK]
    dead = dead_axes(run, programs)
    found: dict[str, str] = {}
    for s in programs:
        program, case = s.case.program, s.case
        here = [d for d in dead if (d.workload, d.provider) == (case.workload, case.provider)]
        for axis in program.work_axes if program else ():
            name = program.carried.get(axis, axis) if program else axis
            unread = all(m.flags_read.get(name) is False for m in run.of(case.case_id))
            if unread or any(axis in d.axes for d in here):
                found[case.case_id] = axis
    return found


def _dead(run: Run, provider: str, rows: Sequence[Contrast]) -> Iterator[DeadAxis]:
    """The axis of these rows, if in each of them cases were compared and all do the same."""
    compared = [[c for a, b in row.pairs if (c := _compare(run, a, b))] for row in rows]
    every = [c for of in compared for c in of]
    if all(compared) and all(c.same for c in every):
        yield DeadAxis(
            workload=rows[0].workload,
            provider=provider,
            axes=rows[0].axes,
            values=tuple(dict.fromkeys(v for row in rows for v in (row.base, row.value))),
            pairs=len(every),
            without_kernels=any(c.without_kernels for c in every),
            time_differs=any(c.time_differs for c in every),
        )


def _compare(run: Run, a: CaseSummary, b: CaseSummary) -> _ComparedPair | None:
    """None if too little is known."""
    if "step_s" in a.apart or "step_s" in b.apart:
        return None
    first, second = run.of(a.case.case_id), run.of(b.case.case_id)
    counted, ran = _same_counters(first, second), _same_names(first, second)
    outputs, reported = _same_outputs(first, second), _same_readings(a, first, second)
    differs = False in (counted, ran, outputs, reported) or _other_steps(a, first, second)
    if not differs and not (counted and (outputs or reported)):
        return None
    profiles = [m.profile for m in (*first, *second)]
    ratio = times_better(a.metrics["step_s"], b.metrics["step_s"], higher_is_better=False)
    near = 1 - NO_EFFECT <= ratio.value <= 1 + NO_EFFECT
    return _ComparedPair(
        same=not differs,
        time_differs=not near and not (ratio.low or 0.0) <= 1 <= (ratio.high or 0.0),
        without_kernels=ran is None or any(c is None or bool(c.no_kernels) for c in profiles),
    )


def _other_steps(of: CaseSummary, *cases: Sequence[Measurement]) -> bool:
    """Whether no two processes ended at the same step, or a step is slow in all processes of one
    case and in none of the other. If the harness ended them, both are chance."""
    steps = of.case.program.steps if of.case.program else None
    ended = steps is not None and steps.until == "sampled"
    seen = [[m.over_steps for m in case if m.over_steps] for case in cases]
    if ended or not all(seen) or any(m.until_sampled for case in cases for m in case):
        return False
    a, b = ({s.step[-1] for s in case if s.step} for case in seen)
    slow = [[{n for n, _ in slow_steps(s.step, s.step_s)} for s in case] for case in seen]
    only = (x[0].intersection(*x) - y[0].union(*y) for x, y in (slow, slow[::-1]))
    return a.isdisjoint(b) or any(only)


def _same_counters(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether all counters that both have are equal; None if there are none, or if one varies from
    step to step in another way."""
    a, b = exact_counters(first).counts, exact_counters(second).counts
    common = a.keys() & b.keys()
    if any(a[name] != b[name] for name in common):
        return False
    varying = {name for m in (*first, *second) if m.counters for name in m.counters.series}
    for name in varying:
        one, other = by_step(first, name), by_step(second, name)
        if not (one and other and all(len({*at}) == 1 for at in zip(*one, *other, strict=False))):
            return None
    return True if common or varying else None


def _same_names(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether the same kernels and operators ran; None if a case's own processes disagree, or if
    other numbers of steps were profiled: what runs now and then may be in one profile only."""
    if len({m.profile.steps for m in (*first, *second) if m.profile}) > 1:
        return None
    cases = [{m.profile.fingerprint if m.profile else "" for m in case} for case in (first, second)]
    if any(len(names) != 1 or "" in names for names in cases):
        return None
    return cases[0] == cases[1]


def _same_outputs(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether the first steps gave the same outputs; None if a process has no output digest."""
    cases = [[_digests(m) for m in processes] for processes in (first, second)]
    processes = [digests for case in cases for digests in case]
    if not all(processes):
        return None
    if len({frozenset(digests) for digests in processes}) > 1:  # names, dtypes, shapes
        return False
    for key in processes[0]:
        columns = [[digests[key] for digests in case] for case in cases]
        within = max(max(column) - min(column) for column in columns)
        if max(map(max, columns)) - min(map(min, columns)) > TIMES * within:
            return False
    return True


def _digests(m: Measurement) -> Mapping[tuple[object, ...], float]:
    return {
        (d.name, d.dtype, d.shape, part): getattr(d, part)
        for d in m.output_digest
        for part in ("norm", "projection")
    }


def _same_readings(
    of: CaseSummary, first: Sequence[Measurement], second: Sequence[Measurement]
) -> bool | None:
    """Whether a program reports the same numbers in all digits; None if it is unknown, because they
    are times or rates, or vary between processes, or may do so in a single one."""
    program = of.case.program.readings if of.case.program else ()
    timed = {r.metric for r in program if r.unit in ("", "s", "ms") or r.unit.endswith("/s")}
    found: bool | None = None
    for name in set.intersection(*(set(m.readings) for m in (*first, *second))) - timed:
        a, b = ([m.readings[name] for m in own] for own in (first, second))
        if not all(_aligned(c[0], curve) for c in (a, b) for curve in c):
            continue
        if not _aligned(a[0], b[0]):
            return False if min(len(a), len(b)) > 1 else None
        found = True
    return found


def _aligned(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether two curves agree where they overlap, in over half of one; their starts differ."""
    most = min(len(a), len(b)) // 2
    return any(
        all(x == y for x, y in zip(one[start:], other, strict=False))
        for one, other in ((a, b), (b, a))
        for start in range(len(one) - most)
        if one and other and one[start] == other[0]
    )
