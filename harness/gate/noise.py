"""What more pairs of a case do not average away, and the tolerance of a case that scatters far."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.records import Thresholds

DAY_CV = 0.014
"""Standard deviation of a case between days on one GPU. Assumed: the largest variation between the
processes of a typical node."""
CARD_CV = 0.02
"""Standard deviation of a case between cards of one model, days included. Over the cards of one
SKU, times spread by 8 % on average (arXiv:2208.11035), four standard deviations of 2 %. Here dense
attention and training, whose code did not change, moved by 2.6 % (root mean square) between four
pairs of H200 runs: 1.8 % for one card."""
NOISY_CV = 0.014
"""Standard deviation between processes of one case from which the case is noisy: the geometric
mean of a typical node's 0.8 % and a noisy one's 2.5 %."""
NOISY_TOLERANCE = 0.05
"""A noisy case passes below this. Few of its clean cases could be bounded by the usual 3 %."""


def by_scatter(thresholds: Thresholds, given: Mapping[str, Any], process_cv: float) -> Thresholds:
    """The thresholds of a case whose processes scatter so far.

    Args:
        given: Those that the policy sets, which stay.
    """
    if process_cv <= NOISY_CV or "tolerance" in given:
        return thresholds
    return replace(thresholds, tolerance=min(NOISY_TOLERANCE, thresholds.stored_tolerance))
