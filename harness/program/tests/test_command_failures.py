"""A program that fails, cannot start, or runs code that is not under test."""

import re
from pathlib import Path

import pytest

from harness.errors import SuiteError
from harness.records import Outcome, Suite
from harness.runner.launcher import Launcher
from harness.tests.answers import answered
from harness.tests.commands import LOSS, STEPS, asked, measured, run, steps_of, suite_of
from harness.tests.faulty import LeapingClock, evidence_of
from harness.tests.gate_repositories import commit, git, write

# --- the ways to fail --------------------------------------------------------------------


def test_a_program_without_new_steps_hangs_and_its_stacks_are_kept(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    """It still writes lines, but none reports a step. Its steps have numbers of their own."""
    program = f"""
def wait_for_a_peer():
    os.close(os.open({str(clock.mark)!r}, os.O_CREAT))
    while True:
        print("still waiting"); time.sleep(0.05)
for i in range(1001, 1006):
    print("step", i, "loss", i / 2); time.sleep(0.005)
wait_for_a_peer()
"""
    m = measured(warm, tmp_path, program, STEPS, LOSS, "measure: {timeout_s: 1000000}")

    seen = evidence_of(m)
    assert m.outcome is Outcome.HANG
    assert (steps_of(m).step[-1], steps_of(m).values["loss"][-1]) == (1005, 502.5)
    assert ("after its step 1005" in m.detail, seen.last_step) == (True, 1005)
    assert re.fullmatch(r"wait_for_a_peer \(program.py:\d+\)", seen.frame)
    assert "in wait_for_a_peer" in (tmp_path / m.log).read_text()


BROKEN = """
def broken():
    raise ValueError("no data")
for i in (1001, 1002): print("step", i)
broken()
"""


@pytest.mark.parametrize(
    ("program", "outcome", "detail"),
    [
        (BROKEN, Outcome.CRASH, "exited with 1, after its step 1002: ValueError: no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", Outcome.CRASH, "killed by SIGKILL"),
        ("sys.exit(137)", Outcome.CRASH, "exited with 137 .*SIGKILL"),
        ("raise MemoryError", Outcome.OUT_OF_MEMORY, r"MemoryError \[peak \d\.\d+ GB"),
        ("raise OSError(28, os.strerror(28))", Outcome.INVALID_ENVIRONMENT, "No space left"),
        ("print('it 1')", Outcome.UNSUPPORTED, r"matches progress 'step .*'; the last: 'it 1'$"),
        ("print('step 1')", Outcome.UNSUPPORTED, "after 1 steps.* a sample needs two more lines"),
        (
            "os.write(1, ''.join(f'step {i}\\n' for i in range(1, 9)).encode())",
            Outcome.UNSUPPORTED,
            "after 8 steps, whose lines arrived together, .* flush .* each step$",
        ),
        (
            "sys.exit('[rank1]: ValueError: no data\\na.b.ChildFailedError:\\n=====\\nx\\n=====')",
            Outcome.CRASH,
            r"exited with 1: \[rank1\]: ValueError: no data$",
        ),
        (
            "print('step 1\\nstep 2')\nfor i in range(9): time.sleep(.01);print('step', i+3)",
            Outcome.UNSUPPORTED,
            "loss: ",
        ),
        ("print('step 1 loss 1..2')", Outcome.UNSUPPORTED, "loss: '1..2' is not a number"),
    ],
)
def test_each_failure_has_its_outcome(
    warm: Launcher, tmp_path: Path, program: str, outcome: Outcome, detail: str
) -> None:
    m = measured(warm, tmp_path, program, STEPS, LOSS)

    assert m.outcome is outcome
    assert re.search(detail, m.detail), m.detail
    seen = evidence_of(m)
    assert program is not BROKEN or (seen.steps, seen.last_step) == (2, 1002)
    assert program is not BROKEN or seen.frame.startswith("broken (program.py:")


def test_nan_is_named_by_the_step_that_reports_it(warm: Launcher, tmp_path: Path) -> None:
    program = """
for i in range(11, 17):
    time.sleep(0.01)
    print('step', i, 'loss', 'nan' if i == 15 else 1.5)
"""
    m = measured(warm, tmp_path, program, STEPS, LOSS)

    assert m.outcome is Outcome.NON_FINITE
    assert m.detail.endswith(", at its step 15")
    assert (steps_of(m).step[-1], steps_of(m).not_finite) == (14, {"loss": (15,)})


def test_a_gradient_norm_may_overflow(warm: Launcher, tmp_path: Path) -> None:
    """As in fp16, where the loss scale falls until a step is taken."""
    program = """
for i in range(11, 23):
    time.sleep(0.01)
    print('step', i, 'loss', 'inf' if i < LAST else 1.5)
"""
    norm = LOSS.replace("loss:", "grad_norm:")
    m = measured(warm, tmp_path, program.replace("LAST", "14"), STEPS, norm)

    assert m.outcome is Outcome.OK, m.detail
    assert steps_of(m).not_finite == {"grad_norm": (12, 13)}
    always = measured(warm, tmp_path, program.replace("LAST", "99"), STEPS, norm)
    assert (always.outcome, always.readings) == (Outcome.OK, {"grad_norm": ()})


@pytest.mark.parametrize(
    ("key", "device", "seen", "needs", "said"),
    [
        ("gpus", "", 1, 2, "needs 2 GPUs, this machine has 1"),
        ("gpus", "", 0, 2, "this machine has 0"),
        ("gpus", "", 0, 1, ""),
        ("gpus", "", 2, 2, ""),
        ("world_size", "cuda", 1, 2, "needs 2 GPUs, this machine has 1"),
        ("world_size", "cpu", 0, 2, ""),
    ],
)
def test_a_program_that_needs_more_gpus_than_there_are_is_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, key: str, device: str, seen: int, needs: int,
    said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (case,) = suite_of("open('started', 'w')", tmp_path, f"{key}: n", f"axes: {{n: {needs}}}").cases

    m = answered(case, device=device)

    assert (m.outcome is Outcome.UNSUPPORTED, said in m.detail) == (bool(said), True), m.detail
    assert (tmp_path / "started").exists() is not bool(said)


# --- what a suite may not say ------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (("command: x", "factory: a.b:c"), "needs either a factory or a command"),
        (("factory: a.b:c", "providers: [p]", "tokens: 3"), "goes with command, not with factory"),
        (("factory: a.b:c",), "needs providers with a factory"),
        (("command: x 'y",), "command cannot be split: No closing quotation"),
        (("command: x {batc}", "axes: {batch: [1, 2]}"), "'batc' is not an axis here.*'batch'"),
        (("command: x", "axes: {batch: [1, 2]}"), ":11:12: 'batch' is swept but does not reach"),
        (("command: x {b", "axes: {b: 1}"), "single brace"),
        (("command: x {b:--b}", "axes: {b: [1, 2]}"), "needs an axis that is true or false"),
        (("command: x -{b:b}", "axes: {b: [true, false]}"), "must be a whole argument"),
        (("command: x", "progress: 'step (('"), "is not a regular expression"),
        (("command: x", r"metrics: {step_s: {line: 'took \d+'}}"), "no group named 'value'"),
        (("command: x", "metrics: {loss: {json: loss}}"), "needs unit and better"),
        (("command: x", "metrics: {tokens_per_sec: {json: a}}"), "'tokens_per_s'"),
        (("command: x", "metrics: {step_cycles: {json: a}}"), "a program cannot report it"),
        (("command: x", "metrics: {mfu: {}}"), "needs one of line or json"),
        (("command: x", "metrics: {mfu: {line: '(?P<value>.)', prefix: R}}"), "prefix needs json"),
        (("command: x", "tokens: [batch]"), "'batch' is not an axis here"),
        (("command: x", "gpus: batch"), ":11:11: 'batch' is not an axis here"),
        (("command: x", "gpus: 0"), "gpus must be greater than or equal to 1, not 0$"),
        (("command: x", "gpus: 1", "world_size: 2"), "needs gpus or world_size, not both"),
        (("command: x", "tokens: 3", "metrics: {tokens_per_s: {json: a}}"), "Remove this metric"),
        (("command: x", "measure: {graph: true}"), "graph needs a factory"),
    ],
)
def test_a_mistake_is_reported_with_its_place(rows: tuple[str, ...], said: str) -> None:
    with pytest.raises(SuiteError, match=r"suite\.yaml:\d+:\d+: ") as raised:
        asked(*rows)

    assert re.search(said, str(raised.value), re.DOTALL), str(raised.value)


