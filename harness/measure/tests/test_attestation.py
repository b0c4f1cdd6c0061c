"""What a workload says that it ran with, against its case."""

from dataclasses import replace
from typing import Any

import pytest

from harness.measure.attestation import observed
from harness.measure.failures import Failed
from harness.tests.workers import make_case
from harness.workload import Workload


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"effective": lambda: {"T": 7, "other": 1}}, Failed, "asked for 8, ran with 7"),
        ({"flags": lambda: {"NSA_A": False}}, Failed, "NSA_A=1 was set, but nothing"),
        ({"effective": lambda: {"T": [8]}}, TypeError, "'T' a list"),
        ({"flags": lambda: {"NSA_A": 1}}, TypeError, "'NSA_A' a int"),
    ],
)
def test_another_axis_value_or_an_unread_variable_is_a_mismatch(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    case = make_case("good", axes={"T": 8}, env={"NSA_A": "1", "UNKNOWN": "1"})
    flags = {"NSA_A": True, "EXPORTED": False}  # by the user, not by the case
    right = Workload(run=lambda: None, effective=lambda: {"T": 8, "other": 2}, flags=lambda: flags)

    assert observed(case, right) == ({"T": 8, "other": 2}, flags)
    changed = replace(right, **changes)
    with pytest.raises(error, match=said) as raised:
        observed(case, changed)
    if isinstance(raised.value, Failed):
        assert raised.value.seen.keys() == {"effective", "flags_read"}
