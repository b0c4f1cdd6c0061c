"""Verdicts: no unknown value is GO."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.scaling import ScalingFit, ScalingPoint
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
    """The result of the one stated rule."""
    return verdict(*summaries, rules=(rule,), **k).rules[1]


# --- one case and its interval -----------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [
        (500, 520, GO),
        (499, 520, INCONCLUSIVE),
        (100, 499, CONDITIONAL),
        (99, 499, INCONCLUSIVE),
        (99, 600, INCONCLUSIVE),
        (80, 99, NO_GO),
        (None, None, INCONCLUSIVE),
        (math.nan, math.nan, INCONCLUSIVE),
        (600, math.inf, INCONCLUSIVE),
    ],
)
def test_higher_is_better(low: float | None, high: float | None, decision: Decision) -> None:
    assert stated(summary(low, high)).decision is decision


@pytest.mark.parametrize(
    ("low", "high", "decision"),
    [(1, 2, GO), (1.9, 2.1, INCONCLUSIVE), (2.1, 5, CONDITIONAL), (5.1, 6, NO_GO)],
)
def test_lower_is_better(low: float, high: float, decision: Decision) -> None:
    rule = Rule(name="fast", metric="step_s", go=2.0, abort=5.0)

    assert stated(summary(low, high, metric="step_s"), rule=rule).decision is decision


def test_without_abort_a_missed_go_is_no_go() -> None:
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
def test_go_needs_finite_intervals_of_ok_cases(
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
def test_higher_intervals_never_give_a_worse_decision(
    intervals: list[tuple[float, float]], gain: float, quantifier: str
) -> None:
    """The decision may pass through INCONCLUSIVE."""
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
    """Out of memory is NO-GO for a stated rule, but not for the rule that every case ran."""
    case_ran = verdict(summary(), summary(name="b", outcome=outcome), rules=())
    expected = GO if outcome is Outcome.OK else NO_GO if outcome in FAILURES else INCONCLUSIVE

    assert (case_ran.decision, case_ran.decided_by) == (expected, EVERY_CASE_RAN)
    if outcome is Outcome.OUT_OF_MEMORY:
        expected = NO_GO
    assert stated(summary(outcome=outcome)).decision is expected


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - {Outcome.OK}))
def test_an_allowed_outcome_is_reported_but_is_go(outcome: Outcome) -> None:
    allowed = summary(name="b", outcome=outcome, allow={outcome: "known since May"})

    v = verdict(summary(), allowed)

    assert v.decision is GO
    (found,) = v.rules[0].findings
    assert (found.fact, found.outcome, found.detail) == (Fact.ALLOWED, outcome, "known since May")


def test_an_outcome_that_is_not_allowed_counts() -> None:
    other = summary(outcome=Outcome.CRASH, allow={Outcome.TIMEOUT: "slow"})

    assert verdict(other).decision is NO_GO


def test_a_case_without_a_measurement_is_inconclusive() -> None:
    suite = run([case({"name": "a"}), case({"name": "b"})], lambda _: []).suite

    assert judge(suite, HERE, [summary()], ()).decision is INCONCLUSIVE


def test_a_missing_process_is_inconclusive() -> None:
    asked = summary()
    more = replace(asked, case=replace(asked.case, settings=MeasureSettings(processes=4)))

    assert verdict(more, rules=()).decision is INCONCLUSIVE


@pytest.mark.parametrize(
    ("rule", "lower_bound_s", "decision"),
    [
        pytest.param(FLOOR, 5.2, NO_GO, id="below-abort"),
        pytest.param(FLOOR, 2.0, INCONCLUSIVE, id="between"),
        pytest.param(FLOOR, None, INCONCLUSIVE, id="no-bound"),
        pytest.param(Rule(name="s", metric="step_s", go=1, abort=5), 5.2, NO_GO, id="step-over"),
        pytest.param(
            Rule(name="s", metric="step_s", go=1, abort=6), 5.2, INCONCLUSIVE, id="step-under"
        ),
        pytest.param(Rule(name="m", metric="mfu", go=0.1), 5.2, INCONCLUSIVE, id="other-metric"),
    ],
)
def test_a_timeout_is_no_go_or_inconclusive(
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


def test_any_names_the_undecided_cases_that_may_be_go() -> None:
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


@pytest.mark.parametrize(("first", "second"), [*combinations(WORST_FIRST, 2)])
def test_the_worse_of_two_rules_decides(first: Decision, second: Decision) -> None:
    intervals = {NO_GO: (10, 20), INCONCLUSIVE: (90, 110), CONDITIONAL: (200, 300), GO: (600, 700)}
    rules = tuple(replace(FLOOR, name=n, match=Match(criteria={"name": (n,)})) for n in ("a", "b"))

    v = verdict(
        summary(*intervals[second], name="a"), summary(*intervals[first], name="b"), rules=rules
    )

    assert (v.decision, v.decided_by) == (first, "b")


def test_a_rule_for_another_gpu_does_not_apply() -> None:
    elsewhere = replace(FLOOR, gpu="A100", go=1e9)

    v = verdict(summary(), rules=(FLOOR, elsewhere))

    assert v.decision is GO
    assert not v.rules[2].applies
    assert [(f.fact, f.detail) for f in v.rules[2].findings] == [(Fact.OTHER_DEVICE, "NVIDIA H200")]


def test_no_applicable_rule_is_inconclusive() -> None:
    v = verdict(summary(), rules=(replace(FLOOR, gpu="A100"),))

    assert v.decision is INCONCLUSIVE
    assert (v.rule, v.device) == (None, "NVIDIA H200")


def test_a_crash_is_no_go_even_if_no_rule_applies() -> None:
    v = verdict(summary(outcome=Outcome.CRASH), rules=(replace(FLOOR, gpu="A100"),))

    assert (v.decision, v.decided_by) == (NO_GO, EVERY_CASE_RAN)


def test_a_suite_without_rules_is_decided_by_whether_its_cases_ran() -> None:
    v = verdict(summary(), rules=())

    assert (v.decision, v.decided_by) == (GO, EVERY_CASE_RAN)


def test_go_by_several_rules_counts_them() -> None:
    assert verdict(summary()).decided_by == "all 2 rules"


# --- exponents ---------------------------------------------------------------------------

SCALES = Rule(name="scales", metric="scaling_exponent", axis="seq_len", go=1.3, abort=1.8)


def curve(low: float | None, high: float | None, *, axis: str = "seq_len") -> ScalingFit:
    points = tuple(
        ScalingPoint(case_id=f"train/nsa/name={n}", x=x) for n, x in zip("ab", (1, 2), strict=True)
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


def test_an_exponent_from_single_processes_is_inconclusive() -> None:
    sure = curve(1.0, 1.1)
    assert sure.exponent is not None
    once = replace(sure, exponent=replace(sure.exponent, processes=1))

    result = stated(summary(), summary(name="b"), rule=SCALES, fits=(once,))

    assert result.decision is INCONCLUSIVE
    assert [f.fact for f in result.findings] == [Fact.SINGLE_PROCESSES]


def test_a_matched_case_outside_every_fit_is_inconclusive() -> None:
    lonely = summary(name="c")

    result = stated(summary(), summary(name="b"), lonely, rule=SCALES, fits=(curve(1.0, 1.1),))

    assert result.decision is INCONCLUSIVE
    assert result.evidence == ("train/nsa/name=c",)


def test_a_fit_over_another_axis_does_not_count() -> None:
    fits = (curve(1.0, 1.1, axis="batch"),)

    assert stated(summary(), summary(name="b"), rule=SCALES, fits=fits).decision is INCONCLUSIVE
