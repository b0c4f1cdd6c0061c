"""Sentences about a suite's verdict."""

import pytest

from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.gate.records import State
from harness.records import Decision, Estimate, Fact, Finding, Outcome, Rule
from harness.report import verdict_text
from harness.report.series import gate_text
from harness.tests.fake_runs import ended, run, sweep, timed
from harness.tests.fake_verdicts import gate_case


def test_cases_that_ended_alike_share_a_sentence() -> None:
    cases = sweep(n=[0, 1, 2, 3])
    made = run(cases, lambda c: ended(c, Outcome.CRASH, detail="illegal memory access"))

    sentence = verdict_text.verdict_sentence(
        judge(made.suite, made.environment, summarise(made), ())
    )

    assert [c.case_id in sentence for c in cases] == [True, True, False, False]
    assert sentence.count("illegal memory access") == 1


@pytest.mark.parametrize(
    ("rule", "gap"),
    [
        (Rule(name="r", metric="tokens_per_s", go=500.0), ", missed by 20x"),
        (Rule(name="r", metric="tokens_per_s", go=500.0, quantifier="any"), ", missed by 10x"),
        (Rule(name="r", metric="step_s", go=1.0), ", missed by 4.0x"),
        (Rule(name="r", metric="tokens_per_s", go=26.0), ", missed by 1.04x"),
        (Rule(name="r", metric="host_syncs", go=0.0), ""),
        (Rule(name="r", metric="tokens_per_s", go=20.0), ""),
        (Rule(name="r", metric="tokens_per_s", go=1), ", met 25x over"),
    ],
)
def test_a_missed_limit_and_one_without_teeth_have_their_factor(rule: Rule, gap: str) -> None:
    cases = sweep(n=[1, 2])
    made = run(
        cases, lambda c: timed(c, 2.0 * float(c.axes["n"]), tokens=100, cv=1e-6), rules=[rule]
    )

    (result,) = (
        r for r in judge(made.suite, made.environment, summarise(made), ()).rules if r.stated
    )

    assert verdict_text.margin_text(result) == gap


def test_a_case_that_is_judged_by_its_limits_alone_is_not_compared() -> None:
    only_limits = gate_case(state=State.UNCOMPARED, comparison=None, candidate_s=0.25)

    assert gate_text.change_text(only_limits) == "not compared: 250 ms"


def test_a_metric_that_only_a_program_knows_goes_by_its_name() -> None:
    lacking = Finding(decision=Decision.INCONCLUSIVE, fact=Fact.NO_METRIC, metric="loss")

    assert verdict_text.finding_sentence(lacking) == "loss not available"


def test_what_stays_open_says_after_how_many_processes() -> None:
    e = Estimate(value=2.0, low=1.0, high=4.0, processes=4, samples=9, each=(1.0, 2.0, 2.0, 4.0))
    left = Finding(decision=Decision.INCONCLUSIVE, fact=Fact.OPEN, metric="step_s", estimate=e)

    assert verdict_text.finding_sentence(left).endswith(", open after 4 processes")
