"""The value of each criterion in one process, and when it has none."""

from dataclasses import replace
from typing import Any

import pytest

from harness.bisect import criteria
from harness.bisect.criteria import Criterion, CriterionKind, Unreadable
from harness.errors import HarnessError
from harness.records import (
    MAX_USES,
    Clock,
    Counters,
    Measurement,
    MetricSource,
    Outcome,
    Profile,
    Program,
    Use,
)
from harness.tests.fake_runs import case

CASE = case({"seq_len": 512})
PROGRAM = Program(argv=("train",), readings=(MetricSource(metric="loss_s", json="loss"),))


def measured(**changes: Any) -> Measurement:
    fields = {
        "case_id": CASE.case_id,
        "process": 0,
        "outcome": Outcome.OK,
        "clock": Clock.CUDA_EVENT,
        "samples_s": (0.1, 0.3, 0.2),
        "steady": True,
        **changes,
    }
    return Measurement(**fields)


def failed(outcome: Outcome) -> Measurement:
    return measured(outcome=outcome, samples_s=(), detail="as planted\nand more")


def read(kind: CriterionKind, name: str, measurement: Measurement) -> float:
    return criteria.read(Criterion(kind=kind, name=name), measurement, 3)


def use(name: str) -> Use:
    return Use(name=name, where="", calls=1.0, time_s=1e-6)


def test_a_time_is_the_median_of_what_is_kept() -> None:
    assert read(CriterionKind.METRIC, "step_s", measured()) == 0.2
    disturbed = measured(samples_s=(0.1, 0.3, 0.2, 9.0), discarded={"shared": (3,)})
    assert read(CriterionKind.METRIC, "step_s", disturbed) == 0.2


@pytest.mark.parametrize(
    ("changes", "message", "again"),
    [
        ({"steady": False}, "steady", True),
        ({"discarded": {"shared": (1, 2)}}, "too few undisturbed samples", True),
        ({"outcome": Outcome.INCORRECT, "samples_s": (), "detail": "far off"}, "far off", False),
    ],
)
def test_a_missing_time_has_a_reason(changes: Any, message: str, again: bool) -> None:
    with pytest.raises(Unreadable, match=message) as refused:
        read(CriterionKind.METRIC, "step_s", measured(**changes))
    assert refused.value.again is again


def test_a_program_of_unknown_steadiness_has_a_time() -> None:
    assert read(CriterionKind.METRIC, "step_s", measured(steady=None)) == 0.2


def test_a_reported_metric_is_read_and_a_missing_one_is_not_zero() -> None:
    assert (
        read(CriterionKind.METRIC, "loss_s", measured(readings={"loss_s": (3.0, 1.0, 2.0)})) == 2.0
    )
    assert read(CriterionKind.METRIC, "peak_memory_bytes", measured(peak_memory_bytes=5)) == 5.0
    for name in ("loss_s", "peak_memory_bytes"):
        with pytest.raises(Unreadable, match="unknown"):
            read(CriterionKind.METRIC, name, measured())
    with pytest.raises(Unreadable, match="unknown"):
        read(CriterionKind.METRIC, "loss_s", measured(peak_memory_bytes=5))
    with pytest.raises(Unreadable, match="a positive value"):
        read(CriterionKind.METRIC, "loss_s", measured(readings={"loss_s": (0.0,)}))


def test_a_counter_that_is_unknown_or_differs_has_no_value() -> None:
    known = measured(counters=Counters(host_syncs=3))
    assert read(CriterionKind.COUNTER, "host_syncs", known) == 3.0
    unknown = measured(counters=Counters(unknown={"kernel_launches": "no GPU"}))
    with pytest.raises(Unreadable, match="kernel_launches is unknown: no GPU"):
        read(CriterionKind.COUNTER, "kernel_launches", unknown)
    differing = measured(counters=Counters(host_syncs=3, differing=("host_syncs",)))
    with pytest.raises(Unreadable, match="differs between two steps"):
        read(CriterionKind.COUNTER, "host_syncs", differing)
    with pytest.raises(Unreadable, match="unknown"):
        read(CriterionKind.COUNTER, "host_syncs", measured())


