"""Suite files as benchmarks of pytest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.cli.tests.test_cli import SUITE as FAKES
from harness.records import Outcome, Run
from harness.runner.launcher import Launcher
from harness.store import reader

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
SUITE = (FAKES % "good").replace("[fake]", "[one, two]").replace("sleep", "fake")
BAD = """\
  - name: bad
    factory: harness.tests.fake_workloads:raises
    providers: [one]
    axes: {seq_len: 1}
"""
PLUGINS = ("-p", "harness.integrations.pytest_plugin", "-p", "pytest_benchmark.plugin")


class Pytest:
    """Runs pytest with the plugin in a folder of its own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.folder = pytester.path

    def suite(self, text: str, name: str = "fakes.yaml") -> None:
        (self.folder / name).write_text(text)

    def run(self, *arguments: str, plugins: tuple[str, ...] = PLUGINS) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(*plugins, *arguments)

    def runs(self) -> list[Run]:
        return [*reader.stored(self.folder / "reports/runs", pytest.fail)]


@pytest.fixture
def inner(pytester: pytest.Pytester, warm: Launcher, monkeypatch: pytest.MonkeyPatch) -> Pytest:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Launcher, "of", lambda suite: warm)
    monkeypatch.setattr(warm, "close", lambda: None, raising=True)
    return Pytest(pytester)


