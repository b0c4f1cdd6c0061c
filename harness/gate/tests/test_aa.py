"""`harness calibrate`: A/A pairs, and unsteady processes."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError
from harness.gate.aa import steady_pairs
from harness.gate.calibration import MIN_PAIRS
from harness.records import Outcome
from harness.runner.interleave import Side, Task
from harness.store import reader
from harness.tests import fake_runs
from harness.tests.gate_repositories import repository

TASKS = [Task(suite="s.yaml", case=fake_runs.case({"seq_len": n})) for n in (512, 1024)]


class TwoSides:
    """Two sides; the first `unsteady` processes of the first case are not steady."""

    def __init__(self, unsteady: int, outcome: Outcome = Outcome.OK) -> None:
        self.sides = [Side(n, (), cast(Any, None), fake_runs.environment()) for n in "ab"]
        self.unsteady = unsteady
        self.outcome = outcome
        self.asked: list[list[int]] = []

    def take(self, plan: Sequence[tuple[Task, range]], text: str) -> None:
        self.asked.append([len(indices) for _, indices in plan])
        for side in self.sides:
            for task, indices in plan:
                side.measured.setdefault(task.key, []).extend(
                    self.process(task, index) for index in indices
                )

    def process(self, task: Task, index: int) -> Any:
        if self.outcome is not Outcome.OK:
            return fake_runs.ended(task.case, self.outcome)[0]
        steady = task is not TASKS[0] or index >= self.unsteady
        (made,) = fake_runs.timed(task.case, 0.1, processes=1, process=index, steady=steady)
        return made

    def pairs(self, wanted: int) -> list[int]:
        found = steady_pairs(self.take, self.sides, TASKS, wanted)
        return [len(found[task.case.case_id]) for task in TASKS]


@pytest.mark.parametrize(
    ("unsteady", "wanted", "asked", "found"),
    [
        pytest.param(0, 12, [[12, 12]], [12, 12], id="all are steady"),
        pytest.param(2, 12, [[12, 12]], [10, 12], id="enough are"),
        pytest.param(3, 12, [[12, 12], [1]], [10, 12], id="one more"),
        pytest.param(5, 10, [[10, 10], [5]], [10, 10], id="one in two"),
    ],
)
def test_unsteady_pairs_are_replaced(
    unsteady: int, wanted: int, asked: list[list[int]], found: list[int]
) -> None:
    machine = TwoSides(unsteady)

    assert machine.pairs(wanted) == found
    assert machine.asked == asked


@pytest.mark.parametrize(
    ("machine", "said"),
    [
        (TwoSides(6), "6 of 10 pairs are not steady; 10 steady pairs are needed"),
        (TwoSides(0, Outcome.NON_FINITE), "ended non_finite: planted"),
    ],
)
def test_a_failed_or_unsteady_case_is_refused_at_once(machine: TwoSides, said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        machine.pairs(MIN_PAIRS)

    assert len(machine.asked) == 1


def test_a_node_is_calibrated_with_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # set by other tests

    said = CliRunner().invoke(app, ["calibrate", "toysuites/toys.yaml", "--json"])

    assert said.exit_code in (0, 3), said.exception  # 3: A/A pairs differed by chance
    answer = json.loads(said.stdout)
    assert [c["case_id"] for c in answer["answer"]["cases"]] == ["sleep/a/step_s=0.004"]
    (kept,) = (tmp_path / "ci/baselines").glob("*/toysuites__toys.calibration.json")
    assert json.loads(kept.read_text())["answer"] == answer["answer"]
    runs = [reader.load(tmp_path / "reports/runs", r) for r in answer["run_id"].split()]
    assert [(len(r.measurements) >= 12, bool(r.ended_at)) for r in runs] == [(True, True)] * 2
