"""What would have fitted, where a case ran out of memory.

The peaks of the cases of the same sweep that did fit, equal in all but one axis, are fitted over
that axis as fixed + slope * axis, or axis squared where there are three or more and that fits
better; the fit is solved for the memory there is. An estimate: fragmentation is not in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harness.records import Case, Measurement, Outcome, Run, Scalar

MIN_GROWTH = 1.05
"""Peaks that grow by less over an axis are not of that axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The largest size that would fit, for one case that did not."""

    case_id: str
    axis: str = ""
    """The axis that scales memory; empty where none could be found."""
    largest: int | None = None
    """Estimated; None where nothing allows an estimate."""
    points: int = 0
    """Cases the estimate is fitted to."""
    why_not: str = ""
    """Why there is no estimate."""

    def __str__(self) -> str:
        if self.largest is None:
            return self.why_not
        return (
            f"{self.axis} up to about {self.largest} would fit "
            f"(estimated from {self.points} cases that did)"
        )


def capacities(run: Run) -> tuple[Capacity, ...]:
    """One answer for each case of a run that ended out of memory."""
    ended = {m.case_id for m in run.measurements if m.outcome is Outcome.OUT_OF_MEMORY}
    return tuple(_capacity(case, run) for case in run.suite.cases if case.case_id in ended)


def _capacity(case: Case, run: Run) -> Capacity:
    gpu = run.environment.gpu
    room_bytes = gpu.memory_bytes if gpu else run.environment.memory_bytes
    peaks = {
        other.case_id: peak
        for other in run.suite.cases
        if (other.workload, other.provider) == (case.workload, case.provider)
        and (peak := _peak_bytes(run.of(other.case_id), on_gpu=gpu is not None)) is not None
    }
    best: Capacity | None = None
    single = ""
    for axis in case.swept:
        asked = _number(case.axes.get(axis))
        if asked is None:
            continue
        points = sorted(
            (x, peaks[other.case_id])
            for other in run.suite.cases
            if other.case_id in peaks
            and _only_differs_in(axis, case, other)
            and (x := _number(other.axes.get(axis))) is not None
            and x < asked
        )
        if len(points) == 1:
            single = f"{axis}={points[0][0]:g} fitted ({points[0][1] / 1e9:.2f} GB)"
        if len(points) < 2 or points[-1][1] < MIN_GROWTH * points[0][1]:
            continue
        found = _solve(case.case_id, axis, asked, points, room_bytes)
        if best is None or found.points > best.points:
            best = found
    if best is not None:
        return best
    if single:
        why = f"{single}; one smaller case is too few for an estimate"
    elif peaks:
        why = "no smaller case that is equal in all but one size fitted"
    else:
        why = "no other case of this sweep fitted"
    return Capacity(case_id=case.case_id, why_not=why)


def _solve(
    case_id: str,
    axis: str,
    asked: float,
    points: Sequence[tuple[float, float]],
    room_bytes: float,
) -> Capacity:
    x, y = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    fits = []
    for power in (1, 2) if len(points) > 2 else (1,):
        design = np.stack([np.ones_like(x), x**power], axis=1)
        coefficients, *_ = np.linalg.lstsq(design / y[:, None], np.ones_like(y), rcond=None)
        misfit = float(np.sum((design @ coefficients / y - 1) ** 2))
        fits.append((misfit, power, coefficients))
    _, power, (fixed, slope) = min(fits, key=lambda f: f[:2])
    if slope <= 0 or fixed >= room_bytes:
        why = f"the peaks over {axis} do not grow as a size would make them"
        return Capacity(case_id=case_id, axis=axis, why_not=why)
    largest = ((room_bytes - fixed) / slope) ** (1 / power)
    if largest >= asked:
        why = (
            f"by the peaks of {len(points)} smaller cases {axis}={asked:g} would have fitted: "
            "fragmentation, another process, or memory that only this size needs"
        )
        return Capacity(case_id=case_id, axis=axis, points=len(points), why_not=why)
    return Capacity(case_id=case_id, axis=axis, largest=int(largest), points=len(points))


def _peak_bytes(measurements: Sequence[Measurement], *, on_gpu: bool) -> float | None:
    """Of the processes of a case that all ended OK; on the CPU, the largest resident memory."""
    if not measurements or any(m.outcome is not Outcome.OK for m in measurements):
        return None
    peaks: list[float] = []
    for m in measurements:
        if on_gpu:
            peaks += [m.peak_memory_bytes] if m.peak_memory_bytes is not None else []
        elif m.telemetry is not None:
            seen = [r for r in m.telemetry.channels.get("rss_bytes", ()) if r is not None]
            peaks += [max(seen)] if seen else []
    return max(peaks, default=None)


def _only_differs_in(axis: str, case: Case, other: Case) -> bool:
    return (case.workload, case.provider) == (other.workload, other.provider) and all(
        case.axes.get(name) == other.axes.get(name) for name in {*case.axes, *other.axes} - {axis}
    )


def _number(value: Scalar | None) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
