"""Comparison with stored processes: measured on another day, so not in pairs.

All processes of a day share the level of that day, and more processes do not average it away. So
the interval includes the variation between days, or between cards if the card is another of the
same model, and the tolerance is wider.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import scipy

from harness.analysis.comparison import Statistics, judge, of_logs, pairs_needed, standard_error
from harness.analysis.statistics import Floats
from harness.records import Change, Comparison, Facts, Measurement, Thresholds
from harness.runner.interleave import clock

FEWEST = 2
"""Processes that each side of a case needs."""
DAY_CV = 0.014
"""Standard deviation of a case between days on one GPU. Assumed: the largest variation between the
processes of a typical node."""
CARD_CV = 0.02
"""Standard deviation of a case between cards of one model, days included. Over the cards of one
SKU, times spread by 8 % on average (arXiv:2208.11035), four standard deviations of 2 %. Here dense
attention and training, whose code did not change, moved by 2.6 % (root mean square) between four
pairs of H200 runs: 1.8 % for one card."""


def too_few(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> Facts:
    """Which side has too few processes to compare, and how few; empty if none has."""
    sides = (("baseline", baseline), ("candidate", candidate))
    short = [{"there": len(p), "in": name} for name, p in sides if len(p) < FEWEST]
    return {"too_few": short, "needed": FEWEST} if short else {}


def compare_stored(
    sides: Mapping[str, tuple[Sequence[Measurement], Sequence[Measurement]]],
    thresholds: Thresholds,
    *,
    day_cv: float,
    other_card: bool = False,
) -> tuple[Comparison, ...]:
    """Judge every case by the processes of both sides, at least two each; see `too_few`.

    The standard error is that of Welch's test plus the variation of two days (or cards, if these
    are two of one model) and two builds. The rules are those of the interleaved comparison, with
    `stored_tolerance` as the tolerance. An undecided case names the interleaved pairs that would
    decide it, because more processes of the same day would not.
    """
    wider = replace(thresholds, tolerance=thresholds.stored_tolerance)
    measured = {c: _statistics(*s, day_cv, wider) for c, s in sides.items()}
    answers = judge(measured, dict.fromkeys(sides, wider))
    found = (_instead(answers[c], *s, len(sides), thresholds) for c, s in sides.items())
    card = math.expm1(-float(scipy.special.ndtri(wider.alpha)) * math.sqrt(2) * CARD_CV)
    beside = {"card": card} if other_card else {}  # what two cards make of the interval
    return tuple(replace(c, facts={**c.facts, **beside}) for c in found)


def _logs(side: Sequence[Measurement]) -> Floats:
    return np.log([m.step_s for m in side])


def _statistics(
    baseline: Sequence[Measurement],
    candidate: Sequence[Measurement],
    day_cv: float,
    thresholds: Thresholds,
) -> Statistics:
    sides = [_logs(side) for side in (baseline, candidate)]
    parts = [float(x.var(ddof=1)) / len(x) for x in sides]
    # Satterthwaite, with the variance of days and builds taken as known.
    known = 2 * day_cv**2 + thresholds.of_builds**2
    unsure = sum(v**2 / (len(x) - 1) for v, x in zip(parts, sides, strict=True))
    freedom = (sum(parts) + known) ** 2 / unsure if unsure else math.inf
    se = math.sqrt(sum(parts) + known)
    centre = float(sides[1].mean() - sides[0].mean())
    half = float(scipy.special.stdtrit(freedom, 1 - thresholds.alpha)) * se
    low, high = centre - half, centre + half
    p_slower, p_faster = (
        float(scipy.special.stdtr(freedom, z)) for z in (-centre / se, centre / se)
    )
    return Statistics(
        ratio=of_logs(centre, low, high, n=min(map(len, sides)), p=p_slower),
        p_faster=p_faster,
        error=thresholds.alpha,
        se=standard_error(low, high, thresholds.alpha),
        cycles=_cycles(baseline, candidate),
        freedom=freedom,
    )


def _cycles(baseline: Sequence[Measurement], candidate: Sequence[Measurement]) -> float | None:
    """Log ratio of cycles; None if any clock was not read."""
    clocks = [[clock(m) for m in side] for side in (baseline, candidate)]
    if not all(map(all, clocks)):
        return None
    one, other = (
        float((_logs(side) + np.log(np.array(hz, dtype=float))).mean())
        for side, hz in zip((baseline, candidate), clocks, strict=True)
    )
    return other - one


def _instead(
    answer: Comparison,
    baseline: Sequence[Measurement],
    candidate: Sequence[Measurement],
    cases: int,
    thresholds: Thresholds,
) -> Comparison:
    """State the cost of an interleaved comparison instead of more unpaired processes."""
    if answer.change is not Change.UNDECIDED:
        return answer
    if answer.clock_explained:
        return replace(answer, facts={**answer.facts, "unpaired": True})
    sd = math.sqrt(sum(_logs(side).var(ddof=1) for side in (baseline, candidate)))
    needed, minutes = pairs_needed(math.log(answer.ratio.value), sd, cases, thresholds), None
    walls = [m.wall_s for m in candidate if m.wall_s]
    if needed is not None:
        needed = max(needed, thresholds.confirm_pairs)
        minutes = needed * 2 * float(np.mean(walls)) / 60 if walls else None
    return replace(answer, pairs_needed=needed, minutes_needed=minutes)
