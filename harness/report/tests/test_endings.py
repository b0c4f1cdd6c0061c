"""The last lines on the screen after a run."""

from dataclasses import replace

import pytest

from harness.analysis.study import Study
from harness.records import Case, Evidence, Measurement, Outcome, Rule
from harness.report.endings import next_lines, number_lines, verdict_lines
from harness.tests.fake_runs import ended, run, sweep, timed, to, variables

CASES = [*sweep(seq_len=[512, 1024, 2048]), *sweep(provider="dense", seq_len=[512, 1024, 2048])]
FAST = Rule(name="fast enough", metric="tokens_per_s", go=100)


def steps(case: Case) -> list[Measurement]:
    """NSA grows in proportion, and takes three times as long as dense."""
    seconds = int(case.axes["seq_len"]) * (3e-4 if case.provider == "nsa" else 1e-4)
    return timed(case, seconds)


def test_the_last_lines_have_the_verdict_and_three_numbers() -> None:
    of = Study(run(CASES, steps, rules=[FAST]))

    assert [*verdict_lines(of)] == [("Verdict", "GO: all 2 rules are met")]
    lines = dict(number_lines(of))
    assert [*lines] == ["Compared", "Speed", "Growth"]
    assert "seq_len=512: nsa is 3" in lines["Compared"]
    assert "slower than dense (154 ms and 51." in lines["Compared"]
    assert lines["Speed"].endswith("tokens/s")
    assert lines["Growth"] == "train nsa: a step grows as seq_len^1.0 from 1,024 to 2,048"


def test_the_pair_of_a_rule_is_compared_before_any_other() -> None:
    ours, theirs = to(provider="nsa", seq_len=2048), to(provider="dense")
    rule = replace(FAST, name="ratio", metric="step_s", match=ours, against=theirs, go=0.1)
    of = Study(run(CASES, steps, rules=[rule]))

    assert "seq_len=2048: nsa is 3" in dict(number_lines(of))["Compared"]


def test_rules_that_are_not_met_have_a_line_each() -> None:
    rules = [replace(FAST, name=name, go=1e9) for name in "abcde"]
    of = Study(run(CASES, steps, rules=rules))

    head, *rest = (text for _, text in verdict_lines(of))

    assert head == "NO-GO: 5 of 6 rules are not met"
    assert [text[:8] for text in rest] == ["NO-GO: a", "NO-GO: b", "NO-GO: c", "and 2 mo"]


@pytest.mark.parametrize(
    ("name", "commands"), [("smoke", ["run smoke-gpu", "harness init"]), ("mine", ["harness show"])]
)
def test_what_to_try_next_is_a_command(name: str, commands: list[str]) -> None:
    of = Study(run(CASES, steps, name=name))

    said = [text for _, text in next_lines(of)]

    assert [any(c in text for c in commands) for text in said] == [True] * len(commands)


@pytest.mark.parametrize("unread", [False, True])
def test_after_a_failure_the_next_step_repeats_the_case_alone(unread: bool) -> None:
    how = Outcome.UNSUPPORTED if unread else Outcome.CRASH
    seen = Evidence(steps=0)
    of = Study(run(CASES[:1], lambda c: [replace(m, evidence=seen) for m in ended(c, how)]))

    (said,) = (text for _, text in verdict_lines(of))
    last = "\n".join(text for _, text in next_lines(of))

    assert "every case ran" not in said
    assert f"--filter {CASES[0].case_id} --set measure.processes=1" in last
    assert ("let init find it: harness init --command" in last) is unread


def test_what_two_axes_do_only_together_is_said_first() -> None:
    of = Study(variables())

    label, said = next(iter(number_lines(of)))

    assert label == "Together"
    assert said == "A=1 with B=1 is at least 47x faster; neither alone is shown to be."
