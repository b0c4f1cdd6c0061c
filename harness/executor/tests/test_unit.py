"""What is compared is measured on one GPU."""

from dataclasses import replace
from typing import Any

import pytest

from harness.executor.unit import joined, units
from harness.records import Case, Gap, Match, Observation, Rule, Suite, Suspect, Suspects
from harness.tests import fake_runs

ON, OFF = (Match(criteria={"gc": (value,)}) for value in ("on", "off"))
RULE = Rule(name="r", metric="tokens_per_s", go=1.0)
PAIRS = replace(RULE, match=ON, against=OFF)
CURVE = replace(RULE, name="s", metric="scaling_exponent", axis="seq_len", match=ON)
CASES = fake_runs.sweep(gc=("off", "on"), seq_len=(1, 2, 3, 4))


def suite(*of: Case, **changes: Any) -> Suite:
    return replace(fake_runs.run(of or CASES, lambda _: []).suite, **changes)


def sizes(of: Suite) -> list[int]:
    return [len(members) for members in units(of)]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ([], [1] * 8),  # nothing is compared
        ([PAIRS], [2] * 4),
        ([CURVE], [1] * 4 + [4]),
        ([PAIRS, replace(CURVE, match=OFF)], [8]),  # links join
    ],
)
def test_what_a_rule_compares_is_one_unit(rules: list[Rule], expected: list[int]) -> None:
    assert sizes(suite(rules=tuple(rules))) == expected


def test_a_suspect_or_a_provider_makes_a_unit_early_rules_are_first_and_small_ones_share() -> None:
    gap = Gap(metric="tokens_per_s", expected=2.0, seen=1.0, source="s")
    tested = Suspect(name="gc", without=OFF, with_=ON)
    more = fake_runs.sweep(provider="dense", gc=("off",), seq_len=(1, 2, 3, 4))
    many = fake_runs.sweep(gc=("off", "on"), seq_len=range(1, 33))
    ratio = Observation(metric="step_s", seen=1.0, at=ON, over=OFF)
    for asked in ({"tested": (tested,)}, {"tested": (), "observed": (ratio,)}):
        assert sizes(suite(suspects=Suspects(gap=gap, **asked))) == [2] * 4
    assert sizes(suite(*CASES, *more)) == [2] * 4 + [1] * 4
    assert units(suite(rules=(replace(RULE, match=ON, abort_early=True),)))[0][0].axes["gc"] == "on"
    assert [len(joined(units(suite(*many, rules=(PAIRS,))), n)) for n in (1, 8)] == [8, 16]
