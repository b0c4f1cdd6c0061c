"""Comparisons of a baseline and a candidate find a planted change."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import PermutationMethod, wilcoxon

from harness.analysis.comparison import confirm, holm, pairs_needed, screen
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


def judge(first: list[Pair], second: list[Pair]) -> Comparison:
    """One case, confirmed by the second pairs if there are any."""
    (answer,) = confirm({"a": first}, {"a": second} if second else {}, DEFAULT)
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
    first = pairs(planted, DEFAULT.screen_pairs, spread=spread, seed=7)
    second = pairs(planted, 20, spread=spread, seed=1007)

    answer = judge(first, [] if screen(first, DEFAULT) else second)

    assert answer.change is expected
    assert answer.low is not None
    assert answer.high is not None
    assert answer.low < planted < answer.high


def test_a_certain_slowdown_of_no_practical_size_is_the_same() -> None:
    answer = judge(pairs(1.013, 6, spread=0.0005), pairs(1.013, 20, spread=0.0005))

    assert answer.p_value is not None
    assert answer.p_value < DEFAULT.alpha
    assert answer.change is Change.SAME


@pytest.mark.parametrize(
    ("ratios", "passes"),
    [
        ((0.999, 1.0, 1.001, 1.002, 0.998, 1.0), True),
        ((0.99, 1.00, 1.01, 1.06, 0.94, 1.00), False),  # noise that could hide a slowdown
        ((0.999, 1.0, 1.001, 1.002, 0.998), False),
    ],
    ids=["calm", "noisy", "few"],
)
def test_a_screen_is_passed_by_enough_calm_pairs(ratios: tuple[float, ...], passes: bool) -> None:
    assert screen([Pair(baseline_s=1.0, candidate_s=r) for r in ratios], DEFAULT) is passes


def test_a_confirmation_uses_its_new_pairs_only() -> None:
    answer = judge(pairs(1.06, 6), pairs(1.0, 20))

    assert (answer.change, answer.pairs) == (Change.SAME, 20)


def test_the_more_cases_are_confirmed_the_smaller_a_p_value_must_be() -> None:
    one = pairs(1.018, 20, spread=0.014, seed=3)
    clean = {f"c{i}": pairs(1.0, 20, seed=100 + i) for i in range(59)}

    alone = judge(one, one)
    among = confirm({"a": one, **clean}, {"a": one, **clean}, DEFAULT)[0]

    assert alone.p_value is not None
    assert among.p_value == pytest.approx(60 * alone.p_value)
    assert (alone.change, among.change) == (Change.SLOWER, Change.UNDECIDED)
    adjusted = holm({"a": 0.001, "b": 0.04, "c": 0.03})
    assert adjusted == pytest.approx({"a": 0.003, "c": 0.06, "b": 0.06})  # they ascend


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
    clocks = {"baseline_hz": 1.98e9, "candidate_hz": candidate_hz}

    answer = judge(pairs(1.05, 6), [replace(p, **clocks) for p in pairs(1.05, 20)])
    unread = judge(pairs(1.05, 6), pairs(1.05, 20))

    assert (answer.change, answer.clock_explained) == (change, explained)
    assert unread.change is Change.SLOWER
    assert unread.reason != answer.reason, "it says that the clock is not known"
    assert answer.pairs_needed is None


def test_the_pairs_that_an_undecided_case_needs_do_decide_it() -> None:
    answer = judge(pairs(1.02, 6), pairs(1.02, 20, spread=0.025, seed=5))

    assert answer.change is Change.UNDECIDED
    assert answer.pairs_needed is not None
    assert answer.minutes_needed == pytest.approx(answer.pairs_needed * 20.0 / 60)
    assert answer.smallest_effect is not None
    assert 0.02 < answer.smallest_effect < 0.05
    more = (pairs(answer.ratio, answer.pairs_needed, spread=0.025, seed=n) for n in range(10))
    assert sum(judge(p[:5], p).change is not Change.UNDECIDED for p in more) >= 7


def test_a_gap_beyond_the_tolerance_needs_the_pairs_that_show_it_slower() -> None:
    """Nine times in ten: (2.58 + 1.28) standard errors above 0, or 1.28 above practical."""
    assert pairs_needed(math.log(1.10), 0.10, 1, DEFAULT) == pytest.approx(16, abs=2)
    assert pairs_needed(math.log(1.10), 0.10, 60, DEFAULT) > 20


NO_BOUNDS = {"low": None, "high": None, "smallest_effect": None}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (pairs(1.05, 6), [], {"change": Change.UNDECIDED, "p_value": None, "pairs_needed": 20}),
        (pairs(1.0, 6), [], {"change": Change.SAME, "p_value": None, "pairs_needed": None}),
        (pairs(1.0, 1), [], {"change": Change.UNDECIDED, **NO_BOUNDS}),
        (pairs(1.0, 6), pairs(1.0, 6), {"change": Change.UNDECIDED, **NO_BOUNDS}),
    ],
    ids=["not confirmed", "passed", "one pair", "six pairs to confirm"],
)
def test_few_pairs_decide_little(
    first: list[Pair], second: list[Pair], expected: dict[str, object]
) -> None:
    answer = judge(first, second)

    assert {name: getattr(answer, name) for name in expected} == expected


def test_a_case_that_passed_the_screen_has_a_smallest_effect() -> None:
    """Above screen_ratio by 1.28 standard errors of the mean of six pairs."""
    assert judge(pairs(1.0, 6), []).smallest_effect == pytest.approx(0.018, abs=0.004)


@pytest.mark.parametrize("bad", [math.nan, 0.0, math.inf])
@pytest.mark.parametrize("name", ["baseline_s", "candidate_hz", "wall_s"])
def test_a_pair_needs_positive_finite_numbers(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="not a positive, finite number"):
        replace(Pair(baseline_s=1.0, candidate_s=1.0), **{name: bad})


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        judge([], [])
    with pytest.raises(ValueError, match="not screened"):
        confirm({"a": pairs(1.0, 6)}, {"b": pairs(1.0, 20)}, DEFAULT)
    with pytest.raises(ValueError, match="at least 8"):
        Thresholds(confirm_pairs=7)
    assert least_pairs(60, 0.005) == 14
