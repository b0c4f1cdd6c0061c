"""Noise classes, and comparisons with stored processes, on planted noise."""

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis.comparison import confirm
from harness.gate.calibration import (
    DAY_CV,
    THRESHOLDS,
    NoiseClass,
    between_days,
    calibrate,
    classify,
    process_cv,
)
from harness.gate.unpaired import Process, compare_stored
from harness.records import Change, Pair, Thresholds
from reports.studies.noise import NOISY, QUIET, TYPICAL, Noise, RecordedNoise


def drawn(noise: Noise, n: int, *, seed: int, ratio: float = 1.0) -> list[Pair]:
    draw = noise.draw(np.random.default_rng(seed), 1, n)
    return [
        Pair(baseline_s=0.01 * math.exp(a), candidate_s=0.01 * ratio * math.exp(b))
        for a, b in zip(draw.baseline[0], draw.candidate[0], strict=True)
    ]


@pytest.mark.parametrize(
    ("noise", "expected"),
    [(QUIET, NoiseClass.QUIET), (TYPICAL, NoiseClass.TYPICAL), (NOISY, NoiseClass.NOISY)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_the_noise_class_is_found(noise: Noise, expected: NoiseClass) -> None:
    calibration = calibrate({f"c{i}": drawn(noise, 20, seed=i) for i in range(7)})

    assert calibration.noise is expected
    assert calibration.biased == ()


def test_a_noisy_case_on_a_quiet_node_gets_its_own_thresholds() -> None:
    calibration = calibrate(
        {
            **{f"c{i}": drawn(QUIET, 20, seed=i) for i in range(4)},
            "wild": drawn(NOISY, 20, seed=9),
        }
    )

    assert calibration.noise is NoiseClass.QUIET
    assert calibration.thresholds("wild") == THRESHOLDS[NoiseClass.NOISY]
    assert calibration.thresholds("c0") == calibration.thresholds("new") == Thresholds()


def test_a_case_whose_aa_pairs_differ_is_named() -> None:
    """The side that runs second is slower: the node, not the code."""
    calibration = calibrate(
        {"a": drawn(TYPICAL, 20, seed=1), "b": drawn(TYPICAL, 20, seed=2, ratio=1.04)}
    )

    assert calibration.biased == ("b",)


def test_the_variation_of_a_process_is_estimated_from_pairs() -> None:
    draw = RecordedNoise(name="", residuals=((0.02, -0.02) * 40,)).draw(
        np.random.default_rng(1), 200, 20
    )

    assert process_cv(draw.candidate - draw.baseline).mean() == pytest.approx(0.02, rel=0.05)
    assert classify(0.02) is NoiseClass.NOISY


def test_too_few_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="10 are needed"):
        calibrate({"a": drawn(QUIET, 9, seed=1)})
    with pytest.raises(ValueError, match="no case"):
        calibrate({})


def test_the_variation_between_days_needs_enough_days() -> None:
    rng = np.random.default_rng(1)
    days = [{f"c{i}": math.exp(rng.normal(0.0, 0.01)) for i in range(50)} for _ in range(5)]

    assert between_days(days, NoiseClass.NOISY) == pytest.approx(0.01, rel=0.1)
    assert between_days(days[:2], NoiseClass.NOISY) == DAY_CV[NoiseClass.NOISY]
    assert between_days([], NoiseClass.QUIET) == DAY_CV[NoiseClass.QUIET]


def test_cases_of_different_noise_are_judged_together() -> None:
    """By Holm over all of them, each under its own tolerance."""
    pairs = {"a": drawn(TYPICAL, 32, seed=1), "b": drawn(NOISY, 32, seed=3)}
    own = {"a": Thresholds(), "b": THRESHOLDS[NoiseClass.NOISY]}

    a, b = confirm(pairs, pairs, own)

    assert (a.change, b.change) == (Change.SAME, Change.SAME)
    assert confirm(pairs, pairs, Thresholds())[1].change is Change.UNDECIDED
    with pytest.raises(ValueError, match="alpha"):
        confirm(pairs, pairs, {**own, "a": Thresholds(alpha=0.01)})
    with pytest.raises(ValueError, match="no thresholds"):
        confirm(pairs, pairs, {"a": Thresholds()})


# --- against a stored baseline -----------------------------------------------------------


def processes(level: float, n: int, *, seed: int, cv: float = 0.005) -> list[Process]:
    rng = np.random.default_rng(seed)
    return [
        Process(step_s=0.01 * level * math.exp(x), wall_s=10.0) for x in rng.normal(0, cv, size=n)
    ]


def stored(ratio: float, *, day_cv: float = 0.005, n: int = 10, hz: float | None = None):
    before, now = processes(1.0, n, seed=1), processes(ratio, n, seed=2)
    if hz is not None:
        before = [replace(p, hz=1.98e9) for p in before]
        now = [replace(p, hz=hz) for p in now]
    return compare_stored({"a": before}, {"a": now}, day_cv=day_cv, thresholds=Thresholds())[0]


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
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low < ratio < answer.high
    if change is Change.UNDECIDED:
        assert answer.pairs_needed == 20
        assert answer.minutes_needed == pytest.approx(20 * 20.0 / 60)


def test_two_noisy_processes_are_undecided() -> None:
    """Student's quantile of one degree of freedom takes the bound out of all sense."""
    wild = {"a": [Process(step_s=0.010), Process(step_s=0.030)]}
    many = {f"b{i}": [Process(step_s=0.010), Process(step_s=0.011)] for i in range(5)}

    (answer, *_) = compare_stored(
        wild | many, wild | many, day_cv=0.01, thresholds=Thresholds(alpha=1e-4)
    )

    assert answer.change is Change.UNDECIDED
    assert (answer.low, answer.high, answer.smallest_effect) == (None, None, None)
    assert "unbounded" in answer.reason


def test_more_processes_do_not_reduce_the_variation_between_days() -> None:
    few, many = stored(1.0, n=10, day_cv=0.02), stored(1.0, n=1000, day_cv=0.02)

    assert few.high is not None
    assert many.high is not None
    assert many.high - many.ratio > 0.9 * (few.high - few.ratio)


def test_a_day_with_another_clock_is_undecided() -> None:
    assert stored(1.05, hz=1.98e9 / 1.05).clock_explained
    assert stored(1.05, hz=1.98e9).change is Change.SLOWER


def test_the_interval_over_days_covers_the_true_ratio() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(400):
        days = np.exp(rng.normal(0.0, 0.01, size=2))
        sides = [
            {"a": [Process(step_s=d * math.exp(x)) for x in rng.normal(0.0, 0.008, size=5)]}
            for d in days
        ]
        answer = compare_stored(*sides, day_cv=0.01, thresholds=Thresholds())[0]
        assert answer.low is not None
        assert answer.high is not None
        inside += answer.low < 1.0 < answer.high

    assert 0.97 < inside / 400 < 1.0


def test_invalid_processes_are_refused() -> None:
    two = processes(1.0, 2, seed=1)

    def ask(baseline: list[Process] | None, day_cv: float = 0.01) -> None:
        known = {} if baseline is None else {"a": baseline}
        compare_stored(known, {"a": two}, day_cv=day_cv, thresholds=Thresholds())

    ask(two)
    with pytest.raises(ValueError, match="not in the stored baseline"):
        ask(None)
    with pytest.raises(ValueError, match="at least 2 processes"):
        ask(two[:1])
    with pytest.raises(ValueError, match="day_cv"):
        ask(two, day_cv=math.nan)
    with pytest.raises(ValueError, match="step_s"):
        Process(step_s=math.nan)
