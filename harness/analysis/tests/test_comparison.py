"""Comparisons of a baseline and a candidate find a planted change."""

import math
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from scipy.stats import PermutationMethod, mannwhitneyu

from harness.analysis import comparison
from harness.analysis.comparison import (
    EARLY,
    decided,
    holm,
    next_look,
    pair_sd,
    pairs_needed,
    pairs_to_take,
    screen,
    screened,
    statistics,
    swapped,
    time_logs,
)
from harness.analysis.statistics import Flags, exact_bounds, hodges_lehmann, order_free_p
from harness.records import Change, Comparison, Pair, Ratio, Thresholds, least_pairs
from harness.report.series.gate_text import because

DEFAULT = Thresholds()


def pairs(ratio: float, n: int, *, spread: float = 0.008, seed: int = 0) -> list[Pair]:
    """Pairs of processes whose medians scatter by 0.8 %, as on a typical node."""
    rng = np.random.default_rng(seed)
    a, b = np.exp(rng.normal(0.0, spread, size=(2, n)))
    return [
        Pair(baseline_s=0.01 * x, candidate_s=0.01 * ratio * y, wall_s=20.0, swapped=i % 2 == 1)
        for i, (x, y) in enumerate(zip(a, b, strict=True))
    ]


def judge(found: list[Pair], thresholds: Thresholds = DEFAULT, share: float = 1.0) -> Comparison:
    """One case by one look."""
    looked = {"a": statistics(found, thresholds, share)}
    return comparison.judge(looked, {"a": thresholds})["a"]


# --- rank statistics ---------------------------------------------------------------------


def order(n: int) -> Flags:
    """Every second pair ran in the other order."""
    return np.array([i % 2 == 1 for i in range(n)])


EVERY = PermutationMethod(n_resamples=10**6)  # more than the 126 choices: all of them


@pytest.mark.parametrize(
    ("n", "ties", "method"),
    [(3, False, "exact"), (5, False, "exact"), (20, False, "exact"), (9, True, EVERY)],
)
def test_the_p_values_are_those_of_the_rank_sum_test_of_the_two_orders(
    n: int, ties: bool, method: Any
) -> None:
    d, odd = np.random.default_rng(n).normal(0.3, 1.0, size=(20, n)), order(n)
    d = np.round(d) if ties else d
    assert (d == 0).any() == ties

    ours = order_free_p(d, odd)

    both = ((x[~odd], -x[odd]) for x in d)
    theirs = [mannwhitneyu(*x, alternative="greater", method=method).pvalue for x in both]
    assert ours == pytest.approx(theirs)


def test_equal_times_and_pairs_of_one_order_have_p_value_1() -> None:
    assert order_free_p(np.zeros(20), order(20)) == 1.0
    assert order_free_p(np.ones(20), order(20) | True) == 1.0


def test_the_exact_bounds_enclose_the_centres_that_the_test_does_not_reject() -> None:
    d, odd = np.random.default_rng(2).normal(0.0, 1.0, size=20), order(20)

    bounds = exact_bounds(d, odd, 0.01)

    assert bounds is not None
    low, high = map(float, bounds)
    assert low < hodges_lehmann(d, odd) < high
    assert order_free_p(d - (low - 1e-9), odd) <= 0.01 < order_free_p(d - (low + 1e-9), odd)
    assert order_free_p((high + 1e-9) - d, odd) <= 0.01 < order_free_p((high - 1e-9) - d, odd)


def test_too_few_pairs_or_those_of_one_order_have_no_exact_bounds() -> None:
    orders = (order(8), order(9), order(20) | True)
    found = [exact_bounds(np.arange(float(len(one))), one, 0.01) for one in orders]

    assert [bounds is None for bounds in found] == [True, False, True]


@pytest.mark.parametrize("effect", [0.0, 0.03, -0.2])
def test_what_the_order_does_changes_no_answer(effect: float) -> None:
    """The process that runs first is slower by the effect; there are six pairs, then twenty."""

    def slowed(p: Pair) -> Pair:
        return replace(p, candidate_s=p.candidate_s * math.exp(effect * (1 if p.swapped else -1)))

    def sd_of(group: list[Pair]) -> float:
        return float(pair_sd(time_logs(group), swapped(group)))

    few, many = (pairs(1.02, n, seed=n) for n in (6, 20))
    late_few, late_many = ([slowed(p) for p in group] for group in (few, many))

    screens = [screened("a", group, DEFAULT) for group in (few, late_few)]
    for then, now in ((judge(many), judge(late_many)), screens):
        assert now.change is then.change
        ends, before = ((r.low, r.value, r.high) for r in (now.ratio, then.ratio))
        assert ends == pytest.approx(before)
    assert sd_of(late_many) == pytest.approx(sd_of(many))


