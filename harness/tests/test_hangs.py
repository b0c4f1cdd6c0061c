"""A hang is not a slow case; its stacks are kept, and the next case runs."""

import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from harness.execution import evidence, pace, stacks
from harness.execution.launcher import Launcher
from harness.records import Outcome, Telemetry
from harness.tests.faulty import EITHER, evidence_of, file_of, make_case, run
from harness.tests.workers import GPU, QUICK


def test_a_hang_at_step_5_is_told_from_slowness_by_its_own_pace(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a millisecond, and a suite that would have waited for a minute."""
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.6)
    began = time.monotonic()

    (hang,) = run(warm, tmp_path, make_case("hangs_at_5"))

    took_s = time.monotonic() - began
    found = evidence_of(hang)
    assert hang.outcome is Outcome.HANG
    assert re.search(f"0.6 s, in {EITHER}, 5 runs done", hang.detail), hang.detail
    assert (found.runs, found.runs_exact, found.stall_limit_s) == (5, True, 0.6)
    assert found.silent_s is not None
    assert 0.6 < found.silent_s < 0.6 + 1.0, "seen at once"
    assert hang.wall_s < 0.6 + 5.0, "reported within the limit and five seconds"
    assert took_s < 30.0, "and the next case has run"
    assert found.frame.startswith("wait_for_godot (fault_workloads.py:")
    assert "wait_for_godot" in (tmp_path / file_of(hang, "python stacks").path).read_text()
    assert "nanosleep" in (tmp_path / file_of(hang, "native stacks").path).read_text()
    assert file_of(hang, "native stacks").note


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_a_kernel_that_does_not_end_is_a_hang(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.4)

    (hang,) = run(warm, tmp_path, make_case("spins_on_the_gpu"))

    assert hang.outcome is Outcome.HANG
    assert evidence_of(hang).frame.startswith("step (fault_workloads.py:")


def test_a_process_in_which_triton_has_compiled_writes_its_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.4)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' tests set it

    with Launcher() as compiling:
        (hang,) = run(compiling, tmp_path, make_case("hangs_after_compiling"))

    assert evidence_of(hang).frame.startswith("step (fault_workloads.py:")


def test_a_hang_is_reproduced_by_its_script_alone(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.3)
    case = make_case("hangs_at_5", env={"NSA_TEST_FLAG": "a 'quoted' value"})
    (hang,) = run(warm, tmp_path, case)
    script = tmp_path / file_of(hang, "reproduce").path
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    again = subprocess.run(
        [sys.executable, script], cwd="/", env=bare, capture_output=True, text=True, check=False
    )

    assert again.returncode == 1, again.stderr
    assert "run 4: 0.0" in again.stdout
    assert "run 5" not in again.stdout
    assert "in wait_for_godot" in again.stderr


def test_without_py_spy_the_kernel_tells_where_a_hang_waits(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.3)
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(stacks, "INTERPRETER", str(tmp_path / "python"))

    (hang,) = run(warm, tmp_path, make_case("hangs_at_5"))

    native = file_of(hang, "native stacks")
    assert native.note.startswith("/proc (")
    assert native.note.endswith("py-spy is not installed")
    assert "State:" in (tmp_path / native.path).read_text()


def test_the_limit_of_silence_follows_the_steps_within_its_bounds() -> None:
    settings = replace(QUICK, stall_s=120.0)
    slow, quick, huge = pace.Pace(settings), pace.Pace(settings), pace.Pace(settings)
    for followed, step_s in ((slow, 1.0), (quick, 0.001), (huge, 9.0)):
        assert followed.stall_limit_s(timed=True) == 120.0, "no step is known yet"
        followed.ran(1, 20.0, 20.0)  # cold: compiled
        followed.ran(2, 20.0 + step_s, step_s)
        followed.ran(3, 20.0 + 2 * step_s, step_s)

    assert slow.stall_limit_s(timed=True) == pytest.approx(50.0)
    assert quick.stall_limit_s(timed=True) == pace.STALL_FLOOR_S
    assert huge.stall_limit_s(timed=True) == 120.0
    assert quick.stall_limit_s(timed=False) == 120.0, "the reference is no step"


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


def test_slow_but_alive_is_told_with_its_rate_and_what_it_would_need(
    warm: Launcher, tmp_path: Path
) -> None:
    settings = replace(QUICK, timeout_s=1.3)

    (slow,) = run(warm, tmp_path, make_case("good", axes={"step_s": 0.5}, settings=settings))

    found = evidence_of(slow)
    assert slow.outcome is Outcome.TIMEOUT
    assert re.search(r"slow, not hung: the fewest samples would take 2(\.\d+)? s", slow.detail)
    assert found.runs in (1, 2)
    assert found.pace_s == pytest.approx(0.5, abs=0.1)
    assert found.needed_s == pytest.approx(4 * 0.5, abs=0.4)
    assert "stuck" not in slow.detail
    assert slow.lower_bound_s is not None
