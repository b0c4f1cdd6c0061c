"""The command line, as a newcomer and a CI job meet it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli import main as cli
from harness.git import repository
from harness.suite.schema import json_schema
from harness.tests.command_line import harness
from harness.tests.fake_runs import H200

ROOT = Path(__file__).resolve().parents[3]
PATH = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""This checkout first, then the folders of the Python that runs the tests."""

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


def started(
    *options: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """A run of the suite that can be interrupted."""
    return subprocess.Popen(
        [sys.executable, "-m", "harness", "run", "fakes.yaml", *options],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": PATH, **(env or {})},
        stderr=subprocess.PIPE,
        text=True,
        # Under nohup, or as a background job, Ctrl-C would be ignored from the start.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )


def write_suite(folder: Path, factory: str = "good") -> None:
    (folder / "fakes.yaml").write_text(SUITE % factory)


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The one message of a request that could not be carried out."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_run_ends_in_a_dated_report_and_a_second_one_in_version_2(tmp_path: Path) -> None:
    write_suite(tmp_path)

    first = harness("run", "fakes.yaml", "--no-self-test", cwd=tmp_path)
    second = harness("run", "fakes.yaml", "--json", cwd=tmp_path)

    assert first.returncode == 0, first.stderr
    assert "Verdict: GO" in first.stdout
    assert "% work (accuracy, counting, warm-up, sampling)" in " ".join(first.stdout.split())
    answer = json.loads(second.stdout)
    assert {check["name"] for check in answer["self_test"]["checks"]} >= {"host_clock"}
    assert answer["time"]["whole"] is True
    assert len(answer["spread"]) == 2
    assert answer["report"].endswith("Test Engineer Report - Fakes v2.md")
    reports = sorted(path.name for path in (tmp_path / "reports").glob("*.md"))
    assert [name[10:] for name in reports] == [
        " Test Engineer Report - Fakes v1.md",
        " Test Engineer Report - Fakes v2.md",
    ]


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a suite, its factory and a recorded run of it."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "own.py").write_text("from harness.tests.fake_workloads import good\n")
    write_suite(folder)
    suite = folder / "fakes.yaml"
    suite.write_text(suite.read_text().replace("harness.tests.fake_workloads", "own"))
    result = harness("run", "fakes.yaml", "--no-report", "--no-self-test", cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture
def recorded(once: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(once, tmp_path, dirs_exist_ok=True)


def test_a_recorded_run_can_be_listed_shown_and_reported_again(recorded: Path) -> None:
    listed = json.loads(harness("list", "runs", "--json", cwd=recorded).stdout)
    narrow = harness("list", "runs", cwd=recorded, env={"COLUMNS": "50"})
    shown = json.loads(harness("show", "--json", cwd=recorded).stdout)
    reported = harness("report", "latest", cwd=recorded)

    (folder,) = (recorded / "reports/runs").glob("*-fakes-*")
    assert folder.name in narrow.stdout, "ids are never cut"
    assert [run["run_id"] for run in listed["runs"]] == [shown["run"]] == [folder.name]
    assert [case["outcome"] for case in shown["cases"]] == ["ok", "ok"]
    assert reported.returncode == 0
    assert len(list((recorded / "reports").glob("*.md"))) == 1


def test_a_dry_run_shows_the_plan_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_suite(tmp_path, "no_such_function")
    monkeypatch.chdir(tmp_path)
    command = ["run", "fakes.yaml", "--dry-run", "--set", "seq_len=1,2,4"]

    planned, shown = (CliRunner().invoke(cli.app, [*command, *x]) for x in (["--json"], []))

    assert [case["axes"]["seq_len"] for case in json.loads(planned.stdout)["cases"]] == [1, 2, 4]
    assert "sleep/fake/seq_len=4" in shown.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["fakes.yaml"]


def test_a_failing_case_is_no_go(tmp_path: Path) -> None:
    write_suite(tmp_path, "raises")

    result = harness("run", "fakes.yaml", cwd=tmp_path)

    assert result.returncode == 1
    assert "NO-GO" in result.stdout


def test_an_interrupted_run_can_be_resumed(tmp_path: Path) -> None:
    write_suite(tmp_path)
    running = started(
        *("--set", "measure.min_samples=40", "--set", "measure.max_samples=40"), cwd=tmp_path
    )
    record = wait_for_measurements(2, tmp_path / "reports/runs")
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=30)
    kept = measurements(record)

    resumed = harness("run", "--resume", "latest", "--json", cwd=tmp_path)

    assert running.returncode == 3
    assert f"harness run --resume {record.parent.relative_to(tmp_path)}" in said
    assert 1 <= kept < 4, "the one being written may be lost, no earlier one"
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["finished"] is True
    assert measurements(record) == 4


def test_sigterm_before_the_first_process_is_undecided_and_leaves_nothing(tmp_path: Path) -> None:
    write_suite(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    running = subprocess.Popen(
        [sys.executable, "-m", "harness", "run", "fakes.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: any(temporary.glob("tmp*/log")))  # a worker describes the environment
    running.terminate()
    _, said = running.communicate(timeout=30)

    assert (running.returncode, said) == (3, "interrupted\n")
    assert not any(temporary.glob("tmp*"))
    assert not (tmp_path / "reports/runs").exists()


def test_a_run_is_not_resumed_on_another_device(recorded: Path) -> None:
    record = unfinished(recorded)
    first, newline, rest = record.read_text().partition("\n")
    line = json.loads(first)
    line["environment"]["gpu"] = asdict(replace(H200, name="NVIDIA A100"))
    record.write_text(json.dumps(line) + newline + rest)
    before = record.read_bytes()

    message = refused(harness("run", "--resume", "latest", cwd=recorded))

    assert "NVIDIA A100, but this machine has" in message
    assert record.read_bytes() == before


def test_a_resumed_run_is_checked_before_it_goes_on(recorded: Path) -> None:
    """Otherwise a misspelt variable would record the remaining cases as crashed."""
    record = unfinished(recorded)
    (recorded / "own.py").unlink()
    before = record.read_bytes()

    message = refused(harness("run", "--resume", "latest", cwd=recorded))

    assert "no module 'own' is installed, or in the current folder\n  Check the spelling" in message
    assert "\n  1 more case fails" in message
    assert record.read_bytes() == before


def unfinished(folder: Path) -> Path:
    """The record of the folder's run without its end, as of a killed run."""
    (record,) = (folder / "reports/runs").glob("*/run.jsonl")
    *kept, _, _ = record.read_text().splitlines(keepends=True)
    record.write_text("".join(kept))
    return record


def measurements(record: Path) -> int:
    return record.read_text().count('{"kind": "measurement"')


def wait_for_measurements(count: int, runs: Path) -> Path:
    def enough() -> list[Path]:
        return [r for r in runs.glob("*/run.jsonl") if measurements(r) >= count]

    wait_until(lambda: bool(enough()))
    return enough()[0]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come within a minute"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "smok"], "Did you mean 'smoke'"),
        (["run"], "either a suite or --resume"),
        (["run", "smoke", "--resume", "latest"], "either a suite or --resume"),
        (["run", "--resume", "latest", "--set", "seq_len=1"], "--resume continues"),
        (["run", "smoke", "--filter", "nothing"], "no case matches"),
        (["run", "smoke", "--set", "seq_lenn=1"], "Did you mean 'seq_len'"),
        (["run", "smoke", "--set", "preset=tyny"], "did you mean 'tiny'"),
        (["run", "a100-retest"], "needs an NVIDIA GPU"),
        (["overhead", "attention"], "needs an NVIDIA GPU"),
        (["show", "20200101"], "reports/runs"),
        (["list", "cases"], "harness list runs"),
        (["calibrate", "smoke", "--pairs", "3"], "value for '--pairs': use 10 or more\n"),
        (["bisect", "smoke", "--effect", "7"], "value for '--effect': use 1 or less\n"),
        (["list", "runs", "-n", "few"], "list --help"),
        (["export", "latest"], "Missing option '--format'"),
        (["gate", "--bse", "main"], "no option --bse\n  Did you mean --base?"),
        (["run", "smoke", "--filter"], "'--filter' requires an argument"),
        (["run", "smoke", "decode"], "unexpected extra argument"),
        (["baseline", "keep"], "No such command 'keep'"),
        (["gait"], "Did you mean 'gate'?"),
        (["--suite", "smoke"], "no option --suite"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_request_that_cannot_be_met_is_one_message_with_a_remedy(
    arguments: Sequence[str], said: str, tmp_path: Path
) -> None:
    result = harness(*arguments, cwd=tmp_path, env={"CUDA_VISIBLE_DEVICES": ""})

    assert said in refused(result)
    assert not (tmp_path / "reports/runs").exists()


def test_a_misspelt_flag_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    message = refused(harness("run", "smoke", cwd=tmp_path, env={"NSA_USE_FA3": "1"}))

    assert "NSA_USE_FA3 is not a flag" in message
    assert "Did you mean NSA_USE_FA2?" in message


@pytest.mark.parametrize(
    ("module", "said"),
    [
        pytest.param(
            "own:mak",
            "factory 'own:mak': own has no 'mak'\n  Did you mean 'make'?\n  1 more case fails",
            id="near",
        ),
        pytest.param(
            "owm:make",
            "factory 'owm:make': no module 'owm' is installed, or in the current folder\n"
            "  Check the spelling, install it, or add its folder to PYTHONPATH.",
            id="module",
        ),
        pytest.param(
            "own:NUMBER",
            "factory 'own:NUMBER': it is of type int, not a function\n"
            "  Name a function that returns a harness.workload.Workload.\n",
            id="no function",
        ),
    ],
)
def test_a_missing_factory_is_refused_at_its_place(module: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("NUMBER = 1\ndef make(): ...\ndef more(): ...\n")
    text = SUITE.replace("harness.tests.fake_workloads:%s", module)
    (tmp_path / "fakes.yaml").write_text(text)

    message = refused(harness("run", "fakes.yaml", cwd=tmp_path))

    assert f"error: fakes.yaml:8:14: case sleep/fake/seq_len=1: {said}" in message


def test_an_unwritable_report_folder_is_found_before_the_run(tmp_path: Path) -> None:
    write_suite(tmp_path)
    (tmp_path / "file").write_text("in the way")

    message = refused(harness("run", "fakes.yaml", "--reports", "file/reports", cwd=tmp_path))

    assert "file/reports" in message
    assert not (tmp_path / "reports").exists()


def test_the_doctor_describes_the_machine_and_the_code_that_is_measured(tmp_path: Path) -> None:
    """Not the repository of the current folder."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    git = repository.read_git(ROOT)

    examined = harness("doctor", "--json", cwd=tmp_path)

    answer = json.loads(examined.stdout)
    assert examined.returncode == (0 if answer["verdict"] in ("ok", "warn") else 3)
    assert answer["environment"]["versions"]["torch"]
    assert {"device", "disk", "git", "versions"} <= {check["name"] for check in answer["checks"]}
    assert answer["environment"]["git"] == (asdict(git) if git else None)


def test_the_doctor_names_what_differs_from_a_run(recorded: Path) -> None:
    """The folder is not a git repository, so the commit is a difference too."""
    same = harness("doctor", "--against", "latest", "--json", cwd=recorded)
    text = (recorded / "fakes.yaml").read_text()
    (recorded / "fakes.yaml").write_text(text.replace("sample_s: 0.01", "sample_s: 0.02"))
    other = harness(
        *("doctor", "--against", "latest", "--json"), cwd=recorded, env={"NSA_TEST_FLAG": "1"}
    )

    code = ("commit", "not known", "not known")
    assert (same.returncode, other.returncode) == (3, 3)
    (found,) = json.loads(same.stdout)["differences"]
    assert (found["name"], found["baseline"], found["candidate"]) == code
    found = json.loads(other.stdout)["differences"]
    assert [(d["name"], d["baseline"], d["candidate"]) for d in found] == [
        ("NSA_TEST_FLAG", "none", "1"),
        code,
        ("measure.sample_s of all cases", "0.01", "0.02"),
    ]


def test_the_schema_is_printed_for_editors(tmp_path: Path) -> None:
    assert json.loads(harness("schema", cwd=tmp_path).stdout) == json_schema()