@pytest.mark.parametrize(("sd", "cases", "taken"), [(0.01, 1, 20), (0.05, 1, 28), (0.2, 60, 64)])
def test_pairs_that_scatter_far_ask_for_more(sd: float, cases: int, taken: int) -> None:
    assert pairs_to_take(sd, cases, Thresholds(tolerance=0.05)) == pytest.approx(taken, abs=4)
    assert pairs_to_take(sd, cases, Thresholds(most_pairs=20)) == 20


# --- the decision ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("planted", "spread", "expected"),
    [
        (1.00, 0.008, Change.SAME),
        (1.03, 0.008, Change.SLOWER),
        (1.05, 0.025, Change.SLOWER),
        (0.90, 0.008, Change.FASTER),
        (1.02, 0.025, Change.UNDECIDED),
        (1.00, 0.100, Change.UNDECIDED),
    ],
)
def test_the_planted_change_is_found(planted: float, spread: float, expected: Change) -> None:
    first = pairs(planted, DEFAULT.screen_pairs, spread=spread, seed=7)
    second = pairs(planted, 20, spread=spread, seed=1007)

    answer = screened("a", first, DEFAULT) if screen(first, DEFAULT) else judge(second)

    assert answer.change is expected
    assert (answer.ratio.low or math.inf) < planted < (answer.ratio.high or 0)


def test_a_certain_slowdown_of_no_practical_size_is_the_same() -> None:
    answer = judge(pairs(1.013, 20, spread=0.0005))

    assert (answer.ratio.p or 1.0) < DEFAULT.alpha
    assert answer.change is Change.SAME


@pytest.mark.parametrize(
    ("ratios", "passes"),
    [
        ((0.999, 1.0, 1.001, 1.002, 0.998, 1.0), True),
        ((0.99, 1.00, 1.01, 1.06, 0.94, 1.00), False),  # noise that could hide a slowdown
        ((0.999, 1.0, 1.001, 1.002, 0.998), False),
    ],
)
def test_a_screen_is_passed_by_enough_calm_pairs(ratios: tuple[float, ...], passes: bool) -> None:
    group = [Pair(baseline_s=1.0, candidate_s=r, swapped=i % 2 == 1) for i, r in enumerate(ratios)]
    assert screen(group, DEFAULT) is passes


@pytest.mark.parametrize(
    ("cases", "sd", "build_cv", "looks"),
    [
        (1, 0.01, 0.001, [12, 18, 26]),
        (12, 0.01, 0.001, [16, 20, 26]),
        (60, 0.01, 0.001, [18, 22, 26]),
        (1, 0.1, 0.001, [12, 18, 26, 70]),
        (1, 0.01, 0.02, [26]),  # more pairs do not average the luck of two builds
    ],
)
def test_looks_have_more_pairs_each_and_the_last_as_many_as_the_scatter_asks_for(
    cases: int, sd: float, build_cv: float, looks: list[int]
) -> None:
    found, thresholds = [0], Thresholds(build_cv=build_cv)
    while (more := next_look(found[-1], sd, cases, thresholds)) > found[-1]:
        found.append(more)

    assert found[1:] == looks


def test_a_large_slowdown_is_decided_by_the_first_look() -> None:
    answers = [judge(pairs(1.15, n), share=EARLY) for n in (12, 11)]

    assert [a.change for a in answers] == [Change.SLOWER, Change.UNDECIDED]
    assert answers[0].ratio.p == pytest.approx(1 / EARLY / math.comb(12, 6))


def test_a_look_is_as_strict_as_its_share_of_alpha() -> None:
    found, one_build = pairs(1.018, 20, spread=0.01, seed=3), Thresholds(build_cv=0.0)
    whole, part = judge(found, one_build), judge(found, one_build, share=0.1)
    stricter = judge(found, replace(one_build, alpha=0.1 * DEFAULT.alpha))

    assert whole.ratio.p is not None
    assert part.ratio.p == pytest.approx(10 * whole.ratio.p)
    ends = [(r.low, r.high) for r in (part.ratio, stricter.ratio, whole.ratio)]
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize(
    ("ratio", "change", "done"),
    [
        (1.0, Change.SAME, True),
        (1.02, Change.SAME, False),  # below the tolerance; more pairs may show it slower
        (1.02, Change.SLOWER, True),
        (1.016, Change.SLOWER, False),  # more pairs may show it below 1.5 %
        (0.98, Change.FASTER, True),
        (1.0, Change.UNDECIDED, False),
    ],
)
def test_an_early_look_decides_what_is_clear(ratio: float, change: Change, done: bool) -> None:
    answer = replace(judge(pairs(1.0, 20)), ratio=Ratio(value=ratio, n=20), change=change)

    assert decided(answer, DEFAULT) is done


