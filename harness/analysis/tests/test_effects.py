"""Effects of single axes, over pairs of cases with a planted one."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.effects import MAX_LEVELS, Effect, effects, longest, together
from harness.analysis.roofline import MAX_STACKS, OTHER, OUTSIDE, Stack, stacks
from harness.analysis.summary import summarise
from harness.records import Breakdown, Case, Measurement, Outcome, Profile, Ratio, Scalar, Use
from harness.report.text import effect_sentences, together_sentences
from harness.tests.fake_runs import case, ended, run, sweep, taking, timed

Measure = Callable[[Any], list[Measurement]]


QUICK_S, LATE_S = 0.95, 45.0


def timeout(c: Case, bound_s: float = LATE_S) -> list[Measurement]:
    return ended(c, Outcome.TIMEOUT, lower_bound_s=bound_s, tokens=512)


def found_in(cases: Sequence[Case], measure: Measure) -> tuple[Effect, ...]:
    return effects(summarise(run(cases, measure)))


def test_the_planted_effect_is_found() -> None:
    def measure(c: Any) -> list[Measurement]:
        step = 0.1 * c.axes["seq_len"] / 512 * (1.24 if c.axes["gc"] == "on" else 1)
        return timed(c, step, cv=0.005)

    length, gc = found_in(sweep(seq_len=[512, 2048], gc=["off", "on"]), measure)

    assert length.axis == "seq_len"
    assert (gc.base, gc.value, gc.pairs) == ("off", "on", 2)
    assert (gc.ratio.low or math.inf) < 1.24 < (gc.ratio.high or 0)
    assert length.ratio.value == pytest.approx(1, abs=0.02)  # per token
    assert not gc.negligible


def test_each_provider_is_compared_with_the_first_that_ran() -> None:
    slower = {"first": 1.0, "ours": 1.0, "dense": 4.0, "peer": 2.0}
    cases = [case({"seq_len": n}, provider=p) for p in slower for n in (512, 2048)]
    cases.remove(next(c for c in cases if c.provider == "peer"))

    def measure(c: Any) -> list[Measurement]:
        if c.provider == "first":
            return ended(c, Outcome.CRASH)
        return timed(c, slower[c.provider] * 1e-4 * c.axes["seq_len"], cv=0.005)

    dense, peer = (e for e in found_in(cases, measure) if e.axis == "provider")

    assert (dense.base, dense.value, dense.pairs) == ("ours", "dense", 2)
    assert (peer.base, peer.value, peer.pairs) == ("ours", "peer", 1)
    assert dense.ratio.value == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(
    ("late", "bound_s", "found"),
    [
        ([("off", 512)], 45.0, [(1 / 45, {"seq_len": 512})]),
        ([("on", 512), ("on", 2048)], 45.0, [(45, {})]),
        ([("off", 512), ("on", 2048)], 45.0, [(1 / 45, {"seq_len": 512}), (45, {"seq_len": 2048})]),
        ([("off", 512)], 0.9, []),
        ([("off", 512), ("on", 512)], 45.0, []),
    ],
)
def test_a_case_that_timed_out_bounds_the_effect(
    late: list[tuple[str, int]], bound_s: float, found: list[tuple[float, dict[str, int]]]
) -> None:
    def measure(c: Any) -> list[Measurement]:
        if (c.axes["gc"], c.axes["seq_len"]) in late:
            return timeout(c, bound_s)
        return timed(c, 1.0, cv=0.0001, tokens=512)

    made = found_in(sweep(gc=["off", "on"], seq_len=[512, 2048]), measure)
    bounds = [e for e in made if e.axis == "gc" and e.at_least]

    assert [e.within for e in bounds] == [within for _, within in found]
    assert [e.ratio.value for e in bounds] == pytest.approx([ratio for ratio, _ in found], rel=0.02)
    assert all(e.ratio.low is e.ratio.high is None for e in bounds)


def test_two_processes_that_scatter_are_clear_of_a_far_bound() -> None:
    """Their interval would leave less than a hundredth of it."""

    def measure(c: Any) -> list[Measurement]:
        if c.axes["gc"] == "off":
            return timeout(c, 1000.0)
        return taking(c, 1.0, 1.3)

    (effect,) = found_in(sweep(gc=["off", "on"]), measure)

    assert effect.ratio.inverse.value == pytest.approx(1000 / 1.3**5)


def planted(effect: Callable[[Mapping[str, Any]], float], cases: Sequence[Case]) -> Any:
    """Effects of gc, which multiplies the step of each case by the planted amount."""

    def measure(c: Case) -> list[Measurement]:
        return timed(c, 0.1 * (effect(c.axes) if c.axes["gc"] == "on" else 1), cv=0.002)

    return [e for e in found_in(cases, measure) if e.axis == "gc"]


TEXT = sweep(dataset=["text", "random"], seq_len=[512, 2048], gc=["off", "on"])


def test_an_effect_is_that_in_each_level_of_the_axes_that_change_it() -> None:
    found = planted(lambda axes: 1.76 if axes["seq_len"] == 512 else 1.29, TEXT)

    assert [(e.within, e.pairs) for e in found] == [({"seq_len": 512}, 2), ({"seq_len": 2048}, 2)]
    assert [e.ratio.value for e in found] == pytest.approx([1.76, 1.29], rel=0.01)
    assert not any(e.disagree for e in found)

    def both(axes: Mapping[str, Any]) -> float:
        return {512: 1.5, 2048: 1.0}[axes["seq_len"]] * {"text": 2.4, "random": 1.2}[
            axes["dataset"]
        ]

    ratios = sorted(e.ratio.value for e in planted(both, TEXT))
    assert ratios == pytest.approx([1.2, 1.8, 2.4, 3.6], rel=0.01)


def test_providers_are_not_pooled_where_another_axis_separates_as_well() -> None:
    grown: dict[str, Any] = {"nsa": {512: 1.3, 2048: 1.32}, "dense": {512: 1.3, 2048: 2.6}}
    cases = [c for p in grown for c in sweep(provider=p, seq_len=[512, 2048], gc=["off", "on"])]

    def measure(c: Case) -> list[Measurement]:
        factor = grown[c.provider][c.axes["seq_len"]] if c.axes["gc"] == "on" else 1
        return timed(c, 0.1 * factor, cv=0.002)

    found = [e for e in found_in(cases, measure) if e.axis == "gc"]

    assert found[0].within == {"provider": "nsa"}


def test_pairs_that_too_many_levels_separate_disagree() -> None:
    cases = sweep(seq_len=[2**i for i in range(MAX_LEVELS + 1)], gc=["off", "on"])

    (found,) = planted(lambda axes: 1 + axes["seq_len"] / 10, cases)

    assert found.disagree
    assert found.within == {}
    assert [min(found.by_pair), max(found.by_pair)] == pytest.approx([1.1, 7.4], rel=0.01)


def test_axes_that_only_change_together_are_one() -> None:
    sizes = ((2048, 16, "off"), (2048, 16, "on"), (8192, 4, "off"), (8192, 4, "on"))
    cases = [case({"seq_len": n, "batch": b, "gc": gc}) for n, b, gc in sizes]

    found = found_in(cases, lambda c: timed(c, float(c.axes["batch"]) * 0.01, cv=0.002))

    together = next(e for e in found if e.axis == "seq_len/batch")
    assert (together.base, together.value, together.pairs) == ("2048/16", "8192/4", 2)


# --- where the time of a step goes ---------------------------------------------------------


def seen(busy_s: float, **kernels: float) -> Profile:
    """A profile of a step of 0.1 s with this time of kernels in each range."""
    return Profile(
        kernels=tuple(
            Use(name="k", where=f"nsa.{where}" if where != "none" else "", calls=1, time_s=t)
            for where, t in kernels.items()
        ),
        breakdown=Breakdown(step_s=0.1, device_busy_s=busy_s),
    )


def stacked(*cases: Case, profile: Profile | None = None, **step_s: Any) -> tuple[Stack, ...]:
    def measure(c: Case) -> list[Measurement]:
        step = step_s.get(str(c.axes.get("branch")), 0.1)
        return timed(c, step, cv=0, profile=profile, samples_s=(step,) * 20)

    recorded = run(cases, measure)
    return stacks(recorded, summarise(recorded))


@pytest.mark.parametrize(
    ("profile", "parts"),  # seconds of select, window, other kernels and the time outside of them
    [
        (seen(0.06, select=0.04, window=0.01, none=0.01), (0.04, 0.01, 0.01, 0.04)),
        (seen(0.06, select=0.08, window=0.04), (0.04, 0.02, 0, 0.04)),
        (seen(0.09, select=0.04, window=0.01), (0.04, 0.01, 0.04, 0.01)),
        (seen(0.11, select=0.04, window=0.07), (0.4 / 11, 0.7 / 11, 0, 0)),
    ],
)
def test_parts_of_a_profile_add_up_to_the_step(profile: Profile, parts: Sequence[float]) -> None:
    (found,) = stacked(case({"seq_len": 512}), profile=profile)

    names = ("select", "window", OTHER, OUTSIDE)
    assert found.parts == pytest.approx(dict(zip(names, parts, strict=True)))
    assert sum(found.parts.values()) == pytest.approx(found.step_s)


def test_a_case_that_a_rule_asks_is_shown_before_a_longer_one() -> None:
    cases = [replace(case({"seq_len": 512, "batch": b}), workload=f"w{b}") for b in range(6)]
    cases = [replace(c, case_id=f"{c.workload}/{c.case_id}") for c in cases]
    two = seen(0.06, select=0.04, window=0.01)
    recorded = run(cases, lambda c: timed(c, 0.1 * (1 + int(c.axes["batch"])), cv=0, profile=two))

    for first, shown in (((), "w0 w5 w4 w3"), ((cases[2].case_id,), "w2 w0 w5 w4")):
        found = stacks(recorded, summarise(recorded), [cases[0].case_id], first=first)
        assert [s.case.workload for s in found] == shown.split()


def test_an_operator_is_shown_beside_many_cases_of_the_model() -> None:
    model = sweep(gc=[str(i) for i in range(MAX_STACKS)])
    operator = case({"branch": "op"}, workload="operator")
    checked = case({"branch": "same"}, workload="checked", factory=model[0].factory)
    profile = seen(0.06, select=0.04, window=0.01)
    times: dict[str, Any] = {"op": 0.01, "same": 0.02}

    found = stacked(*model, operator, checked, profile=profile, **times)

    assert len(found) == MAX_STACKS
    assert found[-1].case == operator
    assert checked not in [s.case for s in found]


def test_ranges_of_pytorch_have_names_of_parts_and_the_time_of_all_kernels_counts() -> None:
    every = {"Optimizer.step#AdamW.step": 0.02, "nsa.optimiser": 0.01, "nccl:all_reduce": 0.01}
    every["nsa.feed_forward"] = 0.02
    profile = seen(0.06, select=0.03)
    assert profile.breakdown is not None
    graph = replace(profile.breakdown, kernels_by_range=every, ranges="as without replay")
    profile = replace(profile, breakdown=graph)

    (found,) = stacked(case({"seq_len": 512}), profile=profile)

    assert found.parts == pytest.approx(
        {"optimiser": 0.03, "communication": 0.01, "feed forward": 0.02, OTHER: 0, OUTSIDE: 0.04}
    )
    assert found.note == "as without replay"


# --- two variables that act only together ------------------------------------------------


def having(**values: Scalar) -> Callable[[Case], bool]:
    return lambda c: all(c.axes[name] == value for name, value in values.items())


def said(quick: Callable[[Case], bool], late: Measure = timeout, **axes: Any) -> list[str]:
    """Of cases that take `QUICK_S`, and others that time out, or what `late` says."""

    def measure(c: Case) -> list[Measurement]:
        return timed(c, QUICK_S, cv=0.0005, tokens=512) if quick(c) else late(c)

    return [*together_sentences(found_in(sweep(A=[0, 1], B=[0, 1], **axes), measure))]


BOTH = having(A=1, B=1)
FASTER = "A=1 with B=1 is at least 47x faster; neither alone is shown to be."


def test_two_variables_that_act_only_together_are_found_by_the_bounds_of_timeouts() -> None:
    assert said(BOTH) == [FASTER]
    assert said(lambda c: not BOTH(c)) == [FASTER.replace("faster", "slower")]
    assert said(having(A=0, B=1)) == [FASTER.replace("A=1", "A=0")]


def test_measured_cases_have_an_interval() -> None:
    (one,) = said(having(A=0, B=0), late=lambda c: timed(c, LATE_S, tokens=512))

    assert one.startswith("A=0 with B=0 is 47")
    assert one.endswith("] faster; neither alone is shown to be.")


@pytest.mark.parametrize(
    ("quick", "late"),
    [
        (having(A=1), timeout),  # one alone does it
        (lambda c: c.axes["A"] == c.axes["B"], timeout),  # so does neither
        (lambda _: False, timeout),
        (BOTH, lambda c: timeout(c, 0.9)),
        (BOTH, lambda c: timeout(c, 1.1)),  # hardly slower
        (BOTH, lambda c: [replace(m, outcome=Outcome.HANG) for m in timeout(c)]),
        (BOTH, lambda c: timed(c, LATE_S / (1 + 9 * c.axes["A"]), tokens=512)),  # one alone helps
    ],
)
def test_no_more_is_claimed_than_is_shown(quick: Callable[[Case], bool], late: Measure) -> None:
    assert said(quick, late) == []


def test_a_third_variable_is_named_only_if_it_matters() -> None:
    assert said(BOTH, C=[0, 1]) == [FASTER]
    assert FASTER.replace(";", " at C=1;") in said(having(A=1, B=1, C=1), C=[0, 1])


@pytest.mark.parametrize("seed", range(10))
def test_scatter_alone_is_no_effect(seed: int) -> None:
    cases = sweep(A=[0, 1], B=[0, 1], C=[0, 1], D=[0, 1])

    assert together(found_in(cases, lambda c: timed(c, 1.0, cv=0.2, seed=seed))) == ()


def test_the_longest_axis_joins_cases_which_those_of_a_shape_do_not() -> None:
    def axis(*lengths: int) -> str:
        shapes = [{"q_heads": heads, "kv_heads": heads // 8} for heads in (64, 32, 16)]
        cases = [case({**shape, "seq_len": n}) for shape in shapes for n in lengths]
        return longest(summarise(run(cases, lambda c: timed(c, 0.05))))

    assert axis(512, 1024) == "seq_len"  # two values, but three rows instead of six
    assert axis(512) == ""


def test_pairs_that_lie_twice_apart_are_a_range() -> None:
    what: Any = {"workload": "train", "axis": "route", "base": "v2", "value": "v1", "cases": "ab"}
    for ends, said in (((20, 95), "20x to 95x slower"), ((0.1, 0.25), "4.0x to 10x faster")):
        of = Effect(**what, ratio=Ratio(value=3.5, n=1), by_pair=ends)
        assert next(iter(effect_sentences([of]))).startswith(f"`route`, v1 against v2: {said}")
