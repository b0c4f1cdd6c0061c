"""Comparisons of a baseline and a candidate find a planted change."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import PermutationMethod, wilcoxon

from harness.analysis.comparison import confirm, holm, screen
from harness.analysis.statistics import exact_bounds, hodges_lehmann, signed_rank_p
from harness.records import Change, Comparison, Pair, Thresholds, least_pairs

DEFAULT = Thresholds()


def pairs(ratio: float, n: int, *, spread: float = 0.008, seed: int = 0) -> list[Pair]:
    """Pairs of processes whose medians scatter by 0.8 %, as on a typical node."""
    rng = np.random.default_rng(seed)
    a, b = np.exp(rng.normal(0.0, spread, size=(2, n)))
    return [
        Pair(baseline_s=0.01 * x, candidate_s=0.01 * ratio * y, wall_s=20.0)
        for x, y in zip(a, b, strict=True)
    ]


def clocked(plain: list[Pair], baseline_hz: float, candidate_hz: float) -> list[Pair]:
    return [replace(p, baseline_hz=baseline_hz, candidate_hz=candidate_hz) for p in plain]


def judge(ratio: float, *, spread: float = 0.008, seed: int = 0) -> Comparison:
    """One case through both stages."""
    first = {"a": pairs(ratio, DEFAULT.screen_pairs, spread=spread, seed=seed)}
    second = {"a": pairs(ratio, 20, spread=spread, seed=seed + 1000)}
    (answer,) = confirm(first, {} if screen(first["a"], DEFAULT) else second, DEFAULT)
    return answer


# --- rank statistics ---------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 5, 12, 20])
def test_signed_rank_p_values_equal_those_of_scipy(n: int) -> None:
    d = np.random.default_rng(n).normal(0.3, 1.0, size=(20, n))

    ours = signed_rank_p(d)

    theirs = [wilcoxon(x, alternative="greater", method="exact").pvalue for x in d]
    assert ours == pytest.approx(theirs)


def test_ties_and_zeros_have_the_exact_permutation_distribution() -> None:
    d = np.round(np.random.default_rng(1).normal(0.3, 1.0, size=(6, 9)))
    assert (d == 0).any()

    ours = signed_rank_p(d)

    every = PermutationMethod(n_resamples=10**6)  # more than the 2**9 sign flips: all of them
    theirs = [
        wilcoxon(x, alternative="greater", zero_method="pratt", method=every).pvalue for x in d
    ]
    assert ours == pytest.approx(theirs)


def test_equal_times_have_p_value_1() -> None:
    assert signed_rank_p(np.zeros(20)) == 1.0


def test_the_exact_bounds_enclose_the_centres_that_the_test_does_not_reject() -> None:
    d = np.random.default_rng(2).normal(0.0, 1.0, size=20)

    bounds = exact_bounds(d, 0.01)

    assert bounds is not None
    low, high = map(float, bounds)
    assert low < hodges_lehmann(d) < high
    assert signed_rank_p(d - (low - 1e-9)) <= 0.01 < signed_rank_p(d - (low + 1e-9))
    assert signed_rank_p((high + 1e-9) - d) <= 0.01 < signed_rank_p((high - 1e-9) - d)


def test_too_few_pairs_have_no_exact_bounds() -> None:
    assert exact_bounds(np.arange(6.0), 0.01) is None
    assert exact_bounds(np.arange(7.0), 0.01) is not None


# --- the decision ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "spread", "expected"),
    [
        pytest.param(1.00, 0.008, Change.SAME, id="unchanged"),
        pytest.param(1.03, 0.008, Change.SLOWER, id="3 % slower"),
        pytest.param(1.05, 0.025, Change.SLOWER, id="5 % slower on a noisy node"),
        pytest.param(0.90, 0.008, Change.FASTER, id="10 % faster"),
        pytest.param(1.02, 0.025, Change.UNDECIDED, id="2 % on a noisy node"),
        pytest.param(1.00, 0.100, Change.UNDECIDED, id="unchanged on a very noisy node"),
    ],
)
def test_the_planted_change_is_found(planted: float, spread: float, expected: Change) -> None:
    answer = judge(planted, spread=spread, seed=7)

    assert answer.change is expected
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low < planted < answer.high


def test_a_certain_slowdown_of_no_practical_size_is_the_same() -> None:
    answer = confirm(
        {"a": pairs(1.013, 6, spread=0.0005)}, {"a": pairs(1.013, 20, spread=0.0005)}, DEFAULT
    )[0]

    assert answer.p_value is not None
    assert answer.p_value < DEFAULT.alpha
    assert answer.change is Change.SAME


def test_a_case_whose_noise_could_hide_a_slowdown_does_not_pass_the_screen() -> None:
    """Though its centre is fine: four of six pairs show no change."""
    noisy = [Pair(baseline_s=1.0, candidate_s=r) for r in (0.99, 1.00, 1.01, 1.06, 0.94, 1.00)]
    calm = [Pair(baseline_s=1.0, candidate_s=r) for r in (0.999, 1.0, 1.001, 1.002, 0.998, 1.0)]

    assert not screen(noisy, DEFAULT)
    assert screen(calm, DEFAULT)
    assert not screen(calm[:5], DEFAULT)


def test_a_confirmation_uses_its_new_pairs_only() -> None:
    answer = confirm({"a": pairs(1.06, 6)}, {"a": pairs(1.0, 20)}, DEFAULT)[0]

    assert answer.change is Change.SAME
    assert answer.pairs == 20


def test_the_more_cases_are_confirmed_the_smaller_a_p_value_must_be() -> None:
    one = pairs(1.018, 20, spread=0.014, seed=3)
    alone = confirm({"a": one}, {"a": one}, DEFAULT)[0]
    clean = {f"c{i}": pairs(1.0, 20, seed=100 + i) for i in range(59)}
    among = confirm({"a": one, **clean}, {"a": one, **clean}, DEFAULT)[0]

    assert alone.p_value is not None
    assert among.p_value is not None
    assert among.p_value == pytest.approx(60 * alone.p_value)
    assert (alone.change, among.change) == (Change.SLOWER, Change.UNDECIDED)


def test_adjusted_p_values_ascend() -> None:
    assert holm({"a": 0.001, "b": 0.04, "c": 0.03}) == pytest.approx(
        {"a": 0.003, "c": 0.06, "b": 0.06}
    )


@pytest.mark.parametrize(
    ("candidate_hz", "change", "explained"),
    [
        pytest.param(1.98e9, Change.SLOWER, False, id="same clock"),
        pytest.param(1.98e9 / 1.05, Change.UNDECIDED, True, id="clock 5 % lower"),
        pytest.param(1.98e9 / 1.01, Change.SLOWER, False, id="clock explains a fifth"),
    ],
)
def test_a_gap_that_vanishes_in_cycles_is_undecided(
    candidate_hz: float, change: Change, explained: bool
) -> None:
    second = clocked(pairs(1.05, 20), 1.98e9, candidate_hz)

    answer = confirm({"a": pairs(1.05, 6)}, {"a": second}, DEFAULT)[0]

    assert (answer.change, answer.clock_explained) == (change, explained)
    if explained:
        assert answer.pairs_needed is None


def test_the_pairs_that_an_undecided_case_needs_do_decide_it() -> None:
    answer = confirm({"a": pairs(1.02, 6)}, {"a": pairs(1.02, 20, spread=0.025, seed=5)}, DEFAULT)[
        0
    ]

    assert answer.change is Change.UNDECIDED
    assert answer.pairs_needed is not None
    assert answer.minutes_needed == pytest.approx(answer.pairs_needed * 20.0 / 60)
    assert answer.smallest_effect is not None
    assert 0.02 < answer.smallest_effect < 0.05
    decided = [
        confirm({"a": many[:5]}, {"a": many}, DEFAULT)[0].change is not Change.UNDECIDED
        for seed in range(10)
        if (many := pairs(answer.ratio, answer.pairs_needed, spread=0.025, seed=seed))
    ]
    assert sum(decided) >= 7


def test_a_case_that_was_not_confirmed_is_undecided() -> None:
    answer = confirm({"a": pairs(1.05, 6)}, {}, DEFAULT)[0]

    assert answer.change is Change.UNDECIDED
    assert (answer.p_value, answer.pairs_needed) == (None, 20)


def test_a_case_that_passed_the_screen_has_a_smallest_effect() -> None:
    """Above screen_ratio by 1.28 standard errors of the mean of six pairs."""
    answer = confirm({"a": pairs(1.0, 6)}, {}, DEFAULT)[0]

    assert (answer.change, answer.p_value) == (Change.SAME, None)
    assert answer.smallest_effect == pytest.approx(0.018, abs=0.004)


def test_one_pair_has_no_bounds() -> None:
    answer = confirm({"a": pairs(1.0, 1)}, {}, DEFAULT)[0]

    assert answer.change is Change.UNDECIDED
    assert (answer.low, answer.high, answer.smallest_effect) == (None, None, None)


def test_a_confirmation_of_six_pairs_decides_nothing() -> None:
    few = pairs(1.0, 6)

    answer = confirm({"a": few}, {"a": few}, DEFAULT)[0]

    assert answer.change is Change.UNDECIDED
    assert (answer.low, answer.high, answer.smallest_effect) == (None, None, None)


@pytest.mark.parametrize("bad", [math.nan, 0.0, math.inf])
@pytest.mark.parametrize("name", ["baseline_s", "candidate_hz", "wall_s"])
def test_a_pair_needs_positive_finite_numbers(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="not a positive, finite number"):
        replace(Pair(baseline_s=1.0, candidate_s=1.0), **{name: bad})


def test_a_case_needs_pairs_of_the_screen() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        confirm({"a": []}, {}, DEFAULT)
    with pytest.raises(ValueError, match="not screened"):
        confirm({"a": pairs(1.0, 6)}, {"b": pairs(1.0, 20)}, DEFAULT)


def test_a_confirmation_needs_enough_pairs_to_reach_alpha() -> None:
    with pytest.raises(ValueError, match="at least 8"):
        Thresholds(confirm_pairs=7)
    assert least_pairs(60, 0.005) == 14
