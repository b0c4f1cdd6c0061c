"""Scaling fits find a planted exponent, limit or bend."""

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
    """One group of six lengths with a planted exponent; cases over the limit time out."""
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
def test_a_fit_finds_the_planted_exponent(exponent: float, limit_s: float) -> None:
    fit = fitted(exponent, limit_s=limit_s)

    assert fit.exponent is not None
    assert fit.exponent.low is not None
    assert fit.exponent.high is not None
    assert fit.exponent.value == pytest.approx(exponent, abs=0.02)
    assert fit.exponent.low < exponent < fit.exponent.high
    assert fit.at(512) == pytest.approx(0.01 * 4**exponent, rel=0.02)
    assert fit.group == "forward/nsa"


def test_a_timeout_makes_the_fit_steeper() -> None:
    """Three points are linear; the fourth took at least eight times what they predict."""
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


def test_a_bound_far_below_the_line_changes_nothing() -> None:
    x, y = np.log([128.0, 256, 512, 1024]), np.log([0.01, 0.021, 0.039, 0.082])

    plain = scaling._least_squares(x, y)
    censored = scaling._tobit(x, y, np.log([2048.0]), np.log([1e-6]))

    assert censored == pytest.approx(plain, abs=2e-3)


def test_95_of_100_censored_intervals_contain_the_true_exponent() -> None:
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


def test_two_measured_points_give_no_fit() -> None:
    fit = fitted(2.0, limit_s=0.05)

    assert fit.exponent is None
    with pytest.raises(ValueError, match="2 measured values of seq_len"):
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


def test_a_fit_has_the_processes_of_its_poorest_point() -> None:
    cases = sweep(seq_len=[128, 256, 512])

    def measure(c: Any) -> list[Measurement]:
        alone = c.axes["seq_len"] == 256
        return timed(c, 1e-4 * c.axes["seq_len"], processes=1 if alone else 2)

    (fit,) = scaling.fit(summarise(run(cases, measure)))

    assert fit.exponent is not None
    assert fit.exponent.processes == 1


def test_a_flat_curve_has_a_fixed_cost_only_if_every_case_used_the_axis() -> None:
    def note(*seen: int) -> str:
        """The note of a flat curve if the workload used these lengths."""
        cases = sweep(seq_len=[128, 256, 512])

        def measure(c: Any) -> list[Measurement]:
            return timed(c, 0.01, effective=c.axes if c.axes["seq_len"] in seen else {})

        (fit,) = scaling.fit(summarise(run(cases, measure)))
        return fit.note

    assert "fixed cost" in note(128, 256, 512)
    assert "check that the workload uses it" in note(256)
    assert note() == note(256)
    assert fitted(1.0).note == ""


def test_a_curve_that_steepens_is_not_a_power_law() -> None:
    """As on a GPU: kernel launches cost the same at every length, until the work exceeds them."""
    steps = {128: 0.037, 256: 0.037, 512: 0.039, 1024: 0.053, 2048: 0.099}
    cases = sweep(workload="forward", seq_len=list(steps))

    (fit,) = scaling.fit(summarise(run(cases, lambda c: timed(c, steps[int(c.axes["seq_len"])]))))

    assert "seq_len 1024 to 2048" in fit.note


def test_there_is_one_fit_for_each_value_of_the_other_axes() -> None:
    cases = sweep(seq_len=[128, 256, 512], gc=[False, True], batch=[1, 2])

    fits = scaling.fit(summarise(run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"])))))

    assert [f.group for f in fits] == [
        f"train/nsa/gc={gc}/batch={batch}" for gc in ("false", "true") for batch in (1, 2)
    ]
    assert {f.axis for f in fits} == {"seq_len"}
