"""A suite's command is run as it is, read by its output, and judged like any worker."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from harness import suite
from harness.analysis.summary import summarise
from harness.errors import SuiteError
from harness.execution import pace
from harness.execution.launcher import Launcher
from harness.execution.output import Lines, Log
from harness.execution.runner import run_suite
from harness.execution.series import Series
from harness.execution.told import Step
from harness.gating.interleave import verified
from harness.records import (
    Clock,
    Estimate,
    Evidence,
    Measurement,
    MeasureSettings,
    Outcome,
    Run,
    Suite,
)
from harness.tests.gate_repositories import git
from harness.tests.small_run import ENVIRONMENT
from harness.tests.workers import Counter, Memory, Quiet, descendants

HEAD = """
schema: 1
title: T
subject: S
question: Q?
measure: {processes: 1, min_samples: 3, max_samples: 20, sample_s: 0.01, warmup_s: 0.2,
          timeout_s: 20, stall_s: 15, census: false}
workloads:
  - name: prog
"""
STEPS = r"progress: {step: 'step (?P<step>\d+)'}"
LOSS = r"metrics: {loss: {line: 'loss (?P<value>\S+)', unit: nats, better: lower}}"


def suite_of(program: str, folder: Path, *lines: str) -> Suite:
    """A suite with one workload: a Python program of this text, and further lines of YAML."""
    (folder / "program.py").write_text("import os, sys, time, json, signal\n" + program)
    rows = ["command: ['{python}', program.py]", f"cwd: {folder}", *lines]
    return suite.loads(HEAD + "".join(f"    {row}\n" for row in rows), "suite.yaml")


def run(warm: Launcher, folder: Path, asked: Suite) -> Measurement:
    """One process of the only case; nothing is left running."""
    writer = Memory(folder)
    for case in asked.cases:
        (folder / case.case_id).parent.mkdir(parents=True, exist_ok=True)
    run_suite(asked, writer=writer, probes=[Counter()], observer=Quiet(), launcher=warm)
    assert descendants() == []
    (m,) = writer.measurements
    return m


def measured(warm: Launcher, folder: Path, program: str, *lines: str) -> Measurement:
    return run(warm, folder, suite_of(program, folder, *lines))


def evidence_of(m: Measurement) -> Evidence:
    assert m.evidence is not None
    return m.evidence


# --- ok ----------------------------------------------------------------------------------


def test_the_time_between_progress_lines_is_the_samples(warm: Launcher, tmp_path: Path) -> None:
    program = """
for i in range(1, 13):
    time.sleep(0.02)
    print(f"step {i} loss {1 / i}")
"""
    m = measured(warm, tmp_path, program, STEPS, LOSS, "tokens: [4, 8]")

    assert (m.outcome, m.detail, m.clock) == (Outcome.OK, "", Clock.HOST)
    readings = (*m.warmup_s, *m.samples_s)
    assert len(readings) == 11, "the first line ends the setup"
    assert 0.01 < np.median(readings) < 0.1  # a line that is read late makes the next one early
    assert m.tokens == 32
    assert m.effective["timed_by"] == "progress lines"
    assert [p.name for p in m.phases] == ["start", "setup", "warmup", "sampling"]
    assert m.samples_at_s[0] == pytest.approx(m.phases[-1].start_s, abs=1e-6)
    told = m.readings["loss"]
    assert told == tuple(pytest.approx(1 / i) for i in range(13 - len(told), 13))
    assert "step 12" in (tmp_path / m.log).read_text()


def test_a_step_time_that_is_told_is_taken_at_its_word(warm: Launcher, tmp_path: Path) -> None:
    program = "for i in range(9): print(f'it {i} took {i + 100} ms')"
    told = r"progress: {step: 'it (?P<step>\d+) took (?P<step_ms>\d+) ms', setup_steps: 2}"

    m = measured(warm, tmp_path, program, told)

    assert (*m.warmup_s, *m.samples_s) == tuple(pytest.approx(0.1 + i / 1e3) for i in range(2, 9))


def test_a_line_of_ten_steps_is_one_reading_of_their_mean(warm: Launcher, tmp_path: Path) -> None:
    program = """
for i in range(0, 100, 10):
    time.sleep(0.05)
    print("step", i)
"""
    m = measured(warm, tmp_path, program, STEPS)

    assert len(m.warmup_s) + len(m.samples_s) == 9
    assert 0.0049 < np.median(m.samples_s) < 0.02


def test_a_program_is_ended_when_there_are_enough_samples(warm: Launcher, tmp_path: Path) -> None:
    program = """
