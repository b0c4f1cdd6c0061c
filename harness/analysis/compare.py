"""Two sides of a change, base and head, compared by fresh processes that ran side by side.

The unit is the pair: one process of the baseline and one of the candidate, next to each other in
time, their order alternating (A B, B A, A B, ...). Slow drift of the machine falls on both sides.
All arithmetic is on logarithms of time ratios, candidate over baseline: above one is slower.

The decision has two stages. `screen` lets a case pass on a few pairs, or asks for more; `confirm`
judges the rest on new pairs alone, so that a case is never judged by the noise that selected it.
Holm's procedure over the confirmed cases keeps the chance that a clean change has any case called
slower under `alpha`, however many cases there are. harness/README.md has the error rates.

Sources: Kalibera & Jones, ISMM 2013 (processes, not samples); Holm, Scand. J. Stat. 6 (1979).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm
from scipy.stats import t as student_t

from harness.analysis.rank import Floats, exact_bounds, hodges_lehmann, signed_rank_p

POWER = 0.9
"""How often a change of the smallest effect stated would be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A process of the baseline and one of the candidate, run next to each other."""

    baseline_s: float
    """Median step time of the process after its steady state."""
    candidate_s: float
    baseline_hz: float | None = None
    """Mean SM clock while the samples were taken; None where it was not read."""
    candidate_hz: float | None = None
    wall_s: float | None = None
    """How long the two processes held the GPU; states what more pairs would cost."""

    def __post_init__(self) -> None:
        for name in ("baseline_s", "candidate_s", "baseline_hz", "candidate_hz", "wall_s"):
            value = getattr(self, name)
            if value is None and name not in ("baseline_s", "candidate_s"):
                continue
            if value is None or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{name}={value} is not a positive, finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The numbers of the decision. Defaults are those whose error rates README.md states."""

    screen_pairs: int = 5
    """Pairs of the screen. MEASUREMENT.md, the gate, step 2."""
    screen_ratio: float = 1.012
    """Ratio up to which the screen lets a case pass. MEASUREMENT.md, the gate, step 2."""
    confirm_pairs: int = 20
    """New pairs of the confirmation. MEASUREMENT.md, the gate, step 3."""
    alpha: float = 0.01
    """Chance that any of a clean change's cases is called slower, and the error of each bound of
    an interval. MEASUREMENT.md, the gate, step 3."""
    practical: float = 0.015
    """Slowdown below which a difference is of no account, however sure. MEASUREMENT.md, step 3."""
    tolerance: float = 0.03
    """Slowdown that a case must be shown to stay under to pass. The smallest that the issue asks
    to be found."""
    stored_tolerance: float = 0.05
    """The same against a stored baseline, whose day is another: days differ by more than a pair."""

    def __post_init__(self) -> None:
        if self.screen_pairs < 2:
            raise ValueError(f"screen_pairs={self.screen_pairs}: fewer than two have no spread")
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha={self.alpha} is not between 0 and 0.5")
        if 0.5**self.confirm_pairs > self.alpha:
            raise ValueError(
                f"confirm_pairs={self.confirm_pairs}: an exact test of so few pairs never reaches "
                f"alpha={self.alpha}; take at least {least_pairs(1, self.alpha)}"
            )
        if not 1 < self.screen_ratio < 1 + self.tolerance:
            raise ValueError(f"screen_ratio={self.screen_ratio} is not between 1 and tolerance")
        if not 0 <= self.practical <= self.tolerance <= self.stored_tolerance:
            raise ValueError(
                f"practical={self.practical}, tolerance={self.tolerance}, stored_tolerance="
                f"{self.stored_tolerance} do not ascend from 0"
            )


