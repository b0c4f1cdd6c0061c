"""The sentences on axes without effect and on variables."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis.tests.test_dead_axes import FLAGS, SWEEP, did, inert, of_length
from harness.report.tests.test_report import values
from harness.report.text import dead_axis_sentence
from harness.tests.fake_runs import run

(DEAD,) = inert(SWEEP, of_length)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "`flag` has no effect (0, 1 and 2): the same operators, kernels, counters and"),
        ({"without_kernels": True}, "(kernels not seen) in 6"),
        ({"time_differs": True}, "in 6 pairs of cases; only the step time differs."),
        ({"axes": ("provider",), "values": (("a",), ("b",))}, "providers a and b do the same:"),
    ],
)
def test_an_axis_without_effect_in_words(changes: dict[str, Any], expected: str) -> None:
    assert expected in dead_axis_sentence(replace(DEAD, **changes))


def test_an_axis_without_effect_is_a_cause_and_in_the_profile() -> None:
    built = values(run(FLAGS, did))

    assert "flag has no effect" in f"{built['lines']}{built['why']}"
    assert built["dead"][0].startswith("`train/nsa`: `flag` has no effect (0 and 1)")
