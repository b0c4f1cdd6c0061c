"""The study separates the variance between builds from that of their processes."""

import numpy as np
import pytest

from reports.studies.build_noise import spread


@pytest.mark.parametrize("between", [0.0, 0.01])
def test_the_components_of_the_variance_are_found(between: float) -> None:
    rng = np.random.default_rng(3)
    found = []
    for _ in range(300):
        builds, rounds = rng.normal(0, between, (10, 1)), rng.normal(0, 0.02, (1, 5))
        found.append(spread(builds + rounds + rng.normal(0, 0.004, (10, 5))))

    assert np.mean([s.within**2 for s in found]) ** 0.5 == pytest.approx(0.004, rel=0.03)
    assert np.median([s.between for s in found]) == pytest.approx(between, abs=0.001)
    covered = np.mean([s.between_high >= between for s in found])
    assert covered >= 0.95
    assert np.mean([s.p_value < 0.05 for s in found]) > 0.99 or between == 0
