"""Planted causes are found among idle differences: alone, together and one after the other."""

import math
from collections.abc import Callable, Mapping

import pytest

from harness.bisect.ddmin import (
    DifferencesConclusion,
    ExactDdmin,
    NoisyDdmin,
    mask_of,
    members,
    minimal,
)
from harness.bisect.search import BisectStage
from harness.bisect.tests.modelled import carried_out
from reports.studies.noise import QUIET, TYPICAL, ModelledNoise


def of_set(value: Callable[[set[int]], float]) -> Callable[[int], float]:
    return lambda mask: value(set(members(mask)))


def slowed(by: Mapping[int, float]) -> Callable[[int], float]:
    """Each difference multiplies the time by so much, and the others do nothing."""
    return of_set(lambda s: math.prod(by.get(i, 1.0) for i in s))


def sets(found: DifferencesConclusion) -> list[tuple[int, ...]]:
    return sorted(p.items for p in found.parts)


@pytest.mark.parametrize("wanted", [{0}, {7}, {2, 5}, {0, 1, 6}, set(range(8))])
def test_the_smallest_set_is_found_in_few_questions(wanted: set[int]) -> None:
    asked = []

    def moves(mask: int) -> bool:
        asked.append(mask)
        return wanted <= set(members(mask))

    assert minimal(range(8), moves) == mask_of(sorted(wanted))
    assert len(asked) < 8**2


def test_one_counter_among_twelve_differences_takes_few_processes() -> None:
    found, asked = carried_out(ExactDdmin(12), of_set(lambda s: 7.0 if 9 in s else 4.0))

    assert found.found
    assert sets(found) == [(9,)]
    assert len(asked) <= 2 + 9
    assert all(len(a.positions) == 1 for a in asked)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(lambda s: 2.0 if {1, 4} <= s else 1.0, [(1, 4)], id="together"),
        pytest.param(lambda s: 1.0 + 4 * (1 in s) + 2 * (4 in s), [(1,), (4,)], id="added"),
    ],
)
def test_two_differences_that_count_are_both_named(
    count: Callable[[set[int]], float], expected: list[tuple[int, ...]]
) -> None:
    found, _ = carried_out(ExactDdmin(6), of_set(count))

    assert found.found
    assert sets(found) == expected


def test_a_configuration_that_cannot_be_measured_is_not_the_answer() -> None:
    """Difference 3 runs only with 2."""
    found, _ = carried_out(
        ExactDdmin(4),
        of_set(lambda s: 5.0 if 3 in s else 1.0),
        cannot=lambda mask: 3 in members(mask) and 2 not in members(mask),
    )

    assert sets(found) == [(2, 3)]


def test_a_slow_difference_is_found_and_confirmed() -> None:
    found, asked = carried_out(NoisyDdmin(5, 0.03), slowed({4: 1.06}), TYPICAL, seed=2)

    assert found.found
    assert sets(found) == [(4,)]
    assert found.parts[0].comparison is not None
    assert found.parts[0].comparison.ratio == pytest.approx(1.06, abs=0.015)
    assert {a.stage for a in asked} == {*BisectStage} - {BisectStage.PROFILE}
    assert sum(len(a.positions) for a in asked) < 150


@pytest.mark.parametrize(
    ("count", "planted", "noise"),
    [
        pytest.param(4, {2: 0.9}, QUIET, id="faster"),
        pytest.param(5, {1: 1.12, 3: 1.05}, QUIET, id="two"),
        pytest.param(8, {2: 1.05, 5: 1.05}, TYPICAL, id="two alike"),
    ],
)
def test_all_that_moved_the_time_are_found_without_idle_ones(
    count: int, planted: dict[int, float], noise: ModelledNoise
) -> None:
    found, _ = carried_out(NoisyDdmin(count, 0.03), slowed(planted), noise, seed=4)

    assert found.found
    assert sets(found) == [(i,) for i in planted]


@pytest.mark.parametrize("search", [ExactDdmin(4), NoisyDdmin(4, 0.03)], ids=["exact", "noisy"])
def test_equal_configurations_find_no_difference(search: ExactDdmin | NoisyDdmin) -> None:
    noise = TYPICAL if isinstance(search, NoisyDdmin) else None

    found, asked = carried_out(search, slowed({}), noise, seed=5)

    assert not found.found
    assert found.parts == ()
    assert "do not differ" in found.reason
    assert {a.stage for a in asked} == {BisectStage.ANCHORS}
