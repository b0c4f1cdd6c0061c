"""What is compared is measured on one GPU; blocks are shorter than their limit."""

from dataclasses import replace
from typing import Any

import pytest

from harness.executor.blocks import LEAST_S, MOST_CASES, packed, units
from harness.executor.jobs import BLOCK_S
from harness.records import Case, Gap, Match, Program, Rule, Suite, Suspect, Suspects
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
    gap = Gap(metric="tokens_per_s", expected=2.0, seen=1.0)
    tested = Suspect(name="gc", without=OFF, with_=ON)
    assert sizes(suite(suspects=Suspects(gap=gap, tested=(tested,)))) == [2] * 4


def test_links_join_to_one_unit_and_early_rules_come_first() -> None:
    scaling = replace(RULE, name="s", metric="scaling_exponent", axis="seq_len", match=OFF)
    assert sizes(suite(rules=(scaling, replace(RULE, match=ON, against=OFF)))) == [8]
    first = units(suite(rules=(replace(RULE, match=ON, abort_early=True),)))[0][0]
    assert first.axes["gc"] == "on"


@pytest.mark.parametrize(
    ("unit_s", "slots", "sizes"),
    [
        pytest.param(BLOCK_S * 0.9, 1, [2] * 4, id="under-the-limit"),
        pytest.param(BLOCK_S * 2, 4, [2] * 4, id="never-smaller-than-a-unit"),
        pytest.param(LEAST_S * 2, 1, [2] * 4, id="several-a-slot"),
        pytest.param(LEAST_S / 2, 1, [4] * 2, id="worth-a-start"),
        pytest.param(LEAST_S / 4, 2, [4] * 2, id="no-slot-without-one"),
    ],
)
def test_blocks_keep_units_whole(unit_s: float, slots: int, sizes: list[int]) -> None:
    of = units(suite(rules=(replace(RULE, match=ON, against=OFF),)))
    found = packed(of, {c.case_id: unit_s / 6 for c in cases()}, slots=slots)  # 3 processes each
    assert [len(b.case_ids) for b in found] == sizes
    assert [b.name for b in found] == [f"b{i:03d}" for i in range(len(found))]


def test_the_cases_of_a_block_fit_into_a_command() -> None:
    many = fake_runs.sweep(seq_len=range(MOST_CASES + 1))
    found = packed([(c,) for c in many], {c.case_id: 0.01 for c in many}, slots=1)
    assert [len(b.case_ids) for b in found] == [MOST_CASES, 1]


def test_cases_that_need_the_node_come_first_and_in_own_blocks() -> None:
    one, two, three, four, *_ = cases()
    several = replace(two, program=Program(argv=("x",), gpus=2))
    host_bound = replace(three, settings=replace(three.settings, exclusive=True))
    ranks = replace(four, program=Program(argv=("x",), world_size=2))
    of = [(one,), (several,), (host_bound,), (ranks,)]
    found = packed(of, {c.case_id: 1.0 for (c,) in of}, slots=1)
    assert [(b.alone, len(b.case_ids)) for b in found] == [(True, 3), (False, 1)]
