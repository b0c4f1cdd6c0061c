"""The intervals that reports print cover what they should, and inform."""

import pytest

from reports.studies.interval_coverage import NOISES, coverage, looks


@pytest.mark.parametrize("noise", NOISES)
def test_two_processes_of_twelve_cases_have_a_narrow_interval_that_covers(noise: str) -> None:
    found = coverage(noise, 12, 2, runs=60, seed=1)

    assert found.moderated > 0.92
    assert found.moderated_width < found.plain_width * 0.62


def test_looks_leave_less_open_and_cost_nothing_where_all_is_clear() -> None:
    two, clear = (looks(noise, 0.1, runs=20, seed=1) for noise in ("noisy", "typical"))
    six = looks("noisy", 0.1, first=6, runs=20, seed=1)

    assert two.open < six.open
    assert (clear.wrong, clear.open, clear.processes < 2.1) == (0, 0, True)


@pytest.mark.parametrize("noise", ["normal 20 %", "bimodal, 15 % are 4 % slower"])
def test_a_clean_suite_of_30_rules_is_wrong_in_at_most_5_percent(noise: str) -> None:
    """With a margin that is less than one process scatters: two processes are wrong in half."""
    two, looked = (looks(noise, 0.02, most=most, runs=40, seed=1) for most in (2, 6))

    assert two.wrong > 0.3
    assert looked.wrong < 0.05
