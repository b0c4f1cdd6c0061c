"""The gate: an unknown is never called good."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.scaling import Point, ScalingFit
from harness.analysis.verdict import EVERY_CASE_RAN, WORST_FIRST, judge
from harness.records import (
    FAILURES,
    METRICS,
    CaseSummary,
    Decision,
    Environment,
    Estimate,
    Fact,
    Match,
    MeasureSettings,
    Metric,
    Outcome,
    Rule,
    RuleResult,
    Suite,
    Verdict,
)
from harness.report import verdict_text
from harness.tests.fake_runs import case, environment, run

GO, CONDITIONAL, NO_GO, INCONCLUSIVE = (
    Decision.GO,
    Decision.CONDITIONAL,
    Decision.NO_GO,
    Decision.INCONCLUSIVE,
)
FLOOR = Rule(name="floor", metric="tokens_per_s", go=500, abort=100)
HERE = environment()


def estimate(low: float | None, high: float | None, value: float | None = None) -> Estimate:
    if value is None:
        value = 1.0 if low is None or high is None else (low + high) / 2
    return Estimate(value=value, low=low, high=high, processes=3, samples=60)


def summary(
    low: float | None = 600,
    high: float | None = 620,
    *,
    name: str = "a",
    outcome: Outcome | None = Outcome.OK,
    metric: str = "tokens_per_s",
    **changes: Any,
) -> CaseSummary:
    """A case whose metric has this interval."""
    allow = changes.pop("allow", {})
    metrics = {metric: estimate(low, high)}
    metrics.setdefault("step_s", estimate(1, 1.1))
    return CaseSummary(
        **{
            "case": case({"name": name}, allow=allow),
            "outcome": outcome,
            "metrics": metrics if outcome is Outcome.OK else {},
            **changes,
        }
    )


def verdict(
    *summaries: CaseSummary,
    rules: tuple[Rule, ...] = (FLOOR,),
    fits: tuple[ScalingFit, ...] = (),
    env: Environment = HERE,
) -> Verdict:
    suite: Suite = run([s.case for s in summaries], lambda _: [], rules=rules).suite
    return judge(suite, env, summaries, fits)


def stated(*summaries: CaseSummary, rule: Rule = FLOOR, **k: Any) -> RuleResult:
    """What the one stated rule said."""
    return verdict(*summaries, rules=(rule,), **k).rules[1]


# --- one case and its interval -----------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [
        pytest.param(500, 520, GO, id="whole-interval-at-or-above-go"),
        pytest.param(499, 520, INCONCLUSIVE, id="across-go"),
        pytest.param(100, 499, CONDITIONAL, id="between"),
        pytest.param(99, 499, INCONCLUSIVE, id="across-abort"),
        pytest.param(99, 600, INCONCLUSIVE, id="across-both"),
        pytest.param(80, 99, NO_GO, id="below-abort"),
        pytest.param(None, None, INCONCLUSIVE, id="one-process"),
        pytest.param(math.nan, math.nan, INCONCLUSIVE, id="nan"),
        pytest.param(600, math.inf, INCONCLUSIVE, id="infinite"),
    ],
)
def test_higher_is_better(low: float | None, high: float | None, decision: Decision) -> None:
    assert stated(summary(low, high)).decision is decision


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [
        (1.0, 2.0, GO),
        (1.9, 2.1, INCONCLUSIVE),
        (2.1, 5.0, CONDITIONAL),
        (4.9, 5.1, INCONCLUSIVE),
        (5.1, 6.0, NO_GO),
    ],
)
def test_lower_is_better_is_the_mirror(low: float, high: float, decision: Decision) -> None:
    rule = Rule(name="fast", metric="step_s", go=2.0, abort=5.0)

    assert stated(summary(low, high, metric="step_s"), rule=rule).decision is decision


def test_without_abort_a_miss_is_no_go() -> None:
    rule = replace(FLOOR, abort=None)

    assert stated(summary(400, 499), rule=rule).decision is NO_GO
    assert stated(summary(490, 510), rule=rule).decision is INCONCLUSIVE


def test_an_absent_metric_is_inconclusive() -> None:
    rule = Rule(name="busy", metric="gpu_utilisation", go=0.5)

    result = stated(summary(), rule=rule)

    assert result.decision is INCONCLUSIVE
    assert [f.fact for f in result.findings] == [Fact.NO_METRIC]


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
            st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)),
            st.sampled_from([None, *Outcome]),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from(["all", "any"]),
    st.sampled_from([m for m in METRICS.values() if m.name != "scaling_exponent"]),
)
def test_go_is_given_only_on_finite_intervals_of_ok_cases(
    found: list[tuple[float | None, float | None, Outcome | None]], quantifier: str, metric: Metric
) -> None:
    rule = Rule(name="r", metric=metric.name, go=500, abort=500, quantifier=quantifier)
    summaries = [
        summary(low, high, name=str(i), outcome=outcome, metric=metric.name)
        for i, (low, high, outcome) in enumerate(found)
    ]

    result = stated(*summaries, rule=rule)

    good = [
        outcome is Outcome.OK
        and low is not None
        and high is not None
        and math.isfinite(low)
        and math.isfinite(high)
        and (low >= 500 if metric.higher_is_better else high <= 500)
        for low, high, outcome in found
    ]
    if result.decision is GO:
        assert all(good) if quantifier == "all" else any(good)


interval = st.tuples(st.floats(1, 1000), st.floats(0, 300)).map(lambda t: (t[0], t[0] + t[1]))


@given(
    st.lists(interval, min_size=1, max_size=3),
    st.floats(0, 500),
    st.sampled_from(["any", "all"]),
)
def test_a_faster_run_is_never_judged_worse_by_a_decided_rule(
    intervals: list[tuple[float, float]], gain: float, quantifier: str
) -> None:
    """Shift every interval up: the decision may pass through INCONCLUSIVE, never turn back."""
    rule = replace(FLOOR, quantifier=quantifier)
    order = {NO_GO: 0, INCONCLUSIVE: 1, CONDITIONAL: 1, GO: 2}

    before, after = (
        stated(
            *(summary(lo + g, hi + g, name=str(i)) for i, (lo, hi) in enumerate(intervals)),
            rule=rule,
        )
        for g in (0.0, gain)
    )

    assert order[after.decision] >= order[before.decision]


# --- outcomes ----------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", [*Outcome, None])
def test_every_outcome_has_its_decision(outcome: Outcome | None) -> None:
    expected = INCONCLUSIVE
    if outcome is Outcome.OK:
        expected = GO
    elif outcome in FAILURES or outcome is Outcome.OUT_OF_MEMORY:
        expected = NO_GO

    assert stated(summary(outcome=outcome)).decision is expected


@pytest.mark.parametrize("outcome", [*Outcome, None])
def test_every_case_ran_is_a_rule_of_every_suite(outcome: Outcome | None) -> None:
    expected = INCONCLUSIVE
    if outcome is Outcome.OK:
        expected = GO
    elif outcome in FAILURES:
        expected = NO_GO

    v = verdict(summary(), summary(name="b", outcome=outcome), rules=())

    assert v.decision is expected
    assert v.decided_by == EVERY_CASE_RAN


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.OK}))
def test_an_allowed_outcome_is_reported_and_turns_nothing(outcome: Outcome) -> None:
    allowed = summary(name="b", outcome=outcome, allow={outcome: "known since May"})

    v = verdict(summary(), allowed)

    assert v.decision is GO
    (found,) = v.rules[0].findings
    assert (found.fact, found.outcome, found.detail) == (Fact.ALLOWED, outcome, "known since May")


def test_another_outcome_than_the_allowed_one_counts() -> None:
    other = summary(outcome=Outcome.CRASH, allow={Outcome.TIMEOUT: "slow"})

    assert verdict(other).decision is NO_GO


def test_a_case_the_suite_names_and_nobody_measured_is_missing() -> None:
    suite = run([case({"name": "a"}), case({"name": "b"})], lambda _: []).suite

    assert judge(suite, HERE, [summary()], ()).decision is INCONCLUSIVE


def test_a_run_cut_short_is_not_complete() -> None:
    """Two of three processes give an interval; the run is still not what the suite asked."""
    asked = summary()
    more = replace(asked, case=replace(asked.case, settings=MeasureSettings(processes=4)))

    assert verdict(more, rules=()).decision is INCONCLUSIVE


@pytest.mark.parametrize(
    ("rule", "lower_bound_s", "decision"),
    [
        pytest.param(FLOOR, 5.2, NO_GO, id="bound-proves-under-abort"),
        pytest.param(FLOOR, 2.0, INCONCLUSIVE, id="bound-between-proves-nothing"),
        pytest.param(FLOOR, None, INCONCLUSIVE, id="no-bound"),
        pytest.param(Rule(name="s", metric="step_s", go=1, abort=5), 5.2, NO_GO, id="step-over"),
        pytest.param(
            Rule(name="s", metric="step_s", go=1, abort=6), 5.2, INCONCLUSIVE, id="step-under"
        ),
        pytest.param(Rule(name="m", metric="mfu", go=0.1), 5.2, INCONCLUSIVE, id="other-metric"),
    ],
)
def test_a_timeout_proves_a_miss_or_nothing(
    rule: Rule, lower_bound_s: float | None, decision: Decision
) -> None:
    late = summary(outcome=Outcome.TIMEOUT, lower_bound_s=lower_bound_s, tokens=512)

    assert stated(late, rule=rule).decision is decision


# --- many cases --------------------------------------------------------------------------


def test_all_is_decided_by_the_worst_case() -> None:
    result = stated(summary(name="a"), summary(50, 60, name="b"), summary(200, 300, name="c"))

    assert result.decision is NO_GO
    assert result.evidence == ("train/nsa/name=b",)


@pytest.mark.parametrize("outcome", [Outcome.CRASH, Outcome.TIMEOUT, Outcome.OUT_OF_MEMORY, None])
def test_any_is_decided_by_the_best_case(outcome: Outcome | None) -> None:
    result = stated(
        summary(name="a", outcome=outcome), summary(name="b"), rule=replace(FLOOR, quantifier="any")
    )

    assert result.decision is GO
    assert result.evidence == ("train/nsa/name=b",)


def test_any_without_a_good_case_is_not_go() -> None:
    rule = replace(FLOOR, quantifier="any")

    assert stated(summary(50, 60), summary(200, 300, name="b"), rule=rule).decision is CONDITIONAL
    assert (
        stated(summary(50, 60), summary(None, None, name="b"), rule=rule).decision is INCONCLUSIVE
    )


def test_any_names_the_cases_that_may_yet_be_good() -> None:
    rule = replace(FLOOR, quantifier="any")
    cases = summary(200, 300), summary(450, 560, name="b"), summary(50, 160, name="c")

    fair = stated(*cases, rule=rule)
    good = stated(*cases, summary(500, 520, name="d"), rule=rule)

    assert (fair.decision, good.decision) == (CONDITIONAL, GO)
    assert fair.evidence == ("train/nsa/name=a",)
    assert [(f.subject, f.fact) for f in fair.perhaps] == [("train/nsa/name=b", Fact.ACROSS)]
    assert good.perhaps == ()


@pytest.mark.parametrize("quantifier", ["all", "any"])
def test_a_rule_that_matches_nothing_is_inconclusive(quantifier: str) -> None:
    rule = replace(FLOOR, quantifier=quantifier, match=Match(criteria={"provider": ("dense",)}))

    assert stated(summary(), rule=rule).decision is INCONCLUSIVE


# --- the whole verdict -------------------------------------------------------------------


def test_the_worst_rule_decides_and_is_named() -> None:
    rules = (FLOOR, Rule(name="strict", metric="tokens_per_s", go=1000, abort=700))

    v = verdict(summary(), rules=rules)

    assert (v.decision, v.decided_by) == (NO_GO, "strict")


@pytest.mark.parametrize("worse", range(4))
@pytest.mark.parametrize("better", range(4))
def test_order_of_decisions(worse: int, better: int) -> None:
    intervals = {NO_GO: (10, 20), INCONCLUSIVE: (90, 110), CONDITIONAL: (200, 300), GO: (600, 700)}
    first, second = WORST_FIRST[worse], WORST_FIRST[better]
    rules = tuple(replace(FLOOR, name=n, match=Match(criteria={"name": (n,)})) for n in ("a", "b"))

    v = verdict(
        summary(*intervals[first], name="a"), summary(*intervals[second], name="b"), rules=rules
    )

    assert v.decision is WORST_FIRST[min(worse, better)]


def test_a_rule_for_another_gpu_does_not_apply_and_says_so() -> None:
    elsewhere = replace(FLOOR, name="A100 floor", gpu="A100", go=1e9)

    v = verdict(summary(), rules=(FLOOR, elsewhere))

    assert v.decision is GO
    assert not v.rules[2].applies
    assert verdict_text.rule_sentence(v.rules[2]) == "for A100 only; this is NVIDIA H200"


def test_no_applicable_rule_is_inconclusive() -> None:
    v = verdict(summary(), rules=(replace(FLOOR, gpu="A100"),))

    assert v.decision is INCONCLUSIVE
    assert (v.rule, v.device) == (None, "NVIDIA H200")


def test_a_crash_is_no_go_even_where_no_rule_applies() -> None:
    v = verdict(summary(outcome=Outcome.CRASH), rules=(replace(FLOOR, gpu="A100"),))

    assert (v.decision, v.decided_by) == (NO_GO, EVERY_CASE_RAN)


def test_a_suite_without_rules_asks_only_that_its_cases_run() -> None:
    assert verdict(summary(), rules=()).decision is GO


# --- exponents ---------------------------------------------------------------------------

SCALES = Rule(name="scales", metric="scaling_exponent", axis="seq_len", go=1.3, abort=1.8)


def curve(low: float | None, high: float | None, *, axis: str = "seq_len") -> ScalingFit:
    points = tuple(
        Point(case_id=f"train/nsa/name={n}", x=x) for n, x in zip("ab", (1, 2), strict=True)
    )
    exponent = None if low is None else estimate(low, high)
    return ScalingFit(
        axis=axis,
        group="train/nsa",
        workload="train",
        points=points,
        exponent=exponent,
        reason="two",
    )


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [
        (1.0, 1.1, GO),
        (1.2, 1.4, INCONCLUSIVE),
        (1.4, 1.5, CONDITIONAL),
        (1.9, 2.1, NO_GO),
        (None, None, INCONCLUSIVE),
    ],
)
def test_an_exponent_is_judged_by_its_interval(
    low: float | None, high: float | None, decision: Decision
) -> None:
    result = stated(summary(), summary(name="b"), rule=SCALES, fits=(curve(low, high),))

    assert result.decision is decision
    assert result.evidence == ("train/nsa/name=a", "train/nsa/name=b")


def test_an_exponent_from_single_processes_decides_nothing() -> None:
    """Its interval comes from the scatter of the points about the line, not from processes."""
    sure = curve(1.0, 1.1)
    assert sure.exponent is not None
    once = replace(sure, exponent=replace(sure.exponent, processes=1))

    result = stated(summary(), summary(name="b"), rule=SCALES, fits=(once,))

    assert result.decision is INCONCLUSIVE
    assert [f.fact for f in result.findings] == [Fact.SINGLE_PROCESSES]


def test_a_requirement_reads_as_a_sentence() -> None:
    rule = replace(FLOOR, match=Match(criteria={"gc": (0,)}))

    assert (
        verdict_text.requirement_text(stated(summary(), rule=rule))
        == "tokens/s ≥ 500 in every case with gc=0; NO-GO under 100"
    )


def test_a_matched_case_outside_every_fit_is_unknown() -> None:
    lonely = summary(name="c")

    result = stated(summary(), summary(name="b"), lonely, rule=SCALES, fits=(curve(1.0, 1.1),))

    assert result.decision is INCONCLUSIVE
    assert result.evidence == ("train/nsa/name=c",)


def test_a_fit_over_another_axis_does_not_count() -> None:
    fits = (curve(1.0, 1.1, axis="batch"),)

    assert stated(summary(), summary(name="b"), rule=SCALES, fits=fits).decision is INCONCLUSIVE


def test_cases_that_ended_alike_are_told_once() -> None:
    died = [
        summary(name=f"d{i}", outcome=Outcome.CRASH, detail="illegal memory access")
        for i in range(4)
    ]
    hung = summary(name="h", outcome=Outcome.HANG, detail="no progress for 60 s")

    reason = verdict_text.verdict_sentence(verdict(*died, hung, rules=()))

    ids = [s.case.case_id for s in died]
    assert reason == (
        f"{EVERY_CASE_RAN}: 5 of 5 cases: {ids[0]}, {ids[1]} and 2 more: "
        "crash: illegal memory access; "
        f"{hung.case.case_id}: hang: no progress for 60 s"
    )
