"""The criterion of a bisection: a metric, which has noise, or an exact one.

Readings of a metric are compared by statistics. A counter and an outcome are exact: one process is
enough, and a commit is bad if its value is nearer to that of the bad commit.
"""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from harness.errors import HarnessError
from harness.records import COUNTERS, NOT_OF_THE_CODE, Case, Measurement, Outcome, Suite
from harness.suite.choice import passing

METRICS = ("step_s", "peak_memory_bytes")
"""Metrics that every process has; a program may report more."""
SHOWN_CASES = 5
UNPROFILED = ("dispatched_ops", "host_syncs")
"""Counters that need no profiler."""


class CriterionKind(StrEnum):
    METRIC = "metric"
    COUNTER = "counter"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """What distinguishes good from bad."""

    kind: CriterionKind
    name: str
    """The metric, counter or outcome."""

    @property
    def exact(self) -> bool:
        return self.kind is not CriterionKind.METRIC

    def __str__(self) -> str:
        return self.name if self.kind is CriterionKind.METRIC else f"{self.kind} {self.name}"


PROFILED = Criterion(kind=CriterionKind.COUNTER, name="kernel_launches")
"""For a process that only tells what ran."""


class Unreadable(Exception):
    """A process has no value for the criterion, or a commit cannot be built."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        """`again`: another process of the same commit may have one."""
        super().__init__(reason)
        self.again = again


def one_case(suite: Suite, pattern: str, origin: str) -> Case:
    """The only case that matches a pattern; a HarnessError, with `origin` as the name of the suite,
    if none matches or several do."""
    found = passing(suite.cases, [pattern])
    if len(found) != 1:
        ids = "\n  ".join(c.case_id for c in (found or suite.cases)[:SHOWN_CASES])
        raise HarnessError(
            f"--case {pattern or '(none)'} matches {len(found)} cases of {origin}; a bisection "
            "needs exactly one",
            f"Some of the {'matches' if found else 'cases'}:\n  {ids}",
        )
    return found[0]


def chosen(case: Case, given: Mapping[str, str | None]) -> Criterion:
    """The criterion of a command line, by its kind; the step time by default. A HarnessError if
    several are given, or if the case does not have it."""
    named = {CriterionKind(kind): name for kind, name in given.items() if name}
    if len(named) > 1:
        raise HarnessError(
            f"{' and '.join(f'--{k}' for k in named)}: a bisection has one criterion",
            "Run one bisection for each.",
        )
    kind, name = next(iter(named.items()), (CriterionKind.METRIC, METRICS[0]))
    reported = [r.metric for r in case.program.readings] if case.program else []
    known = {
        CriterionKind.METRIC: dict.fromkeys([*METRICS, *reported]),
        CriterionKind.COUNTER: COUNTERS,
        CriterionKind.OUTCOME: [o.value for o in Outcome if o not in NOT_OF_THE_CODE],
    }[kind]
    if name not in known:
        raise HarnessError(
            f"--{kind} {name}: {case.case_id} has no such {kind}", f"Use one of {', '.join(known)}."
        )
    return Criterion(kind=kind, name=name)


def prepared(case: Case, criterion: Criterion) -> Case:
    """The case with the settings to measure this criterion."""
    settings = replace(case.settings, processes=1)
    if criterion.kind is CriterionKind.METRIC:
        settings = replace(settings, profile=False)
    elif criterion.kind is CriterionKind.COUNTER:
        settings = replace(
            settings.untimed(1),
            accuracy=False,  # an incorrect commit can be counted too
            # A program is counted only in its profiled process.
            profile=case.program is not None or criterion.name not in UNPROFILED,
        )
    # An outcome keeps the profile, which detects a path mismatch.
    return replace(case, settings=settings)


def read(criterion: Criterion, measurement: Measurement, min_samples: int) -> float:
    """The value of the criterion in one process; Unreadable if it has none."""
    if criterion.kind is CriterionKind.OUTCOME:
        asked = measurement.outcome.value == criterion.name
        if asked or measurement.outcome is not Outcome.UNSUPPORTED:
            return float(asked)
    if measurement.outcome is not Outcome.OK:
        detail = measurement.detail.strip().partition("\n")[0]
        raise Unreadable(f"{str(measurement.outcome).replace('_', ' ')}: {detail}")
    if criterion.kind is CriterionKind.COUNTER:
        return _counter(criterion.name, measurement)
    return _metric(criterion.name, measurement, min_samples)


def _metric(name: str, measurement: Measurement, min_samples: int) -> float:
    if not measurement.is_evidence(min_samples):
        raise Unreadable("too few undisturbed samples", again=True)
    if measurement.steady is False:
        raise Unreadable("it did not reach a steady state", again=True)
    if name == "step_s":
        return measurement.step_s
    reported = measurement.readings.get(name, ())
    value = statistics.median(reported) if reported else measurement.peak_memory_bytes
    if value is None or (name != "peak_memory_bytes" and not reported):
        raise Unreadable(f"its {name} is unknown")
    if value <= 0:
        raise Unreadable(f"its {name} is {value:g}; a ratio needs a positive value")
    return float(value)


def _counter(name: str, measurement: Measurement) -> float:
    counters = measurement.counters
    if counters is None:
        raise Unreadable(f"{name} is unknown: no counters")
    if (value := getattr(counters, name)) is None:
        why = counters.unknown.get(name, "its worker did not count it")
        raise Unreadable(f"{name} is unknown: {why}")
    if name in counters.series:
        raise Unreadable(f"{name} differs between two steps")
    return float(value)