i = 0
while True:
    i += 1; time.sleep(0.005); print("step", i)
"""
    m = measured(warm, tmp_path, program, STEPS[:-1] + ", until: sampled}")

    assert m.outcome is Outcome.OK
    assert 3 <= len(m.samples_s) <= 20
    assert m.wall_s < 5


def test_without_progress_the_whole_program_is_one_sample(warm: Launcher, tmp_path: Path) -> None:
    m = measured(warm, tmp_path, "time.sleep(0.1)")

    assert m.outcome is Outcome.OK
    assert len(m.samples_s) == 1
    assert 0.1 <= m.samples_s[0] < 2
    assert m.steady is None
    assert m.effective["timed_by"] == "the whole program"


def test_metrics_come_from_json_lines_and_files(warm: Launcher, tmp_path: Path) -> None:
    program = """
print("{not json}")
for i in range(4):
    print(json.dumps({"train": {"ms": 10 + i}, "note": "x"}))
print("RESULT " + json.dumps({"speed": [7, 8]}), file=sys.stderr)
open("out.csv", "w").write("a,b\\n1,2\\n3,4\\n")
open("out.jsonl", "w").write('{"x": 5}\\n{"x": 6}\\n')
"""
    m = measured(
        warm,
        tmp_path,
        program,
        "metrics:",
        "  step_s: {json: train.ms, scale: 0.001}",
        "  speed: {json: speed.1, prefix: 'RESULT', unit: x, better: higher}",
        "  column: {file: out.csv, csv: b, unit: x, better: higher}",
        "  x: {file: out.jsonl, json: x, unit: x, better: higher}",
    )

    assert (*m.warmup_s, *m.samples_s) == tuple(pytest.approx(0.01 + i / 1e3) for i in range(4))
    assert m.readings == {"speed": (8.0,), "column": (2.0, 4.0), "x": (5.0, 6.0)}


def test_axes_are_arguments_and_variables(warm: Launcher, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, sys, json\nprint(json.dumps({'n': int(sys.argv[1].split('=')[1])"
        " * int(os.environ['SIZE']) + len(sys.argv)}))\n"
    )
    asked = suite.loads(
        HEAD
        + f"""\
    command: "{{python}} program.py --n={{n}} {{fast:--fast}}"
    cwd: {tmp_path}
    axes: {{n: 6, SIZE: 7, fast: [true, false]}}
    metrics: {{n: {{json: n, unit: x, better: higher}}}}
""",
        "suite.yaml",
    )
    assert [c.program.argv[1:] for c in asked.cases if c.program] == [
        ("program.py", "--n=6", "--fast"),
        ("program.py", "--n=6"),
    ]

    m = run(warm, tmp_path, replace(asked, cases=(replace(asked.cases[0], case_id="one"),)))

    assert m.readings["n"] == (6 * 7 + 3,)


def test_what_is_told_becomes_a_metric_that_a_rule_may_name(tmp_path: Path) -> None:
    rule = "verdict: [{name: learns, metric: loss, go: 2.0, abort: 3.0}]\n"
    asked = suite.loads(HEAD + "    command: x\n    " + LOSS + "\n" + rule, "suite.yaml")
    (case,) = asked.cases
    settings = replace(case.settings, processes=2)
    asked = replace(asked, cases=(replace(case, settings=settings),))
    good = Measurement(
        case_id=case.case_id, process=0, outcome=Outcome.OK, samples_s=(1.0,), steady=True
    )
    taken = (
        replace(good, readings={"loss": (1.0, 1.25, 9.0)}),
        replace(good, process=1, readings={"loss": (1.25,)}),
    )
    whole = Run(run_id="r", folder="", suite=asked, environment=ENVIRONMENT, measurements=taken)

    (summary,) = summarise(whole)

    assert summary.metrics["loss"] == Estimate(
        value=1.25, low=1.25, high=1.25, processes=2, samples=4
    )
    assert asked.rules[0].quantity.unit == "nats"
    (summary,) = summarise(replace(whole, measurements=(taken[0], good)))
    assert "loss" not in summary.metrics, "a process that did not tell it leaves it unknown"


# --- the ways to fail --------------------------------------------------------------------


def test_slow_is_a_timeout_with_its_pace(warm: Launcher, tmp_path: Path) -> None:
    program = """
for i in range(1, 10**6):
    time.sleep(0.1); print("step", i)
