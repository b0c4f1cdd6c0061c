"""Effects of single axes, over pairs of cases with a planted one."""

from typing import Any

import pytest

from harness.analysis.effects import effects
from harness.analysis.summary import summarise
from harness.records import Measurement, Outcome
from harness.tests.fake_runs import case, ended, run, sweep, timed


def test_the_planted_effect_is_found() -> None:
    cases = sweep(seq_len=[512, 2048], gc=["off", "on"])

    def measure(c: Any) -> list[Measurement]:
        step = 0.1 * c.axes["seq_len"] / 512 * (1.24 if c.axes["gc"] == "on" else 1)
        return timed(c, step, cv=0.005)

    found = {e.axis: e for e in effects(summarise(run(cases, measure)))}

    gc, length = found["gc"], found["seq_len"]
    assert (gc.base, gc.value, gc.pairs) == ("off", "on", 2)
    assert gc.low is not None
    assert gc.high is not None
    assert gc.low < 1.24 < gc.high
    assert length.ratio == pytest.approx(1, abs=0.02)  # per token
    assert not gc.negligible


def test_each_provider_is_compared_with_the_first_that_ran() -> None:
    slower = {"first": 1.0, "ours": 1.0, "dense": 4.0, "peer": 2.0}
    cases = [
        case({"seq_len": n}, provider=provider)
        for provider in slower
        for n in ((512, 2048) if provider != "peer" else (2048,))
    ]

    def measure(c: Any) -> list[Measurement]:
        if c.provider == "first":
            return ended(c, Outcome.CRASH)
        return timed(c, slower[c.provider] * 1e-4 * c.axes["seq_len"], cv=0.005)

    found = effects(summarise(run(cases, measure)))

    by_provider = {(e.base, e.value): e for e in found if e.axis == "provider"}
    assert [*by_provider] == [("ours", "dense"), ("ours", "peer")]
    assert [e.pairs for e in by_provider.values()] == [2, 1]
    assert by_provider["ours", "dense"].ratio == pytest.approx(4, rel=0.02)


def test_only_pairs_of_ok_cases_that_differ_in_one_axis_count() -> None:
    together = [case({"a": 0, "b": 0}), case({"a": 1, "b": 1})]

    def measure(c: Any) -> list[Measurement]:
        return timed(c, 0.1) if c.axes["gc"] == "off" else ended(c, Outcome.CRASH)

    assert effects(summarise(run(together, lambda c: timed(c, 0.1)))) == ()
    assert effects(summarise(run(sweep(gc=["off", "on"]), measure))) == ()


@pytest.mark.parametrize(("processes", "negligible"), [(5, True), (1, False)])
def test_a_flag_without_effect_is_negligible_if_the_interval_shows_it(
    processes: int, negligible: bool
) -> None:
    cases = sweep(NSA_USE_FA2=[0, 1])

    (effect,) = effects(
        summarise(run(cases, lambda c: timed(c, 0.1, cv=0.001, processes=processes)))
    )

    assert (effect.low is not None, effect.negligible) == (negligible, negligible)
