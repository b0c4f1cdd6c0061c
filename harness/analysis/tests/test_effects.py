"""Effects of single axes, over pairs of cases with a planted one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.effects import MAX_LEVELS, effects
from harness.analysis.summary import summarise
from harness.records import Case, Measurement, Outcome
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
    apart = [case({"a": 0, "b": 0}), case({"a": 1, "b": 1}), case({"a": 2, "b": 0})]

    def measure(c: Any) -> list[Measurement]:
        return timed(c, 0.1) if c.axes["gc"] == "off" else ended(c, Outcome.CRASH)

    assert [
        e for e in effects(summarise(run(apart, lambda c: timed(c, 0.1)))) if e.axis == "b"
    ] == []
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


def planted(effect: Callable[[Mapping[str, Any]], float], cases: Sequence[Case]) -> Any:
    """Effects of gc, which multiplies the step of each case by the planted amount."""

    def measure(c: Case) -> list[Measurement]:
        return timed(c, 0.1 * (effect(c.axes) if c.axes["gc"] == "on" else 1), cv=0.002)

    return [e for e in effects(summarise(run(cases, measure))) if e.axis == "gc"]


def test_an_effect_is_that_in_each_level_of_the_axis_that_changes_it() -> None:
    cases = sweep(dataset=["text", "random"], seq_len=[512, 2048], gc=["off", "on"])

    found = planted(lambda axes: 1.76 if axes["seq_len"] == 512 else 1.29, cases)

    assert [(e.within, e.pairs) for e in found] == [({"seq_len": 512}, 2), ({"seq_len": 2048}, 2)]
    assert [e.ratio for e in found] == [
        pytest.approx(1.76, rel=0.01),
        pytest.approx(1.29, rel=0.01),
    ]
    assert not any(e.disagree for e in found)


def test_an_effect_that_two_axes_change_is_split_by_both() -> None:
    cases = sweep(dataset=["text", "random"], seq_len=[512, 2048], gc=["off", "on"])

    def both(axes: Mapping[str, Any]) -> float:
        return (
            1.2 * (1.5 if axes["seq_len"] == 512 else 1) * (2 if axes["dataset"] == "text" else 1)
        )

    assert sorted(e.ratio for e in planted(both, cases)) == pytest.approx(
        [1.2, 1.8, 2.4, 3.6], rel=0.01
    )


def test_providers_are_not_pooled_where_another_axis_separates_as_well() -> None:
    grown = {("nsa", 512): 1.3, ("nsa", 2048): 1.32, ("dense", 512): 1.3, ("dense", 2048): 2.6}
    cases = [
        case({"seq_len": length, "gc": gc}, provider=provider)
        for provider, length in grown
        for gc in ("off", "on")
    ]

    def measure(c: Case) -> list[Measurement]:
        factor = grown[c.provider, c.axes["seq_len"]] if c.axes["gc"] == "on" else 1
        return timed(c, 0.1 * factor, cv=0.002)

    found = [e for e in effects(summarise(run(cases, measure))) if e.axis == "gc"]

    assert found[0].within == {"provider": "nsa"}


def test_pairs_that_too_many_levels_separate_disagree() -> None:
    lengths = [2**i for i in range(MAX_LEVELS + 1)]

    (found,) = planted(
        lambda axes: 1 + axes["seq_len"] / 10, sweep(seq_len=lengths, gc=["off", "on"])
    )

    assert found.disagree
    assert found.within == {}
    assert (found.smallest, found.largest) == pytest.approx((1.1, 7.4), rel=0.01)


def test_axes_that_only_change_together_are_one() -> None:
    cases = [
        case({"seq_len": n, "batch": b, "gc": gc})
        for n, b in ((2048, 16), (8192, 4))
        for gc in ("off", "on")
    ]

    found = effects(summarise(run(cases, lambda c: timed(c, c.axes["batch"] * 0.01, cv=0.002))))

    together = next(e for e in found if e.axis == "seq_len/batch")
    assert (together.base, together.value, together.pairs) == ("2048/16", "8192/4", 2)


def test_workloads_that_do_the_same_are_compared_by_the_axis_that_each_fixes() -> None:
    def one(workload: str, graph: str, batch: int, **more: Any) -> Case:
        made = case({"batch": batch, "graph": graph}, workload=workload)
        return replace(made, factory="m:train", swept=("batch",), **more)

    cases = [one("graphs", "on", 1), one("graphs", "on", 8), one("plain", "off", 8)]
    swept = [one("graphs", "on", 1), one("graphs", "on", 2), one("plain", "on", 2)]
    other = [one("graphs", "on", 8), one("plain", "off", 8, env={"NSA_USE_TRITON": "1"})]

    def measure(c: Case) -> list[Measurement]:
        return timed(c, 0.3 if c.axes["graph"] == "off" else 0.1, cv=0.002)

    (found,) = (e for e in effects(summarise(run(cases, measure))) if e.other)

    assert (found.workload, found.other, found.axis) == ("plain", "graphs", "graph")
    assert (found.ratio, found.pairs) == (pytest.approx(3, rel=0.01), 1)
    assert effects(summarise(run(other, measure))) == ()
    assert not any(e.other for e in effects(summarise(run(swept, measure))))
