"""The records of a comparison: what goes in, the numbers of the decision, what comes out."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


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
    """The numbers of the decision; reports/studies/README.md has the defaults' error rates."""

    screen_pairs: int = 6
    """Pairs of the screen: three whole A B B A blocks, on which linear drift cancels. Five, as the
    first simulations had it, send 29 % of a typical node's clean cases on; six, 13 %."""
    screen_ratio: float = 1.012
    """Ratio up to which the screen lets a case pass. From those simulations."""
    confirm_pairs: int = 20
    """New pairs of the confirmation, ten whole blocks. From those simulations."""
    alpha: float = 0.005
    """Chance that any of a clean change's cases is called slower, and the error of each bound of
    an interval. Half of the 1 % that is promised: a case has two chances to pass, and drift makes
    neighbouring pairs a little alike, which the exact test does not know."""
    practical: float = 0.015
    """Slowdown below which a difference is of no account, however sure. From those simulations."""
    tolerance: float = 0.03
    """Slowdown that a case must be shown to stay under to pass: the smallest worth finding."""
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


ByCase = Thresholds | Mapping[str, Thresholds]
"""The same for all cases, or each case's own, as its calibrated noise needs; alpha is shared."""


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
    """Minutes that their processes take; None where no pair says how long it took."""
    reason: str
    tolerance: float | None = None
    """The slowdown that the interval neither exceeds nor excludes, where that leaves it open."""


def least_pairs(cases: int, alpha: float) -> int:
    """Fewest pairs at which one of so many confirmed cases can be called slower at all."""
    return math.ceil(math.log2(cases / alpha))


def thresholds_of(thresholds: ByCase, case_id: str) -> Thresholds:
    """The thresholds of one case.

    Raises:
        ValueError: The mapping leaves the case out.
    """
    if isinstance(thresholds, Thresholds):
        return thresholds
    if case_id not in thresholds:
        raise ValueError(f"{case_id}: no thresholds for this case")
    return thresholds[case_id]
