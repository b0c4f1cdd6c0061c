"""Scaling: plant an exponent, a limit or a bend; ask for it back."""

import math
from typing import Any

import numpy as np
import pytest

from harness.analysis import scaling
from harness.analysis.scaling import ScalingFit
from harness.analysis.summary import summarise
from harness.records import Measurement, Outcome
from harness.tests.fake_runs import ended, run, sweep, timed


def fitted(
    exponent: float, *, limit_s: float = math.inf, cv: float = 0.005, **changes: Any
) -> ScalingFit:
    """One group of six lengths with a planted exponent; past the limit, timeouts."""
    cases = sweep(workload="forward", seq_len=[128, 256, 512, 1024, 2048, 4096])

    def measure(c: Any) -> list[Measurement]:
        step = 0.01 * (c.axes["seq_len"] / 128) ** exponent
        if step > limit_s:
            return ended(c, Outcome.TIMEOUT, lower_bound_s=limit_s)
        return timed(c, step, cv=cv, **changes)

    (fit,) = scaling.fit(summarise(run(cases, measure)))
    return fit


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("limit_s", [math.inf, 0.3])
def test_the_planted_exponent_is_found(exponent: float, limit_s: float) -> None:
    fit = fitted(exponent, limit_s=limit_s)

    assert fit.exponent is not None
    assert fit.exponent.low is not None
    assert fit.exponent.high is not None
    assert fit.exponent.value == pytest.approx(exponent, abs=0.02)
    assert fit.exponent.low < exponent < fit.exponent.high
    assert fit.at(512) == pytest.approx(0.01 * 4**exponent, rel=0.02)
    assert fit.group == "forward/nsa"


def test_a_timeout_steepens_the_fit_that_leaves_it_out() -> None:
    """Three points say linear; the fourth took at least eight times what they foretell."""
    cases = sweep(seq_len=[128, 256, 512, 1024])

    def measure(c: Any) -> list[Measurement]:
        if c.axes["seq_len"] == 1024:
            return ended(c, Outcome.TIMEOUT, lower_bound_s=0.64)
        return timed(c, 0.01 * c.axes["seq_len"] / 128, cv=0.05)

    summaries = summarise(run(cases, measure))
    (with_it,) = scaling.fit(summaries)
    (without,) = scaling.fit(summaries[:3])

    assert with_it.exponent is not None
    assert without.exponent is not None
    assert with_it.exponent.value > without.exponent.value + 0.3
    assert with_it.censored == 1


def test_a_bound_far_under_the_line_changes_nothing() -> None:
    x, y = np.log([128.0, 256, 512, 1024]), np.log([0.01, 0.021, 0.039, 0.082])

    plain = scaling._least_squares(x, y)
    censored = scaling._tobit(x, y, np.log([2048.0]), np.log([1e-6]))

    assert censored == pytest.approx(plain, abs=2e-3)


def test_the_censored_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    x = np.log([128.0, 256, 512, 1024, 2048, 4096])
    limit = 1.7 * math.log(1500)
    covered = 0
    draws = 150
    for _ in range(draws):
        y = 1.7 * x + rng.normal(0, 0.1, x.size)
        seen = y < limit
        hidden = x[~seen]
        _, low, high, _ = scaling._tobit(x[seen], y[seen], hidden, np.full(hidden.shape, limit))
        covered += low <= 1.7 <= high

    assert 0.88 < covered / draws < 0.99


def test_two_measured_points_are_no_fit() -> None:
    fit = fitted(2.0, limit_s=0.05)

    assert fit.exponent is None
    assert fit.reason == "2 measured values of seq_len; a fit needs 3"
    with pytest.raises(ValueError, match="a fit needs 3"):
        fit.at(512)


def test_a_hang_is_not_a_slow_point() -> None:
    cases = sweep(seq_len=[128, 256, 512, 1024])

    def measure(c: Any) -> list[Measurement]:
        if c.axes["seq_len"] == 1024:
            return ended(c, Outcome.HANG, lower_bound_s=120.0)
        return timed(c, 0.01 * c.axes["seq_len"] / 128, cv=0.002)

    (fit,) = scaling.fit(summarise(run(cases, measure)))

    assert fit.censored == 0
    assert fit.exponent is not None
    assert fit.exponent.value == pytest.approx(1, abs=0.03)


def test_a_curve_that_does_not_move_is_suspicious_unless_the_axis_was_seen_to_arrive() -> None:
    assert "which did reach the workload: a fixed cost" in fitted(0.0).note
    assert "did the axis reach the workload?" in fitted(0.0, effective={}).note
    assert fitted(1.0).note == ""


def test_a_curve_that_steepens_is_no_power_law() -> None:
    """As on a GPU: launching kernels costs the same at every length, until the work outgrows it."""
    steps = {128: 0.037, 256: 0.037, 512: 0.039, 1024: 0.053, 2048: 0.099}
    cases = sweep(workload="forward", seq_len=list(steps))

    (fit,) = scaling.fit(summarise(run(cases, lambda c: timed(c, steps[int(c.axes["seq_len"])]))))

    assert "steepens, with exponent 0." in fit.note
    assert "from seq_len 1024 to 2048" in fit.note


def test_groups_differ_in_all_other_axes() -> None:
    cases = sweep(seq_len=[128, 256, 512], gc=["off", "on"], batch=[1, 2])

    fits = scaling.fit(summarise(run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"])))))

    assert [f.group for f in fits] == [
        f"train/nsa/gc={gc}/batch={batch}" for gc in ("off", "on") for batch in (1, 2)
    ]
    assert {f.axis for f in fits} == {"seq_len"}
