"""Suite files as tests of pytest."""

import ast
import itertools
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.records import Outcome
from harness.runner.launcher import Launcher
from harness.store import reader
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


def test_only_named_suites_are_collected(inner: Pytest) -> None:
    inner.suite(SUITE, "suites/fakes.yaml")
    inner.suite("services:\n  web: {image: nginx}\n", "compose.yaml")

    by_folder = inner.run("--collect-only")
    by_name = inner.run("--collect-only", "suites/fakes.yaml", "-q")
    no_suite = inner.run("--collect-only", "compose.yaml")

    assert by_folder.ret is pytest.ExitCode.NO_TESTS_COLLECTED
    by_name.stdout.fnmatch_lines(["suites/fakes.yaml::fake/one/seq_len=1"])
    assert no_suite.ret is pytest.ExitCode.USAGE_ERROR


def test_an_ini_option_collects_suites_by_pattern(inner: Pytest) -> None:
    inner.suite(SUITE, "suites/fakes.yaml")
    inner.suite(SUITE, "others/fakes.yaml")
    inner.pytester.makeini("[pytest]\nharness_suites = suites/*.yaml\n")

    result = inner.run("--collect-only", "-q")

    assert result.parseoutcomes() == {"tests": 4} or "4 tests collected" in result.stdout.str()
    result.stdout.no_fnmatch_line("others/*")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(SUITE.replace("providers", "provider"), "*fakes.yaml:9:5: *", id="misspelt"),
        pytest.param(SUITE + "  bad: [\n", "*fakes.yaml:11:*not YAML*", id="not-yaml"),
        pytest.param(
            SUITE.replace("one, two", "!!python/name:os.system x"),
            "*fakes.yaml:9:*tag * is not allowed*",
            id="tag",
        ),
    ],
)
def test_an_invalid_suite_is_an_error_with_its_line(inner: Pytest, text: str, said: str) -> None:
    inner.suite(text)

    result = inner.run("fakes.yaml")

    assert result.ret is pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([said])


def test_a_good_suite_passes_and_its_run_is_stored(inner: Pytest) -> None:
    inner.suite(SUITE)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=4)
    assert result.ret is pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["verdict: GO*"])
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
    inner.suite(SUITE + BAD)

    result = inner.run("fakes.yaml", "--junitxml=junit.xml")

    result.assert_outcomes(passed=4, failed=1)
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


def test_a_case_that_violates_a_rule_fails(inner: Pytest) -> None:
    rule = "verdict:\n  - {name: idle, metric: dispatched_ops, go: 0, match: {provider: two}}\n"
    inner.suite(SUITE.replace(":good", ":multiplies") + rule)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=2, failed=2)
    result.stdout.fnmatch_lines(
        ["NO-GO by idle: fake/two/seq_len=1*", "*required: * ≤ 0 in every*"]
    )


def test_an_undecided_case_fails(inner: Pytest) -> None:
    """One process has no interval, so the rule is undecided."""
    rule = "verdict:\n  - {name: slow enough, metric: step_s, go: 100}\n"
    inner.suite(SUITE.replace("processes: 2", "processes: 1") + rule)

    result = inner.run("fakes.yaml::fake/one/seq_len=1")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["INCONCLUSIVE by slow enough: *"])


def test_a_required_operator_needs_a_profile(inner: Pytest) -> None:
    stated = '    operators: {must: ["aten::scaled_dot_product_attention"]}\n'
    inner.suite(SUITE.replace("stall_s: 20}", "stall_s: 20, profile: false}") + stated)

    result = inner.run("fakes.yaml::fake/one/seq_len=1")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["INCONCLUSIVE by required kernels *switched off*"])


def test_a_rule_over_several_cases_fails_the_session(inner: Pytest) -> None:
    rule = "verdict:\n  - {name: one is idle, metric: dispatched_ops, go: 0, quantifier: any}\n"
    inner.suite(SUITE.replace(":good", ":multiplies") + rule)

    result = inner.run("fakes.yaml")

    result.assert_outcomes(passed=4)
    assert result.ret is pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["verdict: NO-GO: one is idle*"])


def test_an_allowed_outcome_is_expected(inner: Pytest) -> None:
    inner.suite(SUITE + BAD + "    allow: {crash: block sizes are checked since v2}\n")

    result = inner.run("fakes.yaml", "-rx")

    result.assert_outcomes(passed=4, xfailed=1)
    assert result.ret is pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["XFAIL *crash is allowed: block sizes are checked since v2"])


def test_a_declined_case_fails_unless_allowed(inner: Pytest) -> None:
    inner.suite(SUITE.replace("good", "declined").replace("{seq_len: [1, 2]}", "{head_dim: 7}"))

    result = inner.run("fakes.yaml::fake/one")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["fake/one: unsupported", "*head_dim=7"])


def test_a_stopped_run_can_be_resumed(inner: Pytest) -> None:
    inner.suite(SUITE.replace("good", "raises"))

    result = inner.run("fakes.yaml", "-x")

    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["6 processes were not run; to resume: harness run --resume *"])
    assert [h.state for h in inner.runs()] == ["unfinished"]


@pytest.mark.slow
def test_xdist_workers_share_a_run_and_measure_one_at_a_time(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    stamps = pytester.path / "stamps"
    pytester.makepyfile(
        stamping=f"""
        import os, time
        from harness.tests.fake_workloads import _good_but

        def stamp(provider, axes):
            def run():
                began = time.monotonic()
                time.sleep(0.05)
                with open({str(stamps)!r}, "a") as file:
                    file.write(f"{{os.getppid()}}, {{began}}, {{time.monotonic()}}\\n")
            return _good_but(run=run)
        """
    )
    text = SUITE.replace("harness.tests.fake_workloads:good", "stamping:stamp")
    (pytester.path / "fakes.yaml").write_text(text)

    result = pytester.runpytest_subprocess(
        "-p", "harness.integrations.pytest_plugin", "-p", "xdist", "-n", "2", "fakes.yaml"
    )

    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["verdict: GO*"])
    (header,) = headers(pytester.path / "reports/runs")
    assert (header.state, header.cases, header.measurements) == ("complete", 4, 8)
    times = sorted(ast.literal_eval(line) for line in stamps.read_text().splitlines())
    assert len({forkserver for forkserver, _, _ in times}) == 2
    spans = sorted((began, ended) for _, began, ended in times)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))
