"""Verdicts: no unknown value is GO."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from harness.analysis.scaling import ScalingFit, ScalingPoint
from harness.analysis.study import Study
from harness.analysis.verdict import EVERY_CASE_RAN, judge
from harness.records import (
    FAILURES,
    WORST_FIRST,
    Case,
    CaseSummary,
    Decision,
    Estimate,
    Fact,
    Measurement,
    MeasureSettings,
    Outcome,
    Rule,
    RuleResult,
    TensorDigest,
    Verdict,
)
from harness.tests.fake_runs import case, environment, run, sweep, taking, timed, to

GO, CONDITIONAL, NO_GO, INCONCLUSIVE = Decision
FLOOR = Rule(name="floor", metric="tokens_per_s", go=500, abort=100)
ANY = replace(FLOOR, quantifier="any")
FAST = Rule(name="fast", metric="step_s", go=2.0, abort=5.0)
BUSY = Rule(name="busy", metric="gpu_utilisation", go=0.5)
ELSEWHERE = replace(FLOOR, gpu="A100", go=1e9)
SCALES = Rule(name="scales", metric="scaling_exponent", axis="seq_len", go=1.3, abort=1.8)
HERE = environment()


def estimate(low: float | None, high: float | None) -> Estimate:
    value = 1.0 if low is None or high is None else (low + high) / 2
    return Estimate(value=value, low=low, high=high, n=3, samples=60)


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
    one = case({"name": name}, allow=changes.pop("allow", {}))
    metrics = {"step_s": estimate(1, 1.1), metric: estimate(low, high)}
    known = metrics if outcome is Outcome.OK else {}
    return CaseSummary(case=one, outcome=outcome, metrics=known, **changes)


def verdict(
    *summaries: CaseSummary, rules: tuple[Rule, ...] = (FLOOR,), fits: tuple[ScalingFit, ...] = ()
) -> Verdict:
    suite = run([s.case for s in summaries], lambda _: [], rules=rules).suite
    return judge(suite, HERE, summaries, fits)


def stated(*summaries: CaseSummary, rule: Rule = FLOOR, **k: Any) -> RuleResult:
    return verdict(*summaries, rules=(rule,), **k).rules[1]


# --- one case and its interval -----------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "low", "high", "decision"),
    [
        (FLOOR, 500, 520, GO),
        (FLOOR, 499, 520, INCONCLUSIVE),
        (FLOOR, 100, 499, CONDITIONAL),
        (FLOOR, 99, 499, INCONCLUSIVE),
        (FLOOR, 99, 600, INCONCLUSIVE),
        (FLOOR, 80, 99, NO_GO),
        (FLOOR, None, None, INCONCLUSIVE),
        (FLOOR, math.nan, math.nan, INCONCLUSIVE),
        (FLOOR, 600, math.inf, INCONCLUSIVE),
        (FLOOR, 600, None, INCONCLUSIVE),
        (ANY, math.nan, math.nan, INCONCLUSIVE),
        (ANY, 600, math.inf, INCONCLUSIVE),
        (FAST, -math.inf, 1, INCONCLUSIVE),
        (FAST, None, 1, INCONCLUSIVE),
        (FAST, 1, 2, GO),
        (FAST, 1.9, 2.1, INCONCLUSIVE),
        (FAST, 2.1, 5, CONDITIONAL),
        (FAST, 5.1, 6, NO_GO),
        (replace(FLOOR, abort=None), 400, 499, NO_GO),
        (replace(FLOOR, abort=None), 490, 510, INCONCLUSIVE),
    ],
)
def test_a_case_is_judged_by_its_whole_interval(
    rule: Rule, low: float | None, high: float | None, decision: Decision
) -> None:
    assert stated(summary(low, high, metric=rule.metric), rule=rule).decision is decision


# --- outcomes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "decision"), [("", INCONCLUSIVE), ("atomic additions", GO), (None, GO)]
)
def test_processes_with_other_outputs_pass_only_if_the_suite_allows_it(
    stated: str | None, decision: Decision
) -> None:
    """None: a run that was stored before this was judged."""
    one = replace(case({"name": "a"}), nondeterministic=stated)
    digests = [TensorDigest(name="", dtype="", shape=(), norm=n, projection=0.0) for n in (1, 2)]
    made = [replace(m, output_digest=(digests[m.process == 1],)) for m in timed(one, 1.0)]

    (summed,), found = (of := Study(run([one], lambda _: made))).summaries, of.verdict

    assert (summed.differing, found.decision) == ((1,), decision)
    facts = [f.fact for r in found.rules for f in r.findings]
    assert facts == ([Fact.NOT_DETERMINISTIC] if stated == "" else [])


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
    v = verdict(summary(), summary(name="b", outcome=outcome, allow={outcome: "since May"}))

    assert v.decision is GO
    (found,) = v.rules[0].findings
    assert (found.fact, found.outcome, found.detail) == (Fact.ALLOWED, outcome, "since May")
    other = summary(outcome=Outcome.CRASH, allow={Outcome.TIMEOUT: "slow"})
    assert verdict(other).decision is NO_GO


def test_a_missing_case_or_process_is_inconclusive() -> None:
    suite = run([case({"name": "a"}), case({"name": "b"})], lambda _: []).suite
    asked = summary()
    more = replace(asked, case=replace(asked.case, settings=MeasureSettings(processes=4)))

    assert judge(suite, HERE, [asked], ()).decision is INCONCLUSIVE
    assert verdict(more, rules=()).decision is INCONCLUSIVE


def late(lower_bound_s: float | None, **changes: Any) -> CaseSummary:
    changes |= {"lower_bound_s": lower_bound_s, "tokens": 512}
    return summary(outcome=Outcome.TIMEOUT, **changes)


SLOW = late(5.2, name="b", working=True)


def test_without_a_rule_a_case_that_was_slow_or_busy_at_its_time_limit_is_measured() -> None:
    v = verdict(summary(), SLOW, rules=())

    assert (v.said, v.decision.exit_status) == ("measured: 1 of 2 cases end in time", 0)
    first, slow = v.rules[0].findings
    assert (first.fact, first.subject) == (Fact.FASTEST, "train/nsa/name=a")
    assert (slow.fact, slow.subject, slow.bound) == (Fact.SLOW, "train/nsa/name=b", 5.2)


@pytest.mark.parametrize(
    ("cases", "rules", "decision"),
    [
        ([late(5.2, name="b")], (), INCONCLUSIVE),  # it stood still
        ([SLOW, summary(name="c", outcome=Outcome.HANG)], (), NO_GO),
        ([SLOW], (replace(BUSY, match=to(name="a")),), INCONCLUSIVE),
    ],
)
def test_another_timeout_is_not_measured(
    cases: list[CaseSummary], rules: tuple[Rule, ...], decision: Decision
) -> None:
    busy = summary(metric="gpu_utilisation", low=0.6, high=0.7)

    assert verdict(busy, *cases, rules=rules).decision is decision
    assert verdict(SLOW, rules=()).decision is INCONCLUSIVE, "no case ends in time"


def test_the_fastest_case_names_those_that_are_not_told_apart_from_it() -> None:
    ended = summary(600, 620), summary(605, 625, name="d"), summary(100, 101, name="c")

    found = verdict(*ended, SLOW, rules=()).rules[0].findings[0]

    assert (found.estimate, found.metric) == (estimate(605, 625), "tokens_per_s")
    assert found.cases == ("train/nsa/name=d", "train/nsa/name=a")


@pytest.mark.parametrize(
    ("rule", "case", "decision", "fact"),
    [
        (FLOOR, late(5.2), NO_GO, Fact.AT_MOST),
        (FLOOR, late(2.0), INCONCLUSIVE, Fact.ENDED),
        (FLOOR, late(None), INCONCLUSIVE, Fact.ENDED),
        (FAST, late(5.2), NO_GO, Fact.AT_LEAST),
        (FAST, late(5.0), INCONCLUSIVE, Fact.ENDED),
        (BUSY, late(5.2), INCONCLUSIVE, Fact.ENDED),
        (BUSY, summary(), INCONCLUSIVE, Fact.NO_METRIC),
        (ELSEWHERE, summary(), INCONCLUSIVE, Fact.OTHER_DEVICE),
    ],
)
def test_an_unknown_value_and_the_bound_of_a_timeout_are_never_go(
    rule: Rule, case: CaseSummary, decision: Decision, fact: Fact
) -> None:
    result = stated(case, rule=rule)

    assert result.decision is decision
    assert [f.fact for f in result.findings] == [fact]
    assert result.applies is (rule is not ELSEWHERE)


# --- many cases --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "first", "second", "decision"),
    [
        (FLOOR, {}, {"low": 50, "high": 60}, NO_GO),
        (FLOOR, {}, {"low": 200, "high": 300}, CONDITIONAL),
        (ANY, {"low": 50, "high": 60}, {"low": 200, "high": 300}, CONDITIONAL),
        (ANY, {"low": 50, "high": 60}, {"low": None}, INCONCLUSIVE),
        (ANY, {"outcome": Outcome.CRASH}, {}, GO),
        (ANY, {"outcome": Outcome.TIMEOUT}, {}, GO),
        (ANY, {"outcome": Outcome.OUT_OF_MEMORY}, {}, GO),
        (ANY, {"outcome": None}, {}, GO),
    ],
)
def test_all_is_decided_by_the_worst_case_and_any_by_the_best(
    rule: Rule, first: dict[str, Any], second: dict[str, Any], decision: Decision
) -> None:
    result = stated(summary(**first), summary(name="b", **second), rule=rule)

    assert result.decision is decision
    assert result.evidence == ("train/nsa/name=b",)


def test_any_names_the_undecided_cases_that_may_be_go() -> None:
    cases = summary(200, 300), summary(450, 560, name="b"), summary(50, 160, name="c")

    fair = stated(*cases, rule=ANY)
    good = stated(*cases, summary(500, 520, name="d"), rule=ANY)

    assert (fair.decision, good.decision) == (CONDITIONAL, GO)
    assert fair.evidence == ("train/nsa/name=a",)
    assert [(f.subject, f.fact) for f in fair.perhaps] == [("train/nsa/name=b", Fact.OPEN)]
    assert good.perhaps == ()


@pytest.mark.parametrize("rule", [FLOOR, ANY])
def test_a_rule_that_matches_nothing_is_inconclusive(rule: Rule) -> None:
    nothing = replace(rule, match=to(provider="dense"))
    assert stated(summary(), rule=nothing).decision is INCONCLUSIVE


# --- the whole verdict -------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [*combinations(WORST_FIRST, 2)])
def test_the_worse_of_two_rules_decides(first: Decision, second: Decision) -> None:
    intervals = {NO_GO: (10, 20), INCONCLUSIVE: (90, 110), CONDITIONAL: (200, 300), GO: (600, 700)}
    rules = tuple(replace(FLOOR, name=n, match=to(name=n)) for n in ("a", "b"))
    cases = (summary(*intervals[d], name=n) for n, d in (("a", second), ("b", first)))

    v = verdict(*cases, rules=rules)

    assert (v.decision, v.decided_by) == (first, "b")


@pytest.mark.parametrize(
    ("outcome", "rules", "decision", "decided_by"),
    [
        (Outcome.OK, (FLOOR,), GO, "all 2 rules"),
        (Outcome.OK, (), GO, EVERY_CASE_RAN),
        (Outcome.OK, (FLOOR, ELSEWHERE), GO, "all 2 rules"),
        (Outcome.OK, (ELSEWHERE,), INCONCLUSIVE, "no applicable rule"),
        (Outcome.CRASH, (ELSEWHERE,), NO_GO, EVERY_CASE_RAN),
    ],
)
def test_a_verdict_names_what_decided_it(
    outcome: Outcome, rules: tuple[Rule, ...], decision: Decision, decided_by: str
) -> None:
    v = verdict(summary(outcome=outcome), rules=rules)

    assert (v.decision, v.decided_by, v.device) == (decision, decided_by, "NVIDIA H200")


# --- exponents ---------------------------------------------------------------------------


def curve(low: float | None, high: float | None, axis: str = "seq_len") -> ScalingFit:
    """A fit over the cases a and b."""
    return ScalingFit(
        axis=axis,
        group="train/nsa",
        workload="train",
        points=tuple(ScalingPoint(case_id=f"train/nsa/name={name}", x=1.0) for name in "ab"),
        exponent=None if low is None else estimate(low, high),
    )


BENT = replace(curve(1.0, 1.1), last=estimate(1.9, 2.0), steepens=True)


@pytest.mark.parametrize(
    ("fit", "decision", "fact", "others"),
    [
        (curve(1.0, 1.1), GO, Fact.DECIDED, ""),
        (curve(1.4, 1.5), CONDITIONAL, Fact.DECIDED, ""),
        (replace(curve(1.0, 1.1), kernels=estimate(1.4, 1.5)), CONDITIONAL, Fact.DECIDED, ""),
        (replace(BENT, kernels=estimate(1.4, 1.5)), NO_GO, Fact.DECIDED, ""),  # its last octave
        (curve(None, None), INCONCLUSIVE, Fact.NO_FIT, ""),
        (curve(1.0, 1.1), INCONCLUSIVE, Fact.NO_GROUP, "c"),  # a case outside of every fit
        (curve(1.0, 1.1, axis="batch"), INCONCLUSIVE, Fact.NO_GROUP, "ab"),
    ],
)
def test_an_exponent_is_judged_by_its_interval(
    fit: ScalingFit, decision: Decision, fact: Fact, others: str
) -> None:
    cases = (summary(name=name) for name in sorted({*"ab", *others}))

    result = stated(*cases, rule=SCALES, fits=(fit,))

    assert result.decision is decision
    assert {f.fact for f in result.findings} == {fact}
    assert result.evidence == tuple(f"train/nsa/name={name}" for name in others or "ab")


# --- processes that scatter ---------------------------------------------------------------

SCATTERED = (0.00399, 0.0047, 0.00891)


def scattered(rule: Rule, steps: Mapping[str, Sequence[float]]) -> RuleResult:
    """What a rule says of a run whose processes take these step times, by provider or length."""
    cases = [*sweep(seq_len=[64, 1024, 16384]), *sweep(provider="dense", seq_len=[64])]
    names = {c.case_id: "dense" if c.provider == "dense" else str(c.axes["seq_len"]) for c in cases}

    def measure(c: Case) -> list[Measurement]:
        return taking(c, *steps[names[c.case_id]])

    asked = [c for c in cases if names[c.case_id] in steps]
    result = Study(run(asked, measure, rules=[rule])).verdict
    return next(r for r in result.rules if r.stated)


QUICK = Rule(name="quick", metric="step_s", go=1.0, match=to(seq_len=64))


@pytest.mark.parametrize(
    ("limit", "steps", "decision", "likely"),
    [
        (10.0, SCATTERED, GO, None),
        (0.02, SCATTERED, INCONCLUSIVE, GO),
        (0.006, SCATTERED, INCONCLUSIVE, None),
        (1e-6, SCATTERED, NO_GO, None),
        (10.0, SCATTERED[:1], INCONCLUSIVE, GO),
        (4.0, (1.0, 1.3), GO, None),
        (3.0, (1.0, 1.3), INCONCLUSIVE, GO),
        (1.1, (1.0, 1.3), INCONCLUSIVE, None),
        (0.9, (1.0, 1.3), INCONCLUSIVE, NO_GO),
        (0.3, (1.0, 1.3), NO_GO, None),
    ],
)
def test_processes_that_scatter_decide_only_far_from_the_limit(
    limit: float, steps: Sequence[float], decision: Decision, likely: Decision | None
) -> None:
    result = scattered(replace(QUICK, go=limit), {"64": steps})

    assert (result.decision, [f.likely for f in result.findings]) == (decision, [likely])


@pytest.mark.parametrize(
    ("others", "limit", "decision"),
    [
        (1.01, 1.25, GO),  # the others scatter by 1 %: as far as the processes differ is enough
        (1.01, 1.12, INCONCLUSIVE),  # near
        (1.3, 1.12, INCONCLUSIVE),  # the others scatter by 30 %
        (1.01, 1.05, INCONCLUSIVE),  # processes on both sides
        (1.01, 0.98, NO_GO),
    ],
)
def test_processes_on_one_side_decide_beyond_the_usual_scatter(
    others: float, limit: float, decision: Decision
) -> None:
    rule = replace(QUICK, go=limit)
    ends = {"1024": (2.0, 2.0 * others), "16384": (3.0, 3.0 * others), "dense": (1.0, others)}

    assert scattered(rule, {"64": (1.0, 1.1), **ends}).decision is decision


FASTER = replace(QUICK, match=to(provider="nsa", seq_len=64), against=to(provider="dense"))
OF_TWO = {"64": (0.004, 0.009), "dense": (4.0, 4.1)}
GROWING = {"64": (0.01, 0.021), "1024": (0.16, 0.17), "16384": (2.56, 2.56)}


@pytest.mark.parametrize(
    ("rule", "steps", "go", "decision"),
    [
        (FASTER, OF_TWO, 2.0, GO),
        (FASTER, OF_TWO, 100.0, INCONCLUSIVE),
        (FASTER, OF_TWO, 1e5, NO_GO),
        (SCALES, GROWING, 1.8, GO),
        (SCALES, GROWING, 1.3, INCONCLUSIVE),
        (SCALES, GROWING, 0.2, NO_GO),
    ],
)
def test_a_ratio_or_exponent_of_scattered_processes_decides_only_far_from_the_limit(
    rule: Rule, steps: Mapping[str, Sequence[float]], go: float, decision: Decision
) -> None:
    assert scattered(replace(rule, go=go, abort=None), steps).decision is decision
