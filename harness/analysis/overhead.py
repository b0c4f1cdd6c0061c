"""What reading the probes costs the code under test: processes with it against processes without.

The runner lays the two sides out as A B, B A, A B, ...: neither is always first, and a slow drift
of the card falls on both. Each adjacent pair gives one ratio of medians; their logarithms have a
t-interval. Several cases are pooled, each pair counting once.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis import stats
from harness.records import Outcome, Run, Suite

LIMIT = 0.005
"""Largest share of the step time that sampling may cost."""
WITH, WITHOUT = "sampled", "unsampled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Step time with the sampler over step time without it."""

    ratio: float
    low: float | None
    high: float | None
    """95 % t-interval over pairs; None of one pair."""
    pairs: int

    @property
    def shown(self) -> bool | None:
        """Whether the cost is within LIMIT; None where the interval crosses it."""
        if self.low is None or self.high is None:
            return None
        if self.high - 1 <= LIMIT:
            return True
        return False if self.low - 1 > LIMIT else None


def arranged(suite: Suite, *, processes: int) -> Suite:
    """The suite with every case twice, with and without the sampler, and nothing to judge."""
    return replace(
        suite,
        name=f"{suite.name}-sampling",
        title=f"{suite.title}: what sampling costs",
        subject=f"{suite.subject} Sampling",
        question="What does reading the probes cost the step time?",
        rules=(),
        expectations=(),
        cost=None,
        cases=tuple(
            replace(
                case,
                case_id=f"{case.case_id}/{side}",
                settings=replace(case.settings, processes=processes, telemetry=side == WITH),
            )
            for case in suite.cases
            for side in (WITH, WITHOUT)
        ),
    )


def overhead(run: Run) -> Overhead | None:
    """Of a run over an arranged suite; None without one whole pair."""
    medians = {
        (m.case_id, m.process): float(np.median(m.samples_s))
        for m in run.measurements
        if m.outcome is Outcome.OK
    }
    logs = [
        math.log(sampled / medians[twin])
        for (case_id, process), sampled in medians.items()
        if case_id.endswith(f"/{WITH}")
        and (twin := (case_id.removesuffix(WITH) + WITHOUT, process)) in medians
    ]
    if not logs:
        return None
    estimate = stats.arithmetic(logs, samples=len(logs))
    low, high = (None if end is None else math.exp(end) for end in (estimate.low, estimate.high))
    return Overhead(ratio=math.exp(estimate.value), low=low, high=high, pairs=len(logs))
