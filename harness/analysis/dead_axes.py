"""Axes that change nothing, and speeds that do not change with the work.

Two cases did the same where their counters, the names of what ran, and their outputs agree. What
is unknown is no evidence: without counters, or without outputs, nothing is said of a pair. Outputs
agree where the digests of two cases lie no farther apart than those of one case's processes, which
on a GPU need not add up in the same order: to the digit where the processes agree to the digit.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise

from harness.analysis.counters import exact_counters
from harness.analysis.effects import NO_EFFECT
from harness.analysis.scaling import MIN_POINTS, group_of
from harness.records import CaseSummary, Estimate, Measurement, Outcome, Run, Scalar

TIMES = 2.0
"""How much farther apart than one case's processes two cases may lie, and agree."""
LARGE = 0.10
"""A difference in time or work from which it is more than a detail."""
MIN_SPAN = 2.0
"""Largest value of an axis over its smallest from which an unchanging speed is odd."""

Values = tuple[Scalar | None, ...]
"""A value of each axis that is looked at together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadAxis:
    """Values of an axis that all do the same, in every pair of cases that could be compared."""

    workload: str
    provider: str
    """Empty where the axis is the provider."""
    axes: tuple[str, ...]
    """The axis; or axes that the suite only ever changes together."""
    values: tuple[Values, ...]
    """Those that do the same, in the suite's order."""
    all_values: bool
    """Whether the axis has no others."""
    pairs: int
    """Pairs of cases that were compared, equal in all other axes."""
    without_kernels: bool
    """Whether kernels were not compared, for want of a GPU or of a census; operators may be."""
    fastest: float
    slowest: float
    """Smallest and largest ratio of the step times of a pair: later value over earlier one."""
    time_differs: bool
    """Whether the step time of some pair differs by more than its noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """A speed that is the same, within noise, over an axis along which the work grows."""

    group: str
    """Workload, provider and the other swept axes."""
    axis: str
    low: float
    high: float
    """Smallest and largest value of the axis."""
    metric: str
    """tokens_per_s, or step_s."""
    value: float
    spread: float
    """Of the metric: largest over smallest, less one."""
    growth: float | None
    """FLOPs from the smallest to the largest value: per token for tokens_per_s, of a run for
    step_s. None where they are not counted."""
    reached: bool
    """Whether the workload observed the axis under its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Oddities:
    """What a run's axes do not do."""

    dead: tuple[DeadAxis, ...] = ()
    still: tuple[Invariance, ...] = ()
    pairs: int = 0
    """Pairs of cases that differ in one axis, or in axes that only change together."""
    compared: int = 0
    """Those of which enough is known to say whether they did the same."""


def oddities(run: Run, summaries: Sequence[CaseSummary]) -> Oddities:
    """Every axis, the provider among them, of which some values do the same; and every speed that
    does not follow the work, but along axes that are dead."""
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    processes: dict[str, list[Measurement]] = {}
    for m in run.measurements:
        processes.setdefault(m.case_id, []).append(m)
    dead: list[DeadAxis] = []
    total = compared = 0
    for workload in dict.fromkeys(s.case.workload for s in ok):
        ours = [s for s in ok if s.case.workload == workload]
        sweeps: list[tuple[str, tuple[str, ...], list[CaseSummary]]] = [("", ("provider",), ours)]
        for provider in dict.fromkeys(s.case.provider for s in ours):
            members = [s for s in ours if s.case.provider == provider]
            sweeps += [(provider, axes, members) for axes in _sweeps(members)]
        for provider, axes, members in sweeps:
            seen = _seen(processes, axes, members)
            total += sum(p.total for p in seen.values())
            compared += sum(p.compared for p in seen.values())
            order = list(dict.fromkeys(_at(s, axes) for s in members))
            dead += _dead(workload, provider, axes, order, seen)
    known = {(d.workload, d.provider, name) for d in dead if d.all_values for name in d.axes}
    return Oddities(
        dead=tuple(dead), still=_still(ok, processes, but=known), pairs=total, compared=compared
    )


def _still(
    ok: Sequence[CaseSummary],
    processes: Mapping[str, Sequence[Measurement]],
    *,
    but: Collection[tuple[str, str, str]],
) -> tuple[Invariance, ...]:
    """Every group of cases whose speed does not follow the work along a numeric axis.

    A run's time that does not grow with its FLOPs; tokens/s that stay, though each token costs
    more FLOPs. Where a token costs the same, constant tokens/s are as they should be, if the axis
    was seen to reach the workload. A variable that is no size of anything is left out.
    """
    found = []
    for axis in dict.fromkeys(name for s in ok for name in s.case.swept):
        for group in _groups([s for s in ok if _number(s, axis)], (axis,)):
            case = group[0].case
            if (case.workload, case.provider, axis) in but:
                continue
            ranked = sorted(group, key=lambda s: _number(s, axis))
            first, last = _number(ranked[0], axis), _number(ranked[-1], axis)
            if last >= MIN_SPAN * first:
                found += _constant(axis, first, last, ranked, _reached(axis, ranked, processes))
    return tuple(found)


