"""The records of a comparison: pairs, thresholds and the result."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.records.judged import Facts, Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A process of the baseline and one of the candidate that ran one after the other."""

    baseline_s: float
    """Median step time of the process in its steady state."""
    candidate_s: float
    baseline_hz: float | None = None
    """Mean SM clock while the samples were taken; None if it was not read."""
    candidate_hz: float | None = None
    wall_s: float | None = None
    """How long the two processes held the GPU: the cost of one more pair."""
    swapped: bool = False
    """The candidate's process ran first."""

    def __post_init__(self) -> None:
        for name in ("baseline_s", "candidate_s", "baseline_hz", "candidate_hz", "wall_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} is not a positive, finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The numbers of the decision; reports/studies/README.md has the defaults' error rates."""

    screen_pairs: int = 6
    """Pairs of the screen: three whole A B B A blocks, in which linear drift cancels."""
    screen_ratio: float = 1.012
    """Largest ratio that passes the screen."""
    confirm_pairs: int = 20
    """New pairs of a case that no earlier look decides: ten whole blocks."""
    most_pairs: int = 64
    """Most new pairs, if their scatter shows that confirm_pairs decide little."""
    alpha: float = 0.005
    """Probability that any case of a clean change is called slower, and the error of each bound of
    an interval. Half of the promised 1 %: a slow case has two chances to pass."""
    practical: float = 0.015
    """Slowdown below which a difference does not matter, however certain it is."""
    tolerance: float = 0.03
    """Slowdown that must be ruled out for a case to pass: the smallest worth finding."""
    stored_tolerance: float = 0.05
    """The same against a stored run: days differ by more than the processes of a pair."""
    build_cv: float = 0.001
    """Standard deviation between builds that differ in nothing that matters; 0 for one build. On an
    H200: 0.00 to 0.09 %, at most 0.25 % (reports/studies/README.md)."""

    def __post_init__(self) -> None:
        if self.screen_pairs < 2:
            raise ValueError(f"screen_pairs={self.screen_pairs}: a spread needs two or more")
        if not 0 < self.alpha < 0.5:
            raise ValueError(f"alpha={self.alpha} is not between 0 and 0.5")
        if self.confirm_pairs < least_pairs(1, self.alpha):
            raise ValueError(
                f"confirm_pairs={self.confirm_pairs}: too few for an exact test to reach "
                f"alpha={self.alpha}; set at least {least_pairs(1, self.alpha)}"
            )
        if not 1 < self.screen_ratio < 1 + self.tolerance:
            raise ValueError(f"screen_ratio={self.screen_ratio} is not between 1 and tolerance")
        if not 0 <= self.practical <= self.tolerance <= self.stored_tolerance:
            raise ValueError(
                f"practical={self.practical}, tolerance={self.tolerance}, stored_tolerance="
                f"{self.stored_tolerance} must ascend from 0"
            )

    @property
    def of_builds(self) -> float:
        """Standard deviation of the ratio of two builds."""
        return math.sqrt(2) * self.build_cv


ByCase = Mapping[str, Thresholds]
"""By case id, widened to a case's noise; alpha is the same for all."""


class Change(StrEnum):
    """How the candidate compares with the baseline."""

    SAME = "same"  # shown to be below the tolerance
    SLOWER = "slower"
    FASTER = "faster"  # reported, not a failure
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The result for one case. Ratios are candidate over baseline: above one is slower."""

    case_id: str
    change: Change
    ratio: Ratio
    """By all pairs of the case; each bound is wrong at most as often as alpha. `p` is adjusted by
    Holm; None without a confirmation."""
    clock_explained: bool = False
    """The change in time is absent in cycles: the GPU clock differed. The case is undecided."""
    smallest_effect: float | None
    """Slowdown that would have been found nine times in ten, as a fraction; None if unbounded."""
    pairs_needed: int | None = None
    """Pairs that would decide nine times in ten; None if it is decided, or no number would."""
    minutes_needed: float | None = None
    """Minutes for these pairs; None if no pair recorded its time."""
    facts: Facts = field(default_factory=dict, hash=False)
    """Why, in numbers: `across` is the slowdown that the interval of an undecided case contains;
    `card`, of stored times on two cards, is half of the interval that these alone would have."""


def least_pairs(cases: int, alpha: float) -> int:
    """Fewest pairs, in turns in both orders, with which one of the cases can be called slower."""
    return next(n for n in itertools.count(2) if math.comb(n, n // 2) >= cases / alpha)