def test_a_kernel_is_absent_only_if_all_kernels_are_known() -> None:
    ran = Profile(kernels=(use("selected_fwd_64"),), operators=(use("aten::mm"),))
    assert read(CriterionKind.KERNEL, "selected_fwd*", measured(profile=ran)) == 1.0
    assert read(CriterionKind.KERNEL, "aten::mm", measured(profile=ran)) == 1.0
    assert read(CriterionKind.KERNEL, "dense*", measured(profile=ran)) == 0.0
    unseen = replace(ran, no_kernels="CUPTI is in use")
    with pytest.raises(Unreadable, match="CUPTI is in use"):
        read(CriterionKind.KERNEL, "dense*", measured(profile=unseen))
    assert read(CriterionKind.KERNEL, "dense*", measured(profile=unseen, clock=Clock.HOST)) == 0.0
    many = replace(ran, kernels=tuple(use(f"k{n}") for n in range(MAX_USES)))
    with pytest.raises(Unreadable, match="more may have run"):
        read(CriterionKind.KERNEL, "dense*", measured(profile=many))
    with pytest.raises(Unreadable, match="no profile"):
        read(CriterionKind.KERNEL, "dense*", measured(profile=Profile(skipped="too long")))


def test_an_outcome_is_bad_if_it_is_the_requested_one() -> None:
    assert read(CriterionKind.OUTCOME, "crash", failed(Outcome.CRASH)) == 1.0
    assert read(CriterionKind.OUTCOME, "crash", failed(Outcome.HANG)) == 0.0
    assert read(CriterionKind.OUTCOME, "crash", measured()) == 0.0
    assert read(CriterionKind.OUTCOME, "unsupported", failed(Outcome.UNSUPPORTED)) == 1.0
    with pytest.raises(Unreadable, match=r"unsupported: as planted$"):
        read(CriterionKind.OUTCOME, "crash", failed(Outcome.UNSUPPORTED))


def test_a_case_is_prepared_for_the_criterion() -> None:
    def prepared(kind: CriterionKind, name: str) -> Any:
        return criteria.prepared(CASE, Criterion(kind=kind, name=name)).settings

    assert prepared(CriterionKind.METRIC, "step_s").max_samples == CASE.settings.max_samples
    assert not prepared(CriterionKind.METRIC, "step_s").profile
    assert not prepared(CriterionKind.COUNTER, "host_syncs").profile
    assert prepared(CriterionKind.COUNTER, "kernel_launches").profile  # the profiler counts them
    assert prepared(CriterionKind.KERNEL, "x").profile
    assert prepared(CriterionKind.COUNTER, "host_syncs").max_samples == 1
    program = replace(CASE, program=Program(argv=("train",)))
    syncs = Criterion(kind=CriterionKind.COUNTER, name="host_syncs")
    assert criteria.prepared(program, syncs).settings.profile  # where alone it is counted
    assert prepared(CriterionKind.OUTCOME, "path_mismatch").profile


def test_one_criterion_is_chosen_and_a_wrong_name_lists_the_valid_ones() -> None:
    assert criteria.chosen(CASE) == Criterion(kind=CriterionKind.METRIC, name="step_s")
    assert criteria.chosen(CASE, counter="host_syncs").exact
    program = replace(CASE, factory="", program=PROGRAM)
    assert criteria.chosen(program, metric="loss_s").name == "loss_s"
    with pytest.raises(HarnessError, match=r"(?s)--metric loss_s: .*has none.*step_s"):
        criteria.chosen(CASE, metric="loss_s")
    with pytest.raises(HarnessError, match=r"(?s)host_sync.*There are .*host_syncs"):
        criteria.chosen(CASE, counter="host_sync")
    with pytest.raises(HarnessError, match="one criterion"):
        criteria.chosen(CASE, metric="step_s", outcome="crash")