"""
    m = measured(warm, tmp_path, program, STEPS, "measure: {timeout_s: 0.9}")

    assert m.outcome is Outcome.TIMEOUT
    assert "slow, not hung" in m.detail
    assert m.lower_bound_s is not None
    assert 0.09 < m.lower_bound_s < 0.3


def test_hung_is_told_from_slow_and_its_stacks_are_kept(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.5)
    program = """
def wait_for_a_peer():
    while True:
        print("still waiting"); time.sleep(0.05)
for i in range(1, 6):
    print("step", i); time.sleep(0.005)
wait_for_a_peer()
"""
    m = measured(warm, tmp_path, program, STEPS)

    assert m.outcome is Outcome.HANG
    assert "5 step" in m.detail or "4 runs done" in m.detail
    assert re.fullmatch(r"wait_for_a_peer \(program.py:\d+\)", evidence_of(m).frame)
    names = {f.name: f for f in evidence_of(m).files}
    assert "in wait_for_a_peer" in (tmp_path / names["python stacks"].path).read_text()
    assert "reproduce" in names


def test_a_line_that_the_suite_calls_alive_is_no_hang(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.4)
    program = """
for i in range(1, 9):
    print("step", i); time.sleep(0.005)
for i in range(9):
    print("validating"); time.sleep(0.1)
"""
    m = measured(warm, tmp_path, program, STEPS[:-1] + ", alive: ^validating}")

    assert m.outcome is Outcome.OK


@pytest.mark.parametrize(
    ("program", "outcome", "said"),
    [
        ("raise ValueError('no data')", Outcome.CRASH, "exited with 1: ValueError: no data"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Outcome.CRASH, "killed by SIGSEGV"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Outcome.CRASH, "killed by SIGKILL"),
        ("sys.exit(137)", Outcome.CRASH, "of SIGKILL, as a shell says it"),
        ("raise MemoryError", Outcome.OUT_OF_MEMORY, "MemoryError"),
        ("raise OSError(28, os.strerror(28))", Outcome.INVALID_ENVIRONMENT, "No space left"),
        ("print('it 1')", Outcome.CRASH, r"progress: none of 1 lines of output fits.*'it 1'"),
        ("print('step 1')", Outcome.CRASH, "the program ended after 1 steps"),
        (
            "print('step 1\\nstep 2')\nfor i in range(9): time.sleep(.01);print('step', i+3)",
            Outcome.CRASH,
            "loss: a line that fits .* was never seen",
        ),
        ("print('step 1 loss nan')\ntime.sleep(60)", Outcome.NON_FINITE, "loss is nan, in"),
        ("print('step 1 loss 1..2')", Outcome.CRASH, "loss: '1..2' is no number"),
    ],
)
def test_each_way_to_fail_earns_its_outcome(
    warm: Launcher, tmp_path: Path, program: str, outcome: Outcome, said: str
) -> None:
    m = measured(warm, tmp_path, program, STEPS, LOSS)

    assert m.outcome is outcome
    assert re.search(said, m.detail), m.detail
    assert m.samples_s == ()
    assert m.wall_s < 10


def test_the_evidence_of_a_crash_is_kept(warm: Launcher, tmp_path: Path) -> None:
    program = """
def broken():
    raise ValueError("no data")
print("step 1"); print("step 2"); broken()
"""
    m = measured(warm, tmp_path, program, STEPS)

    seen = evidence_of(m)
    assert seen.stderr_tail.endswith("ValueError: no data\n")
    assert seen.frame.startswith("broken (program.py:")
    assert (seen.runs, seen.runs_exact) == (2, True)
    script = next(f for f in seen.files if f.name == "reproduce")
    text = (tmp_path / script.path).read_text()
    assert "program.py" in text
    command = [sys.executable, str(tmp_path / script.path)]
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.stderr.endswith("ValueError: no data\n")
    assert again.returncode == 1


def test_an_old_file_is_not_read_for_a_new_one(warm: Launcher, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text('{"x": 5}')

    m = measured(
        warm, tmp_path, "pass", "metrics: {x: {file: out.json, json: x, unit: x, better: higher}}"
    )

    assert m.outcome is Outcome.CRASH
    assert "of an earlier run" in m.detail


# --- output ------------------------------------------------------------------------------


def test_a_line_without_an_end_is_read_at_the_end(warm: Launcher, tmp_path: Path) -> None:
    program = """
for i in range(1, 9):
    sys.stdout.write(f"\\rstep {i}"); time.sleep(0.01)
