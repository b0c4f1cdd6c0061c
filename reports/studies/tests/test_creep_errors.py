"""Creep is found, and a clean history seldom names a case."""

import numpy as np
import pytest

from harness.gate import creep
from reports.studies.creep_errors import STEP, histories, named

LOOKS, RUNS = 400, 21


@pytest.mark.parametrize(("rho", "runs"), [(0.0, RUNS), (0.5, RUNS), (0.5, 40)])
def test_creep_is_found_and_a_clean_history_names_no_case(rho: float, runs: int) -> None:
    """Of 40 runs the first 20 lose, and the rest stay there."""
    shape = (LOOKS, 6, runs)
    clean = named(histories(0.006, rho, 0.0, shape=shape, seed=1), least=-0.9)
    slower = named(histories(0.006, rho, STEP, shape=shape, seed=1))

    assert clean.any(axis=1).mean() <= creep.ERROR, "of looks; any case of it"
    assert slower[:, 0].mean() >= 0.8, "20 steps of 0.3 %"
    assert slower[:, 1:].any(axis=1).mean() <= creep.ERROR


def test_the_interval_covers_the_loss() -> None:
    logs = histories(0.006, 0.5, STEP, shape=(LOOKS, 1, RUNS), seed=1)
    centre, half, _ = creep.moved(logs, ["card"] * RUNS)
    true = 16 * STEP  # the middles of the two quarters are 16 runs apart

    assert (np.abs(centre - true) <= half).mean() >= 0.98


def test_a_loss_that_came_with_another_card_is_not_creep() -> None:
    logs = np.random.default_rng(1).normal(0, 0.002, (99, 20)) + 0.0015 * np.arange(20)

    one = creep.moved(logs, ["a"] * 20)[2]
    two = creep.moved(logs, ["a"] * 10 + ["b"] * 10)[2]

    assert (one <= creep.ERROR).mean() > 0.9
    assert (two <= creep.ERROR).mean() == 0
