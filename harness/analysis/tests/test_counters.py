"""Counters as metrics, and rules about kernels and operators that nothing confirms."""

from dataclasses import replace
from typing import Any

import pytest

from harness import units
from harness.analysis import recorded
from harness.records import Case, Counters, Measurement, Outcome, PathRule, Profile, Use

OK = Measurement(case_id="a", process=0, outcome=Outcome.OK, samples_s=(1.0,))
CASE = Case(case_id="a", workload="a", factory="a:a", provider="a", axes={})


def counted(process: int = 0, **changes: object) -> Measurement:
    known = {"dispatched_ops": 12, "host_syncs": 0, "steps": 2}
    values = Counters(**{**known, **changes})  # type: ignore[arg-type]
    return replace(OK, process=process, counters=values)


def test_an_exact_count_is_an_interval_of_width_zero() -> None:
    found = recorded.estimates([counted(unknown={"kernel_launches": "no GPU"})])

    assert found["dispatched_ops"].low == found["dispatched_ops"].high == 12
    assert found["host_syncs"].value == 0
    assert "kernel_launches" not in found


@pytest.mark.parametrize(
    "second", [{"dispatched_ops": 13}, {"differing": ("dispatched_ops",)}, {"steps": 1}]
)
def test_a_count_that_is_not_exact_is_absent_with_a_reason(second: dict[str, object]) -> None:
    ok = [counted(), counted(1, **second)]

    assert "dispatched_ops" not in recorded.estimates(ok)
    assert recorded.exact_counters(ok).absent["dispatched_ops"]


def test_processes_that_count_differently_are_noted() -> None:
    (note,) = recorded.disagreements([counted(), counted(1, dispatched_ops=1300)])

    assert "12 to 1,300" in note


def test_a_count_that_varies_is_its_range_over_all_steps() -> None:
    steps = {"dispatched_ops": (12, 30, 18)}
    one = counted(differing=("dispatched_ops",), series=steps, steps=3)
    uses = [Use(name=name, calls=calls, time_s=1.0) for name, calls in (("add", 2.5), ("mm", 2.0))]
    ok = [replace(one, profile=Profile(operators=tuple(uses))), counted(1)]

    found = recorded.estimates(ok)["dispatched_ops"]
    (note,) = recorded.disagreements(ok)

    assert (found.low, found.value, found.high, found.samples) == (12, 12, 30, 5)
    assert "12 to 30 in 5 steps (12, 30, 18, 12, 12)" in note
    assert note.endswith("alike: add")
    assert units.cell("dispatched_ops", found) == "12 (12 to 30 in 5 steps)"
    assert recorded.estimates([one, counted(1, differing=("dispatched_ops",))]).keys() == {
        "host_syncs"
    }, "steps that were not recorded are unknown"


REQUIRED = PathRule(must=("x",))


@pytest.mark.parametrize(
    ("rules", "profile", "gpu", "why"),
    [
        ({"kernels": REQUIRED}, Profile(no_kernels="no GPU"), True, "no GPU"),
        ({"kernels": REQUIRED}, Profile(no_kernels="no GPU"), False, ""),
        ({"operators": REQUIRED}, Profile(no_kernels="no GPU"), True, ""),
        ({"operators": REQUIRED}, Profile(skipped="switched off"), True, "switched off"),
        ({"operators": REQUIRED}, Profile(skipped="switched off"), False, "switched off"),
        ({"operators": REQUIRED}, None, False, "no profile was taken"),
        ({}, None, True, ""),
    ],
)
def test_a_rule_is_attested_only_by_a_profile_of_what_it_is_about(
    rules: dict[str, Any], profile: Profile | None, gpu: bool, why: str
) -> None:
    seen = [replace(OK, profile=profile)]

    assert recorded.unattested(replace(CASE, **rules), seen, gpu=gpu) == why
