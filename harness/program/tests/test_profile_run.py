"""Steps of a program are counted by a hook in one more process."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from harness.messages import ASK_FOR_STACKS, MeasureOrder
from harness.program import process, profile_run, step_hook
from harness.program.profile_run import TimedProgram
from harness.program.startup import sitecustomize
from harness.program.step_hook import ANSWER, CLAIM, UNHEARD, HookOrder, StepHook
from harness.records import (
    LINES,
    OPTIMIZER,
    Case,
    Counters,
    Measurement,
    Outcome,
    PathRule,
    Program,
)
from harness.tests.commands import STEPS, suite_of

TIMED = TimedProgram(setup_s=50.0, step_s=0.001, steps=8, setup_steps=1, by_lines=True)
"""Of a program with the fewest steps that can be counted."""
TRAINING = """
import os, subprocess, sys
import usual_start                                   # set by the sitecustomize that ours hides
assert usual_start.ran == 1
path = [*sys.path]
assert not any("startup" in place for place in path)
with_child = len(sys.argv) == 1
if with_child:                                       # which trains too
    child = subprocess.Popen([sys.executable, __file__, "child"], stdout=subprocess.DEVNULL)
import torch
assert sys.path == path and not {name for name in sys.modules if name.startswith("harness")}
own = torch.nn.Linear(4, 4)
other = torch.nn.Linear(4, 4)
optimisers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (own, other)]
if with_child:
    assert child.wait() == 0
for step in range(1, 9 if len(sys.argv) == 1 else 3):
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss = other(own(torch.ones(2, 4))).sum()
    loss.backward()
    for optimiser in optimisers:
        optimiser.step()
    if os.fork() == 0:                               # like the workers of a data loader
        print("a child's step", step, torch.ones(9).sum().item())
        os._exit(0)
    os.wait()
    print("step", step, "loss", loss.item())
"""
TRAINING_ON_GPU = """
import torch
model = torch.nn.Linear(256, 256, device='cuda')
optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(1, 100):
    optimiser.zero_grad()
    loss = model(torch.ones(64, 256, device='cuda')).sum()
    loss.backward()
    optimiser.step()
    print('step', step, loss.item())
"""


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(ASK_FOR_STACKS)
    yield
    signal.signal(ASK_FOR_STACKS, before)


def case_of(folder: Path, *lines: str, program: str = "") -> Case:
    """The case of a suite with a program, which is profiled."""
    (case,) = suite_of(program, folder, STEPS, *lines).cases
    return replace(case, settings=replace(case.settings, profile=True, sample_s=1.0))


def attested(
    case: Case,
    timed: TimedProgram | str = TIMED,
    roots: tuple[str, ...] = (),
    left_s: float = 600.0,
    elsewhere: tuple[str, ...] = (),
) -> Measurement:
    measured = Measurement(
        case_id=case.case_id, process=0, outcome=Outcome.OK, samples_s=(1.0,), steady=True
    )
    order = MeasureOrder(case=case, process=0, launched_at=0.0, roots=roots, elsewhere=elsewhere)
    ends_at = time.monotonic() + left_s
    return profile_run.attested(measured, order, timed=timed, ends_at=ends_at, alive=lambda: None)


def counters_of(m: Measurement) -> Counters:
    assert m.counters is not None
    return m.counters


def reason_of(m: Measurement) -> str:
    """Why nothing was counted."""
    assert m.profile is not None
    return m.profile.skipped


# --- real programs -----------------------------------------------------------------------


def test_counts_of_a_program_exclude_its_children(tmp_path: Path) -> None:
    """The program starts a child, forks others, and has a sitecustomize."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import usual_start\nusual_start.ran += 1\n")
    (site / "usual_start.py").write_text("ran = 0\n")
    rule = "operators: {must: ['aten::addmm']}"
    env = f"env: {{PYTHONPATH: {site}, NSA_X: 1}}"
    subprocess.run(["git", "init", "--quiet", site], check=True)  # another working tree
    case = case_of(tmp_path, env, rule, program=TRAINING)

    measured = attested(case, roots=(str(tmp_path),), elsewhere=(str(site),))

    counters = counters_of(measured)
    assert measured.profile is not None
    assert not measured.profile.skipped
    assert counters.exact
    if not torch.cuda.is_available():
        assert counters.host_syncs == 1, "one item() of the program itself"
    assert measured.flags_read == {"NSA_X": False}, "PYTHONPATH may be read unseen"
    assert measured.effective["counted_by"] == LINES
    assert measured.effective["torch"] == torch.__version__
    assert f"tree under test: usual_start is {site}" in measured.detail
    assert {"aten::addmm", "aten::mm"} <= {use.name for use in measured.profile.operators}


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("print('step', 1)", "the program is not Python with torch"),
        ("sys.exit('no data')", "the process that counts exited with 1: no data"),
        ("", "no Python of the program started with the hook .*"),
    ],
)
def test_the_reason_why_nothing_was_counted_is_recorded(
    program: str, reason: str, tmp_path: Path
) -> None:
    case = case_of(tmp_path, program=program)
    if not program:
        case = replace(case, program=Program(argv=("ls",)))

    measured = attested(case)

    assert measured.outcome is Outcome.OK
    assert re.fullmatch(reason, reason_of(measured)), reason_of(measured)
    assert set(counters_of(measured).unknown.values()) == {reason_of(measured)}