class Change(StrEnum):
    """What the pairs say of the candidate."""

    SAME = "same"  # shown to stay under the tolerance
    SLOWER = "slower"
    FASTER = "faster"  # reported, never a failure
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answer for one case. Ratios are candidate over baseline: above one is slower."""

    case_id: str
    change: Change
    ratio: float
    low: float | None
    high: float | None
    """Bounds of the ratio, each wrong at most as often as alpha; None where the pairs are too few
    to bound it."""
    p_value: float | None
    """One-sided, that the candidate is slower, adjusted by Holm: compare with alpha. None where
    the screen settled the case or nothing was confirmed."""
    pairs: int
    """Pairs behind the numbers above: those of the confirmation, or of the screen without one."""
    clock_explained: bool
    """The gap in time vanishes in cycles: the GPU's clock differed, not the code. Undecided."""
    smallest_effect: float | None
    """Slowdown that would have been found nine times in ten, as a fraction; None if unbounded."""
    pairs_needed: int | None
    """Pairs of a new confirmation that would decide, nine times in ten, if the ratio is as
    estimated. None where the case is decided, or where pairs cannot decide it."""
    minutes_needed: float | None
    """GPU minutes of those pairs; None where no pair says how long it took."""
    reason: str


def least_pairs(cases: int, alpha: float) -> int:
    """Fewest pairs at which one of so many confirmed cases can be called slower at all."""
    return math.ceil(math.log2(cases / alpha))


# --- the screen --------------------------------------------------------------------------


def screen(pairs: Sequence[Pair], thresholds: Thresholds) -> bool:
    """Whether a case is done after its first pairs; False asks for a confirmation.

    Done needs two things: the Hodges-Lehmann ratio is at most `screen_ratio`, and Student's upper
    bound lies under the tolerance. Without the second a noisy node would let a slowdown pass.
    """
    if len(pairs) < thresholds.screen_pairs:
        return False
    return bool(screened_done(time_logs(pairs), thresholds))


def screened_done(logs: Floats, thresholds: Thresholds) -> NDArray[np.bool_]:
    """`screen` on log ratios of shape [..., pairs]."""
    _, high = _student_bounds(logs, thresholds.alpha)
    near = hodges_lehmann(logs) <= math.log(thresholds.screen_ratio)
    return np.asarray(near & (high < math.log1p(thresholds.tolerance)))


def time_logs(pairs: Sequence[Pair]) -> Floats:
    """Log ratios of time, candidate over baseline."""
    return np.array([math.log(p.candidate_s / p.baseline_s) for p in pairs])


def _student_bounds(logs: Floats, error: float) -> tuple[Floats, Floats]:
    """Bounds on the mean, each of which errs as often as `error`.

    The exact test bounds nothing at 1 % with fewer than seven pairs. Student's bound is right for
    normal noise; a disturbed process widens it, which sends the case to its confirmation.
    """
    n = logs.shape[-1]
    half = student_t.ppf(1 - error, n - 1) * logs.std(axis=-1, ddof=1) / math.sqrt(n)
    mean = logs.mean(axis=-1)
    return mean - half, mean + half


# --- the confirmation --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What the rules need of one confirmed case. Logarithms of ratios."""

    centre: float
    low: float | None
    high: float | None
    p_slower: float
    p_faster: float
    cycles: float | None
    """The centre in cycles (time x clock); None where the clocks were not read."""
    pairs: int
    pair_s: float | None
    """GPU time of one pair."""


def confirm(
    screened: Mapping[str, Sequence[Pair]],
    confirmed: Mapping[str, Sequence[Pair]],
    thresholds: Thresholds,
) -> tuple[Comparison, ...]:
    """Judge every screened case, those with a confirmation by the new pairs alone.

    Args:
        screened: Pairs of the screen by case id.
        confirmed: New pairs of the cases that `screen` did not settle. A case that is missing
            here though it should not be is undecided: an absent answer is never a pass.

    Returns:
        One comparison per screened case, in their order.

    Raises:
        ValueError: A case without any pair, or confirmed without having been screened.
    """
    if unknown := confirmed.keys() - screened.keys():
        raise ValueError(f"{sorted(unknown)[0]}: confirmed, but never screened")
    if empty := [c for group in (screened, confirmed) for c, pairs in group.items() if not pairs]:
        raise ValueError(f"{empty[0]}: no pair to compare")
    judged = judge({c: statistics(pairs, thresholds) for c, pairs in confirmed.items()}, thresholds)
    return tuple(
        judged[case_id] if case_id in judged else _by_screen(case_id, pairs, thresholds)
        for case_id, pairs in screened.items()
    )


