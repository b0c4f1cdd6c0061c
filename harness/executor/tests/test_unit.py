"""What is compared is measured on one GPU."""

from dataclasses import replace
from typing import Any

from harness.executor.unit import units
from harness.records import Case, Gap, Match, Rule, Suite, Suspect, Suspects
from harness.tests import fake_runs

ON, OFF = (Match(criteria={"gc": (value,)}) for value in ("on", "off"))
RULE = Rule(name="r", metric="tokens_per_s", go=1.0)


def cases(**changes: Any) -> tuple[Case, ...]:
    """By seq_len and gc: 8 cases."""
    found = fake_runs.sweep(gc=("off", "on"), seq_len=(1, 2, 3, 4))
    return tuple(replace(c, **changes) for c in found)


def suite(*of: Case, **changes: Any) -> Suite:
    return replace(fake_runs.run(of or cases(), lambda _: []).suite, **changes)


def sizes(of: Suite) -> list[int]:
    return [len(members) for members in units(of)]


def test_what_nothing_compares_may_be_split() -> None:
    assert sizes(suite()) == [1] * 8


def test_providers_of_a_case_are_one_unit() -> None:
    more = fake_runs.sweep(provider="dense", gc=("off",), seq_len=(1, 2, 3, 4))
    assert sizes(suite(*cases(), *more)) == [2] * 4 + [1] * 4


def test_pairs_of_a_ratio_rule_are_one_unit() -> None:
    assert sizes(suite(rules=(replace(RULE, match=ON, against=OFF),))) == [2] * 4


def test_the_curve_of_a_scaling_rule_is_one_unit() -> None:
    rule = replace(RULE, metric="scaling_exponent", axis="seq_len", match=ON)
    assert sizes(suite(rules=(rule,))) == [1] * 4 + [4]


def test_cases_without_and_with_a_suspect_are_one_unit() -> None:
    gap = Gap(metric="tokens_per_s", expected=2.0, seen=1.0, source="s")
    tested = Suspect(name="gc", without=OFF, with_=ON)
    assert sizes(suite(suspects=Suspects(gap=gap, tested=(tested,)))) == [2] * 4


def test_links_join_to_one_unit_and_early_rules_come_first() -> None:
    scaling = replace(RULE, name="s", metric="scaling_exponent", axis="seq_len", match=OFF)
    assert sizes(suite(rules=(scaling, replace(RULE, match=ON, against=OFF)))) == [8]
    first = units(suite(rules=(replace(RULE, match=ON, abort_early=True),)))[0][0]
    assert first.axes["gc"] == "on"
