"""A planted step is found in a history of readings; without a step no commit is found."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from harness.bisect.posterior import Grid, Posterior, ProcessReading
from harness.bisect.search import (
    BisectStage,
    CommitsConclusion,
    ExactSearch,
    NextBlock,
    NoisySearch,
)
from harness.bisect.tests.modelled import carried_out
from harness.records import Change
from harness.report.series.gate_text import because
from reports.studies.noise import QUIET

STEP = math.log(1.05)
PAIRS = [STEP + e for e in (0.004, -0.006, 0.002, -0.001, 0.005, -0.004)]


Search = Callable[..., tuple[CommitsConclusion, list[NextBlock]]]


def noisy(
    culprit: int, *, last: int = 64, factor: float = 1.1, cannot: tuple[int, ...] = ()
) -> tuple[CommitsConclusion, list[NextBlock]]:
    """A search for a step on a quiet node on which some commits do not build."""
    search = NoisySearch(last, 0.03)
    return carried_out(
        search, lambda p: factor if p >= culprit else 1.0, QUIET, 3, cannot.__contains__
    )


def exact(
    culprit: int, *, factor: float = 1.1, cannot: tuple[int, ...] = ()
) -> tuple[CommitsConclusion, list[NextBlock]]:
    search = ExactSearch(64)
    return carried_out(
        search, lambda p: factor if p >= culprit else 1.0, cannot=cannot.__contains__
    )


# --- the posterior -----------------------------------------------------------------------


def after(last: int, *blocks: dict[int, float], grid: Grid | None = None) -> Posterior:
    """The posterior of some blocks: position -> log reading."""
    posterior = Posterior(last, grid or Grid.around(PAIRS))
    for block in blocks:
        posterior.add([ProcessReading(position=p, value=math.exp(x)) for p, x in block.items()])
    return posterior


def test_two_readings_of_a_block_are_compared_and_one_has_no_influence() -> None:
    assert after(8, {0: 0.0, 4: STEP}).probabilities[1:5].sum() > 0.9
    assert after(4, {2: 1.0}).probabilities[1:] == pytest.approx(0.25)


def test_a_probability_is_that_of_a_plain_sum_over_the_level() -> None:
    """One step and one scale, so that only the level of the block is unknown."""
    step, scale, logs = 0.1, 0.02, (0.0, 0.04, 0.1)
    grid = Grid(np.array([step]), np.array([scale]))

    found = after(2, dict(enumerate(logs)), grid=grid).probabilities[1]

    levels = np.linspace(-1, 1, 100_001)
    likelihood = [
        np.prod(
            [
                (1 + ((log - is_bad * step - levels) / scale) ** 2 / 4) ** -2.5
                for log, is_bad in zip(logs, bad, strict=True)
            ],
            axis=0,
        ).sum()
        for bad in ((0, 1, 1), (0, 0, 1))
    ]
    assert found == pytest.approx(likelihood[0] / sum(likelihood), abs=0.001)


# --- the search --------------------------------------------------------------------------


def test_a_planted_five_per_cent_is_found_and_confirmed() -> None:
    found, asked = noisy(41, factor=1.05)

    assert found.found
    assert found.culprits == (41,)
    assert found.comparison is not None
    assert found.comparison.ratio.value == pytest.approx(1.05, abs=0.01)
    confirming = sum(a.stage is BisectStage.CONFIRM for a in asked)
    assert found.comparison.ratio.n == confirming == 12, "the first look decides"
    assert {a.stage for a in asked} == {*BisectStage} - {BisectStage.PROFILE}
    assert sum(len(a.positions) for a in asked) < 80


@pytest.mark.parametrize(
    ("step", "sd", "looks", "change"),
    [
        (0.05, 0.004, 12, Change.SLOWER),
        (0.0, 0.004, 12, Change.SAME),
        (0.02, 0.02, 18, Change.SLOWER),
        (0.02, 0.06, 40, Change.UNDECIDED),
    ],
    ids=["clear", "none", "noisy", "too noisy"],
)
def test_the_confirmation_looks_in_steps_and_stops_when_one_decides(
    step: float, sd: float, looks: int, change: Change
) -> None:
    search, rng = NoisySearch(2, 0.03), np.random.default_rng(4)
    while isinstance(asked := search.confirm(0, 1, 1.0), NextBlock):
        taken = len(search.blocks)
        assert (asked.number, asked.of > taken) == (taken + 1, True)
        values = {0: 1.0, 1: math.exp(step + rng.normal(0, sd))}
        block = [ProcessReading(position=p, value=values[p]) for p in asked.positions]
        search.add(asked.stage, block)

    assert (asked.ratio.n, asked.change) == (looks, change)
    if looks == 12 and change is Change.SLOWER:  # 1/924 is the least of the exact test
        assert asked.ratio.p == pytest.approx(1 / 924 / 0.3, rel=0.2), "a look spends 30 % of alpha"


@pytest.mark.parametrize(
    ("last", "culprit", "factor"),
    [(16, 5, 0.9), (64, 1, 1.1), (64, 64, 1.1)],
    ids=["faster", "first", "last"],
)
def test_a_step_down_and_steps_at_ends_are_found(last: int, culprit: int, factor: float) -> None:
    found, _ = noisy(culprit, last=last, factor=factor)

    assert found.found
    assert found.culprits == (culprit,)


@pytest.mark.parametrize("search", [noisy, exact])
def test_equal_anchors_find_no_commit(search: Search) -> None:
    found, asked = search(65, factor=1.0)

    assert (found.found, found.culprits) == (False, ())
    assert "do not differ" in because(found.facts)  # it would have been seen
    assert {a.stage for a in asked} == {BisectStage.ANCHORS}


def test_a_step_that_new_pairs_do_not_show_is_likely_but_not_found() -> None:
    search, rng = NoisySearch(16, 0.03), np.random.default_rng(1)
    while isinstance(asked := search.next(), NextBlock):
        step = 1.05 if asked.stage is not BisectStage.CONFIRM else 1.0
        block = [
            ProcessReading(
                position=p, value=(step if p >= 5 else 1) * math.exp(rng.normal(0, 2e-3))
            )
            for p in asked.positions
        ]
        search.add(asked.stage, block)

    assert (asked.culprits, asked.found) == ((5,), False)
    assert "likely but not confirmed" in because(asked.facts)


@pytest.mark.parametrize(("search", "most"), [(noisy, 50), (exact, 10)])
def test_commits_that_cannot_be_measured_are_named_together(search: Search, most: int) -> None:
    cannot = (30, 31, 32)

    found, asked = search(31, cannot=cannot)

    assert found.culprits == (*cannot, 33)
    assert not found.found
    assert len(asked) <= most
    assert not {p for a in asked for p in a.positions} & {*cannot}


def test_an_effect_may_be_larger_than_the_tolerance_of_a_stored_baseline() -> None:
    assert isinstance(NoisySearch(8, 0.5).next(), NextBlock)


# --- without noise -----------------------------------------------------------------------


def test_a_counter_takes_about_log2_processes() -> None:
    for culprit in range(1, 65):
        found, asked = exact(culprit)
        assert found.found
        assert found.culprits == (culprit,)
        assert len(asked) <= 2 + 6


def test_a_small_change_before_the_large_one_does_not_make_a_commit_bad() -> None:
    """A counter is bad if it is nearer to the bad commit's."""
    found, _ = carried_out(ExactSearch(8), lambda p: 10.0 if p >= 6 else 3.0 if p >= 2 else 2.0)

    assert found.culprits == (6,)
    assert found.good == 5