def in_a_process(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest as a user starts it, with only the two plugins."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    path = os.pathsep.join((str(folder), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *arguments],
        cwd=folder,
        env={**environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_pytest_benchmark_saves_a_suite_and_fails_when_a_case_is_slower(tmp_path: Path) -> None:
    suite = SUITE.replace("harness.tests.fake_workloads:good", "mine:sleeps")
    (tmp_path / "fakes.yaml").write_text(suite.replace("[1, 2]", "[1]"))
    module = (
        "from harness.tests import fake_workloads\n"
        "def sleeps(provider, axes):\n"
        "    return fake_workloads.good(provider, {'step_s': STEP_S[provider]})\n"
    )

    def timed(one_s: float, *arguments: str) -> subprocess.CompletedProcess[str]:
        step_s = {"one": one_s, "two": 0.004}
        (tmp_path / "mine.py").write_text(f"STEP_S = {step_s}\n{module}")
        return in_a_process(tmp_path, "fakes.yaml", "--benchmark-storage=saved", *arguments)

    compared = ("--benchmark-compare=0001", "--benchmark-compare-fail=median:50%")
    before = timed(0.004, "--benchmark-save=before")
    same = timed(0.004, *compared)
    slower = timed(0.012, *compared, "--benchmark-json=now.json")

    for good in (before, same):
        assert good.returncode == 0, good.stdout + good.stderr
    assert slower.returncode != 0
    assert "Performance has regressed" in slower.stderr
    slow_cases = [line.split()[0] for line in slower.stderr.splitlines() if " - Field" in line]
    assert slow_cases == ["fake/one/seq_len=1"], slower.stderr
    now = json.loads((tmp_path / "now.json").read_text())["benchmarks"]
    one, two = sorted(now, key=lambda b: b["name"])
    assert (one["group"], one["params"]) == ("fake", {"seq_len": 1})
    assert one["stats"]["median"] > 0.012 > two["stats"]["median"]
    run = reader.load(tmp_path / "reports/runs", one["extra_info"]["run"])
    measured = run.of("fake/one/seq_len=1")
    assert one["extra_info"]["processes"] == len(measured) == 2
    assert one["stats"]["data"] == pytest.approx([s for m in measured for s in m.samples_s])


def test_each_case_is_collected_without_torch(tmp_path: Path) -> None:
    (tmp_path / "fakes.yaml").write_text(SUITE)
    loaded = "{'torch', 'harness.runner.rig'} & {*sys.modules}"
    ends = f"import sys\ndef pytest_unconfigure(): print({loaded})\n"
    (tmp_path / "conftest.py").write_text(ends)

    answer = in_a_process(tmp_path, "--collect-only", "-q", "fakes.yaml")

    assert "4 tests collected" in answer.stdout
    assert answer.stdout.endswith("\nset()\n")


def test_a_suite_is_collected_only_by_name(inner: Pytest) -> None:
    inner.suite(SUITE)
    inner.suite("services:\n  web: {image: nginx, role: workloads}\n", "compose.yaml")

    by_folder = inner.run("--collect-only")
    by_name = inner.run("--collect-only", "fakes.yaml", "-q")
    no_suite = inner.run("--collect-only", "compose.yaml")

    assert by_folder.ret is pytest.ExitCode.NO_TESTS_COLLECTED
    by_name.stdout.fnmatch_lines(["fakes.yaml::fake/one/seq_len=1"])
    assert no_suite.ret is pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("suite", "options", "said"),
    [
        (SUITE, PLUGINS[:2], "fakes.yaml needs pytest-benchmark*pip install pytest-benchmark*"),
        (SUITE.replace(":good", ":absent"), PLUGINS, "*has no 'absent'*"),
        (SUITE.replace("providers", "provider"), PLUGINS, "*fakes.yaml:9:5: *"),
        (SUITE.replace("workloads:", "workload:"), PLUGINS, "*Did you mean 'workloads'*"),
        (SUITE, (*PLUGINS, "-p", "xdist", "-n", "1"), "*would disturb each other: remove -n"),
    ],
    ids=["no pytest-benchmark", "no factory", "invalid", "misspelt", "xdist"],
)
def test_a_suite_that_cannot_run_is_an_error_without_a_traceback(
    inner: Pytest, suite: str, options: tuple[str, ...], said: str
) -> None:
    inner.suite(suite)

    result = inner.run("fakes.yaml", plugins=options)

    assert result.ret is not pytest.ExitCode.OK
    result.stdout.fnmatch_lines([said])
    result.stdout.no_fnmatch_line("*AttributeError*")
    assert inner.runs() == []


@pytest.mark.parametrize(
    ("selected", "cases", "said"),
    [
        ((), 4, "fakes.yaml: verdict: measured*"),
        (("-k", "seq_len:2 and not two"), 1, "*no verdict on the suite: 1 of 4 cases*"),
    ],
)
def test_the_run_of_the_selected_cases_is_stored_and_judged_if_it_is_whole(
    inner: Pytest, selected: tuple[str, ...], cases: int, said: str
) -> None:
    inner.suite(SUITE)

    result = inner.run("fakes.yaml", *selected)

    result.assert_outcomes(passed=cases, deselected=4 - cases)
    assert result.ret is pytest.ExitCode.OK
    result.stdout.fnmatch_lines([said])
    (run,) = inner.runs()
    assert run.ended_at
    assert len(run.suite.cases) == cases
    assert [m.outcome for m in run.measurements] == [Outcome.OK] * 2 * cases
    assert run.environment.command[:2] == ("pytest", "-p")


def test_a_failure_shows_its_evidence_and_is_no_benchmark(inner: Pytest) -> None:
    inner.suite(SUITE.replace("one, two", "one") + BAD)

    result = inner.run("fakes.yaml", "--benchmark-json=now.json")

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "bad/one: crash",
            "ValueError: block_size=3 is not a multiple of 16",
            "*bad_one-*.log",
            "fakes.yaml: verdict: NO-GO*",
        ]
    )
    result.stdout.no_fnmatch_line("*was not used at all*")
    now = json.loads((inner.folder / "now.json").read_text())["benchmarks"]
    assert [b["name"] for b in now] == ["fake/one/seq_len=1", "fake/one/seq_len=2"]


def test_a_rule_fails_the_session(inner: Pytest) -> None:
    rule = "verdict:\n  - {name: one is idle, metric: dispatched_ops, go: 0, quantifier: any}\n"
    inner.suite(SUITE.replace(":good", ":multiplies").replace("one, two", "one") + rule)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=2)
    assert result.ret is pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["fakes.yaml: verdict: NO-GO: one is idle*"])


def test_an_allowed_outcome_is_expected(inner: Pytest) -> None:
    inner.suite(SUITE + BAD + "    allow: {crash: block sizes are checked since v2}\n")

    result = inner.run("fakes.yaml::bad/one", "-rx")

    result.assert_outcomes(xfailed=1)
    assert result.ret is pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["XFAIL *crash is allowed: block sizes are checked since v2"])


def test_a_stopped_run_can_be_resumed(inner: Pytest) -> None:
    inner.suite(SUITE.replace("good", "raises"))

    result = inner.run("fakes.yaml", "-x")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*: 6 processes were not run; to resume: harness run --resume *"])
    assert [h.ended_at for h in inner.runs()] == [""]
