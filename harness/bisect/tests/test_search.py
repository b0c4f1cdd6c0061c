"""A planted step is found in a history of readings; without a step no commit is found."""

import math

import numpy as np
import pytest

from harness.bisect.posterior import (
    LEAST_SCALE,
    SCALES,
    Grid,
    LogReading,
    Posterior,
    groups,
    information,
    most_informative,
)
from harness.bisect.search import (
    ANCHOR_PAIRS,
    BisectStage,
    CommitsConclusion,
    ExactSearch,
    NextBlock,
    NoisySearch,
    ProcessReading,
)
from reports.studies.bisect_errors import bisect
from reports.studies.noise import QUIET, TYPICAL

STEP = math.log(1.05)
PAIRS = [STEP + e for e in (0.004, -0.006, 0.002, -0.001, 0.005, -0.004)]


def carried_out(
    search: ExactSearch | NoisySearch,
    culprit: int,
    factor: float,
    seed: int,
    cannot: frozenset[int] = frozenset(),
) -> tuple[CommitsConclusion, list[NextBlock]]:
    """A search answered by a quiet node on which some commits do not build."""
    logs = QUIET.sequence(np.random.default_rng(seed), 1, 2000)[0]
    exact = isinstance(search, ExactSearch)
    asked, taken = [], 0
    while not isinstance(question := search.next(), CommitsConclusion):
        if broken := set(question.positions) & cannot:
            search.skipped |= broken
            continue
        asked.append(question)
        looks = []
        for position in question.positions:
            bad = position >= culprit
            value = float(bad) if exact else math.exp(logs[taken]) * (factor if bad else 1)
            looks.append(ProcessReading(position=position, value=value))
            taken += 1
        search.add(question.stage, looks)
    return question, asked


# --- the posterior -----------------------------------------------------------------------


def test_a_block_moves_the_probability_to_the_right_side() -> None:
    posterior = Posterior(8, Grid.around(PAIRS))

    posterior.add([LogReading(0, 0.0), LogReading(4, STEP), LogReading(8, STEP)])

    chances = posterior.probabilities
    assert chances[0] == 0
    assert chances.sum() == pytest.approx(1)
    assert chances[1:5].sum() > 0.98
    assert chances[1:5] == pytest.approx(chances[1])


def test_the_level_of_a_block_has_no_influence() -> None:
    """Drift changes a whole block equally."""
    near, far = (Posterior(8, Grid.around(PAIRS)) for _ in range(2))

    near.add([LogReading(0, 0.0), LogReading(4, 0.04), LogReading(8, STEP)])
    far.add([LogReading(0, 3.0), LogReading(4, 3.04), LogReading(8, 3 + STEP)])

    assert near.probabilities == pytest.approx(far.probabilities)


def test_a_single_reading_has_no_influence() -> None:
    posterior = Posterior(4, Grid.around(PAIRS))

    posterior.add([LogReading(2, 1.0)])

    assert posterior.probabilities[1:] == pytest.approx(0.25)


def test_two_readings_of_a_block_are_compared() -> None:
    posterior = Posterior(8, Grid.around(PAIRS))

    posterior.add([LogReading(0, 0.0), LogReading(4, STEP)])

    assert posterior.probabilities[1:5].sum() > 0.9


def test_a_probability_is_that_of_a_plain_sum_over_the_level() -> None:
    """One step and one scale, so that only the level of the block is unknown."""
    step, scale, logs = 0.1, 0.02, (0.0, 0.04, 0.1)
    posterior = Posterior(2, Grid(np.array([step]), np.array([scale])))

    posterior.add([LogReading(position, log) for position, log in enumerate(logs)])

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
    assert posterior.probabilities[1] == pytest.approx(likelihood[0] / sum(likelihood), abs=0.001)


