"""From where on is a series of step times steady? By rule, never by "skip 10".

Two questions, in this order:

1. Where does the warm-up end? MSER: cut where the standard error of what remains is smallest,
   d* = argmin_d  s^2(d) / (n - d),  over the first half of the series. Readings far from the
   level of the second half are first pulled in to its edge, so that one straggler cannot cut
   off all that came before it (MSER-5 averages batches of five for this, and so hides a slow
   second or third step in its batch). A cut in the very middle is no cut: it would go further.
2. Is what remains steady? Its two halves must agree in their medians, within a hundredth or
   within what the spread explains. A drift, or a warm-up that never ended, does not.

Sources: White, "An effective truncation heuristic for bias reduction in simulation output",
Simulation 69(6), 1997, and White, Cobb & Spratt, "A comparison of five steady-state truncation
heuristics for simulation", WSC 2000 (MSER-5). That each process must reach its own steady
state, and that some never do: Kalibera & Jones, "Rigorous benchmarking in reasonable time",
ISMM 2013.
"""

import numpy as np
from numpy.typing import NDArray

MIN_STEADY = 4
"""Two readings a half: fewer cannot show a drift."""
TOLERANCE = 0.01
"""A difference between the halves under this share of the median is of no consequence."""
STANDARD_ERRORS = 3.0
"""A difference between the halves under so many standard errors is noise."""
CLIP_SIGMAS = 3.0
"""How far from the level of the second half a reading may pull."""

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_MEDIAN_OVER_MEAN = 1.2533  # standard error of the median over that of the mean, likewise


def steady_start(readings_s: NDArray[np.float64]) -> int | None:
    """Find the index from which readings are steady.

    Args:
        readings_s: Step times in the order taken, shape [N], seconds.

    Returns:
        The index of the first steady reading, under N / 2; None where no steady state shows.
    """
    cuts = len(readings_s) // 2
    if cuts == 0:
        return None
    start = int(np.argmin(_squared_standard_errors(_clipped(readings_s))[: cuts + 1]))
    return start if start < cuts and is_steady(readings_s[start:]) else None


def is_steady(readings_s: NDArray[np.float64]) -> bool:
    """Whether both halves of the readings, shape [N], have the same median; N >= MIN_STEADY."""
    if len(readings_s) < MIN_STEADY:
        return False
    first, second = np.array_split(readings_s, 2)
    spread = max(_sigma(first), _sigma(second))
    error = _MEDIAN_OVER_MEAN * spread * (1 / len(first) + 1 / len(second)) ** 0.5
    allowed = max(TOLERANCE * float(np.median(readings_s)), STANDARD_ERRORS * error)
    return bool(abs(np.median(second) - np.median(first)) <= allowed)


def _clipped(readings_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Deviations from the level of the second half, each pulled in to what is usual there."""
    level = readings_s[len(readings_s) // 2 :]
    centre = float(np.median(level))
    reach = CLIP_SIGMAS * max(_sigma(level), TOLERANCE * centre)
    deviations: NDArray[np.float64] = np.clip(readings_s - centre, -reach, reach)
    return deviations


def _squared_standard_errors(deviations: NDArray[np.float64]) -> NDArray[np.float64]:
    """s^2(d) / (n - d) of deviations[d:] for every d, from sums over the tail; shape [N]."""
    remaining = np.arange(len(deviations), 0, -1)
    total = np.cumsum(deviations[::-1])[::-1]
    squares = np.cumsum(deviations[::-1] ** 2)[::-1]
    result: NDArray[np.float64] = (squares - total**2 / remaining) / remaining**2
    return result


def _sigma(values: NDArray[np.float64]) -> float:
    """Standard deviation as the median absolute deviation tells it."""
    return _MAD_TO_SIGMA * float(np.median(np.abs(values - np.median(values))))
