"""Scaling fits find a planted exponent, limit or bend."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from harness.analysis import scaling
from harness.analysis.scaling import ScalingFit
from harness.analysis.summary import summarise
from harness.records import Decision, Estimate, Fact, Finding, Measurement, Outcome
from harness.report import tables
from harness.report.text import SCALING, filled, finding_sentence
from harness.tests.fake_runs import ended, run, sweep, timed

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def fitted(steps: Mapping[int, float], *, cv: float = 0.005, **late: Any) -> ScalingFit:
    """The fit of a sweep with these step times; cases with `inf` end as `late` says."""

    def measure(c: Any) -> list[Measurement]:
        step = steps[c.axes["seq_len"]]
        return timed(c, step, cv=cv, card="G") if math.isfinite(step) else ended(c, **late)

    cases = sweep(workload="forward", seq_len=list(steps))
    (fit,) = scaling.fit(summarise(run(cases, measure)))
    return fit


def power(
    exponent: float, lengths: Sequence[int] = LENGTHS, limit_s: float = math.inf
) -> dict[int, float]:
    """Step times from 10 ms at a length of 128; infinite above the limit."""
    steps = {n: 0.01 * (n / 128) ** exponent for n in lengths}
    return {n: step if step <= limit_s else math.inf for n, step in steps.items()}


def exponent_of(fit: ScalingFit) -> Estimate:
    assert fit.exponent is not None
    return fit.exponent


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("limit_s", [math.inf, 0.3])
def test_a_fit_finds_the_planted_exponent(exponent: float, limit_s: float) -> None:
    steps = power(exponent, limit_s=limit_s)

    fit = fitted(steps, outcome=Outcome.TIMEOUT, lower_bound_s=limit_s)

    found = exponent_of(fit)
    assert found.value == pytest.approx(exponent, abs=0.02)
    assert (found.low or math.inf) < exponent < (found.high or 0.0)
    assert (fit.group, filled(SCALING["note"], fit.facts)) == ("forward/nsa", "")


@pytest.mark.parametrize(
    ("outcome", "bound_s", "fits"),
    [(Outcome.TIMEOUT, 0.05, True), (Outcome.TIMEOUT, 0.64, False), (Outcome.HANG, 120.0, True)],
)
def test_a_timeout_above_the_curve_of_the_others_leaves_no_fit(
    outcome: Outcome, bound_s: float, fits: bool
) -> None:
    """Three points are linear; the fourth would take 0.08 s. A hang is not a slow point."""
    steps = {**power(1.0, LENGTHS[:3]), 1024: math.inf}

    fit = fitted(steps, outcome=outcome, lower_bound_s=bound_s)

    assert (fit.exponent and fit.exponent.value) == (pytest.approx(1, abs=0.03) if fits else None)
    said = "" if fits else "steeper than a power law: 1,024 timed out"
    assert filled(SCALING["no_fit"], fit.facts) == said
    assert (fit.censored, fit.facts.get("gpus")) == (outcome is Outcome.TIMEOUT, None)  # no GPU


@pytest.mark.parametrize(("third", "reason"), [(0.042, ""), (0.08, "not known from 3 points")])
def test_an_exponent_between_linear_and_cubic_is_not_known(third: float, reason: str) -> None:
    fit = fitted({128: 0.01, 256: 0.02, 512: third})

    assert (filled(SCALING["no_fit"], fit.facts), fit.exponent is None) == (reason, bool(reason))


def test_a_fit_has_the_processes_of_its_poorest_point() -> None:
    def measure(c: Any) -> list[Measurement]:
        return timed(c, 1e-4 * c.axes["seq_len"], processes=1 if c.axes["seq_len"] == 256 else 2)

    (fit,) = scaling.fit(summarise(run(sweep(seq_len=[128, 256, 512]), measure)))

    assert exponent_of(fit).n == 1


@pytest.mark.parametrize("seen", [{128, 256, 512}, {256}, set()])
def test_a_flat_curve_has_a_fixed_cost_only_if_every_case_used_the_axis(seen: set[int]) -> None:
    def measure(c: Any) -> list[Measurement]:
        used, card = c.axes["seq_len"] in seen, str(c.axes["seq_len"])
        return timed(c, 0.01, effective=c.axes if used else {}, card=card)

    (fit,) = scaling.fit(summarise(run(sweep(seq_len=[128, 256, 512]), measure)))

    said = "a fixed cost dominates" if len(seen) == 3 else "check that the workload uses it"
    (row,) = tables.scaling([fit], {p.case_id: p.case_id for p in fit.points}).rows
    finding = Finding(decision=Decision.INCONCLUSIVE, fact=Fact.NO_FIT, facts=fit.facts)
    assert f"{said}; its cases were measured on 3 GPUs" in finding_sentence(finding) == row[-1]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (  # kernel launches cost the same at every length, until the work exceeds them
            {128: 0.037, 256: 0.037, 512: 0.039, 1024: 0.053, 2048: 0.099},
            [(128, 512, 0.0), (512, 1024, 0.44), (1024, 2048, 0.90)],
        ),
        (power(1.1), [(128, 4096, 1.1)]),
        (
            {128: 0.01, 256: 0.01, 512: math.inf, 1024: 0.04, 2048: 0.16},
            [(128, 256, 0.0), (256, 1024, 1.0), (1024, 2048, 2.0)],
        ),
    ],
)
def test_a_curve_that_bends_has_an_exponent_per_segment(
    steps: dict[int, float], expected: list[tuple[int, int, float]]
) -> None:
    fit = fitted(steps, outcome=Outcome.CRASH)

    assert [(s.begin.x, s.end.x) for s in fit.segments] == [ends[:2] for ends in expected]
    for segment, (*_, exponent) in zip(fit.segments, expected, strict=True):
        assert segment.exponent.value == pytest.approx(exponent, abs=0.06)
        assert segment.flat == (exponent == 0)


def test_octaves_that_few_processes_do_not_tell_apart_are_one_segment() -> None:
    steps = {128: 0.010, 256: 0.0205, 512: 0.0450}

    assert [len(fitted(steps, cv=cv).segments) for cv in (0.001, 0.2)] == [2, 1]


def test_a_curve_steepens_if_it_never_flattens_by_more_than_noise() -> None:
    assert not fitted({128: 0.079, 256: 0.053, 512: 0.083, 1024: 0.069, 2048: 0.104}).steepens
    assert not fitted({128: 0.079, 256: 0.04, 512: 0.1, 1024: 0.05, 2048: 0.13}).steepens
    assert fitted({128: 1.0, 256: 1.87, 512: 3.48, 1024: 11.3, 2048: 36.8, 4096: 119.0}).steepens


def test_there_is_one_fit_for_each_value_of_the_other_axes() -> None:
    cases = sweep(seq_len=[128, 256, 512], gc=[False, True])

    fits = scaling.fit(summarise(run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"])))))

    groups = [("seq_len", "train/nsa/gc=false"), ("seq_len", "train/nsa/gc=true")]
    assert [(f.axis, f.group) for f in fits] == groups
