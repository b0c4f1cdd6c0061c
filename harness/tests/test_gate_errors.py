"""The study of the gate's errors, small: its rates are those promised, and a fault would show.

Bounds are Clopper-Pearson at 99.99 %, so that a rate as promised practically never fails a test.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis import compare, rank
from harness.analysis.noise import NOISY, QUIET, TYPICAL, Noise
from harness.analysis.pairs import Change, Comparison, Thresholds
from harness.studies.gate_errors import Line, Setting, Tally, clopper_pearson, markdown, simulate

SURE = 0.9999


def tally(noise: Noise, cases: int, planted: float | None, *, gates: int = 300) -> Tally:
    setting = Setting(noise=noise, cases=cases, planted=planted)
    return simulate(setting, gates=gates, rng=np.random.default_rng(1))


def at_most(hits: int, trials: int, rate: float) -> bool:
    """Whether so many hits are possible at that rate."""
    return clopper_pearson(hits, trials, SURE)[0] <= rate


def at_least(hits: int, trials: int, rate: float) -> bool:
    return clopper_pearson(hits, trials, SURE)[1] >= rate


@pytest.mark.parametrize("cases", [12, 60])
@pytest.mark.parametrize("noise", [QUIET, TYPICAL, NOISY], ids=lambda n: n.name)
def test_a_clean_change_is_seldom_blocked(noise: Noise, cases: int) -> None:
    seen = tally(noise, cases, None, gates=300 if cases == 12 else 150)

    assert at_most(seen.blocked, seen.gates, 0.01)
    assert seen.passed > 0.9 * seen.gates


@pytest.mark.parametrize(
    ("noise", "planted", "share"),
    [(QUIET, 0.03, 0.90), (TYPICAL, 0.03, 0.90), (TYPICAL, 0.05, 0.95), (NOISY, 0.05, 0.95)],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_a_planted_slowdown_is_found_and_does_not_pass(
    noise: Noise, planted: float, share: float
) -> None:
    seen = tally(noise, 12, planted)

    assert at_least(seen.found, seen.gates, share)
    assert at_most(seen.missed, seen.gates, 0.01)


def test_bounds_err_as_seldom_as_they_say() -> None:
    seen = tally(TYPICAL, 2, None, gates=3000)

    for wrong in (seen.exact_low, seen.exact_high, seen.student_high):
        assert at_most(wrong, seen.gates, 0.01)
    assert seen.exact_low + seen.exact_high > 0  # bounds that never err would be too wide


def test_noise_beyond_every_class_is_undecided_not_passed() -> None:
    """With processes 30 % apart nothing can be known of 5 %."""
    seen = tally(replace(NOISY, process_cv=0.3), 4, 0.05, gates=1000)

    assert at_most(seen.missed, seen.gates, 0.01)
    assert at_most(seen.blocked, seen.gates, 0.01)


# --- faults that the figures above have to show ------------------------------------------


def test_without_holm_clean_changes_would_be_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unadjusted(p_values: Mapping[str, float]) -> Mapping[str, float]:
        return p_values

    monkeypatch.setattr(compare, "holm", unadjusted)

    seen = tally(NOISY, 60, None, gates=150)

    assert not at_most(seen.blocked, seen.gates, 0.01)


def test_a_test_on_the_wrong_side_would_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "signed_rank_p", lambda d: rank.signed_rank_p(-d))

    seen = tally(TYPICAL, 12, 0.05)

    assert not at_least(seen.found, seen.gates, 0.95)


# --- the table ---------------------------------------------------------------------------


def test_a_target_is_met_by_the_whole_interval() -> None:
    line = Line(noise="", cases=1, figure="", hits=0, trials=10_000, at_most=0.01)

    assert line.met
    assert not replace(line, hits=95).met
    assert not replace(line, hits=9520, at_most=None, at_least=0.95).met
    assert replace(line, hits=9600, at_most=None, at_least=0.95).met
    assert replace(line, at_most=None).met is None


def test_the_table_says_which_target_was_not_shown_to_be_met() -> None:
    line = Line(noise="quiet", cases=12, figure="a", hits=0, trials=10_000, at_most=0.01)

    table = markdown([line, replace(line, figure="b", hits=200)], ("a", "b", "c"))

    assert table.splitlines()[-1] == (
        "| quiet | 12 | 0.00 [0.00, 0.04] | **2.00 [1.73, 2.29], not shown: ≤ 1%** |  |"
    )


def test_clopper_pearson_is_the_textbooks() -> None:
    assert clopper_pearson(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert clopper_pearson(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert clopper_pearson(10, 10) == pytest.approx((0.6915, 1.0), abs=1e-4)


@pytest.mark.parametrize("spread", [0.008, 0.025])
def test_the_smallest_effect_is_found_nine_times_in_ten(spread: float) -> None:
    rng = np.random.default_rng(1)
    usual = Thresholds()

    def one(effect: float, seed: int) -> Comparison:
        """A case among eleven clean ones."""
        logs = rng.normal(0.0, spread * 2**0.5, size=(12, usual.confirm_pairs))
        logs[0] += np.log1p(effect)
        stats = compare.array_statistics(logs, None, usual)
        return compare.judge({f"{seed}/{i}": s for i, s in enumerate(stats)}, usual)[f"{seed}/0"]

    stated = [e for i in range(30) if (e := one(0.0, i).smallest_effect) is not None]
    found = [one(float(np.median(stated)), i).change is Change.SLOWER for i in range(200)]

    assert at_least(sum(found), len(found), 0.9)
    assert at_most(sum(found), len(found), 0.95)
