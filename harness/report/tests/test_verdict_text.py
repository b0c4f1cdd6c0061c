"""Sentences about a suite's verdict."""

import pytest

from harness.analysis.verdict import of_run
from harness.gate.records import State
from harness.records import Rule
from harness.report import verdict_text
from harness.report.series import gate_text
from harness.tests.fake_runs import run, sweep, timed
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
