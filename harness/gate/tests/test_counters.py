"""Exact counters on disk, what makes two of them differ, and what is listed of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.gate import counters
from harness.records import Counters, Decision, Measurement, Outcome
from harness.report.series.gate_text import because
from harness.runner import launcher
from harness.suite import load as suites
from harness.tests import fake_runs

SUITE = "suites/gate.yaml"
CASE = fake_runs.case({"seq_len": 512})
HERE = fake_runs.environment()


ROOT = Path(__file__).resolve().parents[3]
COUNTS = {"dispatched_ops": 40, "host_syncs": 1, "allocations": 9}
NOTHING: dict[str, Any] = dict.fromkeys(COUNTS)


def counted(steps: int = 2, process: int = 0, **counts: Any) -> Measurement:
    (made,) = fake_runs.timed(CASE, 1.0, processes=1, process=process)
    return replace(made, counters=Counters(**{**COUNTS, **counts}, steps=steps))


@pytest.mark.parametrize(
    ("measured", "counts", "reason"),
    [
        ([], None, "did not run"),
        (fake_runs.ended(CASE, Outcome.CRASH), None, "did not run"),
        ([counted(series={"host_syncs": (1, 2)})], None, "two steps differ in host_syncs"),
        ([counted(steps=1)], None, "no exact counters: only 1 step was counted; 2 are needed"),
        ([counted(1), counted(1, 1, host_syncs=2)], None, "two steps differ in host_syncs"),
        (
            [counted(0, **NOTHING, unknown=dict.fromkeys(COUNTS, "one step takes 40 s"))],
            None,
            "no exact counters: one step takes 40 s",
        ),
        ([counted(), counted(0, 1, **NOTHING, unknown={"host_syncs": "no"})], COUNTS, ""),
        ([counted(), counted(0, 2, **NOTHING)], COUNTS, ""),
    ],
)
def test_counts_need_two_equal_steps_in_a_process(
    measured: list[Measurement], counts: dict[str, int] | None, reason: str
) -> None:
    assert counters.counts_of(measured) == (counts, reason)


def varying(*steps: int, **counts: Any) -> Measurement:
    counts |= {"host_syncs": steps[0], "series": {"host_syncs": steps}}
    return counted(len(steps), **counts)


LOW, HIGH = (3, 5, 4, 3, 6, 4), (13, 15, 14, 13, 16, 14)


@pytest.mark.parametrize(
    ("candidate", "decision", "changed"),
    [
        pytest.param(varying(*LOW), Decision.GO, set(), id="the same steps"),
        pytest.param(varying(*HIGH), Decision.INCONCLUSIVE, set(), id="moved"),
        pytest.param(varying(*LOW[::-1]), Decision.INCONCLUSIVE, set(), id="turned"),
        pytest.param(counted(6, host_syncs=9), Decision.INCONCLUSIVE, set(), id="steady"),
        pytest.param(varying(*LOW, allocations=10), Decision.NO_GO, {"allocations"}, id="an exact"),
    ],
)
def test_a_counter_that_varies_is_compared_step_by_step(
    candidate: Measurement, decision: Decision, changed: set[str]
) -> None:
    changes, finding = counters.compare([varying(*LOW)], [candidate])

    assert (finding.decision, {c.name for c in changes}) == (decision, changed)
    assert (" in 6 steps → " in because(finding.facts)) == (decision is Decision.INCONCLUSIVE)


def test_counts_that_the_change_records_are_accepted() -> None:
    def decided(recorded: dict[str, int]) -> Decision:
        (changed,), finding = counters.compare([counted()], [counted(host_syncs=2)], recorded)
        assert changed.name == "host_syncs"
        return finding.decision

    assert decided(COUNTS) is Decision.NO_GO
    assert decided(COUNTS | {"host_syncs": 2}) is Decision.GO


def test_counters_of_another_torch_or_device_are_not_used() -> None:
    kept = counters.CounterBaseline(device="cpu", torch="2.13.0")

    def why(torch: str, device: str) -> str:
        here: Any = SimpleNamespace(device_name=device, versions={"torch": torch})
        return because(counters.unfit(kept, here))

    assert why("2.13.0+cu130", "cpu") == ""
    assert "with torch 2.13.0, but this is 2.14.0" in why("2.14.0", "cpu")
    assert "counted on cpu, but this is NVIDIA H200" in why("2.13.0", "NVIDIA H200")


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("any", False), ("cuda", False)])
def test_workers_of_a_suite_for_the_cpu_see_no_gpu(
    device: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(launcher, "ForkserverHandle", lambda env, *_: started.append(env))

    launcher.Launcher(device=device, around={"CUDA_VISIBLE_DEVICES": "3"})._warmed()

    assert started == [{"CUDA_VISIBLE_DEVICES": "" if hidden else "3"}]


def test_the_recorded_counters_match_the_suite_and_the_pinned_torch() -> None:
    """If not: `harness gate --counters --record`."""
    kept = json.loads((ROOT / "ci/baselines/counters.json").read_text())
    cases = [case.case_id for case in suites.load("counters").cases]

    assert [*kept["cases"]["suites/counters.yaml"]] == cases
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={kept['torch']}" in pins
    assert kept["device"] == "cpu"