@pytest.mark.parametrize(
    ("pairs", "scale"),
    [([0.02, 0.08] * 3, 1.4826 * 0.03 / math.sqrt(2)), ([0.05] * 6, LEAST_SCALE)],
    ids=["noisy", "equal"],
)
def test_the_grid_is_centred_on_the_noise_of_the_pairs(pairs: list[float], scale: float) -> None:
    assert Grid.around(pairs).scales[SCALES // 2] == pytest.approx(scale)


def test_one_disturbed_process_does_not_outweigh_three_that_agree() -> None:
    posterior = Posterior(8, Grid.around(PAIRS))

    posterior.add(
        [LogReading(0, 0.0), LogReading(4, 0.40), LogReading(8, STEP)]
    )  # something else ran
    for _ in range(3):
        posterior.add([LogReading(0, 0.0), LogReading(4, 0.001), LogReading(8, STEP)])

    assert posterior.probabilities[5:].sum() > 0.9


def test_the_middle_commit_is_the_most_informative() -> None:
    chances = np.array([0, *[1 / 8] * 8])

    assert most_informative(chances, (), 0.1) == (4, information(chances, 4, 0.1))
    assert information(chances, 4, 0.0) == pytest.approx(1.0)
    assert information(chances, 1, 0.0) < information(chances, 3, 0.0)


def test_commits_that_cannot_be_measured_are_grouped_with_the_next() -> None:
    chances = np.array([0, 0.1, 0.2, 0.3, 0.4])

    found = groups(chances, {2, 3})

    assert [c.positions for c in found] == [(1,), (2, 3, 4)]
    assert found[1].probability == pytest.approx(0.9)
    assert (found[1].good, found[1].bad) == (1, 4)


# --- the search --------------------------------------------------------------------------


def test_a_planted_five_per_cent_is_found_and_confirmed() -> None:
    found, asked = carried_out(NoisySearch(64, 0.03), 41, 1.05, seed=3)

    assert found.found
    assert found.culprits == (41,)
    assert found.comparison is not None
    assert found.comparison.ratio == pytest.approx(1.05, abs=0.01)
    assert {a.stage for a in asked} == set(BisectStage)
    assert sum(len(a.positions) for a in asked) < 80


def test_a_commit_that_made_it_faster_is_found() -> None:
    found, _ = carried_out(NoisySearch(16, 0.03), 5, 0.9, seed=4)

    assert found.found
    assert found.culprits == (5,)


@pytest.mark.parametrize("culprit", [1, 64])
def test_the_ends_of_the_history_are_found(culprit: int) -> None:
    found, _ = carried_out(NoisySearch(64, 0.03), culprit, 1.1, seed=5)

    assert found.culprits == (culprit,)


def test_equal_anchors_find_no_commit() -> None:
    found, asked = carried_out(NoisySearch(64, 0.03), 10, 1.0, seed=6)

    assert not found.found
    assert found.culprits == ()
    assert "do not differ" in found.reason
    assert {a.stage for a in asked} == {BisectStage.ANCHORS}


def test_commits_that_cannot_be_measured_are_named_together() -> None:
    found, asked = carried_out(
        NoisySearch(32, 0.03), 12, 1.1, seed=7, cannot=frozenset({11, 12, 13})
    )

    assert found.culprits == (11, 12, 13, 14)
    assert not found.found
    assert not {p for a in asked for p in a.positions} & {11, 12, 13}


def test_the_same_blocks_give_the_same_request() -> None:
    """Resuming relies on it."""
    _, asked = carried_out(NoisySearch(32, 0.03), 20, 1.05, seed=8)
    first, again = NoisySearch(32, 0.03), NoisySearch(32, 0.03)
    for i, question in enumerate(asked):
        block = [
            ProcessReading(position=p, value=1.05 if p >= 20 else 1.0) for p in question.positions
        ]
        first.add(question.stage, block)
        first.next()  # asked after every block, as a search that is never interrupted is
        again.add(question.stage, block)
        if i + 1 >= ANCHOR_PAIRS:
            assert first.probabilities() == pytest.approx(again.probabilities())


def test_simulated_histories_on_a_typical_node() -> None:
    """A small version of the study bisect_errors."""
    rng = np.random.default_rng(1)

    results = [
        bisect(NoisySearch(64, 0.03), int(rng.integers(1, 65)), 1.05, TYPICAL, rng)
        for _ in range(8)
    ]

    assert all(t.right for t in results)
    assert all(t.processes < 150 for t in results)


# --- without noise -----------------------------------------------------------------------


def test_a_counter_takes_about_log2_processes() -> None:
    for culprit in range(1, 65):
        found, asked = carried_out(ExactSearch(64), culprit, 1, seed=0)
        assert found.found
        assert found.culprits == (culprit,)
        assert len(asked) <= 2 + 6


def test_an_exact_search_skips_commits_that_cannot_be_measured() -> None:
    found, asked = carried_out(ExactSearch(64), 33, 1, seed=0, cannot=frozenset({30, 31, 32}))

    assert found.culprits == (30, 31, 32, 33)
    assert not found.found
    assert len(asked) <= 10


def test_anchors_with_equal_values_end_the_search() -> None:
    search = ExactSearch(8)
    for position in (0, 8):
        search.add(BisectStage.ANCHORS, [ProcessReading(position=position, value=1.0)])

    found = search.next()

    assert isinstance(found, CommitsConclusion)
    assert (found.culprits, found.found) == ((), False)


def test_a_small_change_before_the_large_one_does_not_make_a_commit_bad() -> None:
    """A counter is bad if it is nearer to the bad commit's."""
    search = ExactSearch(8)
    while isinstance(block := search.next(), NextBlock):
        (position,) = block.positions
        value = 10.0 if position >= 6 else 3.0 if position >= 2 else 2.0
        search.add(block.stage, [ProcessReading(position=position, value=value)])

    assert block.culprits == (6,)
    assert block.good == 5
