"""The intervals that reports print cover what they should, and inform."""

import pytest

from reports.studies.interval_coverage import NOISES, coverage


@pytest.mark.parametrize("noise", NOISES)
def test_two_processes_of_twelve_cases_have_a_narrow_interval_that_covers(noise: str) -> None:
    found = coverage(noise, 12, 2, runs=60, seed=1)

    assert found.moderated > 0.92
    assert found.moderated_width < found.plain_width * 0.62