# --- dead axes ---------------------------------------------------------------------------


def _sweeps(members: Sequence[CaseSummary]) -> list[tuple[str, ...]]:
    """Axes that change alone in some pair of cases, each; and those that never do, together."""
    names = dict.fromkeys(name for s in members for name in s.case.swept)
    moving = [n for n in names if len({s.case.get(n) for s in members}) > 1]
    alone = [n for n in moving if _groups(members, (n,))]
    together = tuple(n for n in moving if n not in alone)
    return [*((n,) for n in alone), *([together] if len(together) > 1 else [])]


def _groups(members: Iterable[CaseSummary], axes: tuple[str, ...]) -> list[list[CaseSummary]]:
    """Cases that differ in these axes alone; two at least."""
    found: dict[object, list[CaseSummary]] = {}
    for s in members:
        bound = {"workload": s.case.workload, "provider": s.case.provider, **s.case.axes}
        rest = frozenset((k, v) for k, v in bound.items() if k not in axes)
        found.setdefault(rest, []).append(s)
    return [g for g in found.values() if len({_at(s, axes) for s in g}) > 1]


def _at(summary: CaseSummary, axes: tuple[str, ...]) -> Values:
    return tuple(summary.case.get(name) for name in axes)


@dataclass(slots=True)
class _Pairs:
    """What was found of two values of an axis, over all pairs of cases."""

    ratios: list[float] = field(default_factory=list)
    """Of step times, of the pairs that did the same."""
    total: int = 0
    compared: int = 0
    differs: bool = False
    time_differs: bool = False
    without_kernels: bool = False


def _seen(
    processes: Mapping[str, Sequence[Measurement]],
    axes: tuple[str, ...],
    members: Sequence[CaseSummary],
) -> dict[tuple[Values, Values], _Pairs]:
    """What every pair of cases shows of two values, the earlier one first."""
    seen: dict[tuple[Values, Values], _Pairs] = {}
    order = list(dict.fromkeys(_at(s, axes) for s in members))
    for group in _groups(members, axes):
        by_value = {_at(s, axes): s for s in group}
        for a, b in combinations([v for v in order if v in by_value], 2):
            pairs = seen.setdefault((a, b), _Pairs())
            _compare(processes, by_value[a], by_value[b], pairs)
    return seen


def _dead(
    workload: str,
    provider: str,
    axes: tuple[str, ...],
    order: Sequence[Values],
    seen: Mapping[tuple[Values, Values], _Pairs],
) -> list[DeadAxis]:
    found = []
    for alike in _classes(order, {key for key, p in seen.items() if p.ratios and not p.differs}):
        involved = [seen[key] for key in combinations(alike, 2)]
        ratios = [ratio for pairs in involved for ratio in pairs.ratios]
        found.append(
            DeadAxis(
                workload=workload,
                provider=provider,
                axes=axes,
                values=alike,
                all_values=len(alike) == len(order),
                pairs=len(ratios),
                without_kernels=any(p.without_kernels for p in involved),
                fastest=min(ratios),
                slowest=max(ratios),
                time_differs=any(p.time_differs for p in involved),
            )
        )
    return found


def _classes(order: Sequence[Values], same: set[tuple[Values, Values]]) -> list[tuple[Values, ...]]:
    """Values that do the same as every other of their class; classes of one left out."""
    classes: list[list[Values]] = []
    for value in order:
        for members in classes:
            if all((other, value) in same for other in members):
                members.append(value)
                break
        else:
            classes.append([value])
    return [tuple(members) for members in classes if len(members) > 1]


def _compare(
    processes: Mapping[str, Sequence[Measurement]], a: CaseSummary, b: CaseSummary, pairs: _Pairs
) -> None:
    """Add what one pair of cases shows."""
    first, second = processes[a.case.case_id], processes[b.case.case_id]
    counted, ran = _same_counters(first, second), _same_names(first, second)
    outputs = _same_outputs(first, second)
    pairs.total += 1
    if False in (counted, ran, outputs):
        pairs.compared += 1
        pairs.differs = True
    elif counted and outputs:
        pairs.compared += 1
        times = [a.metrics["step_s"], b.metrics["step_s"]]
        pairs.ratios.append(times[1].value / times[0].value)
        pairs.time_differs |= not _within_noise(times, unknown=LARGE)
        pairs.without_kernels |= ran is None or any(
            m.census is None or bool(m.census.no_kernels) for m in (*first, *second)
        )