def statistics(pairs: Sequence[Pair], thresholds: Thresholds) -> Statistics:
    """The statistics of one case's confirmation."""
    logs = time_logs(pairs)
    clocked = [p for p in pairs if p.baseline_hz is not None and p.candidate_hz is not None]
    cycles = np.array([_cycle_log(p) for p in clocked])
    walls = [p.wall_s for p in pairs if p.wall_s is not None]
    bounds = exact_bounds(logs, thresholds.alpha)
    return Statistics(
        centre=float(hodges_lehmann(logs)),
        low=None if bounds is None else float(bounds[0]),
        high=None if bounds is None else float(bounds[1]),
        p_slower=float(signed_rank_p(logs)),
        p_faster=float(signed_rank_p(-logs)),
        cycles=float(hodges_lehmann(cycles)) if 2 * len(clocked) >= len(pairs) else None,
        pairs=len(pairs),
        pair_s=float(np.mean(walls)) if walls else None,
    )


def _cycle_log(pair: Pair) -> float:
    """Log ratio of cycles, candidate over baseline."""
    assert pair.baseline_hz is not None
    assert pair.candidate_hz is not None
    return math.log(pair.candidate_s * pair.candidate_hz / (pair.baseline_s * pair.baseline_hz))


def judge(confirmed: Mapping[str, Statistics], thresholds: Thresholds) -> Mapping[str, Comparison]:
    """Apply the rules of the confirmation to all confirmed cases together."""
    slower = holm({c: s.p_slower for c, s in confirmed.items()})
    faster = holm({c: s.p_faster for c, s in confirmed.items()})
    return {
        case_id: _judge(case_id, s, slower[case_id], faster[case_id], len(confirmed), thresholds)
        for case_id, s in confirmed.items()
    }


def holm(p_values: Mapping[str, float]) -> Mapping[str, float]:
    """Adjusted p-values: those under alpha are rejected with a joint error of alpha."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (case_id, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[case_id] = largest
    return adjusted


def _judge(
    case_id: str,
    s: Statistics,
    p_slower: float,
    p_faster: float,
    cases: int,
    thresholds: Thresholds,
) -> Comparison:
    floor, tolerance = math.log1p(thresholds.practical), math.log1p(thresholds.tolerance)
    gap = _percent(s.centre)
    clock_explained = False
    if p_slower <= thresholds.alpha and s.centre > floor:
        clock_explained = s.cycles is not None and s.cycles <= floor
        if clock_explained:
            assert s.cycles is not None
            change = Change.UNDECIDED
            reason = f"{gap} in time but {_percent(s.cycles)} in cycles: the clock differed"
        else:
            change, reason = Change.SLOWER, f"{gap}, p = {p_slower:.2g} over {cases} confirmed"
            if s.cycles is None:
                reason += "; clocks not read"
    elif p_faster <= thresholds.alpha and s.centre < -floor:
        change, reason = Change.FASTER, f"{gap}, p = {p_faster:.2g} over {cases} confirmed"
    elif s.high is not None and s.high < tolerance:
        change = Change.SAME
        reason = f"{gap}, at most {_percent(s.high)}: under the tolerance"
    else:
        change = Change.UNDECIDED
        most = "unbounded" if s.high is None else f"up to {_percent(s.high)}"
        reason = f"{gap}, {most}: neither shown slower nor under {_percent(tolerance)}"
    se = _standard_error(s, thresholds)
    needed = None
    if change is Change.UNDECIDED and not clock_explained and se is not None:
        needed = _pairs_needed(s, se, cases, thresholds)
        minutes = None if s.pair_s is None else needed * s.pair_s / 60
    else:
        minutes = None
    return Comparison(
        case_id=case_id,
        change=change,
        ratio=math.exp(s.centre),
        low=None if s.low is None else math.exp(s.low),
        high=None if s.high is None else math.exp(s.high),
        p_value=p_slower,
        pairs=s.pairs,
        clock_explained=clock_explained,
        smallest_effect=None if se is None else _smallest_effect(se, cases, thresholds),
        pairs_needed=needed,
        minutes_needed=minutes,
        reason=reason,
    )


def _standard_error(s: Statistics, thresholds: Thresholds) -> float | None:
    """Of the centre, read off the width of its exact interval: outliers do not swell it."""
    if s.low is None or s.high is None:
        return None
    return (s.high - s.low) / 2 / float(norm.ppf(1 - thresholds.alpha))


def _smallest_effect(se: float, cases: int, thresholds: Thresholds) -> float:
    """The test must reject at the strictest of Holm's levels and the estimate pass the floor."""
    found, strict = float(norm.ppf(POWER)), float(norm.ppf(1 - thresholds.alpha / cases))
    log = max((strict + found) * se, math.log1p(thresholds.practical) + found * se)
    return math.expm1(log)


