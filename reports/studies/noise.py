"""Models of how a machine disturbs a measurement: what the gate's error rates are computed on.

A model draws the medians of fresh processes of an unchanged case, as logarithms of their ratio to
the true time. Three are stated by parameters; `recorded` takes the scatter of the processes in
stored runs instead, case by case.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from harness import units
from harness.analysis.statistics import Floats
from harness.records import Outcome, Run


@dataclass(frozen=True, slots=True)
class Draw:
    """Processes of an unchanged case. Logarithms, [cases, pairs] each."""

    baseline: Floats
    candidate: Floats
    baseline_clock: Floats
    """Of the mean SM clock; noise of its reading, so that it explains nothing."""
    candidate_clock: Floats


class Noise(Protocol):
    """A machine."""

    @property
    def name(self) -> str: ...

    def draw(self, rng: np.random.Generator, cases: int, pairs: int) -> Draw:
        """Draw pairs of processes, in the order in which the gate runs them: A B, B A, A B."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledNoise:
    """Noise stated by its parts, all as fractions of the step time."""

    name: str
    process_cv: float
    """How far the medians of fresh processes scatter. On an H200 0.78 % over 12 processes
    (MEASUREMENT.md, facts)."""
    spread: float
    """Interquartile range of the steps inside one process; 1.6 % in the same measurement."""
    samples: int = 30
    """Independent steps behind a process's median: it keeps 1.25 sigma / sqrt(samples) of them."""
    drift: float
    """Standard deviation of the slow drift that all processes share."""
    memory: float = 0.95
    """Correlation of the drift from one process to the next: it lasts some twenty processes."""
    disturbed: float
    """Share of processes that something else on the machine slows down."""
    disturbance: float
    """Mean slowdown of a disturbed process, exponential."""
    clock: float
    """Scatter of the mean SM clock as it is read."""

    def draw(self, rng: np.random.Generator, cases: int, pairs: int) -> Draw:
        x = self.sequence(rng, cases, 2 * pairs)
        return _paired(x, rng.normal(0.0, self.clock, size=(cases, 2 * pairs)))

    def sequence(self, rng: np.random.Generator, cases: int, processes: int) -> Floats:
        """Logarithms of the step times of consecutive processes, [cases, processes]."""
        shape = (cases, processes)
        of_median = 1.2533 * (self.spread / 1.349) / math.sqrt(self.samples)
        x = rng.normal(0.0, math.hypot(self.process_cv, of_median), size=shape)
        x += _drift(rng, shape, self.drift, self.memory)
        x += (rng.random(shape) < self.disturbed) * rng.exponential(self.disturbance, shape)
        return x


