"""Names and values from strangers: no code runs, no file is written elsewhere. ruff refuses code
that evaluates text or hands it to a shell."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import Case, Measurement, Outcome
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.store.writer import create
from harness.tests import fake_runs
from harness.tests.workers import make_case, run

NAMES = [
    "../../../../tmp/evil",
    "/etc/passwd",
    "..",
    ".",
    "a\x00b",
    "a\nb\r\x1b[2J",
    "-rf",
    "$(touch evil); `touch evil`",
    "x" * 5000,
    "µ/日本/\udc80",
    "",
]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_of_a_suite_or_a_case_leaves_the_folder_of_its_run(
    tmp_path: Path, name: str
) -> None:
    case = fake_runs.case({"seq_len": 1}, case_id=name)
    measured = Measurement(case_id=name, process=0, outcome=Outcome.OK, samples_s=(0.1,))
    run = fake_runs.run([case], lambda c: [measured])
    root = tmp_path / "store"

    with create(root, replace(run.suite, name=name[:200] or "x"), run.environment) as writer:
        log = writer.log_path(name, 0)
        writer.append(measured)
        writer.finish()

    assert log.parent == writer.folder / "logs"
    assert writer.folder.parent == root
    assert [p.name for p in tmp_path.iterdir()] == ["store"]
    assert [p.name for p in root.iterdir()] == [writer.run_id]
    (read,) = reader.load(root, writer.run_id).suite.cases
    assert read.case_id == name.replace("\udc80", "?")


def test_the_value_of_a_variable_is_not_run_by_a_shell(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    value = "$(touch evil)`touch evil`; touch evil\na'b\"c\n$HOME"
    case: Case = make_case("reads_environment", env={"NSA_TEST_FLAG": value}, axes={})

    (measured,) = run(warm, tmp_path, case)

    assert measured.outcome is Outcome.OK, measured.detail
    assert measured.effective["flag"] == value
    assert "evil" not in {p.name for p in tmp_path.rglob("*")}