def _pairs_needed(s: Statistics, se: float, cases: int, thresholds: Thresholds) -> int:
    """Fewest pairs that would show the estimated ratio slower, or under the tolerance."""
    pair = se * math.sqrt(s.pairs)
    found = float(norm.ppf(POWER))
    floor, tolerance = math.log1p(thresholds.practical), math.log1p(thresholds.tolerance)
    ways = []
    if s.centre < tolerance:
        bound = float(norm.ppf(1 - thresholds.alpha))
        ways.append(((bound + found) * pair / (tolerance - s.centre)) ** 2)
    if s.centre > floor:
        strict = float(norm.ppf(1 - thresholds.alpha / cases))
        rejected = ((strict + found) * pair / s.centre) ** 2
        ways.append(max(rejected, (found * pair / (s.centre - floor)) ** 2))
    return max(math.ceil(min(ways)), s.pairs + 1, least_pairs(cases, thresholds.alpha))


def _by_screen(case_id: str, pairs: Sequence[Pair], thresholds: Thresholds) -> Comparison:
    """A case without a confirmation: settled by the screen, or left open."""
    logs = time_logs(pairs)
    centre = float(hodges_lehmann(logs))
    gap = _percent(centre)
    low = high = smallest = None
    if len(pairs) > 1:
        low, high = (float(b) for b in _student_bounds(logs, thresholds.alpha))
        se = float(logs.std(ddof=1)) / math.sqrt(len(pairs))
        smallest = math.expm1(math.log(thresholds.screen_ratio) + float(norm.ppf(POWER)) * se)
    needed = minutes = None
    if not screen(pairs, thresholds):
        change = Change.UNDECIDED
        reason = f"{gap} in {len(pairs)} pairs of the screen, and not confirmed"
        needed = thresholds.confirm_pairs
        walls = [p.wall_s for p in pairs if p.wall_s is not None]
        minutes = needed * float(np.mean(walls)) / 60 if walls else None
    elif high is not None and high < 0 and centre < -math.log1p(thresholds.practical):
        change, reason = Change.FASTER, f"{gap}, at most {_percent(high)}, in the screen"
    else:
        assert high is not None
        change = Change.SAME
        reason = f"{gap}, at most {_percent(high)}: settled by the screen"
    return Comparison(
        case_id=case_id,
        change=change,
        ratio=math.exp(centre),
        low=None if low is None else math.exp(low),
        high=None if high is None else math.exp(high),
        p_value=None,
        pairs=len(pairs),
        clock_explained=False,
        smallest_effect=smallest,
        pairs_needed=needed,
        minutes_needed=minutes,
        reason=reason,
    )


def _percent(log: float) -> str:
    return f"{math.expm1(log):+.1%}"
