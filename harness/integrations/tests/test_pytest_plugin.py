"""Suite files as tests of pytest."""

import ast
import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.integrations.pytest_session import judge
from harness.records import Match, Outcome, Rule
from harness.runner.launcher import Launcher
from harness.store import reader
from harness.tests import fake_runs
from harness.tests.indexed import headers

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parents[3]
SUITE = """\
schema: 1
title: Fakes
subject: Fakes
question: Do the fakes answer?
measure: {processes: 2, min_samples: 3, max_samples: 5, sample_s: 0.01, warmup_s: 0.2, stall_s: 20}
workloads:
  - name: fake
    factory: harness.tests.fake_workloads:good
    providers: [one, two]
    axes: {seq_len: [1, 2]}
"""
BAD = """\
  - name: bad
    factory: harness.tests.fake_workloads:raises
    providers: [one]
    axes: {seq_len: 1}
"""


def test_a_failure_cannot_command_the_terminal() -> None:
    (case,) = fake_runs.sweep(seq_len=[1])
    nasty = "\x1b]52;c;\x07"
    failed = fake_runs.run([case], lambda c: fake_runs.ended(c, Outcome.CRASH, detail=nasty))
    allowed = fake_runs.run(
        [replace(case, allow={Outcome.CRASH: nasty})], lambda c: [*failed.of(c.case_id)]
    )

    said = judge(failed).failure + judge(allowed).expected

    assert said.count("]52;c;") == 2
    assert "\x1b" not in said


