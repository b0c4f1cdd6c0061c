"""What a workload says that it ran with, against its case."""

from dataclasses import replace
from typing import Any

import pytest

from harness.measure.attestation import PathMismatch, observed
from harness.records import Case
from harness.workload import Workload


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"effective": lambda: {"T": 7, "other": 1}}, PathMismatch),
        ({"flags": lambda: {"NSA_A": False}}, PathMismatch),
        ({"effective": lambda: {"T": [8]}}, TypeError),
        ({"flags": lambda: {"NSA_A": 1}}, TypeError),
    ],
)
def test_another_axis_value_or_an_unread_variable_is_a_mismatch(
    changes: dict[str, Any], error: type[Exception]
) -> None:
    case = Case(
        case_id="a",
        workload="a",
        factory="a:a",
        provider="a",
        axes={"T": 8},
        env={"NSA_A": "1", "UNKNOWN": "1"},
    )
    flags = {"NSA_A": True, "EXPORTED": False}  # by the user, not by the case
    right = Workload(run=lambda: None, effective=lambda: {"T": 8, "other": 2}, flags=lambda: flags)

    assert observed(case, right) == ({"T": 8, "other": 2}, flags)
    with pytest.raises(error):
        observed(case, replace(right, **changes))
