"""What reading the probes costs the code under test: processes with it against processes without.

The runner lays the two sides out as A B, B A, A B, ...: neither is always first, and a slow drift
of the card falls on both. Each adjacent pair gives one ratio of medians; their logarithms have a
t-interval. Several cases are pooled, each pair counting once.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from harness.analysis import statistics
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
    estimate = statistics.arithmetic(logs, samples=len(logs))
    low, high = (None if end is None else math.exp(end) for end in (estimate.low, estimate.high))
    return Overhead(ratio=math.exp(estimate.value), low=low, high=high, pairs=len(logs))


SAMPLING = "sampling"


WORK = ("accuracy", "census", "counters", "warmup", SAMPLING)
"""Phases in which a worker does what the suite asked for: compare, count, warm up, sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeUse:
    """Seconds of one run."""

    wall_s: float
    """From the command's start to the last measurement; or the lives of the processes, end to
    end, where that is unknown (`whole` is then False)."""
    whole: bool
    work_s: float | None
    """None where no process told its phases, as in a run that was imported."""
    sampling_s: float | None
    processes: int
    lives_s: float
    """Of all processes, launch to exit."""

    @property
    def work_share(self) -> float | None:
        return None if self.work_s is None else self.work_s / self.wall_s

    @property
    def sampling_share(self) -> float | None:
        return None if self.sampling_s is None else self.sampling_s / self.wall_s

    @property
    def overhead_s(self) -> float | None:
        """Of one process, on average: its life without its work. Building the workload, with
        whatever it imports and compiles there, is in it."""
        return None if self.work_s is None else (self.lives_s - self.work_s) / self.processes


def by_phase(run: Run) -> dict[str, float]:
    """Seconds of each phase over all processes, in the order in which they are first seen."""
    spent: dict[str, float] = {}
    for m in run.measurements:
        for p in m.phases:
            spent[p.name] = spent.get(p.name, 0.0) + p.end_s - p.start_s
    return spent


def time_use(run: Run) -> TimeUse | None:
    """None where no process ran, or nobody knows for how long."""
    lives_s = sum(m.wall_s for m in run.measurements)
    wall_s = run.wall_s or lives_s
    if wall_s <= 0:
        return None
    spent = by_phase(run)
    return TimeUse(
        wall_s=wall_s,
        whole=run.wall_s is not None,
        work_s=sum(spent.get(name, 0.0) for name in WORK) if spent else None,
        sampling_s=spent.get(SAMPLING, 0.0) if spent else None,
        processes=len(run.measurements),
        lives_s=lives_s,
    )
