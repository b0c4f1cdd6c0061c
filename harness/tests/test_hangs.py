"""A hang is told from slowness, with its stacks and its last launch; and the next case runs."""

import errno
import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from harness.execution import evidence, pace, reenactment, stacks
from harness.execution.launcher import Launcher
from harness.execution.pace import Pace
from harness.measure import launches, reenact
from harness.records import Outcome, Telemetry
from harness.tests.faulty import LONG_ENOUGH, evidence_of, file_of, make_case, run
from harness.tests.workers import GPU, QUICK


def test_a_hang_at_step_5_is_seen_and_its_stacks_are_kept(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of this case silence counts once five steps are known; of the next one, never."""
    settings = replace(LONG_ENOUGH, stall_s=50.0)

    def limit_s(pace: Pace, *, timed: bool) -> float:
        return 0.3 if pace._settings == settings and pace.runs >= 5 else 60.0

    monkeypatch.setattr(Pace, "stall_limit_s", limit_s)
    monkeypatch.setattr(stacks, "PYTHON_S", 30.0)

    (hang,) = run(warm, tmp_path, make_case("hangs_at_5", settings=settings))

    found = evidence_of(hang)
    assert hang.outcome is Outcome.HANG
    assert (found.runs, found.runs_exact, found.stall_limit_s) == (5, True, 0.3)
    assert found.frame.startswith("wait_for_godot (fault_workloads.py:")
    assert "wait_for_godot" in (tmp_path / file_of(hang, "python stacks").path).read_text()
    assert "nanosleep" in (tmp_path / file_of(hang, "native stacks").path).read_text()
    assert file_of(hang, "native stacks").note


@pytest.fixture
def hangs_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hang is seen soon; its re-enactment has the time it has in earnest."""
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.4)
    monkeypatch.setattr(reenactment, "REENACT_S", 4.5)


@pytest.mark.usefixtures("hangs_early")
def test_the_last_launch_of_a_hang_is_found_by_reenacting_it(
    warm: Launcher, tmp_path: Path
) -> None:
    (hang,) = run(warm, tmp_path, make_case("hangs_in_an_operator"))

    assert hang.outcome is Outcome.HANG
    said = evidence_of(hang).last_kernel
    assert said.startswith("harness_tests.never in run 3 (from 0): in a re-enactment with every"), (
        said
    )
    assert "it did not return" in said


@pytest.mark.usefixtures("hangs_early")
def test_a_hang_on_the_host_is_said_to_lie_after_the_last_launch(
    warm: Launcher, tmp_path: Path
) -> None:
    (hang,) = run(warm, tmp_path, make_case("hangs_after_an_operator"))

    said = evidence_of(hang).last_kernel
    assert re.match(r"aten\.\w+ in run 3 .* it returned, and no other followed for 0.2 s", said), (
        said
    )


@pytest.mark.usefixtures("hangs_early")
def test_a_hang_that_does_not_come_back_has_no_last_launch(warm: Launcher, tmp_path: Path) -> None:
    axes = {"path": str(tmp_path / "mark")}

    (hang,) = run(warm, tmp_path, make_case("hangs_once", axes=axes))

    assert hang.outcome is Outcome.HANG
    assert evidence_of(hang).last_kernel == "unknown: a re-enactment of 5 runs did not hang"


def test_a_reenactment_that_comes_nowhere_is_given_up_in_time(
    warm: Launcher, tmp_path: Path
) -> None:
    settings = replace(LONG_ENOUGH, stall_s=0.5)

    (hang,) = run(warm, tmp_path, make_case("hangs_in_setup", settings=settings))

    assert evidence_of(hang).last_kernel == ("unknown: a re-enactment came to no operator in 0.8 s")


def test_without_room_for_a_reenactment_the_hang_is_recorded(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "STALL_FLOOR_S", 0.4)
    monkeypatch.setattr(launches, "create", _full)

    (hang,) = run(warm, tmp_path, make_case("hangs_in_an_operator"))

    assert hang.outcome is Outcome.HANG
    assert evidence_of(hang).last_kernel.startswith("unknown: no re-enactment: [Errno 28]")


def _full(path: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


@pytest.mark.parametrize("text", ["", "1", "1\tbega", "x\tbegan\taten.mm"])
def test_what_is_half_told_is_not_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "told").write_bytes(text.encode().ljust(launches.SIZE, b"\0"))

    assert launches.read(tmp_path / "told") is None


def test_what_the_gpu_did_stands_beside_the_last_launch() -> None:
    said = reenactment.hangs(launches.Launch(run=3, name="spin", returned=False))
    telemetry = Telemetry(t_s=(1.0, 2.0), channels={"gpu_utilisation": (1.0, 1.0)})

    assert evidence.last_kernel(telemetry, said=said) == (
        "spin in run 3 (from 0): "
        "in a re-enactment with every launch awaited it did not return for 0.2 s; "
        "the GPU was busy for 100% of the last 5 s: a kernel does not end"
    )


def test_triton_kernels_are_told_by_their_names(tmp_path: Path) -> None:
    knobs, compiler = (
        pytest.importorskip("triton.knobs"),
        importlib.import_module("triton.compiler.compiler"),
    )
    told = tmp_path / "told"
    launches.create(told)
    metadata = compiler.LazyDict({"name": "_spin", "function": 1, "stream": 0})

    with launches.telling_into(told) as teller, reenact.kernels(teller):
        teller.run = 7
        knobs.runtime.launch_enter_hook(metadata)
        began = launches.read(told)
        knobs.runtime.launch_exit_hook(metadata)
        ended = launches.read(told)

    assert began == launches.Launch(run=7, name="_spin", returned=False)
    assert ended == launches.Launch(run=7, name="_spin", returned=True)
    assert knobs.runtime.launch_enter_hook.calls == []


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
@pytest.mark.usefixtures("hangs_early")
def test_a_kernel_that_does_not_end_is_named(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reenactment, "QUIET_S", 2.0)  # a CUDA context and a kernel come first

    (hang,) = run(warm, tmp_path, make_case("spins_on_the_gpu"))

    assert hang.outcome is Outcome.HANG
    assert evidence_of(hang).last_kernel.startswith("spin in run 3 (from 0): ")


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
