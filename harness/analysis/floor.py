"""The least time a step could take on the machine it ran on, by what that machine was measured to
reach.

    floor = max(FLOPs / peak FLOP/s, bytes / peak bytes a second, launches x cheapest launch)

The peaks were taken by the instrument's proof just before the run (harness.measure.selfproof), on
that card: the best of a few matrix products, of copies or sums, of empty kernels. What a card keeps
up under its power limit is less, and no bound. A data sheet's numbers are MFU's affair. Share of
floor = floor / time: one is as good as this machine gets.

Source: Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009; launches added.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from harness.records import Peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """A lower bound on the time of one step."""

    seconds: float
    by: str
    """Which of compute, bandwidth and launches it is."""


def floor(
    peaks: Peaks,
    *,
    flops: int | None,
    bytes_moved: int | None,
    launches: float | None,
    precision: str | None,
) -> Floor | None:
    """The floor of one step; None where no term of it is known.

    Args:
        peaks: Of the machine that ran it.
        flops: The mathematics of one step needs.
        bytes_moved: A perfect implementation moves.
        launches: Kernels that one step launches; None where they are unknown, or replayed from
            a graph, which costs less.
        precision: Of its matrix products, as harness.analysis.expectation.precision_of names it.
    """
    terms: Mapping[str, float | None] = {
        "compute": _over(flops, peaks.flops_per_s.get(precision or "")),
        "bandwidth": _over(bytes_moved, peaks.bytes_per_s),
        "launches": launches * peaks.launch_s if launches and peaks.launch_s else None,
    }
    known = {by: seconds for by, seconds in terms.items() if seconds is not None}
    if not known:
        return None
    by = max(known, key=lambda name: known[name])
    return Floor(seconds=known[by], by=by)


def _over(amount: int | None, rate: float | None) -> float | None:
    return amount / rate if amount and rate else None
