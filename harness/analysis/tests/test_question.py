"""Rules that answer the suite's question: pairs, peers, expectations, GPUs and parts of a suite."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.study import Study
from harness.analysis.tests.test_verdict import CONDITIONAL, GO, INCONCLUSIVE, NO_GO
from harness.analysis.verdict import EVERY_CASE_RAN, EXPECTED
from harness.records import (
    Case,
    Decision,
    Fact,
    Finding,
    Measurement,
    Outcome,
    Rule,
    RuleResult,
    Stop,
    Verdict,
    Weight,
)
from harness.report.text import finding_sentence
from harness.report.verdict_text import rule_sentence
from harness.tests.fake_runs import ended, run, sweep, timed, to

LENGTHS = (512, 1024, 2048)
CASES = [c for p in ("nsa", "dense") for c in sweep(provider=p, seq_len=LENGTHS)]

RATIO = Rule(name="ratio", metric="step_s", go=2.0, abort=1.0, match=to(provider="nsa"))
RATIO = replace(RATIO, against=to(provider="dense"))


def judged(
    times: dict[str, float],
    *,
    rules: tuple[Rule, ...] = (RATIO,),
    processes: dict[str, int] | None = None,
    failed: dict[str, Outcome] | None = None,
    **suite: Any,
) -> Verdict:
    """A run in which each provider takes this long at every length."""
    settings = {"nsa": 3, "dense": 3} | (processes or {})

    def measure(c: Case) -> list[Measurement]:
        if failed and c.provider in failed:
            return ended(c, failed[c.provider], processes=3)
        return timed(c, times[c.provider], cv=0.002, processes=settings[c.provider])

    asked = {p: replace(CASES[0].settings, processes=n) for p, n in settings.items()}
    cases = [replace(c, settings=asked[c.provider]) for c in CASES]
    return Study(run(cases, measure, rules=rules, **suite)).verdict


def of(verdict: Verdict, name: str = RATIO.name) -> RuleResult:
    (found,) = (r for r in verdict.rules if r.rule == name)
    return found


@pytest.mark.parametrize(
    ("deciding", "dense_s", "decision"),
    [("", 2.0, INCONCLUSIVE), ("fast", 2.0, GO), ("fast", 0.5, GO), ("fast slow", 0.5, NO_GO)],
)
def test_the_parts_that_decide_are_the_verdict(
    deciding: str, dense_s: float, decision: Decision
) -> None:
    floor = Rule(name="floor", metric="tokens_per_s", go=500, asks="fast", match=RATIO.match)
    rules = (floor, replace(RATIO, asks="slow"))
    found = judged({"nsa": 1.0, "dense": dense_s}, rules=rules, deciding=(*deciding.split(),))
    assert found.decision is decision


# --- ratios ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dense_s", "decision"), [(2.5, GO), (1.5, CONDITIONAL), (0.8, NO_GO), (2.0, INCONCLUSIVE)]
)
@pytest.mark.parametrize("metric", ["step_s", "tokens_per_s"])  # lower or higher is better
def test_a_ratio_is_judged_between_cases_that_are_equal_otherwise(
    metric: str, dense_s: float, decision: Decision
) -> None:
    found = of(judged({"nsa": 1.0, "dense": dense_s}, rules=(replace(RATIO, metric=metric),)))

    assert (found.decision, found.judged) == (decision, len(LENGTHS))
    for f in found.findings:
        assert f.partner == f.subject.replace("/nsa/", "/dense/")
        assert f.estimate is not None
        assert f.estimate.value == pytest.approx(dense_s, rel=0.02)


@pytest.mark.parametrize(("dense_s", "likely"), [(2.5, GO), (0.5, NO_GO), (2.06, GO), (2.0, None)])
def test_one_process_indicates_but_does_not_decide(dense_s: float, likely: Decision | None) -> None:
    verdict = judged({"nsa": 1.0, "dense": dense_s}, processes={"dense": 1})

    assert of(verdict).decision is INCONCLUSIVE
    assert {(f.fact, f.likely) for f in of(verdict).findings} == {(Fact.OPEN, likely)}


@pytest.mark.parametrize(
    ("missing", "decision"),
    [(Weight.CONDITION, CONDITIONAL), (Weight.FAIL, INCONCLUSIVE), (Weight.NOTE, INCONCLUSIVE)],
)
def test_a_peer_that_fails_leaves_a_gap_and_is_not_our_no_go(
    missing: Weight, decision: Decision
) -> None:
    """With `note` no pair is left, and a rule without evidence is never GO."""
    rule, failed = replace(RATIO, missing=missing), {"dense": Outcome.HANG}
    verdict = judged({"nsa": 1.0, "dense": 3.0}, rules=(rule,), failed=failed, peers=("dense",))

    assert of(verdict, EVERY_CASE_RAN).decision is GO
    assert (of(verdict).decision, verdict.decision) == (decision, decision)
    assert missing is Weight.NOTE or "hang" in rule_sentence(of(verdict))


@pytest.mark.parametrize("metric", ["step_s", "tokens_per_s"])
@pytest.mark.parametrize(
    ("late", "bound_s", "processes", "decision", "said"),
    [
        ("dense", 47.5, 3, GO, "at least 46.9x as fast as train/dense/"),
        ("dense", 47.5, 1, INCONCLUSIVE, "at least 4"),
        ("dense", 1.9, 3, CONDITIONAL, "no time of train/dense/"),
        ("nsa", 47.5, 3, NO_GO, "timed out: under 0.0214x as fast as train/dense/"),
        ("nsa", 47.5, 1, INCONCLUSIVE, "timed out: under 0.02"),
        ("nsa", 0.9, 3, INCONCLUSIVE, "timeout"),
    ],
)
def test_the_bound_of_a_timeout_decides_a_ratio(
    late: str, bound_s: float, processes: int, decision: Decision, said: str, metric: str
) -> None:
    """The other side takes 1 s, and half a percent more or less."""
    cases = [c for c in CASES if c.axes["seq_len"] == 512]

    def measure(c: Case) -> list[Measurement]:
        if c.provider == late:
            return ended(c, Outcome.TIMEOUT, lower_bound_s=bound_s, tokens=512)
        return timed(c, 1.0, processes=processes, cv=0.005)

    verdict = Study(run(cases, measure, rules=(replace(RATIO, metric=metric),))).verdict

    assert (of(verdict).decision, said in rule_sentence(of(verdict))) == (decision, True)


def test_a_partner_of_another_workload_shares_the_axes_that_both_have() -> None:
    near, far = sweep(workload="peers", provider="fla", seq_len=LENGTHS[:2])
    (third,) = sweep(workload="third")
    named = replace(RATIO, against=to(workload="peers", provider="fla"))

    both = named.pairs([CASES[0], third, near, far])
    assert both == [(CASES[0], near), (third, near), (third, far)]
    assert not replace(RATIO, against=to(provider="fla")).pairs([CASES[0], near, far])
    assert not replace(RATIO, match=to(), against=to(seq_len=512)).pairs(CASES[:1])


# --- what a rule may do ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "decision"),
    [(Weight.FAIL, NO_GO), (Weight.CONDITION, CONDITIONAL), (Weight.NOTE, GO)],
)
def test_a_rule_counts_as_the_suite_says(counts: Weight, decision: Decision) -> None:
    rule = replace(RATIO, counts=counts)
    assert judged({"nsa": 1.0, "dense": 0.5}, rules=(rule,)).decision is decision


@pytest.mark.parametrize(
    ("counts", "gpu", "decision", "said"),
    [
        (Weight.FAIL, "H200", NO_GO, "NO-GO"),
        (Weight.CONDITION, "H200", CONDITIONAL, "CONDITIONAL"),
        (Weight.FAIL, "A100", GO, "not asked on this GPU"),
        (Weight.NOTE, "H200", GO, None),
    ],
)
def test_expectations_count_in_the_verdict(
    counts: Weight, gpu: str, decision: Decision, said: str | None
) -> None:
    missed = Rule(name="s", metric="step_s", match=to(provider="nsa"), gpu=gpu, high=0.5)
    met = replace(missed, high=5.0)
    for one, wanted in ((missed, decision), (met, GO)):
        expectations = (replace(one, counts=counts),)
        verdict = judged({"nsa": 1.0, "dense": 3.0}, expectations=expectations)
        assert verdict.decision is wanted
        results = [r.said for r in verdict.rules if r.rule == EXPECTED]
        assert len(results) == (said is not None)
        assert one is met or not said or results == [said]


# --- the machine and the part of a suite -------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "asked"), [("A100", False), ("!A100", True), ("!H200", False), ("H200", True)]
)
def test_a_rule_is_asked_on_its_gpus(pattern: str, asked: bool) -> None:
    verdict = judged({"nsa": 1.0, "dense": 2.5}, rules=(replace(RATIO, gpu=pattern),))

    assert of(verdict).applies is asked
    assert of(verdict).said == ("GO" if asked else "not asked on this GPU")
    assert verdict.decision is (GO if asked else INCONCLUSIVE)


@pytest.mark.parametrize(("dense_s", "decision"), [(2.5, INCONCLUSIVE), (0.5, NO_GO)])
def test_a_question_about_another_gpu_is_never_go(dense_s: float, decision: Decision) -> None:
    verdict = judged({"nsa": 1.0, "dense": dense_s}, decides_for="A100")

    assert verdict.decision is decision
    assert verdict.said.startswith("A100 not measured; NVIDIA H200: ")
    assert verdict.here is (GO if decision is INCONCLUSIVE else NO_GO)


def test_rules_of_cases_that_were_left_out_are_not_asked() -> None:
    elsewhere = replace(RATIO, name="decode", match=to(workload="decode"), asked=4)
    verdict = judged({"nsa": 1.0, "dense": 2.5}, rules=(RATIO, elsewhere), left_out=4)

    assert (verdict.decision, verdict.said) == (GO, "GO (partial: 6 of 10 cases)")
    assert of(verdict, "decode").said == "not asked"


def stopped(*left: str, stop: Stop, rules: tuple[Rule, ...], **times: float) -> Verdict:
    """A run that ended before the cases with these parts of an id."""

    def measure(c: Case) -> list[Measurement]:
        return [] if any(part in c.case_id for part in left) else timed(c, times[c.provider])

    of = Study(replace(run(CASES, measure, rules=rules), stopped=stop))
    assert {s.stop for s in of.summaries if s.outcome is None} == {stop}
    return of.verdict


BUDGET = Stop(budget_s=600.0)
FAST = Rule(name="fast", metric="step_s", go=2.0, match=to(provider="nsa"))


def test_a_budget_leaves_a_partial_verdict_of_what_was_measured() -> None:
    other = replace(FAST, name="base", match=to(provider="dense"))
    verdict = stopped("/dense/", stop=BUDGET, rules=(FAST, other, RATIO), nsa=1.0, dense=3.0)

    assert (verdict.said, verdict.decision.exit_status) == ("GO (partial: 3 of 6 cases)", 0)
    said = {r.rule: r.said for r in verdict.rules if r.stated}
    assert said == {"fast": "GO", "base": "not asked", RATIO.name: "not asked"}
    assert "the budget of 10 min left no more time" in rule_sentence(of(verdict, "base"))


@pytest.mark.parametrize(
    ("nsa_s", "quantifier", "decision"),
    [(1.0, "all", INCONCLUSIVE), (5.0, "all", NO_GO), (1.0, "any", GO), (5.0, "any", INCONCLUSIVE)],
)
def test_a_rule_with_cases_that_were_not_run_is_decided_only_by_what_they_cannot_change(
    nsa_s: float, quantifier: str, decision: Decision
) -> None:
    rule = replace(FAST, quantifier=quantifier)
    verdict = stopped("/nsa/seq_len=2048", stop=BUDGET, rules=(rule,), nsa=nsa_s, dense=3.0)

    assert (of(verdict, "fast").decision, verdict.decision) == (decision, decision)
    assert verdict.partial == "5 of 6 cases"


def test_nothing_measured_is_undecided() -> None:
    verdict = stopped("/", stop=BUDGET, rules=(FAST,))

    assert (verdict.decision.exit_status, of(verdict, "fast").said) == (3, "not asked")


def test_a_rule_that_ended_the_run_is_its_verdict() -> None:
    stop = Stop(rule="fast")
    verdict = stopped("/dense/", stop=stop, rules=(FAST, RATIO), nsa=5.0, dense=3.0)

    expected = NO_GO, "fast", "3 of 6 cases"
    assert (verdict.decision, verdict.decided_by, verdict.partial) == expected
    assert of(verdict, EVERY_CASE_RAN).decision is GO
    assert "decided by rule “fast”" in rule_sentence(of(verdict))


def test_expectations_of_cases_that_were_not_run_are_not_asked() -> None:
    far = Rule(name="s", metric="step_s", match=to(provider="dense"), high=1.0)
    made = run(CASES, lambda c: timed(c, 1.0) if c.provider == "nsa" else [], expectations=[far])
    for stop, decision in ((BUDGET, GO), (None, INCONCLUSIVE)):
        assert Study(replace(made, stopped=stop)).verdict.decision is decision


def test_a_run_without_rules_is_measured_unless_it_failed() -> None:
    for failed, said, status in (({}, "measured", 0), ({"nsa": Outcome.CRASH}, "NO-GO", 1)):
        verdict = judged({"nsa": 1.0, "dense": 2.5}, rules=(), failed=failed)
        assert (verdict.said, verdict.decision.exit_status) == (said, status)


# --- the last octave ---------------------------------------------------------------------


def growth(*steps_s: float, over: str = "all") -> Finding:
    """The finding of a curve that takes these times at 512, 1024, ..."""
    cases = sweep(seq_len=[512 * 2**i for i in range(len(steps_s))])
    steps = {c.case_id: step_s for c, step_s in zip(cases, steps_s, strict=True)}
    rule = Rule(name="g", metric="scaling_exponent", axis="seq_len", go=1.3, abort=1.6, over=over)
    made = run(cases, lambda c: timed(c, steps[c.case_id], cv=0.001), rules=[rule])
    (found,) = of(Study(made).verdict, "g").findings
    return found


@pytest.mark.parametrize("over", ["all", "last_octave"])
@pytest.mark.parametrize(("last", "decision"), [(2.0, NO_GO), (1.2, GO)])
def test_a_curve_that_steepens_is_judged_by_its_last_octave(
    over: str, last: float, decision: Decision
) -> None:
    found = growth(1, 1.05, 1.1, 1.15, 1.15 * 2**last, over=over)

    assert found.decision is decision
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(last, abs=0.02)
    assert "4096–8192" in finding_sentence(found)


def test_a_growth_that_a_fixed_cost_hides_says_so() -> None:
    found = growth(1.0, 1.0, 1.0, 1.0)

    assert found.decision is GO
    assert "hardly depends on seq_len" in finding_sentence(found)