QUIET = ModelledNoise(
    name="quiet",
    process_cv=0.003,
    spread=0.005,
    drift=0.001,
    disturbed=0.005,
    disturbance=0.02,
    clock=0.0005,
)
TYPICAL = ModelledNoise(
    name="typical",
    process_cv=0.008,
    spread=0.016,
    drift=0.003,
    disturbed=0.01,
    disturbance=0.03,
    clock=0.002,
)
NOISY = ModelledNoise(
    name="noisy",
    process_cv=0.025,
    spread=0.05,
    drift=0.01,
    disturbed=0.03,
    disturbance=0.10,
    clock=0.005,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNoise:
    """Noise of another kind than ours, by the function that draws consecutive processes."""

    name: str
    sequence: Callable[[np.random.Generator, tuple[int, int]], Floats]

    def draw(self, rng: np.random.Generator, cases: int, pairs: int) -> Draw:
        shape = (cases, 2 * pairs)
        return _paired(self.sequence(rng, shape), np.zeros(shape))


def _two_modes(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(0.0, 0.003, shape) + 0.04 * (rng.random(shape) < 0.15)


def _heavy_tails(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return 0.01 * 1.349 / 1.633 * rng.standard_t(2, shape)  # the middle half as of a CV of 1 %


def _correlated(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    return rng.normal(0.0, 0.003, shape) + _drift(rng, shape, 0.01, 0.9)


def by_case(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    cv = np.exp(rng.uniform(math.log(0.002), math.log(0.05), (shape[0], 1)))
    return np.asarray(cv * rng.normal(size=shape))


def _by_order(rng: np.random.Generator, shape: tuple[int, int]) -> Floats:
    x = TYPICAL.sequence(rng, *shape)
    x[:, ::2] += 0.03
    return x


OTHERS = (
    OtherNoise(name="15 % of processes 4 % slower", sequence=_two_modes),
    OtherNoise(name="t, 2 degrees of freedom", sequence=_heavy_tails),
    OtherNoise(name="AR(1) 0.9", sequence=_correlated),
    OtherNoise(name="CV 0.2 to 5 % by case", sequence=by_case),
    OtherNoise(name="first of a pair 3 % slower", sequence=_by_order),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildNoise:
    """Another noise, and for each build a luck that is the same in all its processes."""

    name: str
    of: Noise
    sd: float

    def draw(self, rng: np.random.Generator, cases: int, pairs: int) -> Draw:
        drawn = self.of.draw(rng, cases, pairs)
        first, second = rng.normal(0.0, self.sd, (2, cases, 1))
        return replace(drawn, baseline=drawn.baseline + first, candidate=drawn.candidate + second)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNoise:
    """The scatter of processes in stored runs. Each simulated case takes on one recorded case."""

    name: str
    residuals: tuple[tuple[float, ...], ...]
    """Per recorded case, log median of each process less their mean, scaled by
    sqrt(n / (n - 1)): so few processes lie closer to their own mean than to the true one."""

    def draw(self, rng: np.random.Generator, cases: int, pairs: int) -> Draw:
        """A smoothed bootstrap: two or three processes alone would repeat their few values."""
        longest = max(map(len, self.residuals))
        table = np.full((len(self.residuals), longest), np.nan)
        for row, values in enumerate(self.residuals):
            table[row, : len(values)] = values
        sizes = np.array([len(r) for r in self.residuals])
        scales = np.sqrt(np.nansum(table**2, axis=1) / sizes)
        chosen = rng.integers(len(self.residuals), size=cases)
        n, scale = sizes[chosen, None], scales[chosen, None]
        shape = (cases, 2 * pairs)
        which = (rng.random(shape) * n).astype(int)
        width = 1.06 * n**-0.2  # Silverman's rule, in units of the scale
        smooth = rng.normal(0.0, 1.0, size=shape) * scale * width
        x = (table[chosen[:, None], which] + smooth) / np.sqrt(1 + width**2)
        return _paired(x, np.zeros(shape))

    def no_noisier_than(self, process_cv: float) -> "RecordedNoise":
        """The recorded cases whose processes scatter by at most so much."""
        kept = tuple(r for r in self.residuals if math.sqrt(np.mean(np.square(r))) <= process_cv)
        return RecordedNoise(name=f"CV at most {units.percent(process_cv)}", residuals=kept)


def recorded(runs: Iterable[Run]) -> RecordedNoise:
    """The scatter of every case that at least two processes of a run measured steadily.

    Raises:
        ValueError: No run holds such a case.
    """
    residuals = []
    for run in runs:
        for case in run.suite.cases:
            medians = [
                float(np.median(m.kept_s))
                for m in run.of(case.case_id)
                if m.outcome is Outcome.OK and m.steady and m.is_evidence(case.settings.min_samples)
            ]
            if len(medians) > 1:
                residuals.append(_residuals(medians))
    if not residuals:
        raise ValueError("no stored run holds a case with two steady processes")
    return RecordedNoise(name="recorded", residuals=tuple(residuals))


def _residuals(medians: Sequence[float]) -> tuple[float, ...]:
    logs = np.log(medians)
    n = len(logs)
    return tuple(float(x) for x in (logs - logs.mean()) * math.sqrt(n / (n - 1)))


def _drift(rng: np.random.Generator, shape: tuple[int, int], scale: float, memory: float) -> Floats:
    """A first-order autoregression along the last axis, stationary with the given scale."""
    steps = rng.normal(0.0, scale * math.sqrt(1 - memory**2), size=shape)
    steps[:, 0] = rng.normal(0.0, scale, size=shape[0])
    for i in range(1, shape[1]):
        steps[:, i] += memory * steps[:, i - 1]
    return steps


def _paired(processes: Floats, clocks: Floats) -> Draw:
    """Split processes in their order of running into the two sides: A B, B A, A B, ..."""
    swapped = np.arange(processes.shape[1] // 2) % 2 == 1
    first, second = processes[:, ::2], processes[:, 1::2]
    first_clock, second_clock = clocks[:, ::2], clocks[:, 1::2]
    return Draw(
        baseline=np.where(swapped, second, first),
        candidate=np.where(swapped, first, second),
        baseline_clock=np.where(swapped, second_clock, first_clock),
        candidate_clock=np.where(swapped, first_clock, second_clock),
    )