def test_a_count_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process.start

    def started(program: Program, where: Path, env: dict[str, str]) -> "subprocess.Popen[bytes]":
        (Path(env[sitecustomize.VARIABLE]) / CLAIM).touch()
        return start(program, where, env)

    monkeypatch.setattr(process, "start", started)
    case = case_of(tmp_path, program="time.sleep(60)")

    measured = attested(case, replace(TIMED, setup_s=0.0), left_s=0.2)

    assert reason_of(measured).startswith("counting did not end within ")


@pytest.mark.parametrize(
    ("timed", "reason"),
    [
        ("the suite sets no progress", "the suite sets no progress"),
        (replace(TIMED, step_s=40.0), "one step takes 40 s, over 30 s"),
        (replace(TIMED, setup_s=100.0), r"it may take 100 s, and \d+ s are left until timeout_s"),
    ],
)
def test_no_process_starts_if_it_could_not_answer(
    timed: TimedProgram | str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "start", lambda *_: pytest.fail("a process was started"))

    assert re.fullmatch(reason, reason_of(attested(case_of(tmp_path), timed, left_s=60.0)))


def test_the_timed_process_has_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sitecustomize.VARIABLE, "/of/a/harness/that/counts/this/one")
    env = process.environment(case_of(tmp_path), ("/tree",))

    assert sitecustomize.VARIABLE not in env
    assert str(sitecustomize.HERE) not in env["PYTHONPATH"]


# --- what a program reads ----------------------------------------------------------------

PARSER = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", "-b", type=int)
parser.add_argument("--lr", type=float)
"""
PARSED = PARSER + "args, rest = parser.parse_known_args()\nprint(args)\n"


@pytest.mark.parametrize(
    ("program", "known"),
    [
        pytest.param(PARSED, {"NSA_X": False, "--n": False, "--lr": False, "-b": False}, id="vain"),
        pytest.param(
            PARSED + "os.environ.get('NSA_X'), os.getenv('NSA_Y'), args.lr, args.batch_size",
            {"NSA_X": True, "--n": False, "--lr": True, "-b": True},
            id="read",
        ),
        pytest.param(PARSED + "vars(args), {**os.environ}", {"--n": False}, id="all copied"),
        pytest.param(
            PARSED + "len(rest)", {"NSA_X": False, "--lr": False, "-b": False}, id="rest used"
        ),
        pytest.param(
            PARSER + "parser.parse_known_args(namespace=type('Own', (), {})())",
            {"NSA_X": False, "--n": False},
            id="another result",
        ),
        pytest.param(
            PARSED + "more = argparse.ArgumentParser()\nmore.add_argument('--n')\n"
            "print(more.parse_known_args()[0].n)",
            {"NSA_X": False, "--n": True, "--lr": False, "-b": False},
            id="two parsers",
        ),
        pytest.param("print()", {"NSA_X": False}, id="no argparse"),
    ],
)
def test_reads_of_variables_and_options_are_noted(
    program: str, known: dict[str, bool], tmp_path: Path
) -> None:
    asked = HookOrder(
        step="", by_lines=True, skip=0, step_s=1.0, profile_s=0.0, ends_at=0.0,
        variables=("NSA_X",), options=("--n", "--lr", "-b"),
    )  # fmt: skip
    (tmp_path / sitecustomize.ORDER).write_text(json.dumps(asdict(asked)))
    words = ["-c", program, "--n=512", "--lr", "0.1", "-b", "2"]
    env = {"NSA_X": "1", "PYTHONPATH": str(sitecustomize.HERE)}
    env[sitecustomize.VARIABLE] = str(tmp_path)

    child = subprocess.Popen([sys.executable, *words], env=env, stdout=subprocess.DEVNULL)
    assert child.wait() == 0

    notes = profile_run._notes(tmp_path)
    assert profile_run._reads(notes, child.pid, asked, words) == known
    of_a_shell = profile_run._reads(notes, child.pid, asked, ["run.sh"])
    assert of_a_shell == {n: was for n, was in known.items() if n != "NSA_X" or was}


# --- what the answer means ---------------------------------------------------------------


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An answer like the hook's, for a program that does not run."""
    ran = {
        "counters": {"dispatched_ops": 3, "steps": 2},
        "profile": {"fingerprint": "f", "steps": 2},
        "kernels": ["flash_fwd_kernel"],
        "operators": ["aten::mm"],
    }
    answer = {
        "ran": ran,
        "by": OPTIMIZER,
        "torch": "2.11",
        "device": "cuda",
        "places": {},
        "code": {},
        "shadowed": [],
        "flags_read": {},
    }
    monkeypatch.setattr(profile_run._HookedRun, "answer", lambda *_: answer)
    return answer


