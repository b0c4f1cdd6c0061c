"""Planted causes are found among idle differences: alone, together and one after the other."""

import math
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from harness.bisect.ddmin import (
    DifferencesConclusion,
    ExactDdmin,
    NoisyDdmin,
    mask_of,
    members,
    minimal,
)
from harness.bisect.search import BisectStage, NextBlock, ProcessReading
from reports.studies.noise import QUIET, TYPICAL, ModelledNoise

Cost = Callable[[frozenset[int]], float]


def carried_out(
    search: ExactDdmin | NoisyDdmin,
    cost: Cost,
    noise: ModelledNoise | None = None,
    seed: int = 0,
    cannot: Callable[[frozenset[int]], bool] = lambda items: False,
) -> tuple[DifferencesConclusion, list[NextBlock]]:
    """A search answered by a modelled node; `cost` is the value of a set of differences."""
    logs = noise.sequence(np.random.default_rng(seed), 1, 3000)[0] if noise else np.zeros(3000)
    asked, taken = list[NextBlock](), 0
    while not isinstance(question := search.next(), DifferencesConclusion):
        broken = [p for p in question.positions if cannot(frozenset(members(p)))]
        if broken:
            search.skipped |= set(broken)
            continue
        asked.append(question)
        looks = []
        for mask in question.positions:
            value = cost(frozenset(members(mask))) * math.exp(logs[taken])
            looks.append(ProcessReading(position=mask, value=value))
            taken += 1
        search.add(question.stage, looks)
    return question, asked


def slowed(by: Mapping[int, float]) -> Cost:
    """Each difference multiplies the time by so much, and the others do nothing."""
    return lambda items: math.prod(by.get(i, 1.0) for i in items)


def sets(found: DifferencesConclusion) -> list[tuple[int, ...]]:
    return [p.items for p in found.parts]


@pytest.mark.parametrize("wanted", [{0}, {7}, {2, 5}, {0, 1, 6}, set(range(8))])
def test_the_smallest_set_is_found_in_few_questions(wanted: set[int]) -> None:
    asked = []

    def moves(mask: int) -> bool:
        asked.append(mask)
        return wanted <= set(members(mask))

    assert minimal(range(8), moves) == mask_of(sorted(wanted))
    assert len(asked) < 8**2


def test_one_counter_among_twelve_differences_takes_few_processes() -> None:
    found, asked = carried_out(ExactDdmin(12), lambda s: 7.0 if 9 in s else 4.0)

    assert found.found
    assert sets(found) == [(9,)]
    assert len(asked) <= 2 + 9
    assert all(len(a.positions) == 1 for a in asked)


def test_two_differences_that_act_only_together_are_one_set() -> None:
    found, _ = carried_out(ExactDdmin(6), lambda s: 2.0 if {1, 4} <= s else 1.0)

    assert sets(found) == [(1, 4)]


def test_two_counts_that_add_up_are_both_named() -> None:
    found, _ = carried_out(ExactDdmin(6), lambda s: 1.0 + 4 * (1 in s) + 2 * (4 in s))

    assert found.found
    assert {i for part in sets(found) for i in part} == {1, 4}


def test_equal_configurations_find_no_difference() -> None:
    found, asked = carried_out(ExactDdmin(4), lambda s: 3.0)

    assert not found.found
    assert "do not differ" in found.reason
    assert len(asked) == 2


def test_a_configuration_that_cannot_be_measured_is_not_the_answer() -> None:
    """Difference 3 runs only with 2."""
    found, _ = carried_out(
        ExactDdmin(4),
        lambda s: 5.0 if 3 in s else 1.0,
        cannot=lambda s: 3 in s and 2 not in s,
    )

    assert sets(found) == [(2, 3)]


@pytest.mark.parametrize("item", [0, 4])
def test_a_slow_difference_is_found_and_confirmed(item: int) -> None:
    found, asked = carried_out(NoisyDdmin(5, 0.03), slowed({item: 1.06}), TYPICAL, seed=2)

    assert found.found
    assert sets(found) == [(item,)]
    assert found.parts[0].comparison is not None
    assert found.parts[0].comparison.ratio == pytest.approx(1.06, abs=0.015)
    assert {a.stage for a in asked} == set(BisectStage)
    assert sum(len(a.positions) for a in asked) < 150


def test_two_slow_differences_are_both_found() -> None:
    found, _ = carried_out(
        NoisyDdmin(5, 0.03),
        slowed({1: 1.12, 3: 1.05}),
        QUIET,
        seed=3,
    )

    assert found.found
    assert {i for part in sets(found) for i in part} == {1, 3}


def test_a_difference_that_made_it_faster_is_found() -> None:
    found, _ = carried_out(NoisyDdmin(4, 0.03), slowed({2: 0.9}), QUIET, seed=4)

    assert found.found
    assert sets(found) == [(2,)]


def test_equal_noisy_configurations_find_no_difference() -> None:
    found, asked = carried_out(NoisyDdmin(4, 0.03), slowed({}), TYPICAL, seed=5)

    assert not found.found
    assert found.parts == ()
    assert "do not differ" in found.reason
    assert {a.stage for a in asked} == {BisectStage.ANCHORS}


def test_single_differences_are_found_on_a_typical_node() -> None:
    rng = np.random.default_rng(6)
    right = 0
    for seed in range(4):
        item = int(rng.integers(6))
        cost = slowed({item: 1.05})
        found, _ = carried_out(NoisyDdmin(6, 0.03), cost, TYPICAL, seed=seed)
        right += sets(found) == [(item,)] and found.found
    assert right >= 3


def test_a_part_of_the_difference_does_not_include_idle_differences() -> None:
    found, _ = carried_out(NoisyDdmin(8, 0.03), slowed({2: 1.05, 5: 1.05}), TYPICAL, seed=4)

    assert sorted(sets(found)) == [(2,), (5,)]
