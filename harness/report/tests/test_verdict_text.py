"""Sentences about a suite's verdict."""

from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.records import Outcome
from harness.report import verdict_text
from harness.tests.fake_runs import ended, run, sweep


def test_cases_that_ended_alike_share_a_sentence() -> None:
    cases = sweep(n=[0, 1, 2, 3])
    made = run(cases, lambda c: ended(c, Outcome.CRASH, detail="illegal memory access"))

    sentence = verdict_text.verdict_sentence(
        judge(made.suite, made.environment, summarise(made), ())
    )

    assert [c.case_id in sentence for c in cases] == [True, True, False, False]
    assert sentence.count("illegal memory access") == 1