def test_a_broken_rule_about_kernels_leaves_no_samples(
    answering: dict[str, Any], tmp_path: Path
) -> None:
    measured = attested(replace(case_of(tmp_path), kernels=PathRule(must_not=("*flash*",))))

    assert measured.outcome is Outcome.PATH_MISMATCH
    assert "flash_fwd_kernel" in measured.detail
    assert measured.samples_s == ()
    assert counters_of(measured).dispatched_ops == 3


def test_a_module_from_outside_the_tree_is_a_path_mismatch(
    answering: dict[str, Any], tmp_path: Path
) -> None:
    """If a package of the roots, or another working tree of the repository, contains it."""
    tree, mine = tmp_path / "tree", tmp_path / "mine"
    (tree / "model").mkdir(parents=True)
    (tree / "model" / "__init__.py").touch()
    subprocess.run(["git", "init", "--quiet", mine], check=True)
    own, other = str(tree / "model" / "__init__.py"), str(mine / "src" / "kern.py")
    case, roots = case_of(tmp_path), (str(tree),)

    answering["places"] = {"model": own, "kern": other}
    assert attested(case, roots=roots).outcome is Outcome.OK
    of_other_tree = attested(case, roots=roots, elsewhere=(str(mine),))
    answering["places"] = {"model": own, "model.layers": "/home/me/model/layers.py"}
    of_package = attested(case, roots=roots)

    assert of_other_tree.outcome is of_package.outcome is Outcome.PATH_MISMATCH
    assert f"kern is {other}" in of_other_tree.detail
    assert "model.layers is /home/me/model/layers.py" in of_package.detail


def test_a_module_that_shadows_the_code_under_test_is_a_path_mismatch(
    answering: dict[str, Any], tmp_path: Path
) -> None:
    answering |= {"code": {"nsa": "/site/nsa.py"}, "shadowed": ["nsa is /site/nsa.py, not /me/nsa"]}

    measured = attested(case_of(tmp_path))

    assert measured.code["nsa"] == "/site/nsa.py"
    assert measured.outcome is Outcome.PATH_MISMATCH
    assert "nsa is /site/nsa.py" in measured.detail


def test_modules_are_found_by_their_package_or_their_folder() -> None:
    here = Path(__file__).parent

    assert step_hook._places(("json",), ()).keys() >= {"json", "json.decoder"}
    assert __name__ not in step_hook._places(("json",), ())
    assert __name__ in step_hook._places((), (str(here),))


# --- the hook ----------------------------------------------------------------------------


class HookedSteps:
    """Steps of this process, its hook and the notes of that."""

    def __init__(self, folder: Path, *, by_lines: bool = True, skip: int = 2) -> None:
        self.folder = folder
        self.notes: list[dict[str, Any]] = []
        self.model = nn.Linear(3, 3)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1) for _ in range(2)]
        asked = HookOrder(
            step=r"step (?P<step>\d+)", by_lines=by_lines, skip=skip, step_s=0.05, profile_s=0.1,
            ends_at=time.monotonic() + 60,
        )  # fmt: skip
        self.hook = StepHook(asked, folder, lambda **note: self.notes.append(note))

    def steps(self, numbers: range, *, line: bool = True) -> None:
        for number in numbers:
            self.step(number, line=line)

    def step(self, number: int, *, line: bool = True) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        for optimizer in self.optimizers:
            self.hook.optimizer_stepped(optimizer)
        if line:
            self.hook.line_written(f"step {number} done")
            self.hook.line_written(f"step {number} evaluated")
            self.hook.line_written("saved")

    @property
    def answer(self) -> dict[str, Any] | None:
        path = self.folder / ANSWER
        return json.loads(path.read_text()) if path.exists() else None


