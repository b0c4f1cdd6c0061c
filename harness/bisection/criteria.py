"""What makes a commit bad: a reading with noise, or an exact one.

A metric's reading goes into statistics. A counter, an outcome and a kernel are exact: one process
tells, and a commit is bad where its value lies nearer to that of the bad anchor.
"""

import statistics
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase

from harness.errors import HarnessError
from harness.records import Case, Clock, Measurement, MeasureSettings, Outcome
from harness.what_ran import COUNTERS, MAX_USES

METRICS = ("step_s", "peak_memory_bytes")
"""Metrics that one process of any case reads; a program may tell more."""
UNPROFILED = ("dispatched_ops", "host_syncs")
"""Counters that need no profiler."""


class Kind(StrEnum):
    METRIC = "metric"
    COUNTER = "counter"
    OUTCOME = "outcome"
    KERNEL = "kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Criterion:
    """By what commits are told apart."""

    kind: Kind
    name: str
    """Of the metric or the counter; the outcome; a pattern (fnmatch) of kernels and operators."""

    @property
    def exact(self) -> bool:
        return self.kind is not Kind.METRIC

    def __str__(self) -> str:
        return self.name if self.kind is Kind.METRIC else f"{self.kind} {self.name}"


class Unreadable(Exception):
    """A process says nothing of the criterion."""

    def __init__(self, reason: str, *, again: bool = False) -> None:
        """`again`: another process of the same commit may."""
        super().__init__(reason)
        self.again = again


def chosen(
    case: Case,
    *,
    metric: str | None = None,
    counter: str | None = None,
    outcome: str | None = None,
    kernel: str | None = None,
) -> Criterion:
    """The one criterion of a command line; the step time where none is named.

    Raises:
        HarnessError: Two are named, or one that the case does not have.
    """
    given = {
        Kind.METRIC: metric,
        Kind.COUNTER: counter,
        Kind.OUTCOME: outcome,
        Kind.KERNEL: kernel,
    }
    named = {kind: name for kind, name in given.items() if name}
    if len(named) > 1:
        raise HarnessError(
            f"{' and '.join(f'--{k}' for k in named)}: a bisection has one criterion",
            "Bisect twice.",
        )
    kind, name = next(iter(named.items()), (Kind.METRIC, METRICS[0]))
    known = {
        Kind.METRIC: (*METRICS, *_told(case)),
        Kind.COUNTER: COUNTERS,
        Kind.OUTCOME: tuple(o.value for o in Outcome if o is not Outcome.INVALID_ENVIRONMENT),
    }.get(kind)
    if known is not None and name not in known:
        raise HarnessError(
            f"--{kind} {name}: {case.case_id} has none", f"There are {', '.join(known)}."
        )
    return Criterion(kind=kind, name=name)


def _told(case: Case) -> tuple[str, ...]:
    """Metrics that a case's program tells of itself."""
    readings = case.program.readings if case.program else ()
    return tuple(r.metric for r in readings if r.metric not in METRICS)


def prepared(case: Case, criterion: Criterion) -> Case:
    """The case, as it is measured for this criterion."""
    settings = replace(case.settings, processes=1)
    match criterion.kind:
        case Kind.METRIC:
            settings = replace(settings, census=False)
        case Kind.COUNTER:
            # A program counts in its census or not at all.
            census = case.program is not None or criterion.name not in UNPROFILED
            settings = _quick(settings, census=census)
        case Kind.KERNEL:
            settings = _quick(settings, census=True)
        case Kind.OUTCOME:
            pass  # a path mismatch is seen by the census
    return replace(case, settings=settings)


def _quick(settings: MeasureSettings, *, census: bool) -> MeasureSettings:
    """As few runs as there can be: nothing is timed, and what is wrong can be counted too."""
    return replace(
        settings,
        min_samples=1,
        max_samples=1,
        sample_s=1e-3,
        warmup_s=0.0,
        rotate_inputs=1,
        accuracy=False,
        census=census,
    )


def read(criterion: Criterion, measurement: Measurement, min_samples: int) -> float:
    """The value of the criterion in one process.

    Raises:
        Unreadable: It has none.
    """
    if criterion.kind is Kind.OUTCOME and (
        measurement.outcome.value == criterion.name
        or measurement.outcome is not Outcome.UNSUPPORTED
    ):
        return float(measurement.outcome.value == criterion.name)
    if measurement.outcome is not Outcome.OK:
        said = measurement.detail.strip().partition("\n")[0]
        raise Unreadable(f"{str(measurement.outcome).replace('_', ' ')}: {said}")
    match criterion.kind:
        case Kind.COUNTER:
            return _counter(criterion.name, measurement)
        case Kind.KERNEL:
            return _kernel(criterion.name, measurement)
    return _metric(criterion.name, measurement, min_samples)


def _metric(name: str, measurement: Measurement, min_samples: int) -> float:
    if not measurement.is_evidence(min_samples):
        raise Unreadable("too few samples are left once the disturbed ones are out", again=True)
    if measurement.steady is False:
        raise Unreadable("it found no steady state", again=True)
    if name == "step_s":
        return statistics.median(measurement.kept_s)
    told = measurement.readings.get(name, ())
    value = statistics.median(told) if told else measurement.peak_memory_bytes
    if value is None or (name != "peak_memory_bytes" and not told):
        raise Unreadable(f"its {name} is unknown")
    if value <= 0:
        raise Unreadable(f"its {name} is {value:g}, which has no ratio to another")
    return float(value)


def _counter(name: str, measurement: Measurement) -> float:
    counters = measurement.counters
    value = None if counters is None else getattr(counters, name)
    if counters is None or value is None:
        why = counters.unknown.get(name, "its worker counted nothing") if counters else "no counts"
        raise Unreadable(f"{name} is unknown: {why}")
    if name in counters.differing:
        raise Unreadable(f"two steps differ in {name}")
    return float(value)


def _kernel(pattern: str, measurement: Measurement) -> float:
    census = measurement.census
    if census is None or census.skipped:
        raise Unreadable(f"what ran is unknown: {census.skipped if census else 'no census'}")
    uses = (census.kernels, census.operators)
    if any(fnmatchcase(use.name, pattern) for group in uses for use in group):
        return 1.0
    if census.no_kernels and measurement.clock is not Clock.HOST:
        raise Unreadable(f"its kernels are unknown: {census.no_kernels}", again=True)
    if any(len(group) >= MAX_USES for group in uses):
        raise Unreadable(f"no name among the {MAX_USES} recorded fits, and more may have run")
    return 0.0
