"""What a culprit changed, beside the value of the criterion. Pure."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.analysis.comparison import time_logs
from harness.analysis.statistics import hodges_lehmann
from harness.bisect.search import (
    BisectStage,
    CommitsConclusion,
    ExactSearch,
    NoisySearch,
    change,
)
from harness.records import COUNTERS, MAX_USES, Counters, Measurement, Profile, Use

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """How much of the difference between good and bad the culprit explains."""

    part: float
    """A ratio; for a counter, a difference."""
    whole: float
    rest: tuple[int, int] | None = None
    """The good and the bad end of a history in which another step may be."""


def profile_change(before: Measurement, after: Measurement) -> ProfileChange:
    """What came and went from one measurement to another."""
    counters, profiles = tuple(_counters(before, after)), []
    for measured in (before, after):
        if measured.profile is None or measured.profile.skipped:
            why = measured.profile.skipped if measured.profile else measured.detail
            return ProfileChange(calls=counters, unknown=why or "a commit was not profiled")
        profiles.append(measured.profile)
    changed = sorted(_uses(*profiles), key=lambda found: -found[0])
    return ProfileChange(calls=(*counters, *(found for _, found in changed[:SHOWN])))


def explained(
    search: ExactSearch | NoisySearch,
    conclusion: CommitsConclusion,
    values: Sequence[Sequence[float]],
) -> Explained | None:
    """The culprit's share; None without a culprit.

    The rest is another step if the difference between good and bad is outside the culprit's
    interval, by a quarter of the effect or more.

    Args:
        values: Of each commit, in the order measured.
    """
    if not conclusion.found or conclusion.good is None:
        return None
    good, culprit = conclusion.good, conclusion.culprits[-1]
    if isinstance(search, ExactSearch):
        at = search.values
        part, whole = at[culprit] - at[good], at[search.last] - at[0]
        before, after = abs(at[good] - at[0]), abs(at[search.last] - at[culprit])
        another = part != whole
    else:
        assert conclusion.comparison is not None
        part, low, high = change(conclusion.comparison)
        logs = time_logs(search.pairs(BisectStage.ANCHORS, 0, search.last))
        whole = math.exp(float(hodges_lehmann(logs)))
        beyond = (low is not None and whole < low) or (high is not None and whole > high)
        least = math.log1p(search.thresholds.tolerance) / 4
        another = beyond and abs(math.log(whole / part)) > least
        before, after = (
            abs(math.log(statistics.median(values[b]) / statistics.median(values[a])))
            for a, b in ((0, good), (culprit, search.last))
        )
    rest = (culprit, search.last) if after >= before else (0, good)
    return Explained(part=part, whole=whole, rest=rest if another else None)


def _counters(before: Measurement, after: Measurement) -> Iterator[CallsChange]:
    a, b = before.counters or Counters(), after.counters or Counters()
    for name in COUNTERS:
        one, other = getattr(a, name), getattr(b, name)
        if None not in (one, other) and one != other and name not in (*a.differing, *b.differing):
            yield CallsChange(kind="counter", name=name, before=one, after=other)


def _uses(before: Profile, after: Profile) -> Iterator[tuple[float, CallsChange]]:
    """Each kernel and operator with another number of calls, and its change in time."""
    for kind, one, other in (
        ("kernel", before.kernels, after.kernels),
        ("operator", before.operators, after.operators),
    ):
        a, b = _by_name(one), _by_name(other)
        for name in {**a, **b}:
            (calls, time_s), (calls_b, time_b_s) = a.get(name, (0.0, 0.0)), b.get(name, (0.0, 0.0))
            lacking = one if name not in a else other if name not in b else ()
            cut = len(lacking) >= MAX_USES  # then a name with less time may still have run
            if calls != calls_b and not (
                cut and max(time_s, time_b_s) <= min(use.time_s for use in lacking)
            ):
                found = CallsChange(kind=kind, name=name, before=calls, after=calls_b)
                yield abs(time_b_s - time_s), found


def _by_name(uses: Sequence[Use]) -> dict[str, tuple[float, float]]:
    found: dict[str, tuple[float, float]] = {}
    for use in uses:
        calls, time_s = found.get(use.name, (0.0, 0.0))
        found[use.name] = (calls + use.calls, time_s + use.time_s)
    return found
