"""The command line, as a newcomer and a CI job meet it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from harness import __main__, units
from harness.cli import main as cli
from harness.cli.console import EXIT_REFUSED
from harness.cli.progress import ProgressBar
from harness.gate.policy import PolicyForm
from harness.git import repository
from harness.records import Outcome, Stop
from harness.runner import forkserver
from harness.store import reader
from harness.suite.fields import schema_of
from harness.suite.schema import SuiteModel
from harness.tests import gate_repositories
from harness.tests.command_line import harness

ROOT = Path(__file__).resolve().parents[3]
SUITE = """\
schema: 1
title: Fakes
subject: Fakes
question: Do the fakes answer?
measure: {processes: 2, min_samples: 3, max_samples: 5, sample_s: 0.01, warmup_s: 0.2, stall_s: 20}
workloads:
  - name: sleep
    factory: harness.tests.fake_workloads:%s
    providers: [fake]
    axes: {seq_len: [1, 2]}
"""


def write_suite(folder: Path, factory: str = "good") -> None:
    (folder / "fakes.yaml").write_text(SUITE % factory)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one message of a request that could not be carried out."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, its factory, and a recorded run of it."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "own.py").write_text("from harness.tests.fake_workloads import good\n")
    write_suite(folder)
    suite = folder / "fakes.yaml"
    suite.write_text(suite.read_text().replace("harness.tests.fake_workloads", "own"))
    result = harness("run", "fakes.yaml", "--trace", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def recorded(once: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(once, tmp_path, dirs_exist_ok=True)


def report(folder: Path) -> Path:
    (page,) = (folder / "reports").glob("*Test Engineer Report - Fakes v1.md")
    return page


def test_a_run_is_stored_and_ends_in_a_dated_report(once: Path) -> None:
    run = reader.load(once / "reports/runs", "latest")

    assert run.ended_at
    assert run.wall_s
    assert run.self_test
    assert {check.name for check in run.self_test.checks} >= {"host_clock"}
    assert "disk" in {check.name for check in run.environment.checks}
    page = report(once).read_text(encoding="utf-8")
    assert "- **warn** device: no GPU" in page
    assert "- **ok** before the run: " in page


def test_the_first_process_of_a_case_keeps_its_trace_if_asked(once: Path) -> None:
    traces = [*(once / "reports/runs").glob("*-fakes-*/logs/**/*.trace.json.gz")]

    assert len(traces) == 2
    assert all(trace.name.endswith(".0.trace.json.gz") for trace in traces)


def test_a_recorded_run_can_be_listed_shown_and_reported_again(recorded: Path) -> None:
    listed = harness("list", "runs", cwd=recorded, env={"COLUMNS": "50"})
    shown = harness("show", cwd=recorded)
    reported = harness("report", "latest", cwd=recorded)

    (folder,) = (recorded / "reports/runs").glob("*-fakes-*")
    assert folder.name in listed.stdout, "ids are never cut"
    assert "Verdict: measured" in shown.stdout
    assert reported.returncode == 0
    (again,) = (recorded / "reports").glob("*Fakes v1.1.md")
    page = again.read_text(encoding="utf-8")
    again.write_text(page.replace("measured", "GO"), "utf-8")
    rendered = harness("report", "--all", cwd=recorded).stdout
    assert again.name in rendered
    assert "1 file changed in" in rendered
    assert again.read_text(encoding="utf-8") == page


def test_a_dry_run_shows_the_plan_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(tmp_path, "no_such_function")
    monkeypatch.chdir(tmp_path)
    adaptive = "measure.processes={from: 2, to: 6}"
    command = ["run", "fakes.yaml", "--dry-run", "--set", "seq_len=1,2,4", "--set", adaptive]

    shown = CliRunner().invoke(cli.app, command)

    assert re.findall(r"sleep/fake/seq_len=(\d)", shown.stdout) == ["1", "2", "4"]
    assert "2 to 6" in shown.stdout
    assert "3 cases, 6 to 18 processes" in shown.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fakes.yaml"]


def test_a_bracket_in_a_pattern_is_no_warning(tmp_path: Path) -> None:
    named = "schema: 1\ntitle: X\nsubject: X\nquestion: X?\nworkloads: [{name: x, command: x, "
    (tmp_path / "x.yaml").write_text(f"{named}progress: '[[]step'}}]\n")

    assert harness("run", "x.yaml", "--dry-run", cwd=tmp_path).stderr == ""


def test_an_interrupted_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_suite(tmp_path)

    def interrupting(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ProgressBar, "finished", interrupting)
        stopped = harness("run", "fakes.yaml", "--no-self-test", cwd=tmp_path)
    (record,) = (tmp_path / "reports/runs").glob("*/run.jsonl")
    kept = measurements(record)
    asked = ("run", "--resume", str(record.parent), "--no-report", "--no-self-test")
    resumed = harness(*asked, "--store", "elsewhere", cwd=tmp_path)

    assert (stopped.returncode, kept) == (3, 1)
    assert f"harness run --resume {record.parent.relative_to(tmp_path)}" in stopped.stderr
    assert resumed.returncode == 0, resumed.stderr
    assert reader.load(tmp_path, record).ended_at
    assert measurements(record) == 4


def test_a_rule_may_end_a_run_and_the_rest_is_measured_only_on_request(tmp_path: Path) -> None:
    write_suite(tmp_path)
    with (tmp_path / "fakes.yaml").open("a") as file:
        file.write("  - {name: bad, factory: harness.tests.fake_workloads:raises, providers: [x]}")
        rule = "{name: floor, match: {workload: bad}, metric: step_s, go: 1, abort_early: true}"
        file.write(f"\nverdict: [{rule}]\n")
    quick = ("--no-report", "--no-self-test")

    stopped = harness("run", "fakes.yaml", *quick, cwd=tmp_path)
    (record,) = (tmp_path / "reports/runs").glob("*/run.jsonl")
    before = reader.load(tmp_path, record)
    again = refused(harness("run", "--resume", "latest", *quick, cwd=tmp_path))
    shown = harness("show", "latest", cwd=tmp_path)
    whole = harness("run", "--resume", "latest", "--no-abort", *quick, cwd=tmp_path)

    assert (stopped.returncode, bool(before.ended_at)) == (1, True)
    assert before.stopped == Stop(rule="floor")
    assert [m.outcome for m in before.measurements] == [Outcome.CRASH]
    for said in (stopped.stderr, again):
        assert "decided by rule “floor”" in said
        assert f"--resume {record.parent.relative_to(tmp_path)} --no-abort" in said
    assert "not run" in shown.stdout
    assert "sleep/fake/seq_len=1: decided by rule “floor”" in shown.stdout
    assert (whole.returncode, measurements(record)) == (1, 5)
    assert reader.load(tmp_path, record).stopped is None


def test_a_run_whose_budget_is_over_is_resumed(recorded: Path) -> None:
    quick = ("--no-report", "--no-self-test", "--store", "empty")

    empty = harness("run", "fakes.yaml", "--budget", "0.001", *quick, cwd=recorded)
    stop = reader.load(recorded / "empty", "latest").stopped
    resumed = harness("run", "--resume", "latest", *quick, cwd=recorded)

    assert (empty.returncode, stop) == (3, Stop(budget_s=0.06))
    assert "the budget of 0.001 min left no more time" in empty.stdout
    assert resumed.returncode == 0
    assert reader.load(recorded / "empty", "latest").stopped is None


def test_a_dry_run_expects_the_times_of_the_newest_run(recorded: Path) -> None:
    (record,) = (recorded / "reports/runs").glob("*/run.jsonl")
    took_s = [m.wall_s for m in reader.read(record.parent).measurements]

    shown = harness("run", "fakes.yaml", "--dry-run", cwd=recorded)

    assert f"expected in all: {units.duration(sum(took_s))}\n" in shown.stdout
    assert "Expected times and steps: 2 cases as in stored runs" in shown.stdout
    assert " ms (" in shown.stdout, "a step and its bound"


def test_sigterm_before_the_first_process_is_undecided_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def reading(*_: object) -> None:
        assert any(temporary.glob("tmp*/log")), "a worker describes the environment"
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(forkserver, "MessageReader", reading)
    stopped = harness("run", "fakes.yaml", cwd=tmp_path)

    assert (stopped.returncode, stopped.stderr) == (3, "interrupted\n")
    assert not any(temporary.iterdir())
    assert not (tmp_path / "reports/runs").exists()


def test_a_resumed_run_is_checked_before_it_goes_on(recorded: Path) -> None:
    """Otherwise a misspelt variable would record the remaining cases as crashed."""
    (record,) = (recorded / "reports/runs").glob("*/run.jsonl")
    *kept, _, _ = record.read_text().splitlines(keepends=True)
    record.write_text("".join(kept))  # as of a killed run
    (recorded / "own.py").unlink()
    before = record.read_bytes()

    message = refused(harness("run", "--resume", "latest", cwd=recorded))

    assert "no module 'own' is installed, or in the current folder\n  Check the spelling" in message
    assert "\n  1 more case fails" in message
    assert record.read_bytes() == before


def measurements(record: Path) -> int:
    return record.read_text().count('{"kind": "measurement"')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "smok"], "Did you mean 'smoke'"),
        (["run"], "either a suite or --resume"),
        (["run", "smoke", "--resume", "latest"], "either a suite or --resume"),
        (["run", "smoke", "--budget", "0"], "'--budget': must be"),
        (["run", "--resume", "latest", "--set", "seq_len=1"], "--resume continues"),
        (["run", "smoke", "--dry-run", "--budget", "5"], "--budget does not apply"),
        (["run", "smoke", "--executor", "ray", "--budget", "1"], "--budget does not apply"),
        (["run", "smoke", "--address", "auto"], "--executor ray only"),
        (["run", "smoke", "--executor", "ray", "--address", "127.0.0.1:1"], "ray start --head"),
        (["run", "smoke", "--set", "preset=tyny"], "did you mean 'tiny'"),
        (["run", "smoke", "--set", "presett=tiny"], "--dry-run` lists"),
        (["run", "attention"], "`harness run smoke` and"),
        (["report", "--all", "--rules", "smoke"], "--all renders each report as it was made"),
        (["show", "20200101"], "reports/runs"),
        (["list", "cases"], "'cases' is not one of 'suites', 'runs'"),
        (["export", "latest"], "Missing option '--format'"),
        (["gate", "--bse", "main"], "No such option: --bse (Possible options: --base"),
        (["run", "smoke", "--filter"], "'--filter' requires an argument"),
        (["gate"], "neither --base nor --counters is given"),
        (["gate", "--counters", "--record", "--head", "HEAD"], "--record stores counts"),
        (["gate", "--counters", "--policy", "absent.yaml"], "absent.yaml: cannot be read"),
        (["gait"], "Did you mean 'gate'?"),
        (["--suite", "smoke"], "No such option: --suite\n  See: harness --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_request_that_cannot_be_met_is_one_message_with_a_remedy(
    arguments: Sequence[str], said: str, tmp_path: Path
) -> None:
    result = harness(*arguments, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})

    assert said in refused(result)
    assert not (tmp_path / "reports/runs").exists()


@pytest.mark.parametrize(
    "defect", [KeyError("a\x1b]52;c;\x07"), EOFError(), BrokenPipeError(32, "")]
)
def test_a_defect_is_exit_4_with_its_traceback_and_never_a_no_go(
    defect: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise defect

    monkeypatch.setattr(reader, "load", fails)

    result = harness("show", cwd=tmp_path)

    assert result.returncode == 4
    assert f"\n{type(defect).__name__}" in result.stderr
    assert "Report it" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(("words", "cut"), [("--help", 0), ("run --help", 0), ("show --help", 25)])
def test_an_output_that_is_not_read_to_its_end_is_no_defect_and_no_verdict(
    words: str, cut: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "harness", *words.split()]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, stdout=pipe, stderr=pipe) as process:
        assert process.stdout
        for _ in range(cut):
            process.stdout.readline()
        process.stdout.close()
        _, said = process.communicate()

    assert process.returncode == EXIT_REFUSED or (cut and process.returncode == 0)
    assert b"defect" not in said


@pytest.mark.parametrize(
    ("failure", "code", "said"),
    [(ImportError("broken"), 4, "Traceback"), (KeyboardInterrupt, 3, "interrupted\n")],
)
def test_an_import_that_fails_or_is_interrupted_is_no_verdict(
    failure: object, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch("builtins.__import__", side_effect=failure), pytest.raises(SystemExit) as left:
        __main__.main()

    assert left.value.code == code
    assert capsys.readouterr().err.startswith(said)


def test_a_missing_factory_is_refused_at_its_place(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def make(): ...\n")
    text = SUITE.replace("harness.tests.fake_workloads:%s", "own:mak")
    (tmp_path / "fakes.yaml").write_text(text)

    message = refused(harness("run", "fakes.yaml", cwd=tmp_path))

    said = "own has no 'mak'\n  Did you mean 'make'?\n  1 more case fails"
    assert f"fakes.yaml:8:14: case sleep/fake/seq_len=1: factory 'own:mak': {said}" in message


def test_an_unwritable_report_folder_is_found_before_the_run(tmp_path: Path) -> None:
    write_suite(tmp_path)
    (tmp_path / "file").write_text("in the way")

    message = refused(harness("run", "fakes.yaml", "--reports", "file/reports", cwd=tmp_path))

    assert "file/reports" in message
    assert not (tmp_path / "reports").exists()


def test_the_doctor_describes_the_machine_and_the_repository_of_its_user(tmp_path: Path) -> None:
    mine = gate_repositories.repository(tmp_path, {})
    git = repository.read_git(mine)

    examined = harness("doctor", cwd=mine / "toy")

    assert examined.returncode in (0, 3)
    assert ("not fit" in examined.stdout) is (examined.returncode == 3)
    assert {"device", "disk", "git"} <= {*examined.stdout.split()}
    assert torch.__version__ in examined.stdout
    assert git is not None
    assert git.commit[:10] in examined.stdout


def test_the_doctor_names_what_differs_from_a_run(recorded: Path) -> None:
    """The folder is not a git repository, so the commit is a difference too."""
    other = harness(*("doctor", "--against", "latest"), cwd=recorded, env={"NSA_TEST_FLAG": "1"})

    assert other.returncode == 3
    found = [line.split() for line in other.stdout.splitlines()[1:]]
    assert [" ".join(line[:3]) for line in found] == ["NSA_TEST_FLAG none 1", "commit not known"]


def test_the_schema_is_printed_for_editors(tmp_path: Path) -> None:
    for options, form in ((), SuiteModel), (("--gate",), PolicyForm):
        assert json.loads(harness("schema", *options, cwd=tmp_path).stdout) == schema_of(form)
