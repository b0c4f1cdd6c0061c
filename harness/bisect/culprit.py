"""What a culprit changed, beside the value of the criterion: by records, and the IR of kernels."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.records import COUNTERS, MAX_USES, Counters, KernelChange, Measurement, Use
from harness.store.ir import changed_kernels

KERNEL = "kernel"
SHOWN = 5
"""Kernels and operators that are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsChange:
    """A counter, kernel or operator with another number per step than before."""

    kind: str
    name: str
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileChange:
    """How the profile of the culprit differs from that of the commit before it."""

    calls: tuple[CallsChange, ...] = ()
    """Counters, then the SHOWN kernels and operators with the largest change in time."""
    unknown: str = ""
    """Why kernels and operators cannot be compared."""
    kernels: tuple[KernelChange, ...] = ()
    """Whose machine code changed."""


def profiled(measurement: Measurement) -> bool:
    return measurement.profile is not None and not measurement.profile.skipped


def profile_change(before: Measurement, after: Measurement) -> ProfileChange:
    """What came and went from one measurement to another."""
    counters, one, other = tuple(_counters(before, after)), before.profile, after.profile
    if one is None or other is None or one.skipped or other.skipped:
        known = [m.profile.skipped if m.profile else m.detail for m in (before, after)]
        why = next(filter(None, known), "a process was not profiled")
        return ProfileChange(calls=counters, unknown=why)
    uses = [
        *_uses(KERNEL, one.kernels, other.kernels),
        *_uses("operator", one.operators, other.operators),
    ]
    uses.sort(key=lambda found: -found[0])
    calls = (*counters, *(found for _, found in uses[:SHOWN]))
    return ProfileChange(calls=calls, kernels=tuple(changed_kernels(one, other)))


def _counters(before: Measurement, after: Measurement) -> Iterator[CallsChange]:
    a, b = before.counters or Counters(), after.counters or Counters()
    for name in COUNTERS:
        one, other = getattr(a, name), getattr(b, name)
        if None not in (one, other) and one != other and name not in (*a.series, *b.series):
            yield CallsChange(kind="counter", name=name, before=one, after=other)


def _uses(
    kind: str, before: Sequence[Use], after: Sequence[Use]
) -> Iterator[tuple[float, CallsChange]]:
    """Each name with another number of calls, and its change in time.

    A full record leaves out what takes less time. A kernel that takes longer than all in it did not
    run; an operator may have, since the host's times scatter, and is compared only if both have it.
    """
    sides = [{(use.name, use.where): use for use in uses} for uses in (before, after)]
    floors = [
        -1.0
        if len(uses) < MAX_USES
        else min(use.time_s for use in uses)
        if kind == KERNEL
        else math.inf
        for uses in (before, after)
    ]
    changes: dict[str, list[tuple[float, float]]] = {}
    for key in {**sides[0], **sides[1]}:
        uses = [side.get(key) for side in sides]
        longest_s = max(use.time_s for use in uses if use)
        if all(use or longest_s > floor for use, floor in zip(uses, floors, strict=True)):
            sums = changes.setdefault(key[0], [(0.0, 0.0), (0.0, 0.0)])
            for i, use in enumerate(uses):
                if use:
                    sums[i] = sums[i][0] + use.calls, sums[i][1] + use.time_s
    for name, ((calls, time_s), (calls_b, time_b_s)) in changes.items():
        if calls != calls_b:
            found = CallsChange(kind=kind, name=name, before=calls, after=calls_b)
            yield abs(time_b_s - time_s), found
