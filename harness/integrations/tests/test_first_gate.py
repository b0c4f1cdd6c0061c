"""`harness init` in repositories that have none of our code."""

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.errors import HarnessError
from harness.gate.policy import parse
from harness.integrations import first_gate
from harness.integrations.first_gate import FirstGate
from harness.records import Case, Counters, Environment, Measurement, Outcome, Run, Suite
from harness.runner.watchdog import RunObserver
from harness.suite.load import loads, shipped_folder
from harness.suite.printed import readings
from harness.tests import fake_runs
from harness.tests.command_line import harness
from harness.tests.gate_repositories import commit, git, write

BENCH = """\
import sys, time

rows = int(sys.argv[2])
for step in range(1, 9):
    time.sleep(0.001)
    print(f"step {step:3} of 8 took {rows / 64:.2f} ms")  # a clock that nothing disturbs
"""
GATE = ".github/workflows/gate.yml"
CPU, H200 = fake_runs.environment(gpu=None), fake_runs.environment()

Processes = Callable[[Case], list[Measurement]]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch=trunk")
    commit(tmp_path, {"README.md": "Theirs.", ".gitignore": "/build/"})
    return tmp_path


def test_a_program_has_a_gate_after_two_commands(theirs: Path) -> None:
    """The program is as new as its gate; later it takes four times as long."""
    write(theirs, {"bench.py": BENCH})
    command = ("--command", "python bench.py --rows {rows}", "--axis", "rows=64")

    made = harness("init", *command, cwd=theirs)
    quick = "screen_pairs: 3, confirm_pairs: 6, alpha: 0.1"
    policy = (theirs / "ci/gate.yaml").read_text().replace("confirm_pairs: 20", quick)
    write(theirs, {"ci/gate.yaml": policy})
    first = harness("gate", "--base", "HEAD", "--no-self-test", cwd=theirs)
    commit(theirs, {})
    commit(theirs, {"bench.py": BENCH.replace("/ 64", "/ 16")})
    slower = harness("gate", "--base", "HEAD~1", "--ci", "--no-self-test", cwd=theirs)

    assert made.returncode == 0, made.stderr
    assert "\n  bench/program: 1 ms\n" in made.stdout
    assert "\n  step_s: as in `step   8 of 8 took 1.00 ms`\n" in made.stdout
    assert max(map(len, made.stdout.splitlines())) <= 100
    assert first.returncode == 0, first.stdout + first.stderr
    assert "there is no file 'bench.py'" in first.stdout
    assert slower.returncode == 1, slower.stdout + slower.stderr
    assert re.search(r"4\.00x .* slower", slower.stdout)
    assert git(theirs, "status", "--porcelain") == "", "what a run writes is ignored"
    assert not (theirs / "ci/baselines").exists()


@pytest.mark.parametrize("forge", first_gate.TEMPLATES)
def test_every_file_that_a_template_names_is_written(forge: str) -> None:
    templates = first_gate.TEMPLATES[forge]
    written = {*templates, first_gate.SUITE, first_gate.POLICY, first_gate.REQUIREMENTS}
    for template in templates:
        text = (shipped_folder() / template).read_text()
        names = r"(?:ci|suites|\.github/workflows)/[\w.-]+\.(?:ya?ml|txt|py|json)\b"
        assert {*re.findall(names, text)} <= written, template


def counted(case: Case, step_s: float = 0.004) -> list[Measurement]:
    made = fake_runs.timed(case, step_s, cv=0.0, counters=Counters(steps=2, host_syncs=0))
    return [replace(m, tokens=None) for m in made]


@pytest.fixture
def init(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FirstGate]:
    """The first gate for a factory whose processes are made up."""
    monkeypatch.chdir(theirs)
    write(theirs, {"benchmarks/workloads.py": "def norm(): ..."})

    def made(env: Environment, measure: Processes = counted) -> FirstGate:
        def measured(suite: Suite, _: Path) -> Run:
            return fake_runs.run(suite.cases, measure, env=env, suite=suite)

        monkeypatch.setattr(first_gate, "_started", lambda *_: measured)
        asked = {"factory": "benchmarks.workloads:norm", "providers": ["mine"]}
        return first_gate.prepared(
            {**asked, "axes": {"rows": [2, 4]}},
            line=(),
            say=print,
            shown=lambda _: nullcontext(RunObserver()),
        )

    return made


