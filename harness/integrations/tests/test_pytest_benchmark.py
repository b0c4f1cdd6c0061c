"""Import from and export to pytest-benchmark, and the timer that waits for the GPU."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_benchmark.stats import Stats
from pytest_benchmark.utils import load_timer

from harness.errors import HarnessError
from harness.integrations import pytest_benchmark, pytest_timer
from harness.records import Clock, Decision, Outcome, Run
from harness.store import reader
from harness.tests import fake_runs
from harness.tests.command_line import harness
from harness.tests.indexed import store

ROOT = Path(__file__).resolve().parents[3]

DOCUMENT: Mapping[str, Any] = {
    "machine_info": {
        "node": "node-7",
        "system": "Linux",
        "release": "6.8.0",
        "machine": "x86_64",
        "python_version": "3.12.7",
        "cpu": {"brand_raw": "Intel Xeon", "count": 16},
    },
    "commit_info": {"id": "c0ffee", "branch": "main", "dirty": True},
    "benchmarks": [
        {
            "group": "attention",
            "name": "test_forward[512]",
            "fullname": "tests/test_x.py::test_forward[512]",
            "params": {"seq_len": 512, "dtype": "bf16", "shape": [1, 2]},
            "options": {"timer": "synchronised"},
            "stats": {"data": [0.5, 0.25, 0.125], "rounds": 3, "iterations": 4},
        },
        {
            "group": None,
            "name": "test_plain",
            "fullname": "tests/test_x.py::test_plain",
            "params": None,
            "options": {},
            "stats": {"data": [0.001], "rounds": 1, "iterations": 1},
        },
    ],
    "datetime": "2026-11-21T07:30:12+00:00",
    "version": "5.3.1",
}


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "bench.json"
    path.write_text(json.dumps({**DOCUMENT, **changes}))
    return path


def first(**changes: Any) -> list[dict[str, Any]]:
    """The document's benchmarks with the first one's stats changed."""
    one, *others = json.loads(json.dumps(DOCUMENT["benchmarks"]))
    return [{**one, "stats": {**one["stats"], **changes}}, *others]


# --- in ----------------------------------------------------------------------------------


def test_a_file_of_pytest_benchmark_becomes_a_run(tmp_path: Path) -> None:
    path = write(tmp_path)

    answer = harness("import", path.name, cwd=tmp_path)

    assert answer.returncode == 0, answer.stderr
    run = reader.load(tmp_path / "reports/runs", answer.stdout.strip())
    assert run.ended_at
    case, plain = run.suite.cases
    assert case.case_id == "tests/test_x.py::test_forward[512]"
    assert (case.workload, plain.workload) == ("attention", "test_plain")
    assert case.axes == {"seq_len": 512, "dtype": "bf16", "shape": "[1, 2]"}
    measured, _ = run.measurements
    assert (measured.outcome, measured.clock) == (Outcome.OK, Clock.HOST)
    assert measured.samples_s == (0.5, 0.25, 0.125)
    assert measured.effective == {"timer": "synchronised", "iterations": 4}
    here = run.environment
    assert (here.hostname, here.cpu, here.cpu_count) == ("node-7", "Intel Xeon", 16)
    assert here.git is not None
    assert (here.git.commit, here.git.dirty_sha256) == ("c0ffee", "unknown")
    assert here.gpu is None
    shown = json.loads(harness("show", "--json", cwd=tmp_path).stdout)

    assert [case["outcome"] for case in shown["cases"]] == ["ok", "ok"]
    assert shown["cases"][0]["metrics"]["step_s"]["value"] == 0.25
    assert shown["cases"][0]["metrics"]["step_s"]["low"] is None, "one process has no interval"
    assert shown["time"]["work_s"] is None
    assert "phases unknown" in harness("show", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"benchmarks": []}, id="no benchmark"),
        pytest.param({"benchmarks": first(data=[])}, id="no rounds"),
        pytest.param({"benchmarks": first(data=[0.5, 0.0, 0.1])}, id="zero"),
        pytest.param({"benchmarks": first(data=[float("nan")] * 3)}, id="nan"),
        pytest.param({"benchmarks": first(data=[5e-324] * 3)}, id="too short"),
        pytest.param({"benchmarks": first(rounds=7)}, id="rounds missing"),
        pytest.param({"benchmarks": first() + first()}, id="twice"),
    ],
)
def test_a_benchmark_without_valid_rounds_is_refused(
    tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    with pytest.raises(HarnessError, match=r"bench\.json: "):
        pytest_benchmark.read_benchmarks(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "the file"),
        (b'{"machine_info": {"node": 3}}', "machine_info.node"),
        (b"[" * 10**5, "not JSON"),
        (json.dumps({**DOCUMENT, "datetime": "0001-01-01T00:00+23:00"}).encode(), "datetime is"),
    ],
)
def test_an_invalid_file_is_refused_with_the_field(tmp_path: Path, data: bytes, where: str) -> None:
    (tmp_path / "bench.json").write_bytes(data)

    with pytest.raises(HarnessError, match=rf"bench\.json: .*{where}"):
        pytest_benchmark.read_benchmarks(tmp_path / "bench.json")


# --- out ---------------------------------------------------------------------------------


def exported_run() -> Run:
    good, bad = fake_runs.sweep(seq_len=[512, 1024])
    return fake_runs.run(
        [good, bad],
        lambda c: (
            fake_runs.timed(c, 0.1) if c is good else fake_runs.ended(c, Outcome.OUT_OF_MEMORY)
        ),
    )


def test_an_export_lists_left_out_cases_and_can_be_imported(tmp_path: Path) -> None:
    run = exported_run()
    document = json.loads(json.dumps(pytest_benchmark.benchmarks(run), allow_nan=False))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(document))

    back = pytest_benchmark.read_benchmarks(path)

    (benchmark,) = document["benchmarks"]
    assert benchmark["extra_info"]["processes"] == 3
    assert document["harness"]["left_out"] == {run.suite.cases[1].case_id: "out_of_memory"}
    assert back.measurements[0].samples_s == tuple(s for m in run.measurements for s in m.samples_s)
    assert back.suite.cases[0].case_id == run.suite.cases[0].case_id
    assert back.environment.git == run.environment.git


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 20, 21])
def test_statistics_are_those_of_pytest_benchmark(count: int) -> None:
    data = [0.1 + (i * 7919 % 31) / 100 for i in range(count)] + [5.0] * (count > 6)
    theirs: Any = Stats()  # type: ignore[no-untyped-call]
    for sample in data:
        theirs.update(sample)

    ours = pytest_benchmark.statistics_of(data)

    assert ours == {
        name: value if isinstance(value, str) else pytest.approx(value)
        for name, value in theirs.as_dict().items()
    }


def test_pytest_benchmark_can_compare_an_export(tmp_path: Path) -> None:
    path = tmp_path / "0001_run.json"
    path.write_text(json.dumps(pytest_benchmark.benchmarks(exported_run())))
    command = [sys.executable, "-m", "pytest_benchmark", "compare", str(path), "--columns", "mean"]

    compared = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert compared.returncode == 0, compared.stdout + compared.stderr
    assert "train/nsa/seq_len=512" in compared.stdout + compared.stderr


def test_the_export_command_names_left_out_cases(tmp_path: Path) -> None:
    store(tmp_path, exported_run())

    def export(form: str, *more: str) -> subprocess.CompletedProcess[str]:
        return harness("export", "latest", "--store", ".", "--format", form, *more, cwd=tmp_path)

    written = export("pytest-benchmark", "-o", "run.json")
    page = export("step-summary")

    assert written.returncode == 0, written.stderr
    assert written.stderr == "left out: train/nsa/seq_len=1024: out_of_memory\n"
    assert len(json.loads((tmp_path / "run.json").read_text())["benchmarks"]) == 1
    assert page.stdout.startswith(f"## ❔ Run: {Decision.INCONCLUSIVE}")


# --- the timer ---------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False])
def test_the_timer_waits_for_launched_work_and_does_not_initialise_cuda(
    monkeypatch: pytest.MonkeyPatch, used: bool
) -> None:
    waited = []
    cuda = SimpleNamespace(is_initialized=lambda: used, synchronize=lambda: waited.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0 + sum(waited))

    assert pytest_timer.synchronised() == 10.0 + used

    monkeypatch.delitem(sys.modules, "torch")
    assert pytest_timer.synchronised() == 10.0 + used


def test_pytest_benchmark_finds_the_timer_by_the_documented_name() -> None:
    timer: Any = load_timer(  # type: ignore[no-untyped-call]
        "harness.integrations.pytest_timer.synchronised"
    )

    assert timer.target is pytest_timer.synchronised
