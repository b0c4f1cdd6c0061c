"""The study of the gate's errors, small: its rates hold, and a fault in the gate changes them.

Bounds are Clopper-Pearson at 99.99 %, so that a rate that holds practically never fails a test.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from harness.analysis import comparison
from reports.studies.gate_errors import (
    GateRate,
    Setting,
    Tally,
    clopper_pearson,
    markdown,
    simulate,
)
from reports.studies.noise import NOISY, TYPICAL, Noise

SURE = 0.9999
LINE = GateRate(noise="quiet", cases=12, figure="a", hits=0, trials=10_000, at_most=0.01)


def tally(noise: Noise, cases: int, planted: float | None, *, gates: int) -> Tally:
    setting = Setting(noise=noise, cases=cases, planted=planted)
    return simulate(setting, gates=gates, rng=np.random.default_rng(1))


def at_most(hits: int, trials: int, rate: float) -> bool:
    """Whether this many hits are possible at that rate."""
    return clopper_pearson(hits, trials, SURE)[0] <= rate


def at_least(hits: int, trials: int, rate: float) -> bool:
    return clopper_pearson(hits, trials, SURE)[1] >= rate


def test_a_clean_change_is_seldom_blocked_and_bounds_hold_as_often_as_they_say() -> None:
    seen = tally(TYPICAL, 2, None, gates=1500)

    for wrong in (seen.blocked, seen.exact_low, seen.exact_high, seen.student_high):
        assert at_most(wrong, seen.gates, 0.01)
    assert seen.passed > 0.9 * seen.gates
    assert seen.exact_low + seen.exact_high > 0  # bounds that never err would be too wide


def test_a_planted_slowdown_is_found_and_does_not_pass() -> None:
    seen = tally(TYPICAL, 12, 0.05, gates=150)

    assert at_least(seen.found, seen.gates, 0.95)
    assert at_most(seen.missed, seen.gates, 0.01)


def test_a_large_slowdown_takes_half_as_many_pairs_as_a_whole_confirmation() -> None:
    seen = tally(TYPICAL, 1, 0.15, gates=50)

    assert seen.found == seen.gates
    assert seen.pairs < 13 * seen.gates


def test_without_holm_clean_changes_are_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unadjusted(p_values: Mapping[str, float], beside: int) -> Mapping[str, float]:
        return p_values

    monkeypatch.setattr(comparison, "holm", unadjusted)

    seen = tally(NOISY, 60, None, gates=150)

    assert not at_most(seen.blocked, seen.gates, 0.01)


def test_gates_of_one_commit_call_as_many_cases_faster_as_slower(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the correction, so that there are enough to compare; and by the last look, because
    an early one lets a faster case pass and a slower one go on."""
    monkeypatch.setattr(comparison, "holm", lambda p_values, beside: p_values)
    monkeypatch.setattr(comparison, "decided", lambda answer, thresholds: False)
    setting = Setting(noise=NOISY, cases=60, practical=0.0)

    seen = simulate(setting, gates=200, rng=np.random.default_rng(2))

    called = seen.faster + seen.slower
    assert called > 20
    low, high = clopper_pearson(seen.faster, called, SURE)
    assert low <= 0.5 <= high
    assert seen.both < seen.either


def test_gates_that_call_the_same_case_overlap() -> None:
    seen = tally(TYPICAL, 2, 0.05, gates=20)

    assert (seen.slower, seen.faster, seen.both, seen.either) == (20, 0, 10, 10)


def test_a_target_is_met_by_the_whole_interval() -> None:
    assert LINE.met
    assert not replace(LINE, hits=95).met
    assert not replace(LINE, hits=9520, at_most=None, at_least=0.95).met
    assert replace(LINE, hits=9600, at_most=None, at_least=0.95).met
    assert replace(LINE, at_most=None).met is None


def test_the_table_marks_a_target_that_is_not_shown_to_be_met() -> None:
    table = markdown([LINE, replace(LINE, figure="b", hits=200)], ("a", "b", "c"))

    assert table.splitlines()[-1] == (
        "| quiet | 12 | 0.00 [0.00, 0.04] | **2.00 [1.73, 2.29], not shown: ≤ 1 %** |  |"
    )
