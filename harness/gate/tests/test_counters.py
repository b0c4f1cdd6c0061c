"""Exact counters on disk, what makes two of them differ, and what is listed of them."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness.gate import counters
from harness.records import Counters, Decision, Measurement, Outcome
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
        ([counted(differing=("host_syncs",))], None, "two steps differ in host_syncs"),
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
    series = {"host_syncs": steps}
    counts |= {"host_syncs": steps[0], "differing": ("host_syncs",), "series": series}
    return counted(len(steps), **counts)


LOW, HIGH = (3, 5, 4, 3, 6, 4), (13, 15, 14, 13, 16, 14)


def sides(before: Measurement, after: Measurement, n: int = 1) -> counters.Counted:
    """So many processes of each side, which count the same."""
    a, b = ([replace(m, process=i) for i in range(n)] for m in (before, after))
    return counters.Counted(baseline=a, candidate=b)


@pytest.mark.parametrize(
    ("candidate", "processes", "decision", "changed"),
    [
        pytest.param(varying(*LOW), 1, Decision.GO, set(), id="the same steps"),
        pytest.param(varying(*HIGH), 8, Decision.NO_GO, {"host_syncs"}, id="moved"),
        pytest.param(varying(*HIGH), 1, Decision.INCONCLUSIVE, {"host_syncs"}, id="one process"),
        pytest.param(varying(*LOW[::-1]), 8, Decision.INCONCLUSIVE, {"host_syncs"}, id="others"),
        pytest.param(counted(6, host_syncs=9), 8, Decision.NO_GO, {"host_syncs"}, id="steady"),
        pytest.param(
            varying(*LOW, allocations=10), 1, Decision.NO_GO, {"allocations"}, id="an exact one"
        ),
        pytest.param(counted(differing=("host_syncs",)), 1, Decision.INCONCLUSIVE, set(), id="old"),
    ],
)
def test_a_counter_that_varies_is_compared_by_its_processes(
    candidate: Measurement, processes: int, decision: Decision, changed: set[str]
) -> None:
    case = sides(varying(*LOW), candidate, processes)

    changes, finding = counters.compare({"a": case})["a"]

    assert (finding.decision, {c.name for c in changes}) == (decision, changed)
    assert counters.undecided(case) is (changed == {"host_syncs"})


def test_holm_is_over_all_counters_of_the_gate_that_vary() -> None:
    """One that moved is found beside sixty that did not, and no longer beside seventy."""
    moved = sides(varying(*LOW), varying(*HIGH), 8)

    def decided(others: int) -> Decision:
        alike = {str(i): sides(varying(*LOW), varying(*LOW[::-1]), 8) for i in range(others)}
        return counters.compare({"moved": moved, **alike})["moved"][1].decision

    assert [decided(n) for n in (0, 60, 70)] == [
        Decision.NO_GO,
        Decision.NO_GO,
        Decision.INCONCLUSIVE,
    ]


def test_a_clean_gate_calls_a_counter_different_in_one_of_a_hundred_at_most() -> None:
    """Three counters vary; all steps of a process share its luck, so the process is the unit."""
    rng, wrong, gates = np.random.default_rng(1), 0, 300

    def process(index: int) -> Measurement:
        steps = rng.poisson(4, size=6) + rng.integers(0, 20)
        return replace(varying(*map(int, steps)), process=index)

    for _ in range(gates):
        cases = {}
        for i in range(3):
            a, b = ([process(n) for n in range(8)] for _ in range(2))
            cases[i] = counters.Counted(baseline=a, candidate=b)
        found = counters.compare(cases).values()
        wrong += any(finding.decision is Decision.NO_GO for _, finding in found)

    assert wrong <= 8, "9 of 300 has a probability of 0.4 % at a rate of 1 %"


def test_counters_of_another_torch_or_device_are_not_used() -> None:
    kept = counters.CounterBaseline(device="cpu", torch="2.13.0")

    def why(torch: str, device: str) -> str:
        here: Any = SimpleNamespace(device_name=device, versions={"torch": torch})
        return counters.unfit(kept, here)

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
