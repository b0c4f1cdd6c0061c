"""Sentences about a suite's verdict."""

from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.records import Match, Outcome, Rule
from harness.report import verdict_text
from harness.tests.fake_runs import ended, run, sweep, timed


def test_a_requirement_states_its_cases_and_thresholds() -> None:
    rule = Rule(
        name="floor", metric="tokens_per_s", go=500, abort=100, match=Match(criteria={"gc": (0,)})
    )
    made = run(sweep(gc=[0]), lambda c: timed(c, 0.05), rules=[rule])

    (*_, result) = judge(made.suite, made.environment, (), ()).rules

    assert all(part in verdict_text.requirement_text(result) for part in ("500", "gc=0", "100"))


def test_cases_that_ended_alike_share_a_sentence() -> None:
    cases = sweep(n=[0, 1, 2, 3])
    made = run(cases, lambda c: ended(c, Outcome.CRASH, detail="illegal memory access"))

    sentence = verdict_text.verdict_sentence(
        judge(made.suite, made.environment, summarise(made), ())
    )

    assert [c.case_id in sentence for c in cases] == [True, True, False, False]
    assert sentence.count("illegal memory access") == 1
