"""Comparisons with stored processes, and cases of different noise judged together."""

import math

import numpy as np
import pytest

from harness.gate.unpaired import compare_stored
from harness.records import Change, Measurement, Outcome, Phase, Telemetry, Thresholds

# --- against a stored run ----------------------------------------------------------------


def processes(*levels: float, hz: float | None = None) -> list[Measurement]:
    read = Telemetry(t_s=(0.5,), channels={"gpu_sm_clock_hz": (hz,)})
    return [
        Measurement(
            case_id="a",
            process=i,
            outcome=Outcome.OK,
            samples_s=(0.01 * level,),
            phases=(Phase(name="sampling", start_s=0.0, end_s=1.0),),
            telemetry=read,
            wall_s=10.0,
        )
        for i, level in enumerate(levels)
    ]


def drawn_levels(level: float, n: int, *, seed: int) -> list[float]:
    return [level * math.exp(x) for x in np.random.default_rng(seed).normal(0, 0.005, size=n)]


def stored(ratio: float, *, day_cv: float = 0.005, n: int = 10, hz: float | None = None):
    before = processes(*drawn_levels(1.0, n, seed=1), hz=1.98e9 if hz else None)
    now = processes(*drawn_levels(ratio, n, seed=2), hz=hz)
    return compare_stored({"a": (before, now)}, Thresholds(), day_cv=day_cv)[0]


@pytest.mark.parametrize(
    ("ratio", "day_cv", "change"),
    [
        pytest.param(1.00, 0.005, Change.SAME, id="unchanged"),
        pytest.param(1.05, 0.005, Change.SLOWER, id="5 % slower"),
        pytest.param(0.90, 0.005, Change.FASTER, id="10 % faster"),
        pytest.param(1.05, 0.020, Change.UNDECIDED, id="days differ by as much"),
        pytest.param(1.00, 0.020, Change.UNDECIDED, id="no change, and no way to know"),
    ],
)
def test_a_stored_baseline_decides_within_the_variation_of_days(
    ratio: float, day_cv: float, change: Change
) -> None:
    answer = stored(ratio, day_cv=day_cv)

    assert answer.change is change
    assert (answer.low or math.inf) < ratio < (answer.high or 0)
    if change is Change.UNDECIDED:
        assert answer.pairs_needed == 20
        assert answer.minutes_needed == pytest.approx(20 * 20.0 / 60)


def test_a_day_with_another_clock_is_undecided() -> None:
    assert stored(1.05, hz=1.98e9 / 1.05).clock_explained
    assert stored(1.05, hz=1.98e9).change is Change.SLOWER


def test_the_interval_over_days_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        days = np.exp(rng.normal(0.0, 0.01, size=2))
        before, now = (processes(*d * np.exp(rng.normal(0.0, 0.008, size=5))) for d in days)
        (answer,) = compare_stored({"a": (before, now)}, Thresholds(), day_cv=0.01)
        inside += (answer.low or math.inf) < 1.0 < (answer.high or 0)

    assert 0.97 < inside / 400 < 1.0