@pytest.mark.parametrize(("env", "hosted"), [(CPU, "times"), (H200, "nothing")], ids=["CPU", "GPU"])
def test_thresholds_and_workflow_are_of_this_machine(
    init: Callable[..., FirstGate], env: Environment, hosted: str
) -> None:
    made = init(env)
    files = made.files
    form = parse(files["ci/gate.yaml"], Path("ci/gate.yaml")).form

    assert form.stage == "block"
    assert form.counters, "they are exact here"
    assert ("tolerance" in form.compare.model_fields_set) is (env is CPU)
    assert f"  HOSTED: {hosted} #" in files[GATE]
    assert f"FORKS_NEED_GPU: {str(env is H200).lower()}\n" in files[GATE]
    assert files[".gitignore"].startswith("/build/\n__pycache__/\n")
    assert [c.case_id for c in loads(files["suites/gate.yaml"], "suites/gate.yaml").cases] == [
        "norm/mine/rows=2",
        "norm/mine/rows=4",
    ]
    assert "  norm/mine/rows=2: 3.99 ms" in made.notes


def test_gitlab_is_seen_and_its_pipeline_is_not_touched(
    theirs: Path, init: Callable[..., FirstGate]
) -> None:
    git(theirs, "remote", "add", "origin", "git@gitlab.com:them/theirs.git")
    write(theirs, {"src/theirs/__init__.py": ""})
    files = init(CPU).files

    assert not {".gitlab-ci.yml", GATE} & {*files}
    assert "GATE_HOSTED:\n    value: times" in files["ci/gitlab.yml"]
    assert 'GATE_RUNNER_TAG:\n    value: ""' in files["ci/gitlab.yml"]
    assert "roots: [., src]" in files["ci/gate.yaml"]


def test_no_file_is_overwritten(theirs: Path) -> None:
    no_axis = harness("init", "--command", "./b {rows}", cwd=theirs)
    write(theirs, {"suites/gate.yaml": "theirs"})

    refused = harness("init", "--command", "true", cwd=theirs)

    assert "no suite for these options: 'rows' is not an axis here\n" in no_axis.stderr
    assert refused.returncode == 2
    assert "suites/gate.yaml exists" in refused.stderr
    assert (theirs / "suites/gate.yaml").read_text() == "theirs"
    assert not (theirs / "ci").exists()


@pytest.mark.parametrize(
    ("measure", "why"),
    [
        (lambda c: fake_runs.ended(c, Outcome.CRASH, detail="exited"), "crash: exited"),
        (lambda c: [*counted(c), *counted(c, 0.1)], "not repeat.*\n.*other load"),
    ],
)
def test_a_case_without_a_speed_is_named(
    init: Callable[..., FirstGate], measure: Processes, why: str
) -> None:
    with pytest.raises(HarnessError, match=f"norm/mine/rows=2: {why}"):
        init(CPU, measure)


def test_ci_installs_the_commit_that_pip_installed_here(
    monkeypatch: pytest.MonkeyPatch, init: Callable[..., FirstGate]
) -> None:
    url = '{"url": "https://host/harness", "vcs_info": {"vcs": "git", "commit_id": "3f2a"}}'
    installed = SimpleNamespace(read_text=lambda _: url)
    monkeypatch.setattr(metadata, "distributions", lambda **_: [installed])

    assert (
        "\nnsa-harness @ git+https://host/harness@3f2a\n" in init(CPU).files["ci/requirements.txt"]
    )


STEPS = [f"[step {i:3}/9] time {i}.5 s" for i in range(5)]


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("step_us: 12.3k, step_ms: 12,345", {}),
        ("total time: 3 s\nCompile time 2 s\nstep 1 of 3", {}),
        ("mean step time:  3.1 ms", {"step_s": 3.1e-3}),
        ('{"tokens_per_s": 1234.5, "step_us": 310}', {"step_s": 310e-6}),
        ("3000 tok/s (took 0.5 s)", {"step_s": 0.5}),
        ("\n".join(STEPS), {"progress": 4.0}),
        ("\n".join(f"{line} took 7 ms" for line in STEPS), {"progress": 4.0, "step_s": 7e-3}),
    ],
)
def test_steps_and_times_are_read_from_the_output(output: str, found: Mapping[str, float]) -> None:
    read = readings(output)
    ways = dict(read.get("metrics", {}))
    ways |= {"progress": {"line": read["progress"]["step"]}} if "progress" in read else {}
    last = output.splitlines()[-1]

    assert {
        name: float(re.search(way["line"], last)[1]) * way.get("scale", 1.0)  # type: ignore[index]
        for name, way in ways.items()
    } == pytest.approx(found)


def test_the_line_that_init_proposes_is_recognised() -> None:
    proposed = first_gate.NO_STEPS.partition("such as: ")[2]
    read = readings("\n".join(proposed.replace("3", str(i), 1) for i in range(5)))

    assert (read["metrics"].keys(), read["progress"]["until"]) == ({"step_s"}, "sampled")


def test_steps_are_not_those_of_evaluations() -> None:
    lines = [f"iter {i}: loss {i}.5" for i in range(10)]
    for i in (0, 3, 6, 9):
        lines[i] = f"step {i}: val loss 9.0\n{lines[i]}\nstep {i}: Test loss 9.0"
    read = readings("\n".join(lines))

    assert re.search(read["progress"]["step"], "step 3: val loss 9.0") is None