def _same_counters(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether all counters that are known of both are equal; None where there is none."""
    a, b = exact_counters(first).counts, exact_counters(second).counts
    common = a.keys() & b.keys()
    return all(a[name] == b[name] for name in common) if common else None


def _same_names(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether the same kernels and operators ran; None where a case's processes do not agree."""
    cases = [{m.census.fingerprint if m.census else "" for m in case} for case in (first, second)]
    if any(len(names) != 1 or "" in names for names in cases):
        return None
    return cases[0] == cases[1]


def _same_outputs(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool | None:
    """Whether the first runs gave the same; None where a process gave nothing to compare."""
    cases = [[_numbers(m) for m in processes] for processes in (first, second)]
    processes = [numbers for case in cases for numbers in case]
    if not all(processes):
        return None
    if len({frozenset(numbers) for numbers in processes}) > 1:  # names, dtypes, shapes
        return False
    for key in processes[0]:
        columns = [[numbers[key] for numbers in case] for case in cases]
        within = max(max(column) - min(column) for column in columns)
        everything = [x for column in columns for x in column]
        if max(everything) - min(everything) > TIMES * within:
            return False
    return True


def _numbers(m: Measurement) -> Mapping[tuple[object, ...], float]:
    return {
        (d.name, d.dtype, d.shape, part): getattr(d, part)
        for d in m.output_digest
        for part in ("norm", "projection")
    }


# --- speeds ------------------------------------------------------------------------------


def _constant(
    axis: str, first: float, last: float, ranked: Sequence[CaseSummary], reached: bool
) -> list[Invariance]:
    """What is odd about one group, whose first case has the least work by its axis."""
    found: list[Invariance] = []
    for metric in ("tokens_per_s", "step_s"):
        if found or not all(metric in s.metrics for s in ranked):
            continue
        if metric == "step_s" and len({_number(s, axis) for s in ranked}) >= MIN_POINTS:
            continue  # analysis.scaling says it
        estimates = [s.metrics[metric] for s in ranked]
        per = [(s.tokens or 1) if metric == "tokens_per_s" else 1 for s in (ranked[0], ranked[-1])]
        flops = [s.flops for s in (ranked[0], ranked[-1])]
        growth = None
        if flops[0] and flops[1]:
            growth = (flops[1] / per[1]) / (flops[0] / per[0])
        grows = growth is not None and growth > 1 + LARGE
        if _within_noise(estimates) and (grows or (not reached and not axis.isupper())):
            values = [e.value for e in estimates]
            found.append(
                Invariance(
                    group=group_of(ranked[0].case, axis),
                    axis=axis,
                    low=first,
                    high=last,
                    metric=metric,
                    value=values[-1],
                    spread=max(values) / min(values) - 1,
                    growth=growth,
                    reached=reached,
                )
            )
    return found


def _reached(
    axis: str, ranked: Sequence[CaseSummary], processes: Mapping[str, Sequence[Measurement]]
) -> bool:
    """Whether the workload was seen to take every value: by what it says, or by what it tells."""
    if all(s.effective.get(axis) == s.case.axes[axis] for s in ranked):
        return True
    told = [processes[s.case.case_id] for s in ranked]
    return all(_tells_apart(a, b) for a, b in pairwise(told))


def _tells_apart(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool:
    """Whether a program told other numbers, which in each case are the same in every process: a
    time or a rate is not, so no noise is taken for an effect."""
    if min(len(first), len(second)) < 2:
        return False
    every = [*first, *second]
    for name in set.intersection(*(set(m.readings) for m in every)):
        count = min(len(m.readings[name]) for m in every)
        curves = [{m.readings[name][:count] for m in case} for case in (first, second)]
        if count and all(len(c) == 1 for c in curves) and curves[0] != curves[1]:
            return True
    return False


def _within_noise(estimates: Sequence[Estimate], *, unknown: float = NO_EFFECT) -> bool:
    """Whether they may all be one number: nearly equal, or with intervals that share one.

    `unknown` is the spread that may be noise where some have no interval.
    """
    values = [e.value for e in estimates]
    spread = max(values) / min(values) - 1
    if spread <= NO_EFFECT:
        return True
    lows = [e.low for e in estimates if e.low is not None]
    highs = [e.high for e in estimates if e.high is not None]
    if len(lows) < len(estimates) or len(highs) < len(estimates):
        return spread <= unknown
    return spread <= LARGE and max(lows) <= min(highs)


def _number(summary: CaseSummary, axis: str) -> float:
    """The axis's value where it is a positive number, else 0."""
    value = summary.case.axes.get(axis)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        return 0.0
    return float(value)