sys.stdout.write(" loss 0.5")
"""
    m = measured(warm, tmp_path, program, STEPS, LOSS)

    assert m.outcome is Outcome.OK
    assert m.readings["loss"] == (0.5,)


def test_a_flood_of_output_is_bounded_in_memory_and_log(warm: Launcher, tmp_path: Path) -> None:
    program = """
block = ("x" * 999 + "\\n") * 1000
for i in range(1, 101):
    sys.stdout.write(block); print("step", i)
sys.stdout.write("y" * 5_000_000)
"""
    m = measured(warm, tmp_path, program, STEPS)

    assert m.outcome is Outcome.OK
    assert len(m.warmup_s) + len(m.samples_s) == 99
    log = (tmp_path / m.log).read_bytes()
    assert len(log) < 13 * 2**20
    assert log.startswith(b"xxx")
    assert b"left out what the program wrote" in log
    assert log.endswith(b"y" * 1000)
    assert m.telemetry is not None


def test_the_log_keeps_head_and_tail(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    with path.open("ab") as file:
        log = Log(file.fileno(), head=100, tail=50)
        for i in range(200):
            log.write(b"%09d\n" % i)
            assert path.stat().st_size < 7 + 100 + 2 * 50 + 100

    text = path.read_bytes()
    assert text.startswith(b"before\n000000000\n000000001\n")
    assert text.endswith(b"000000198\n000000199\n")


def test_lines_are_cut_at_any_end_and_at_their_longest() -> None:
    lines = Lines(longest=8)

    found = [*lines.feed(b"one\r\ntw"), *lines.feed(b"o\rthree\n\n"), *lines.feed(b"x" * 20)]
    found += [*lines.feed(b"yy\nend"), *lines.rest(), *lines.rest()]

    assert found == ["one", "two", "three", "x" * 8, "end"]


def test_what_a_program_leaves_behind_is_ended(warm: Launcher, tmp_path: Path) -> None:
    program = """
import subprocess
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
print("RESULT", json.dumps({"pid": child.pid}))
"""
    m = measured(
        warm,
        tmp_path,
        program,
        "metrics: {pid: {json: pid, prefix: RESULT, unit: x, better: higher}}",
    )

    assert m.outcome is Outcome.OK
    assert not psutil.pid_exists(int(m.readings["pid"][0]))
    assert m.samples_s[0] < 5, "the pipe that it held was not waited for"


# --- the series --------------------------------------------------------------------------


def test_lines_that_arrive_together_share_their_time() -> None:
    series = Series(MeasureSettings(), setup_steps=1)

    assert series.add([Step(1, None)], 10.0) == []
    assert series.add([Step(2, None), Step(3, None)], 10.5) == [0.25, 0.25]
    assert series.add([Step(0, None)], 11.0) == [], "counts anew: nothing is known of the time"
    assert series.add([Step(1, None)], 11.125) == [0.125]
    assert (list(series.time_s), series.together) == ([0.25, 0.25, 0.125], 2)
    assert list(series.began_at) == [10.0, 10.25, 11.0]


def test_lines_that_speak_of_several_steps_are_known() -> None:
    series = Series(MeasureSettings(), setup_steps=1)
    for number, count in enumerate((None, 1, 2, 2, 1, 2)):
        series.add([Step(count, None)], 10.0 + number)
    assert series.by_the_step

    series.add([Step(12, None)], 20.0)

    assert not series.by_the_step, "such a line is no step that a hook could count"


# --- what a suite may not say ------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("command: x", "factory: a.b:c"), "needs a factory or a command, and not both"),
        (("factory: a.b:c", "providers: [p]", "tokens: 3"), "goes with command, not with factory"),
        (("factory: a.b:c",), "needs providers beside its factory"),
        (("command: x 'y",), "command cannot be split: No closing quotation"),
        (("command: x {batc}", "axes: {batch: [1, 2]}"), "'batc' is no axis here.*'batch'"),
        (("command: x", "axes: {batch: [1, 2]}"), ":11:12: 'batch' is swept and does not reach"),
        (("command: x {b", "axes: {b: 1}"), "a brace stands alone"),
        (("command: x {b:--b}", "axes: {b: [1, 2]}"), "needs an axis that is true or false"),
        (("command: x -{b:b}", "axes: {b: [true, false]}"), "must be an argument by itself"),
        (("command: x", "progress: 'step (('"), "is no regular expression"),
        (("command: x", r"metrics: {step_s: {line: 'took \d+'}}"), "no group named 'value'"),
        (("command: x", "metrics: {loss: {json: loss}}"), "needs unit and better"),
        (("command: x", "metrics: {tokens_per_sec: {json: a}}"), "'tokens_per_s'"),
        (("command: x", "metrics: {step_cycles: {json: a}}"), "not for a program to tell"),
        (("command: x", "metrics: {mfu: {json: a, unit: x, better: lower}}"), "has the unit ratio"),
        (("command: x", "metrics: {mfu: {}}"), "needs one of line, json or csv"),
        (("command: x", "metrics: {mfu: {csv: a}}"), "reads a file by json or csv"),
        (("command: x", "tokens: [batch]"), "'batch' is no axis here"),
        (("command: x", "tokens: 3", "metrics: {tokens_per_s: {json: a}}"), "gives tokens_per_s"),
        (("command: x", "measure: {graph: true}"), "graph needs a factory"),
    ],
)
def test_a_mistake_is_told_with_its_place(rows: tuple[str, ...], said: str) -> None:
    text = HEAD + "".join(f"    {row}\n" for row in rows)

    with pytest.raises(SuiteError, match=r"suite\.yaml:\d+:\d+: ") as raised:
        suite.loads(text, "suite.yaml")

    assert re.search(said, str(raised.value), re.DOTALL), str(raised.value)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("command: no-such-program-here",), "'no-such-program-here' is no program on PATH"),
        (("command: ./train.sh",), "'./train.sh' is no program in"),
        (("command: ls", "cwd: nowhere"), "cwd 'nowhere' is no folder"),
    ],
)
def test_a_program_that_is_not_there_stops_the_run(
    warm: Launcher, rows: tuple[str, ...], said: str
) -> None:
    text = HEAD + "".join(f"    {row}\n" for row in rows)

    with pytest.raises(SuiteError, match=said):
        warm.preflight(suite.loads(text, "suite.yaml"))


# --- the tree under test -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The user's working tree, where things have been changed, and a worktree of its commit."""
    home = tmp_path_factory.mktemp("home")
    git(home, "init", "--quiet")
    (home / "src" / "model").mkdir(parents=True)
    (home / "scripts").mkdir()
    (home / "src" / "model" / "__init__.py").write_text("SIZE = 3\n")
    text = "import json, model, os\nprint(json.dumps({'size': model.SIZE, 'n': N}))\n"
    (home / "scripts" / "train.py").write_text(text.replace("N", "1"))
    git(home, "add", "--all")
    git(home, "commit", "--quiet", "--message", "One")
    (home / "scripts" / "train.py").write_text(text.replace("N", "2"))
    (home / "src" / "model" / "__init__.py").write_text("SIZE = 4\n")
    (home / "data.bin").touch()
    git(home, "worktree", "add", "--quiet", "--detach", str(home / "of-commit"), "HEAD")
    return home, home / "of-commit"


