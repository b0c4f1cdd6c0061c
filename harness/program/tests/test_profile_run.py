"""Steps of a program are counted by a hook in one more process."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.messages import ASK_FOR_STACKS, MeasureOrder
from harness.program import process, profile_run
from harness.program.profile_run import TimedProgram
from harness.program.startup import sitecustomize
from harness.program.step_hook import HookOrder
from harness.records import LINES, Case, Counters, Measurement, Outcome, Profile, Program
from harness.tests.commands import STEPS, suite_of
from harness.tests.gate_repositories import write

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
ON_GPU = """
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
    case: Case, timed: TimedProgram | str = TIMED, left_s: float = 600.0, **order_of: Any
) -> tuple[Measurement, Counters, Profile]:
    ok: dict[str, Any] = {"outcome": Outcome.OK, "samples_s": (1.0,), "steady": True}
    measured = Measurement(case_id=case.case_id, process=0, **ok)
    order = MeasureOrder(case=case, process=0, launched_at=0.0, **order_of)
    ends_at = time.monotonic() + left_s
    m = profile_run.attested(measured, order, timed=timed, ends_at=ends_at, alive=lambda: None)
    assert m.counters
    assert m.profile
    return m, m.counters, m.profile


# --- real programs -----------------------------------------------------------------------


def test_counts_of_a_program_exclude_its_children(tmp_path: Path) -> None:
    """The program starts a child, forks others, and has a sitecustomize."""
    site = tmp_path / "site"
    start = "import usual_start\nusual_start.ran += 1\n"
    write(site, {"src/sitecustomize.py": start, "src/usual_start.py": "ran = 0\n"})
    write(tmp_path, {"src/usual_start.py": ""})  # which nothing imports
    rule = "operators: {must: ['aten::addmm'], must_not: ['aten::mm']}"
    env = f"env: {{PYTHONPATH: {site}/src, NSA_X: 1}}"
    subprocess.run(["git", "init", "--quiet", site], check=True)  # another working tree
    case = case_of(tmp_path, env, rule, program=TRAINING)

    trace = tmp_path / "p.0.trace.json.gz"
    where: dict[str, Any] = {"roots": (str(tmp_path),), "elsewhere": (str(site),)}
    measured, counters, seen = attested(case, trace=str(trace), **where)

    assert trace.exists()
    assert not seen.skipped
    assert counters.exact
    assert torch.cuda.is_available() or counters.host_syncs == 1, "an item() of the program"
    assert measured.flags_read == {"NSA_X": False}, "PYTHONPATH may be read unseen"
    assert measured.effective["counted_by"] == LINES
    assert measured.effective["torch"] == torch.__version__
    assert measured.outcome is Outcome.PATH_MISMATCH
    assert (measured.samples_s, measured.steady) == ((), None)
    assert "'aten::mm' ran" in measured.detail
    assert f"usual_start is {site}/src/usual_start.py, not {tmp_path}" in measured.detail
    assert {"aten::addmm", "aten::mm"} <= {use.name for use in seen.operators}


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

    measured, counters, seen = attested(case)

    assert measured.outcome is Outcome.OK
    assert re.fullmatch(reason, seen.skipped), seen.skipped
    assert set(counters.unknown.values()) == {seen.skipped}


def test_a_count_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = process.start

    def started(program: Program, where: Path, env: dict[str, str]) -> process.Processes:
        sitecustomize.note(Path(env[sitecustomize.VARIABLE]), at="steps")
        return start(program, where, env)

    monkeypatch.setattr(process, "start", started)
    case = case_of(tmp_path, program="time.sleep(60)")

    *_, seen = attested(case, replace(TIMED, setup_s=0.0), left_s=0.2)

    assert seen.skipped.startswith("counting did not end within ")


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

    *_, seen = attested(case_of(tmp_path), timed, left_s=60.0)
    assert re.fullmatch(reason, seen.skipped)


def test_the_timed_process_has_no_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sitecustomize.VARIABLE, "/of/a/harness/that/counts/this/one")
    env = process.environment(case_of(tmp_path), ("/tree",))

    assert sitecustomize.VARIABLE not in env
    assert str(sitecustomize.HERE) not in env["PYTHONPATH"]


@pytest.mark.gpu
def test_kernels_and_launches_of_a_program_are_counted(tmp_path: Path) -> None:
    case = case_of(tmp_path, "kernels: {must: ['*elementwise_kernel*']}", program=ON_GPU)

    measured, counters, seen = attested(case)

    assert measured.outcome is Outcome.OK, measured.detail
    assert seen.kernels
    assert counters.exact
    assert (counters.host_syncs, counters.host_device_copies) == (1, 1)
    assert (counters.kernel_launches or 0) >= 4
    assert counters.device_waits
    assert measured.effective["device"] == "cuda"


# --- what a program reads ----------------------------------------------------------------

PARSER = """
import argparse, os, sys
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", "-b", type=int)
parser.add_argument("--lr", type=float)
"""
PARSED = PARSER + "args, rest = parser.parse_known_args()\nprint(args)\n"


COPIED = "import os\nos.environ['NSA_X'], dict(os.environ), [*os.environ.items()]"
BY_TQDM = """
import os
eval("[name for name, _ in os.environ.items()]", {"__name__": "tqdm.utils", "os": os})
"""
TWO_PARSERS = """
more = argparse.ArgumentParser()
more.add_argument("--n")
print(more.parse_known_args()[0].n)
"""
USED = "os.environ.get('NSA_X'), os.getenv('NSA_Y'), args.lr, args.batch_size"
OTHER_RESULT = PARSER + "parser.parse_known_args(namespace=type('Own', (), {})())"
READS = {  # program -> whether variable and options are read, as far as that is known
    PARSED: {"NSA_X": False, "--n": False, "--lr": False, "-b": False},
    PARSED + USED: {"NSA_X": True, "--n": False, "--lr": True, "-b": True},
    PARSED + "vars(args), {**os.environ}": {"--n": False},
    PARSED + "len(rest)": {"NSA_X": False, "--lr": False, "-b": False},
    PARSED + TWO_PARSERS: {"NSA_X": False, "--n": True, "--lr": False, "-b": False},
    OTHER_RESULT: {"NSA_X": False, "--n": False},
    COPIED: {"NSA_X": True},
    BY_TQDM: {"NSA_X": False},
}


@pytest.mark.parametrize("program", READS)
def test_reads_of_variables_and_options_are_noted(program: str, tmp_path: Path) -> None:
    known = READS[program]
    asked = HookOrder(
        step="", by_lines=True, skip=0, profile={}, ends_at=0.0,
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