# --- the tree under test -----------------------------------------------------------------


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The user's working tree, which has changes, and a worktree of its commit."""
    home = tmp_path_factory.mktemp("home")
    git(home, "init", "--quiet")
    model, script = "src/model/__init__.py", "scripts/train.py"
    text = "import json, model, os\nprint(json.dumps({'size': model.SIZE, 'n': N}))\n"
    commit(home, {model: "SIZE = 3\n", script: text.replace("N", "1")})
    write(home, {model: "SIZE = 4\n", script: text.replace("N", "2"), "data.bin": ""})
    git(home, "worktree", "add", "--quiet", "--detach", str(home / "of-commit"), "HEAD")
    return home, home / "of-commit"


def of_tree(command: str, cwd: str) -> Suite:
    both = "size: {json: size, unit: x, better: higher}, n: {json: n, unit: x, better: higher}"
    return asked(f"command: {command}", f"cwd: {cwd}", f"metrics: {{{both}}}")


def test_a_program_runs_in_the_tree_of_its_commit(
    warm: Launcher, tree: tuple[Path, Path], tmp_path: Path
) -> None:
    home, of_commit = tree
    suite = of_tree(f"'{{python}} train.py --data={home}/data.bin'", "scripts")
    launcher = warm.at([of_commit / "src"])
    launcher.check(suite)

    m = run(launcher, tmp_path, suite)

    assert m.readings == {"size": (3.0,), "n": (1.0,)}
    assert m.code == {"program": str(of_commit / "scripts")}


@pytest.mark.parametrize(
    ("command", "cwd", "said"),
    [
        ("no-such-program-here", ".", "'no-such-program-here' not found on PATH"),
        ("./train.sh", ".", "'./train.sh' is not an executable file in"),
        ("ls", "nowhere", "cwd 'nowhere' is not a folder"),
        ("'{python} train.py'", "{home}/scripts", "is not in the tree under test, .*root"),
        ("'{python} train.py'", "../scripts", "is not in the tree under test"),
        ("'{python} {home}/scripts/train.py'", ".", "command names"),
    ],
)
def test_a_program_that_is_not_in_the_tree_under_test_stops_the_run(
    warm: Launcher, tree: tuple[Path, Path], command: str, cwd: str, said: str
) -> None:
    home, of_commit = tree
    suite = of_tree(command.replace("{home}", str(home)), cwd.replace("{home}", str(home)))

    with pytest.raises(SuiteError, match=said):
        warm.at([of_commit / "src"]).check(suite)
