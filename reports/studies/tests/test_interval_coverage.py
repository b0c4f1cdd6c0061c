"""The intervals that reports print cover what they should, and inform."""

import pytest

from reports.studies.interval_coverage import NOISES, coverage, looks


@pytest.mark.parametrize("noise", NOISES)
def test_two_processes_of_twelve_cases_have_a_narrow_interval_that_covers(noise: str) -> None:
    found = coverage(noise, 12, 2, runs=60, seed=1)

    assert found.moderated > 0.92
    assert found.moderated_width < found.plain_width * 0.62


def test_looks_err_no_more_than_the_most_processes_and_leave_less_open() -> None:
    two, six, looked = (
        looks("normal 20 %", 0.1, first=first, most=most, runs=60, seed=1)
        for first, most in ((2, 2), (6, 6), (2, 6))
    )
    clear = looks("typical", 0.1, runs=20, seed=1)

    assert two.wrong > 0.3
    assert looked.wrong < 0.15
    assert looked.wrong <= six.wrong + 0.05
    assert (clear.wrong, clear.open, clear.processes < 2.1) == (0, 0, True)
