"""Sentences about a suite's verdict."""

import pytest

from harness.analysis.verdict import of_run
from harness.gate.records import State
from harness.records import Rule
from harness.report import verdict_text
from harness.report.series import gate_text
from harness.tests.fake_runs import run, sweep, timed, to
from harness.tests.fake_verdicts import gate_case


def test_a_case_that_is_judged_by_its_limits_alone_is_not_compared() -> None:
    only_limits = gate_case(state=State.UNCOMPARED, comparison=None, candidate_s=0.25)

    assert gate_text.change_text(only_limits) == "not compared: 250 ms"


@pytest.mark.parametrize(
    ("rule", "gap"),
    [
        (Rule(name="r", metric="tokens_per_s", go=500.0), ", missed by 20x"),
        (Rule(name="r", metric="tokens_per_s", go=500.0, quantifier="any"), ", missed by 10x"),
        (Rule(name="r", metric="tokens_per_s", go=1), ", met 25x over"),
    ],
)
def test_a_missed_limit_and_one_without_teeth_have_their_factor(rule: Rule, gap: str) -> None:
    cases = sweep(n=[1, 2])
    made = run(
        cases, lambda c: timed(c, 2.0 * float(c.axes["n"]), tokens=100, cv=1e-6), rules=[rule]
    )
    _, verdict = of_run(made)

    assert [verdict_text.margin_text(r) for r in verdict.rules if r.stated] == [gap]


def test_a_slower_side_is_said_to_be_and_by_how_many_a_rule_is_missed() -> None:
    cases = [*sweep(n=[1, 3]), *sweep(provider="dense", n=[1, 3])]
    of, than = to(provider="nsa"), to(provider="dense")
    rule = Rule(name="r", metric="step_s", go=1.0, match=of, against=than)
    steps = {"nsa": 0.1, "dense": 0.2}
    made = run(cases, lambda c: timed(c, 0.3 if c is cases[1] else steps[c.provider]), rules=[rule])
    (result,) = [r for r in of_run(made)[1].rules if r.stated]

    assert verdict_text.rule_sentence(result).endswith("slower than train/dense/n=3")
    assert verdict_text.number(result).startswith("missed by 1 of 2: 1.5")
