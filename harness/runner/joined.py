"""Joins what a worker answered with what its parent saw: here a measurement becomes complete."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.analysis.recorded import readings, unfit
from harness.messages import Built
from harness.records import (
    Evidence,
    Measurement,
    Outcome,
    OverSteps,
    Phase,
    Rank,
    Telemetry,
    of_rank,
)
from harness.runner import evidence

CLOCKS_DISAGREE = 0.5
"""Least share of the sampling phase that the samples must fill; at most, they fill a little more
than all of it."""
SLACK_S, STEP_SLACK_S = 0.1, 5e-4
"""Time of the phase, and of each step in it, that need not be in a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended, as the parent saw it."""

    outcome: Outcome | None = None
    """None: the worker's answer has it."""
    detail: str = ""
    advice: str = ""
    """Which setting of the suite to raise, and to what."""
    lower_bound_s: float | None = None
    evidence: Evidence


@dataclass(slots=True, kw_only=True)
class Answered:
    """What a worker has said of its measurement, up to now."""

    case_id: str
    process: int
    final: Measurement | None = None
    between_s: float | None = None
    """Time of the sampling phase that was not in a step; None for a program."""
    preliminary: Measurement | None = None
    """The answer, sent before a search for the cause that may itself fail."""
    built: Built = field(default_factory=lambda: Built(tokens=None, flops=None, bytes=None))
    rank_steps: tuple[int, ...] = ()
    """Steps of each rank of a program, if it has several."""
    over_steps: list[OverSteps] = field(default_factory=list)


def joined(
    answered: Answered,
    ending: Ending,
    log: Path,
    *,
    phases: tuple[Phase, ...] = (),
    telemetry: Telemetry | None = None,
    survivors: int = 0,
    cold: bool = False,
    **known: Any,
) -> Measurement:
    """The measurement of a process that has ended; without an answer, the record of its failure.
    `survivors`: processes that survived SIGKILL. `known`: other fields, which the parent knows."""
    if ending.outcome is None and answered.final is not None:
        said, note = answered.final, ending.detail
    elif answered.preliminary is not None:
        said = answered.preliminary
        note = f"the search for its origin: {ending.outcome}, {ending.detail}"
    else:
        said, note = _unanswered(answered, ending), ""
    if problem := _clock_problem(said, phases, answered.between_s):
        said, note = said.without_samples(Outcome.INVALID_ENVIRONMENT, problem), ""
    left = f"{survivors} processes survived SIGKILL" if survivors else ""
    whole = replace(
        said,
        **known,
        detail="; ".join(filter(None, (said.detail, note, left))),
        effective={**said.effective, "start": "cold" if cold else "warm"},
        log=str(log.relative_to(log.parents[1])),
        discarded=unfit(said, telemetry, phases),
        over_steps=OverSteps.joined(answered.over_steps),
        telemetry=telemetry,
        phases=phases,
        evidence=_evidence(said, ending.evidence, log),
    )
    return replace(whole, ranks=tuple(with_gpu(whole, rank) for rank in whole.ranks))


def with_gpu(m: Measurement, rank: Rank) -> Rank:
    """A rank of a measurement with what its GPU did."""
    if (seen := m.telemetry) is None:
        return rank
    names = {of_rank(name, rank.rank): name for name in ("gpu_utilisation", "gpu_power_w")}
    own = {names[of]: found for of, found in seen.channels.items() if of in names}
    alone = replace(m, telemetry=replace(seen, channels=own))

    def mean(channel: str) -> float | None:
        found = readings(alone, channel, ("sampling",))
        return statistics.fmean(found) if found else None

    return replace(rank, gpu_utilisation=mean("gpu_utilisation"), gpu_power_w=mean("gpu_power_w"))


def _unanswered(answered: Answered, ending: Ending) -> Measurement:
    """The record of a process that ended, or had to be ended, without an answer."""
    outcome = ending.outcome or Outcome.CRASH
    left = enumerate(answered.rank_steps)
    failure = Measurement(
        case_id=answered.case_id,
        process=answered.process,
        outcome=outcome,
        detail=ending.detail,
        lower_bound_s=ending.lower_bound_s,
        ranks=tuple(Rank(rank=r, steps=n or None, ended="did not end") for r, n in left),
    )
    if outcome is Outcome.CRASH:
        return failure
    built = answered.built  # a bound on a step's time bounds its rate
    return replace(failure, tokens=built.tokens, flops=built.flops, bytes=built.bytes)


def _evidence(said: Measurement, seen: Evidence, log: Path) -> Evidence | None:
    """The worker's evidence of its failure, completed by what the parent saw and by its log."""
    if said.outcome is Outcome.OK:
        return None
    found = said.evidence or seen
    if said.outcome is Outcome.CRASH and not found.frame:
        found = replace(found, frame=evidence.raised_in(log, found.rank))
    steps = seen.steps if found.steps is None else found.steps
    return replace(found, phase=found.phase or seen.phase, steps=steps)


def _clock_problem(said: Measurement, phases: Sequence[Phase], between_s: float | None) -> str:
    """Why the samples cannot be what the sampling phase took; empty if they can."""
    phase = next((p for p in phases if p.name == "sampling"), None)
    if phase is None or between_s is None or not said.samples_s:
        return ""
    spent_s, sum_s = phase.end_s - phase.start_s - between_s, sum(said.samples_s)
    slack_s = SLACK_S + STEP_SLACK_S * len(said.samples_s)
    if CLOCKS_DISAGREE * (spent_s - slack_s) <= sum_s <= 1.1 * spent_s + slack_s:
        return ""
    return (
        f"the samples add up to {sum_s:.3g} s, but the sampling phase ran steps for {spent_s:.3g} "
        "s; look for code that replaces a clock of Python or torch"
    )
