"""A hang is not a slow case; its stacks are kept, and the next case runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.records import Measurement, Outcome, Telemetry
from harness.runner import evidence, pace, stacks, watchdog
from harness.runner.launcher import Launcher
from harness.tests.faulty import PATIENT, LeapingClock, evidence_of, file_of, make_case, run
from harness.tests.workers import GPU


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeapingClock:
    """The watchdog's. On a loaded machine the stacks of a process come late."""
    clock = LeapingClock(tmp_path / "mark")
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(stacks, "PYTHON_S", 60.0)
    monkeypatch.setattr(stacks, "NATIVE_S", 60.0)
    return clock


def hang(
    warm: Launcher, folder: Path, fake: str, clock: LeapingClock, **changes: object
) -> Measurement:
    """The measurement of a workload that hangs; a good one runs after it."""
    axes = {"path": str(clock.mark)}
    case = make_case(fake, axes=axes, settings=PATIENT, **changes)
    (m,) = run(warm, folder, case, observer=clock)
    assert m.outcome is Outcome.HANG, m.detail
    return m


def test_a_hang_at_step_5_is_seen_its_stacks_are_kept_and_its_script_repeats_it(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    m = hang(warm, tmp_path, "hangs_at_5", clock, env={"NSA_TEST_FLAG": "a 'quoted' value"})

    found = evidence_of(m)
    assert (found.steps, found.stall_limit_s) == (5, pace.STALL_FLOOR_S)
    assert found.silent_s is not None
    assert found.silent_s > pace.STALL_FLOOR_S
    assert found.frame.startswith("wait_for_godot (fault_workloads.py:")
    assert "wait_for_godot" in (tmp_path / file_of(m, "python stacks").path).read_text()
    assert "nanosleep" in (tmp_path / file_of(m, "native stacks").path).read_text()
    assert file_of(m, "native stacks").note

    script = tmp_path / file_of(m, "reproduce").path
    script.write_text(re.sub("STALL_S = .*", "STALL_S = 2.0", script.read_text(), count=1))
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    again = subprocess.run(
        [sys.executable, script], cwd="/", env=bare, capture_output=True, text=True, check=False
    )

    assert again.returncode == 1, again.stderr
    assert "run 4:" in again.stdout
    assert "run 5" not in again.stdout
    assert "in wait_for_godot" in again.stderr


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_a_kernel_that_does_not_end_is_a_hang(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    m = hang(warm, tmp_path, "spins_on_the_gpu", clock)

    assert evidence_of(m).frame.startswith("step (fault_workloads.py:")


def test_a_process_in_which_triton_has_compiled_writes_its_stacks(
    tmp_path: Path, clock: LeapingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' tests set it

    with Launcher() as compiling:
        m = hang(compiling, tmp_path, "hangs_after_compiling", clock)

    assert evidence_of(m).frame.startswith("wait_for_godot (fault_workloads.py:")


def test_without_py_spy_the_native_stacks_come_from_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)

    text, kept = stacks.native_stacks([os.getpid()])

    assert kept.note.startswith("/proc (")
    assert kept.note.endswith("; py-spy is not installed")
    assert "State:" in text


@pytest.mark.parametrize(
    ("busy", "said"),
    [(1.0, "a kernel does not end"), (0.0, "nothing runs there"), (0.3, "come and go")],
)
def test_the_last_kernel_is_unknown_and_the_gpu_says_whether_it_runs(
    busy: float, said: str
) -> None:
    telemetry = Telemetry(
        t_s=tuple(range(60)), channels={"gpu_utilisation": (*[0.9] * 54, *[busy] * 5, None)}
    )

    assert re.match(f"unknown; .*{said}", evidence.last_kernel(telemetry))
    assert evidence.last_kernel(Telemetry()) == "", "no GPU, no kernel"
