"""Axes that change nothing, and speeds that a length does not change.

An axis is dead where two cases that differ in it alone ran the same operators and kernels, as
often, and returned the same numbers. What is unknown is no evidence: a case without a census, or
without an output, says nothing.

The numbers are compared as the processes of a case agree among themselves: to the digit where
each process returned exactly the same, else within TIMES their spread.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.effects import NO_EFFECT
from harness.records import Case, CaseSummary, Measurement, Outcome, Run, Scalar
from harness.what_ran import COUNTERS

TIMES = 2.0
MIN_VALUES = 3
"""Values of an axis without which an unchanging speed is no pattern."""
MIN_SPAN = 4.0
"""Largest value over smallest likewise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadAxis:
    """An axis without effect in every comparison that could be made."""

    workload: str
    axis: str
    values: tuple[Scalar, ...]
    groups: int
    """Sets of cases, equal in all else, that were compared."""
    incomparable: int = 0
    """Sets of which too little is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Invariance:
    """tokens/s that is the same, within noise, over all values of a numeric axis."""

    group: str
    axis: str
    values: tuple[float, ...]
    tokens_per_s: float
    spread: float
    """Largest over smallest, less one."""
    same_work: bool
    """A run counts as many tokens at every value: the axis did not reach the workload."""


def dead_axes(run: Run, summaries: Sequence[CaseSummary]) -> tuple[DeadAxis, ...]:
    """Axes that no comparison shows to change anything, and at least one shows not to."""
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    found = []
    for workload, axis in _axes(ok):
        alike, unknown = 0, 0
        values: dict[Scalar, None] = {}
        for group in _groups([s for s in ok if s.case.workload == workload], axis):
            same = _all_same([run.of(s.case.case_id) for s in group])
            if same is False:
                break
            if same is None:
                unknown += 1
            else:
                alike += 1
                values |= {v: None for s in group if (v := s.case.get(axis)) is not None}
        else:
            if alike:
                found.append(
                    DeadAxis(
                        workload=workload,
                        axis=axis,
                        values=tuple(values),
                        groups=alike,
                        incomparable=unknown,
                    )
                )
    return tuple(found)


def invariances(summaries: Sequence[CaseSummary]) -> tuple[Invariance, ...]:
    """Sweeps of a number over which tokens/s does not change, though the number does."""
    ok = [s for s in summaries if s.outcome is Outcome.OK and "tokens_per_s" in s.metrics]
    found = []
    for workload, axis in _axes(ok):
        for group in _groups([s for s in ok if s.case.workload == workload], axis):
            values = [s.case.axes.get(axis) for s in group]
            numbers = [
                float(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool)
            ]
            if len(numbers) < max(MIN_VALUES, len(group)) or not _far_apart(numbers):
                continue
            speeds = [s.metrics["tokens_per_s"] for s in group]
            spread = max(e.value for e in speeds) / min(e.value for e in speeds) - 1
            noise = max((e.high / e.low - 1 for e in speeds if e.low and e.high), default=NO_EFFECT)
            if spread <= max(NO_EFFECT, min(noise, 2 * NO_EFFECT)):
                found.append(
                    Invariance(
                        group=_name(group[0].case, axis),
                        axis=axis,
                        values=tuple(sorted(numbers)),
                        tokens_per_s=speeds[0].value,
                        spread=spread,
                        same_work=len({s.tokens for s in group}) == 1,
                    )
                )
    return tuple(found)


def _axes(summaries: Sequence[CaseSummary]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((s.case.workload, a) for s in summaries for a in s.case.swept))


def _groups(summaries: Sequence[CaseSummary], axis: str) -> list[list[CaseSummary]]:
    """Cases that differ in the axis alone, two at least."""
    found: dict[object, list[CaseSummary]] = {}
    for s in summaries:
        rest = frozenset((k, v) for k, v in s.case.axes.items() if k != axis)
        found.setdefault((s.case.provider, rest), []).append(s)
    return [g for g in found.values() if len({s.case.get(axis) for s in g}) > 1]


def _all_same(cases: Sequence[Sequence[Measurement]]) -> bool | None:
    """Whether all of them ran the same and returned the same; None where that is not known."""
    if any(m.outcome is not Outcome.OK for ms in cases for m in ms):
        return None
    ran = {_ran(m) for ms in cases for m in ms}
    if len(ran - {None}) > 1:
        return False
    tensors = [[_tensors(m) for m in ms] for ms in cases]
    shapes = {tuple(t) for ts in tensors for t in ts if t}
    if len(shapes) > 1:
        return False
    if None in ran or any(not t for ts in tensors for t in ts):
        return None
    return all(_equal([[t[key] for t in ts] for ts in tensors]) for key in tensors[0][0])


def _ran(m: Measurement) -> tuple[object, ...] | None:
    """Counters and census of a process, as one value; None where either is unknown."""
    if m.counters is None or m.census is None or not m.census.fingerprint:
        return None
    return (*(getattr(m.counters, name) for name in COUNTERS), m.census.fingerprint)


def _tensors(m: Measurement) -> Mapping[tuple[object, ...], tuple[float, float]]:
    return {(d.name, d.dtype, d.shape): (d.norm, d.projection) for d in m.output_digest}


def _equal(cases: Sequence[Sequence[tuple[float, float]]]) -> bool:
    """Whether the numbers of all cases agree as well as those of one case's processes do."""
    for part in range(2):
        columns = [[pair[part] for pair in case] for case in cases]
        within = max(max(column) - min(column) for column in columns)
        everything = [x for column in columns for x in column]
        if max(everything) - min(everything) > TIMES * within:
            return False
    return True


def _far_apart(numbers: Sequence[float]) -> bool:
    low, high = min(numbers), max(numbers)
    return low > 0 and math.isfinite(high) and high / low >= MIN_SPAN


def _name(case: Case, axis: str) -> str:
    parts = [f"{n}={case.axes[n]}" for n in case.swept if n != axis]
    return "/".join([case.workload, case.provider, *parts])
