"""Sentences about a suite's verdict."""

from harness.gate.records import State
from harness.report.series import gate_text
from harness.tests.fake_verdicts import gate_case


def test_a_case_that_is_judged_by_its_limits_alone_is_not_compared() -> None:
    only_limits = gate_case(state=State.UNCOMPARED, comparison=None, candidate_s=0.25)

    assert gate_text.change_text(only_limits) == "not compared: 250 ms"
