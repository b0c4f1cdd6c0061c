"""Sentences about a suite's verdict."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.study import Study
from harness.gate.records import State
from harness.records import Breakdown, Case, Decision, Measurement, Profile, Rule
from harness.report import text, verdict_text
from harness.report.answer import named
from harness.report.series import gate_text
from harness.tests.fake_runs import run, sweep, taking, timed, to
from harness.tests.fake_verdicts import gate_case


def test_a_case_that_is_judged_by_its_limits_alone_is_not_compared() -> None:
    only_limits = gate_case(state=State.UNCOMPARED, comparison=None, candidate_s=0.25)

    assert gate_text.change_text(only_limits) == "not compared: 250 ms"


@pytest.mark.parametrize(
    ("rule", "gap"),
    [
        (Rule(name="r", metric="tokens_per_s", go=500.0), ", missed by 20x"),
        (Rule(name="r", metric="tokens_per_s", go=500.0, quantifier="any"), ", missed by 10x"),
        (Rule(name="r", metric="tokens_per_s", go=1), ", met by 25x"),
    ],
)
def test_a_missed_limit_and_one_without_teeth_have_their_factor(rule: Rule, gap: str) -> None:
    cases = sweep(n=[1, 2])
    made = run(
        cases, lambda c: timed(c, 2.0 * float(c.axes["n"]), tokens=100, cv=1e-6), rules=[rule]
    )
    verdict = Study(made).verdict

    assert [verdict_text.margin_text(r) for r in verdict.rules if r.stated] == [gap]


def test_a_slower_side_is_said_to_be_and_by_how_many_a_rule_is_missed() -> None:
    cases = [*sweep(n=[1, 3]), *sweep(provider="dense", n=[1, 3])]
    of, than = to(provider="nsa"), to(provider="dense")
    rule = Rule(name="r", metric="step_s", go=1.0, match=of, against=than)
    steps = {"nsa": 0.1, "dense": 0.2}
    made = run(cases, lambda c: timed(c, 0.3 if c is cases[1] else steps[c.provider]), rules=[rule])
    (result,) = [r for r in Study(made).verdict.rules if r.stated]

    assert verdict_text.rule_sentence(result).endswith("slower than train/dense/n=3")
    assert verdict_text.number(result).startswith("misses 1 of 2, worst: 1.5")


STEPS = Rule(name="r", metric="step_s", go=0.15)
OURS, LONG = to(provider="nsa", seq_len=1), to(provider="nsa", seq_len=4)
DENSE = to(provider="dense")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"metric": "scaling_exponent", "axis": "seq_len"}, "1–4 by kernels, which decide; by "),
        ({"match": OURS}, "200 ms (2 processes); host-bound: kernels are 5 % of the step"),
        ({"match": LONG}, "200 ms (2 processes)"),  # the GPU works all the time
        ({"match": DENSE, "against": OURS, "go": 1.0}, "2.00x as fast as nsa by kernels (2 "),
        ({"match": LONG, "metric": "kernel_s"}, "160 ms"),
        ({"match": LONG, "against": OURS, "metric": "tokens_per_s"}, "; 4.00x slower by kernels"),
        ({"match": DENSE, "against": OURS, "metric": "peak_memory_bytes"}, "peak memory 100 % of"),
    ],
)
def test_a_speed_that_the_host_sets_has_that_of_the_kernels_beside_it(
    asked: dict[str, Any], said: str
) -> None:
    def measure(c: Case) -> list[Measurement]:
        busy_s = 0.01 * int(c.axes["seq_len"]) ** 2 / (2 if c.provider == "dense" else 1)
        work = Profile(breakdown=Breakdown(step_s=0.2, device_busy_s=busy_s))
        return [
            replace(m, profile=work) for m in taking(c, 0.2, 0.2 - (c.provider == "dense") / 99)
        ]

    cases = [*sweep(seq_len=[1, 2, 4]), *sweep(provider="dense", seq_len=[1])]
    made = run(cases, measure, rules=[replace(STEPS, **asked)])
    shown = named((of := Study(made)).verdict, of, of.fits)

    (result,) = [r for r in shown.rules if r.stated]
    assert said in text.finding_sentence(result.findings[0])
    assert result.decision is not Decision.INCONCLUSIVE


def test_one_likely_case_is_enough_where_one_is_asked() -> None:
    rules = [replace(STEPS, quantifier="any")]
    made = run(sweep(n=[2, 1]), lambda c: taking(c, 0.1 * int(c.axes["n"])), rules=rules)
    (result,) = [r for r in Study(made).verdict.rules if r.stated]

    assert (verdict_text.word(result), verdict_text.number(result)[:6]) == ("likely", "100 ms")