def test_the_more_cases_are_confirmed_the_smaller_a_p_value_must_be() -> None:
    one = pairs(1.018, 20, spread=0.014, seed=3)
    clean = {f"c{i}": pairs(1.0, 20, seed=100 + i) for i in range(59)}

    alone = judge(one)
    both = {case_id: statistics(p, DEFAULT) for case_id, p in {"a": one, **clean}.items()}
    among = comparison.judge(both, dict.fromkeys(both, DEFAULT))["a"]
    beside = comparison.judge({"a": both["a"]}, {"a": DEFAULT}, beside=59)["a"]

    assert alone.ratio.p is not None
    assert among.ratio.p == beside.ratio.p == pytest.approx(60 * alone.ratio.p)
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
    clocks: dict[str, Any] = {"baseline_hz": 1.98e9, "candidate_hz": candidate_hz}

    answer = judge([replace(p, **clocks) for p in pairs(1.05, 20)])
    unread = judge(pairs(1.05, 20))

    assert (answer.change, answer.clock_explained) == (change, explained)
    assert unread.change is Change.SLOWER
    assert "no clock was read" in because(unread.facts)
    assert answer.pairs_needed is None


def test_the_pairs_that_an_undecided_case_needs_do_decide_it() -> None:
    answer = judge(pairs(1.02, 20, spread=0.025, seed=5))

    assert answer.change is Change.UNDECIDED
    assert answer.pairs_needed is not None
    assert answer.minutes_needed == pytest.approx(answer.pairs_needed * 20.0 / 60)
    assert answer.smallest_effect is not None
    assert 0.02 < answer.smallest_effect < 0.05
    more = (pairs(answer.ratio.value, answer.pairs_needed, spread=0.025, seed=n) for n in range(10))
    assert sum(judge(p).change is not Change.UNDECIDED for p in more) >= 7


def test_a_gap_beyond_the_tolerance_needs_the_pairs_that_show_it_slower() -> None:
    """Nine times in ten: (2.58 + 1.28) standard errors above 0, or 1.28 above practical."""
    assert pairs_needed(math.log(1.10), 0.10, 1, DEFAULT) == pytest.approx(16, abs=2)
    assert (pairs_needed(math.log(1.10), 0.10, 60, DEFAULT) or 0) > 20


@pytest.mark.parametrize("sd", [0.0, 0.005, 0.02])
def test_the_luck_of_builds_enters_bounds_and_p_values(sd: float) -> None:
    """One case of 400 clean changes is called slower as seldom as without luck; bounds hold."""
    thresholds, rng = Thresholds(build_cv=sd), np.random.default_rng(4)
    ratios = np.exp(rng.normal(0.0, sd * math.sqrt(2), 400))
    made = [pairs(r, 20, spread=0.003, seed=n) for n, r in enumerate(ratios)]

    found = [judge(p, thresholds) for p in made]

    assert sum(f.change is Change.SLOWER for f in found) <= 5
    for answers in (found, [screened("a", p[:6], thresholds) for p in made]):
        assert sum((f.ratio.low or 0) > 1 for f in answers) <= 7
        assert sum((f.ratio.high or 2) < 1 for f in answers) <= 7


def test_where_builds_differ_as_far_as_the_tolerance_more_pairs_are_not_advised() -> None:
    answer = judge(pairs(1.0, 20), Thresholds(build_cv=0.02))

    assert (answer.change, answer.pairs_needed) == (Change.UNDECIDED, None)
    assert "builds differ by 2 %" in because(answer.facts)
    assert pairs_to_take(0.05, 1, Thresholds(build_cv=0.02)) == 20


def test_a_passed_screen_would_have_found_an_effect_above_its_ratio() -> None:
    """By 1.28 standard errors of the mean of six pairs."""
    answer = screened("a", pairs(1.0, 6), DEFAULT)

    assert (answer.change, answer.ratio.p) == (Change.SAME, None)
    assert answer.smallest_effect == pytest.approx(0.018, abs=4e-3)


@pytest.mark.parametrize(("ratio", "count"), [(1.0, 1), (1.05, 6), (0.95, 6)])
def test_few_pairs_decide_nothing(ratio: float, count: int) -> None:
    answer = judge(pairs(ratio, count))

    assert answer.change is Change.UNDECIDED
    assert (answer.ratio.low, answer.ratio.high, answer.smallest_effect) == (None, None, None)


@pytest.mark.parametrize("bad", [math.nan, 0.0, math.inf])
@pytest.mark.parametrize("name", ["baseline_s", "candidate_hz", "wall_s"])
def test_a_pair_needs_positive_finite_numbers(name: str, bad: float) -> None:
    with pytest.raises(ValueError, match="not a positive, finite number"):
        Pair(**cast(Any, {"baseline_s": 1.0, "candidate_s": 1.0, name: bad}))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        Thresholds(confirm_pairs=9)
    assert least_pairs(60, 0.005) == 16