class Pytest:
    """Runs pytest with the plugin in a folder of its own."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.folder = pytester.path

    def suite(self, text: str, name: str = "fakes.yaml") -> Path:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    def run(self, *arguments: str) -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(
            "-p", "harness.integrations.pytest_plugin", *arguments
        )

    def runs(self) -> list[reader.RunHeader]:
        return list(headers(self.folder / "reports/runs"))


@pytest.fixture
def inner(pytester: pytest.Pytester, warm: Launcher, monkeypatch: pytest.MonkeyPatch) -> Pytest:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setattr(Launcher, "of", lambda suite: warm)
    monkeypatch.setattr(warm, "close", lambda: None, raising=True)
    return Pytest(pytester)


def test_each_case_is_collected_without_torch(tmp_path: Path) -> None:
    (tmp_path / "fakes.yaml").write_text(SUITE)
    script = (
        "import sys, pytest\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "status = pytest.main(['-p', 'harness.integrations.pytest_plugin', '--collect-only', '-q', "
        "'fakes.yaml'])\n"
        "print(*{'torch', 'suites.workloads', 'harness.runner.rig'} & set(sys.modules))\n"
        "sys.exit(status)"
    )

    answer = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert answer.returncode == 0, answer.stdout + answer.stderr
    *collected, _, _, loaded = answer.stdout.split("\n")[:-1]
    assert collected == [
        f"fakes.yaml::fake/{provider}/seq_len={n}" for provider in ("one", "two") for n in (1, 2)
    ]
    assert loaded == ""


def test_suites_are_collected_by_name_and_by_pattern(inner: Pytest) -> None:
    inner.suite(SUITE, "suites/fakes.yaml")
    inner.suite(SUITE, "others/fakes.yaml")
    inner.suite("services:\n  web: {image: nginx}\n", "compose.yaml")

    by_folder = inner.run("--collect-only")
    by_name = inner.run("--collect-only", "suites/fakes.yaml", "-q")
    no_suite = inner.run("--collect-only", "compose.yaml")
    inner.pytester.makeini("[pytest]\nharness_suites = suites/*.yaml\n")
    by_pattern = inner.run("--collect-only", "-q")

    assert by_folder.ret is pytest.ExitCode.NO_TESTS_COLLECTED
    by_name.stdout.fnmatch_lines(["suites/fakes.yaml::fake/one/seq_len=1"])
    assert no_suite.ret is pytest.ExitCode.USAGE_ERROR
    by_pattern.stdout.fnmatch_lines(["suites/fakes.yaml::fake/one/seq_len=1"])
    by_pattern.stdout.no_fnmatch_line("others/*")


def test_an_invalid_suite_is_an_error_with_its_line(inner: Pytest) -> None:
    inner.suite(SUITE.replace("providers", "provider"))

    result = inner.run("fakes.yaml")

    assert result.ret is pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*fakes.yaml:9:5: *"])


def test_a_good_suite_passes_and_its_run_is_stored(inner: Pytest) -> None:
    inner.suite(SUITE)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=4)
    assert result.ret is pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["verdict: measured*"])
    (header,) = inner.runs()
    assert (header.state, header.cases, header.measurements) == ("complete", 4, 8)
    run = reader.load(inner.folder / "reports/runs", header.run_id)
    assert {m.outcome for m in run.measurements} == {Outcome.OK}
    assert run.environment.command[:2] == ("pytest", "-p")
    assert run.notes == ()


def test_a_selection_by_k_gives_no_verdict(inner: Pytest) -> None:
    inner.suite(SUITE)

    result = inner.run("fakes.yaml", "-k", "seq_len:2 and not two")

    result.assert_outcomes(passed=1, deselected=3)
    result.stdout.fnmatch_lines(["no verdict on the suite: 1 of 4 cases were selected"])
    (header,) = inner.runs()
    assert (header.cases, header.measurements, header.state) == (1, 2, "complete")


def test_a_failure_shows_its_evidence_and_log(inner: Pytest) -> None:
    inner.suite(SUITE.replace("one, two", "one") + BAD)

    result = inner.run("fakes.yaml", "--junitxml=junit.xml")

    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "bad/one: crash",
            "ValueError: block_size=3 is not a multiple of 16",
            "*traceback: evidence/bad_one-*/traceback.txt",
            "*reproduce: python */reproduce.py",
            "end of logs/bad_one-*",
            "  ValueError: block_size=3 is not a multiple of 16",
            "verdict: NO-GO*",
        ]
    )
    tests = ElementTree.parse(inner.folder / "junit.xml").iter("testcase")
    failed = {
        t.get("name"): "block_size=3" in (f.text or "") for t in tests for f in t.iter("failure")
    }
    assert failed == {"bad/one": True}


FAST = Rule(name="slow enough", metric="step_s", go=0.05)
OTHER_CASE = Match(criteria={"seq_len": (1,)})


@pytest.mark.parametrize(
    ("rule", "measured", "failure"),
    [
        pytest.param(FAST, {}, ["NO-GO"], id="broken"),
        pytest.param(replace(FAST, go=1.0), {}, [], id="met"),
        pytest.param(replace(FAST, go=1.0), {"processes": 1}, ["INCONCLUSIVE"], id="open"),
        pytest.param(replace(FAST, gpu="A100"), {}, [], id="another GPU"),
        pytest.param(replace(FAST, quantifier="any"), {}, [], id="best case"),
        pytest.param(replace(FAST, metric="scaling_exponent", axis="seq_len"), {}, [], id="fit"),
        pytest.param(replace(FAST, match=OTHER_CASE), {}, [], id="another case"),
    ],
)
def test_a_case_fails_unless_it_keeps_every_rule_that_concerns_it_alone(
    rule: Rule, measured: dict[str, Any], failure: list[str]
) -> None:
    cases = fake_runs.sweep(seq_len=[512])

    judged = judge(
        fake_runs.run(cases, lambda c: fake_runs.timed(c, 0.1, **measured), rules=[rule])
    )

    shown = judged.failure.splitlines()
    assert [line.partition(" by ")[0] for line in shown if " by slow enough: " in line] == failure
    assert bool(failure) is any(line.startswith("  required: ") for line in shown) is bool(shown)
    assert dict(judged.properties)["outcome"] == "ok"


def test_a_rule_over_several_cases_fails_the_session(inner: Pytest) -> None:
    rule = "verdict:\n  - {name: one is idle, metric: dispatched_ops, go: 0, quantifier: any}\n"
    inner.suite(SUITE.replace(":good", ":multiplies").replace("one, two", "one") + rule)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=2)
    assert result.ret is pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["verdict: NO-GO: one is idle*"])


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
    result.stdout.fnmatch_lines(["6 processes were not run; to resume: harness run --resume *"])
    assert [h.state for h in inner.runs()] == ["unfinished"]


def test_xdist_workers_share_a_run_and_measure_one_at_a_time(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    stamps = pytester.path / "stamps"
    pytester.makeconftest(
        f"""
        import os, time
        from pathlib import Path
        from types import SimpleNamespace
        from harness.integrations import pytest_session
        from harness.tests import fake_runs

        ignored = lambda *_: None
        locked = Path({str(pytester.path / "locked")!r})

        def hold(gpu):
            locked.touch(exist_ok=False) if gpu else locked.unlink()

        def take(held, suite, **_):
            rig = SimpleNamespace(hold=hold, observe=ignored, measures=ignored, probes=(), gpu=None)
            return rig, SimpleNamespace(preflight=ignored), fake_runs.environment()

        def run_suite(agenda, *, writer, **_):
            began = time.monotonic()
            time.sleep(0.1)
            for measurement in fake_runs.timed(agenda.suite.cases[0], 0.1, processes=2):
                writer.append(measurement)
            with open({str(stamps)!r}, "a") as file:
                file.write(f"{{os.getpid()}}, {{began}}, {{time.monotonic()}}\\n")

        pytest_session.take, pytest_session.run_suite = take, run_suite
        """
    )
    (pytester.path / "fakes.yaml").write_text(SUITE)

    result = pytester.runpytest_subprocess(
        "-p", "harness.integrations.pytest_plugin", "-p", "xdist", "-n", "2", "fakes.yaml"
    )

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["verdict: measured*"])
    (header,) = headers(pytester.path / "reports/runs")
    assert (header.state, header.cases, header.measurements) == ("complete", 4, 8)
    times = sorted(ast.literal_eval(line) for line in stamps.read_text().splitlines())
    assert len({process for process, _, _ in times}) == 2
    spans = sorted((began, ended) for _, began, ended in times)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))
