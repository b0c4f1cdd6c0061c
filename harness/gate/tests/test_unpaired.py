"""Comparisons with stored processes."""

import math
from dataclasses import replace

import numpy as np

from harness.gate.unpaired import compare_stored
from harness.records import Change, Measurement, Telemetry, Thresholds
from harness.tests.fake_runs import case, taking


def processes(*levels: float, hz: float | None = None) -> list[Measurement]:
    """With one reading of the clock, while they take their samples."""
    read = Telemetry(t_s=(18.0,), channels={"gpu_sm_clock_hz": (hz,)})
    return [replace(m, telemetry=read) for m in taking(case({}), *levels)]


def drawn_levels(level: float, n: int, *, seed: int) -> list[float]:
    return [level * math.exp(x) for x in np.random.default_rng(seed).normal(0, 0.005, size=n)]


def stored(ratio: float, hz: float):
    before = processes(*drawn_levels(1.0, 10, seed=1), hz=1.98e9)
    now = processes(*drawn_levels(ratio, 10, seed=2), hz=hz)
    return compare_stored({"a": (before, now)}, Thresholds(), day_cv=0.005)[0]


def test_a_day_with_another_clock_is_undecided() -> None:
    assert stored(1.05, 1.98e9 / 1.05).clock_explained
    assert stored(1.05, 1.98e9).change is Change.SLOWER


def test_the_interval_over_days_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        days = np.exp(rng.normal(0.0, 0.01, size=2))
        before, now = (processes(*d * np.exp(rng.normal(0.0, 0.008, size=5))) for d in days)
        (answer,) = compare_stored({"a": (before, now)}, Thresholds(), day_cv=0.01)
        inside += (answer.ratio.low or math.inf) < 1.0 < (answer.ratio.high or 0)

    assert 0.97 < inside / 400 < 1.0