def of_tree(command: str, cwd: str) -> Suite:
    rows = (
        f"command: {command}",
        f"cwd: {cwd}",
        "metrics: {size: {json: size, unit: x, better: higher},"
        " n: {json: n, unit: x, better: higher}}",
    )
    return suite.loads(HEAD + "".join(f"    {row}\n" for row in rows), "suite.yaml")


def test_a_program_runs_in_the_tree_of_its_commit(
    warm: Launcher, tree: tuple[Path, Path], tmp_path: Path
) -> None:
    home, commit = tree
    asked = of_tree(f"'{{python}} train.py --data={home}/data.bin'", "scripts")
    launcher = warm.at([commit / "src"])
    launcher.check(asked)

    m = run(launcher, tmp_path, asked)

    assert m.readings == {"size": (3.0,), "n": (1.0,)}, "neither script nor module is the user's"
    assert m.code == {"program": str(commit / "scripts")}
    assert verified(m, asked.cases[0], [commit / "src"]) is m
    elsewhere = verified(m, asked.cases[0], [tmp_path])
    assert elsewhere.outcome is Outcome.PATH_MISMATCH


@pytest.mark.parametrize(
    ("command", "cwd", "said"),
    [
        ("'{python} train.py'", "{home}/scripts", "is not in the tree under test, .*root"),
        ("'{python} train.py'", "../scripts", "is not in the tree under test"),
        ("'{python} {home}/scripts/train.py'", ".", "command names .*as seen from cwd"),
    ],
)
def test_a_program_of_the_users_tree_is_refused(
    warm: Launcher, tree: tuple[Path, Path], command: str, cwd: str, said: str
) -> None:
    home, commit = tree
    asked = of_tree(command.replace("{home}", str(home)), cwd.replace("{home}", str(home)))

    with pytest.raises(SuiteError, match=said):
        warm.at([commit / "src"]).check(asked)
