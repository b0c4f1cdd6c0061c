"""Models of noise, and noise resampled from recorded runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from harness.tests.fake_runs import case, run, timed
from reports.studies.noise import QUIET, recorded


def test_drift_falls_on_both_sides_of_a_pair() -> None:
    """That is what pairs are for: drift ten times the noise leaves their ratio alone."""
    drifting = replace(QUIET, drift=0.03, memory=0.999, disturbed=0.0)

    draw = drifting.draw(np.random.default_rng(1), 2000, 20)

    assert draw.baseline.std() > 0.025
    assert (draw.candidate - draw.baseline).std() < 0.006
    assert abs((draw.candidate - draw.baseline).mean()) < 0.0005


def test_which_side_runs_first_alternates() -> None:
    """A machine that slows down all the time would else favour the side that always runs first."""
    falling = replace(QUIET, process_cv=0, spread=0, disturbed=0, clock=0, drift=0.01, memory=1)
    rng = np.random.default_rng(1)

    draw = replace(falling, memory=0.0).draw(rng, 1, 4)

    rng = np.random.default_rng(1)
    rng.normal(size=(1, 8))
    steps = rng.normal(0.0, 0.01, size=(1, 8))[0]
    steps[0] = rng.normal(0.0, 0.01)
    assert draw.baseline[0] == pytest.approx(steps[[0, 3, 4, 7]])
    assert draw.candidate[0] == pytest.approx(steps[[1, 2, 5, 6]])


def test_recorded_noise_scatters_as_the_recorded_processes_did() -> None:
    calm, wild = case({"seq_len": 1}), case({"seq_len": 2})
    stored = run(
        [calm, wild], lambda c: timed(c, 0.05, processes=12, cv=0.004 if c is calm else 0.04)
    )

    noise = recorded([stored])

    scales = [math.sqrt(np.mean(np.square(r))) for r in noise.residuals]
    draw = noise.draw(np.random.default_rng(1), 4000, 20)
    seen = draw.baseline.std(axis=1)
    assert np.quantile(seen, 0.25) == pytest.approx(scales[0], rel=0.15)
    assert np.quantile(seen, 0.75) == pytest.approx(scales[1], rel=0.15)
    assert noise.no_noisier_than(0.014).residuals == (noise.residuals[0],)


def test_unsteady_processes_and_lone_ones_are_no_noise() -> None:
    lone, unsteady = case({"seq_len": 1}), case({"seq_len": 2})
    stored = run(
        [lone, unsteady],
        lambda c: timed(c, 0.05, processes=1) if c is lone else timed(c, 0.05, steady=False),
    )

    with pytest.raises(ValueError, match="two steady processes"):
        recorded([stored])
