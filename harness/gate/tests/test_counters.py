"""Counters per step, and a host sync planted in this project's own model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.gate import counters as counting
from harness.gate.plan import Request
from harness.gate.records import Mode
from harness.gate.session import carry_out, count
from harness.records import Counters, Decision, Measurement, Outcome
from harness.runner import launcher
from harness.suite import load as suites
from harness.tests.gate_repositories import commit, git

ROOT = Path(__file__).resolve().parents[3]
COUNTS = {"dispatched_ops": 40, "host_syncs": 1, "allocations": 9}
NOTHING: dict[str, Any] = dict.fromkeys(COUNTS)


def counted(steps: int = 2, process: int = 0, **counts: Any) -> Measurement:
    counters = Counters(**{**COUNTS, **counts}, steps=steps)
    return Measurement(
        case_id="a", process=process, outcome=Outcome.OK, samples_s=(1.0,), counters=counters
    )


@pytest.mark.parametrize(
    ("measured", "reason"),
    [
        ([], "did not run"),
        ([Measurement(case_id="a", process=0, outcome=Outcome.CRASH)], "did not run"),
        ([counted(differing=("host_syncs",))], "two steps differ in host_syncs"),
        ([counted(steps=1)], "no exact counters: only 1 step was counted; 2 are needed"),
        ([counted(1), counted(1, 1)], "no exact counters: only 1 step was counted; 2 are needed"),
        ([counted(1), counted(1, 1, host_syncs=2)], "two steps differ in host_syncs"),
        (
            [counted(0, **NOTHING, unknown=dict.fromkeys(COUNTS, "one step takes 40 s"))],
            "no exact counters: one step takes 40 s",
        ),
    ],
)
def test_counts_need_two_equal_steps(measured: list[Measurement], reason: str) -> None:
    assert counting.counts_of(measured) == (None, reason)


def test_processes_without_counts_are_ignored() -> None:
    skipped = [
        counted(0, 1, **NOTHING, unknown={"host_syncs": "skipped"}),
        counted(0, 2, **NOTHING),
    ]

    assert counting.counts_of([counted(), *skipped]) == (COUNTS, "")


def test_counters_of_another_torch_or_device_are_not_used() -> None:
    kept = counting.CounterBaseline(device="cpu", torch="2.12.0", commit="c", set_at="2026-11-22")
    here: Any = SimpleNamespace(device_name="cpu", versions={"torch": "2.13.0+cu130"})

    assert "with torch 2.12.0, but this is 2.13.0" in counting.unfit(kept, Path("b"), here)
    same = counting.CounterBaseline(device="cpu", torch="2.13.0", commit="c", set_at="2026-11-22")
    assert counting.unfit(same, Path("b"), here) == ""
    here.device_name = "NVIDIA H200"
    assert "counted on cpu, but this is NVIDIA H200" in counting.unfit(same, Path("b"), here)


@pytest.mark.parametrize(("device", "hidden"), [("cpu", True), ("any", False), ("cuda", False)])
def test_workers_of_a_suite_for_the_cpu_see_no_gpu(
    device: str, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Mapping[str, str]] = []
    monkeypatch.setattr(launcher, "_ForkserverHandle", lambda env, *_: started.append(env))

    launcher.Launcher(device=device, around={"CUDA_VISIBLE_DEVICES": "3"})._warmed()

    assert started == [{"CUDA_VISIBLE_DEVICES": "" if hidden else "3"}]


# --- this project's model ----------------------------------------------------------------

POLICY = """\
schema: 1
stage: block
suites: [{suite: suites/gate.yaml}]
counters: [{suite: suites/counters.yaml, cases: [forward/*]}]
"""
PLANTED = """

_gate = Gate.forward


def _planted(self, x):
    x.sum().item()
    return _gate(self, x)


Gate.forward = _planted
"""
LAYERS = 2
"""Of the tiny preset."""


class Quiet:
    def stage(self, text: str, processes: int) -> None: ...

    def ended(self, side: str, measurement: Measurement) -> None: ...


def judged(request: Request) -> Any:
    return carry_out(request, Quiet(), lambda _: None)


def test_one_host_sync_per_layer_is_found_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nsa", "suites"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ci").mkdir()
    (tmp_path / "ci/gate.yaml").write_text(POLICY)
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    commit(tmp_path, {".gitignore": "__pycache__/\nreports/\n"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = Request(mode=Mode.COUNTERS)

    count(request, Quiet(), lambda _: None)
    untouched = judged(request)
    with (tmp_path / "nsa/model/attention.py").open("a") as module:
        module.write(PLANTED)
    found = judged(request)

    assert untouched.decision is Decision.GO, untouched.reason
    assert len(untouched.cases) == 2
    assert (found.decision, found.exit_status, found.blocks) == (Decision.NO_GO, 1, True)
    by_id = {case.case_id: case for case in found.cases}
    assert by_id["forward/dense"].decision is Decision.GO
    nsa = by_id["forward/nsa"]
    changed = {c.name: (c.before, c.after) for c in nsa.counters}
    assert changed["host_syncs"] == (0, LAYERS)
    assert [r.partition(": ")[2] for r in found.remedies] == ["harness baseline counters"]


def test_the_recorded_counters_match_the_suite_and_the_pinned_torch() -> None:
    """If not: `harness baseline counters`."""
    kept = json.loads((ROOT / "ci/baselines/counters.json").read_text())
    cases = [case.case_id for case in suites.load("counters").cases]

    assert [*kept["cases"]["suites/counters.yaml"]] == cases
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"torch=={kept['torch']}" in pins
    assert kept["device"] == "cpu"
