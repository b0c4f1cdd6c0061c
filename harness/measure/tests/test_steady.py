"""Where the steady state of a series of step times begins."""

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.measure.steady import is_steady, steady_start

Series = NDArray[np.float64]


def noise(n: int, *, sigma: float = 0.01, seed: int = 0) -> Series:
    """Step times about 1 s, skewed as step times are."""
    return np.random.default_rng(seed).lognormal(sigma=sigma, size=n)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("planted", "low", "high"),
    [
        pytest.param(np.ones(100), 0, 25, id="steady from the start"),
        pytest.param(np.r_[30.0, np.ones(99)], 1, 25, id="one compilation"),
        pytest.param(np.r_[30.0, 9.0, 1.5, np.ones(97)], 3, 25, id="three slow steps"),
        *[
            pytest.param(np.where(np.arange(100) == at, 40.0, 1.0), 0, 25, id=f"outlier at {at}")
            for at in (5, 45, 95)
        ],
        pytest.param(np.where(np.arange(100) < 30, 1.3, 1.0), 30, 45, id="step"),
        pytest.param(1 + 3 * np.exp(-np.arange(100) / 6), 15, 45, id="exponential decay"),
        pytest.param(np.where(np.arange(100) < 30, 0.8, 1.0), 30, 45, id="grows slower"),
    ],
)
def test_the_warm_up_is_cut_off(planted: Series, low: int, high: int, seed: int) -> None:
    start = steady_start(planted * noise(len(planted), seed=seed))

    assert start is not None
    assert low <= start <= high


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(1 + np.arange(100) / 500, id="drift of a fifth"),
        pytest.param(1 - np.arange(100) / 500, id="always faster"),
        pytest.param(np.where(np.arange(100) < 70, 1.0, 1.2), id="throttled near the end"),
        pytest.param(1 + 3 * np.exp(-np.arange(100) / 60), id="warm-up longer than the series"),
    ],
)
def test_a_drift_is_not_steady(planted: Series, seed: int) -> None:
    assert steady_start(planted * noise(len(planted), seed=seed)) is None


def test_a_cut_in_the_middle_is_refused() -> None:
    """MSER cuts a drift as late as it can, and the short rest would look steady."""
    drifts = [(1 + np.arange(20) / 200) * noise(20, sigma=0.005, seed=seed) for seed in range(50)]

    assert np.mean([steady_start(drift) is not None for drift in drifts]) < 0.2


@pytest.mark.parametrize("n", [12, 22, 30])
def test_a_quiet_series_is_steady_wherever_its_noise_puts_the_cut(n: int) -> None:
    """Of 200 such series, MSER alone cuts 4 to 16 in the middle."""
    assert all(steady_start(noise(n, sigma=0.003, seed=seed)) is not None for seed in range(200))


def test_identical_readings_are_steady_at_once() -> None:
    """A coarse clock gives them; their spread is zero."""
    assert steady_start(np.ones(20)) == 0
    assert steady_start(np.r_[5.0, np.ones(20)]) == 1


def test_too_few_readings_decide_nothing() -> None:
    assert [steady_start(np.ones(n)) for n in range(4)] == [None] * 4
    assert not any(is_steady(np.ones(n)) for n in range(4))


def test_steady_series_are_found_at_any_length_and_spread() -> None:
    found = [
        steady_start(noise(n, sigma=sigma, seed=seed)) is not None
        for n in (20, 100, 1000)
        for sigma in (0.002, 0.02, 0.1)
        for seed in range(20)
    ]

    assert np.mean(found) > 0.95


def test_only_a_shift_over_a_hundredth_is_not_steady() -> None:
    half = np.ones(50)

    assert is_steady(np.r_[half, 1.009 * half])
    assert not is_steady(np.r_[half, 1.02 * half])