def counted(hooked: HookedSteps) -> dict[str, Any]:
    assert hooked.answer is not None, hooked.notes
    counters: dict[str, Any] = hooked.answer["ran"]["counters"]
    return counters


def test_lines_and_optimizers_count_the_same_steps(tmp_path: Path) -> None:
    answers = []
    for by_lines in (True, False):
        folder = tmp_path / str(by_lines)
        folder.mkdir()
        hooked = HookedSteps(folder, by_lines=by_lines)
        hooked.steps(range(1, 9))
        assert hooked.answer is not None
        assert hooked.answer["by"] == (LINES if by_lines else OPTIMIZER)
        answers.append(counted(hooked))

    assert answers[0] == answers[1]
    assert answers[0]["steps"] == 2
    assert answers[0]["differing"] == []
    assert answers[0]["dispatched_ops"] > 3


@pytest.mark.parametrize("more", [0, 3])
def test_steps_that_differ_are_counted_as_far_as_the_program_goes(
    more: int, tmp_path: Path
) -> None:
    hooked = HookedSteps(tmp_path)
    hooked.hook._asked = replace(hooked.hook._asked, more_steps=more)
    for number in range(1, 7 + more):
        for _ in range(number):
            torch.zeros(1)
        hooked.step(number)

    assert len(counted(hooked)["series"]["dispatched_ops"]) == 2 + more


def test_without_lines_from_python_the_optimizer_counts(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)
    hooked.steps(range(1, 9), line=False)
    assert not (tmp_path / CLAIM).exists()

    (tmp_path / UNHEARD).touch()
    hooked.steps(range(9, 20), line=False)

    assert hooked.answer is not None
    assert hooked.answer["by"] == OPTIMIZER


def test_a_line_of_another_thread_does_not_count(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)

    thread = threading.Thread(target=hooked.hook.line_written, args=("step 1",))
    thread.start()
    thread.join()

    assert not (tmp_path / CLAIM).exists()


def test_a_process_without_operators_gives_no_answer(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)
    for number in range(1, 40):
        hooked.hook.line_written(f"step {number}")

    assert hooked.answer is None
    assert "failed" in hooked.notes[0]


def test_one_process_counts_until_it_ends(tmp_path: Path) -> None:
    first, second = HookedSteps(tmp_path), HookedSteps(tmp_path)
    first.step(1)
    second.steps(range(1, 9))
    assert second.answer is None

    first.hook.process_ends()
    second.steps(range(9, 20))

    assert first.notes == [{"steps": 1}]
    assert second.answer is not None


def test_a_killed_process_is_replaced(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    (tmp_path / CLAIM).write_text(str(child.pid))
    hooked = HookedSteps(tmp_path)
    try:
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        hooked.step(1)
    finally:
        child.wait()

    assert (tmp_path / CLAIM).read_text() == str(os.getpid())


def test_a_forked_child_does_not_count_if_its_parent_does(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)
    hooked.hook.forked()
    hooked.step(1)
    assert (tmp_path / CLAIM).exists()

    hooked.hook.forked()
    hooked.steps(range(2, 20))

    assert hooked.answer is None


def test_an_error_in_counting_is_noted_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**_: object) -> Iterator[None]:
        yield
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr("harness.measure.profile.requests", broken)
    hooked = HookedSteps(tmp_path)
    hooked.steps(range(1, 9))

    assert hooked.notes == [{"failed": "RuntimeError: CUPTI is in use"}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_and_launches_of_a_program_are_counted(tmp_path: Path) -> None:
    program = TRAINING_ON_GPU
    case = case_of(tmp_path, "kernels: {must: ['*elementwise_kernel*']}", program=program)

    measured = attested(case)

    counters = counters_of(measured)
    assert measured.outcome is Outcome.OK, measured.detail
    assert measured.profile is not None
    assert measured.profile.kernels
    assert counters.exact
    assert (counters.host_syncs, counters.host_device_copies) == (1, 1)
    assert counters.kernel_launches is not None
    assert counters.kernel_launches >= 4
    assert counters.device_waits
    assert measured.effective["device"] == "cuda"
