"""The value of each criterion in one process, and when it has none."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from harness.bisect import criteria
from harness.bisect.criteria import Criterion, CriterionKind, Unreadable
from harness.errors import HarnessError
from harness.records import Counters, Measurement, MetricSource, Outcome, Program
from harness.tests.fake_runs import case

CASE = case({"seq_len": 512})
PROGRAM = Program(argv=("train",), readings=(MetricSource(metric="loss_s", json="loss"),))
SYNCS = {"counters": Counters(host_syncs=3)}
DIFFERING = {"counters": Counters(host_syncs=3, series={"host_syncs": (3, 4)})}
UNCOUNTED = {"counters": Counters(unknown={"host_syncs": "no GPU"})}


def failed(outcome: Outcome) -> Mapping[str, Any]:
    return {"outcome": outcome, "samples_s": (), "detail": "as planted\nand more"}


def read(criterion: str, changes: Mapping[str, Any]) -> float:
    """The value of a criterion such as `counter host_syncs` in a process with these fields."""
    kind, name = criterion.split()
    fields = {"outcome": Outcome.OK, "samples_s": (0.1, 0.3, 0.2), "steady": True, **changes}
    measured = Measurement(case_id=CASE.case_id, process=0, **fields)
    return criteria.read(Criterion(kind=CriterionKind(kind), name=name), measured, 3)


@pytest.mark.parametrize(
    ("criterion", "changes", "value"),
    [
        ("metric step_s", {}, 0.2),
        ("metric step_s", {"samples_s": (0.1, 0.3, 0.2, 9), "discarded": {"shared": (3,)}}, 0.2),
        ("metric step_s", {"steady": None}, 0.2),  # a program of unknown steadiness
        ("metric loss_s", {"readings": {"loss_s": (3.0, 1.0, 2.0)}}, 2.0),
        ("metric peak_memory_bytes", {"peak_memory_bytes": 5}, 5),
        ("counter host_syncs", SYNCS, 3),
        ("outcome crash", failed(Outcome.CRASH), 1),
        ("outcome crash", failed(Outcome.HANG), 0),
        ("outcome crash", {}, 0),
        ("outcome unsupported", failed(Outcome.UNSUPPORTED), 1),
    ],
)
def test_a_process_has_a_value(criterion: str, changes: dict[str, Any], value: float) -> None:
    assert read(criterion, changes) == value


@pytest.mark.parametrize(
    ("criterion", "changes", "message", "again"),
    [
        ("metric step_s", {"steady": False}, "steady", True),
        ("metric step_s", {"discarded": {"shared": (1, 2)}}, "too few undisturbed samples", True),
        ("metric step_s", failed(Outcome.INCORRECT), "incorrect: as planted$", False),
        ("metric loss_s", {}, "unknown", False),
        ("metric loss_s", {"peak_memory_bytes": 5}, "unknown", False),
        ("metric loss_s", {"readings": {"loss_s": (0.0,)}}, "a positive value", False),
        ("metric peak_memory_bytes", {}, "unknown", False),
        ("counter host_syncs", UNCOUNTED, "host_syncs is unknown: no GPU", False),
        ("counter host_syncs", DIFFERING, "differs between two steps", False),
        ("counter host_syncs", {}, "unknown", False),
        ("outcome crash", failed(Outcome.UNSUPPORTED), "unsupported: as planted$", False),
    ],
)
def test_a_process_without_a_value_has_a_reason(
    criterion: str, changes: dict[str, Any], message: str, again: bool
) -> None:
    with pytest.raises(Unreadable, match=message) as refused:
        read(criterion, changes)
    assert refused.value.again is again


@pytest.mark.parametrize(
    ("kind", "name", "program", "profile", "quick"),
    [
        ("metric", "step_s", None, False, False),
        ("counter", "host_syncs", None, False, True),
        ("counter", "kernel_launches", None, True, True),  # the profiler counts them
        ("counter", "host_syncs", PROGRAM, True, True),  # where alone it is counted
        ("outcome", "path_mismatch", None, True, False),
    ],
)
def test_a_case_is_prepared_for_the_criterion(
    kind: str, name: str, program: Program | None, profile: bool, quick: bool
) -> None:
    criterion = Criterion(kind=CriterionKind(kind), name=name)

    settings = criteria.prepared(replace(CASE, program=program), criterion).settings

    assert (settings.profile, settings.max_samples == 1) == (profile, quick)


def test_one_criterion_is_chosen_and_a_wrong_name_lists_the_valid_ones() -> None:
    assert criteria.chosen(CASE, {}) == Criterion(kind=CriterionKind.METRIC, name="step_s")
    assert criteria.chosen(CASE, {"metric": None, "counter": "host_syncs"}).exact
    program = replace(CASE, factory="", program=PROGRAM)
    assert criteria.chosen(program, {"metric": "loss_s"}).name == "loss_s"
    for given, message in (
        ({"metric": "loss_s"}, r"(?s)--metric loss_s: .*no such metric.*step_s"),
        ({"counter": "host_sync"}, r"(?s)host_sync.*Use one of .*host_syncs"),
        ({"metric": "step_s", "outcome": "crash"}, "one criterion"),
    ):
        with pytest.raises(HarnessError, match=message):
            criteria.chosen(CASE, given)
