"""Each fault earns its outcome, with evidence, and the next case runs.

The faults of one worker, of the machine around it, of the parent and of the disk. What a worker
must survive besides is in test_runner.py; what a file must, in test_store.py.
"""

import errno
import importlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness import store
from harness.errors import HarnessError, ProbeError, StoreError
from harness.execution import evidence, gpu_lock, pace, reenactment, stacks, vacancy, watchdog
from harness.execution.gpu_lock import GpuLock
from harness.execution.launcher import Launcher
from harness.execution.runner import run_suite
from harness.execution.vacancy import Vacancy
from harness.measure import launches, reenact
from harness.probes import GpuUse
from harness.records import (
    Case,
    Evidence,
    EvidenceFile,
    Measurement,
    NonFiniteOrigin,
    Outcome,
    Telemetry,
)
from harness.tests import test_store
from harness.tests.test_architecture import sources, uses
from harness.tests.test_runner import (
    GPU,
    QUICK,
    Counter,
    Memory,
    Quiet,
    descendants,
    make_suite,
)
from harness.tests.test_runner import make_case as make_good
from harness.tests.test_store import ENVIRONMENT, SUITE, measured

ROOT = Path(__file__).resolve().parents[2]
LONG_ENOUGH = replace(QUICK, min_samples=10)
"""For a fault in a later step to be reached."""
EITHER = r"(warmup|sampling)"


def make_case(fake: str, **changes: object) -> Case:
    case = make_good(fake, axes={"head_dim": 7, **changes.pop("axes", {})})  # type: ignore[dict-item]
    changes.setdefault("settings", LONG_ENOUGH)
    module = "harness.tests.fake_workloads" if fake in FAKES else "harness.tests.fault_workloads"
    return replace(case, factory=f"{module}:{fake}", **changes)  # type: ignore[arg-type]


FAKES = {
    *("raises", "wrong", "segfaults", "exits_politely", "answers_twice", "good", "never_exits"),
    "hangs_in_setup",
}


@pytest.fixture(scope="module")
def warm() -> Iterator[Launcher]:
    with Launcher() as one:
        yield one


def run(warm: Launcher, folder: Path, *cases: Case) -> list[Measurement]:
    """All cases, then a good one, which must run whatever came before."""
    writer = Memory(folder)
    suite = make_suite(*cases, replace(make_case("good"), case_id="following"))
    run_suite(suite, writer=writer, probes=[Counter()], observer=Quiet(), launcher=warm)
    *found, following = writer.measurements
    assert following.outcome is Outcome.OK
    assert descendants() == []
    return found


def evidence_of(m: Measurement) -> Evidence:
    assert m.evidence is not None
    return m.evidence


def file_of(m: Measurement, name: str) -> EvidenceFile:
    (found,) = (f for f in evidence_of(m).files if f.name == name)
    return found


# --- of the worker -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fake", "outcome", "said", "seen"),
    [
        pytest.param(
            "raises",
            Outcome.CRASH,
            "ValueError: block_size=3",
            {"frame": r"run \(fake_workloads.py:\d+\)", "phase": "warmup"},
            id="exception",
        ),
        pytest.param("wrong", Outcome.INCORRECT, "o: error 0.01", {"phase": "accuracy"}),
        pytest.param(
            "segfaults",
            Outcome.CRASH,
            "killed by SIGSEGV",
            {"signal": "SIGSEGV", "frame": r"read \(timing.py:\d+\)"},
        ),
        pytest.param(
            "exits_politely",
            Outcome.CRASH,
            "status 0 and no answer",
            {"signal": "$"},
            id="exit(0) without a result",
        ),
        pytest.param("answers_twice", Outcome.CRASH, "unexpected answer", {}, id="result twice"),
        pytest.param(
            "kills_itself",
            Outcome.CRASH,
            "killed by SIGKILL (the harness did not; out of memory, perhaps)",
            {"signal": "SIGKILL", "runs": "3"},
        ),
        pytest.param(
            "exhausts_host_memory",
            Outcome.OUT_OF_MEMORY,
            "can't allocate memory",
            {"peak_host_bytes": r"\d{8,}"},
        ),
        pytest.param(
            "exhausts_device_memory",
            Outcome.OUT_OF_MEMORY,
            "Tried to allocate 80.00 GiB",
            {"peak_host_bytes": r"\d{8,}"},
        ),
        pytest.param(
            "loses_its_context",
            Outcome.CRASH,
            "the CUDA context is lost",
            {"frame": r"step \(fault_workloads.py:\d+\)"},
        ),
    ],
)
def test_a_fault_earns_its_outcome_with_evidence_and_the_next_case_runs(
    warm: Launcher,
    tmp_path: Path,
    fake: str,
    outcome: Outcome,
    said: str,
    seen: Mapping[str, str],
) -> None:
    (m,) = run(warm, tmp_path, make_case(fake))

    assert (m.outcome, said in m.detail) == (outcome, True), m.detail
    found = evidence_of(m)
    for name, pattern in seen.items():
        assert re.match(pattern, str(getattr(found, name))), (name, found)
    script = tmp_path / file_of(m, "reproduce").path
    compile(script.read_text(), str(script), "exec")
    assert (tmp_path / file_of(m, "telemetry").path).read_text().startswith("t_s,rss_bytes\n")


def test_a_crash_keeps_its_traceback_beside_the_log(warm: Launcher, tmp_path: Path) -> None:
    raised, signalled = run(warm, tmp_path, make_case("raises"), make_case("segfaults"))

    text = (tmp_path / file_of(raised, "traceback").path).read_text()
    assert text.startswith("Traceback (most recent call last):")
    assert "block_size=3" in text
    fatal = (tmp_path / file_of(signalled, "traceback").path).read_text()
    assert fatal.startswith("Fatal Python error: Segmentation fault")


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
    assert re.match(r"aten\.\w+ in run 3 .* it returned, and no other followed", said), said


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
    last = launches.Launch(run=3, name="spin", returned=False)

    known = "unknown; the GPU was busy for 100% of the last 5 s"

    assert reenactment.beside(known, reenactment.hangs(last)) == (
        "spin in run 3 (from 0): in a re-enactment with every launch awaited it did not return; "
        "the GPU was busy for 100% of the last 5 s"
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
def test_a_kernel_that_does_not_end_is_named(warm: Launcher, tmp_path: Path) -> None:
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


# --- NaN and Inf -------------------------------------------------------------------------


def origins(m: Measurement) -> tuple[NonFiniteOrigin, ...]:
    assert m.outcome is Outcome.NON_FINITE, m.detail
    return evidence_of(m).origins


def test_nan_at_step_4_is_traced_to_operator_and_module(warm: Launcher, tmp_path: Path) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_at_step", axes={"bad": 4}))

    assert "loss: 1 of 1 values are NaN or Inf, first in run 4 (counted from 0)" in m.detail
    assert (evidence_of(m).runs, evidence_of(m).runs_exact) == (5, True)
    (origin,) = origins(m)
    assert (origin.computation, origin.value, origin.step) == ("run", "NaN", 4)
    assert (origin.precision, origin.operator) == ("float32", "aten.sub")
    assert origin.module == "second (Module)"
    assert "Inf came before it, from output 0 of aten.exp in second (Module)" in origin.note


def test_nan_of_a_gradient_is_found_in_the_step_before_it_shows(
    warm: Launcher, tmp_path: Path
) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_from_a_gradient"))

    (origin,) = origins(m)
    assert "first in run 3" in m.detail
    assert (origin.step, origin.value) == (2, "NaN")
    assert "in the backward pass" in origin.note


def test_the_definition_tells_whether_the_precision_is_to_blame(
    warm: Launcher, tmp_path: Path
) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_in_check"))

    tested, eager, reference = origins(m)
    assert (tested.computation, tested.value, tested.precision) == ("check", "NaN", "bfloat16")
    assert tested.operator == "aten.div"
    assert (eager.computation, eager.value, eager.precision) == ("eager", "", "bfloat16")
    assert (reference.computation, reference.value, reference.precision) == (
        *("reference", ""),
        "float64",
    )


def test_nan_written_past_the_dispatcher_is_named_where_it_arrives(
    warm: Launcher, tmp_path: Path
) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_past_the_dispatcher"))

    (origin,) = origins(m)
    assert (origin.step, origin.tensor, origin.operator) == (1, "input 0 of aten.mul", "")
    assert "from outside torch" in origin.note


def test_an_infinite_loss_is_no_number_either(warm: Launcher, tmp_path: Path) -> None:
    (m,) = run(warm, tmp_path, make_case("inf_loss"))

    (origin,) = origins(m)
    assert (origin.value, origin.step, origin.operator) == ("Inf", 2, "aten.reciprocal")


def test_nan_that_does_not_come_again_is_said_to_be_so(warm: Launcher, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    (m,) = run(warm, tmp_path, make_case("nan_once", axes={"path": str(mark)}))

    (origin,) = origins(m)
    assert origin.value == ""
    assert origin.note == "not seen again in 4 runs: it does not depend on the case alone"


def test_a_search_that_hangs_does_not_cost_the_outcome(warm: Launcher, tmp_path: Path) -> None:
    settings = replace(QUICK, stall_s=0.5)
    axes = {"path": str(tmp_path / "mark")}

    (m,) = run(warm, tmp_path, make_case("hangs_in_diagnosis", axes=axes, settings=settings))

    assert m.outcome is Outcome.NON_FINITE
    assert "first in run 2" in m.detail
    assert "the search for its origin: hang" in m.detail
    assert evidence_of(m).phase == "run"


# --- of what a worker leaves behind ------------------------------------------------------


def test_stuck_at_exit_keeps_its_answer_and_the_next_case_runs(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "EXIT_S", 0.3)

    (m,) = run(warm, tmp_path, make_case("never_exits"))

    assert (m.outcome, "did not exit" in m.detail) == (Outcome.OK, True)


def test_a_daemon_that_forked_twice_dies_with_its_worker(warm: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "pid"

    (m,) = run(warm, tmp_path, make_case("daemonises", axes={"path": str(path)}))

    assert m.outcome is Outcome.OK, m.detail
    assert not psutil.pid_exists(int(path.read_text()))


class Meter:
    """A GPU whose use follows a script; the last reading repeats."""

    def __init__(self, *uses: GpuUse) -> None:
        self.uses = list(uses)

    def use(self) -> GpuUse:
        return self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]


FREE = GpuUse(used_bytes=5e8, processes={})
HELD = GpuUse(used_bytes=9e9, processes={4711: "process 4711 (python of someone), 8.50 GB"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacancy, "FREE_S", 0.1)
    monkeypatch.setattr(vacancy, "AGAIN_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_an_orphan_on_the_gpu_is_named_and_the_case_after_it_runs(
    warm: Launcher, tmp_path: Path
) -> None:
    """Something that not even the undertaker could end holds memory after the first case."""
    meter = Meter(FREE)
    writer = Memory(tmp_path)

    class Script(Quiet):
        def finished(self, measurement: Measurement) -> None:
            meter.uses = [HELD] if measurement.case_id == "a" else [FREE]

    cases = [replace(make_case("good"), case_id=name) for name in "abc"]
    run_suite(
        make_suite(*cases),
        writer=writer,
        probes=(),
        observer=Script(),
        launcher=warm,
        gpu=Vacancy(meter),
    )

    assert [m.outcome for m in writer.measurements] == [
        *(Outcome.OK, Outcome.INVALID_ENVIRONMENT, Outcome.OK),
    ]
    refused = writer.measurements[1]
    assert "the GPU is shared: process 4711 (python of someone), 8.50 GB" in refused.detail
    assert evidence_of(refused).holders == ("process 4711 (python of someone), 8.50 GB",)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        pytest.param(FREE, FREE, "", id="free"),
        pytest.param(
            replace(FREE, used_bytes=3e9), replace(FREE, used_bytes=3.1e9), "", id="as at first"
        ),
        pytest.param(
            FREE, replace(FREE, used_bytes=2e9), "1.5 GB of the GPU are in use", id="left"
        ),
        pytest.param(
            *(GpuUse(used_bytes=2e9),) * 2, "2.0 GB of the GPU are in use", id="nobody is listed"
        ),
        pytest.param(HELD, HELD, "the GPU is shared", id="shared from the start"),
        pytest.param(
            FREE,
            replace(FREE, throttled_by=("hardware thermal slowdown",)),
            "throttled at the start: hardware thermal slowdown",
            id="throttled",
        ),
        pytest.param(GpuUse(), GpuUse(), "", id="NVML tells nothing"),
    ],
)
def test_a_gpu_that_is_not_ours_alone_is_no_environment(
    before: GpuUse, now: GpuUse, said: str
) -> None:
    why, _ = Vacancy(Meter(before, now)).problem()

    assert said in why
    assert bool(said) == bool(why)


def test_memory_that_comes_back_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vacancy, "POLL_S", 0.001)

    assert Vacancy(Meter(FREE, HELD, HELD, FREE)).problem() == ("", ())


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ({}, ""),
        ({"gpu": "H200", "driver": "570.*"}, ""),
        ({"driver": "580.*"}, "wrong driver: 570.86 is here, and the suite requires 580.*"),
        ({"gpu": "A100"}, "wrong gpu: NVIDIA H200 is here"),
    ],
)
def test_the_wrong_machine_is_no_environment(requires: Mapping[str, str], said: str) -> None:
    why = vacancy.mismatch(requires, ENVIRONMENT)

    assert why.startswith(said)
    assert bool(why) == bool(said)
    assert bool(vacancy.mismatch(requires, replace(ENVIRONMENT, gpu=None))) == bool(requires)


def test_on_the_wrong_machine_nothing_is_started(warm: Launcher, tmp_path: Path) -> None:
    writer, observer = Memory(tmp_path), Quiet()
    suite = make_suite(make_case("good"))

    run_suite(
        suite, writer=writer, probes=(), observer=observer, launcher=warm, unfit="wrong driver"
    )

    assert writer.outcomes == [("good", 0, Outcome.INVALID_ENVIRONMENT)]
    assert observer.phases == []


# --- of two parents ----------------------------------------------------------------------

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from harness.execution.gpu_lock import GpuLock\n"
    "lock = GpuLock('GPU-1', folder=Path(sys.argv[1]))\n"
    "lock.describe('20261121-smoke')\n"
    "print('held', flush=True)\n"
    "time.sleep(3600)\n"
)


@pytest.fixture
def other(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another harness on GPU-1."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_second_harness_on_a_gpu_is_refused_and_told_who_has_it(
    tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    with pytest.raises(ProbeError) as refused:
        GpuLock("GPU-1", folder=tmp_path)

    assert f"held by another harness: process {other.pid}, run 20261121-smoke" in str(refused.value)
    assert "since 20" in str(refused.value)
    assert "--wait-for-gpu" in str(refused.value)
    GpuLock("GPU-2", folder=tmp_path).release()


def test_a_second_harness_waits_and_a_killed_holder_lets_go(
    tmp_path: Path, other: "subprocess.Popen[str]"
) -> None:
    said: list[str] = []

    def waiting(text: str) -> None:
        said.append(text)
        other.kill()

    with GpuLock("GPU-1", wait_s=20, folder=tmp_path, waiting=waiting) as lock:
        holder = json.loads(lock.path.read_text())

    assert len(said) == 1
    assert holder["pid"] == os.getpid()
    GpuLock("GPU-1", folder=tmp_path).release()


def test_a_lock_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match=r"cannot be locked.*No such file"):
        GpuLock("GPU-1", folder=tmp_path / "absent")


def test_a_run_holds_the_gpu_of_its_workers_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML may name another GPU than the one that torch then uses; a run on the CPU holds none."""
    monkeypatch.setattr(gpu_lock, "FOLDER", tmp_path)
    monkeypatch.setattr("harness.probes.nvml.gpus", lambda: [test_store.GPU])
    used = replace(test_store.GPU, uuid="GPU-used")
    said: list[str] = []

    def free(uuid: str) -> bool:
        try:
            GpuLock(uuid, folder=tmp_path).release()
        except ProbeError:
            return False
        return True

    with ExitStack() as held:
        first = gpu_lock.lock_first(held, wait_s=0.0, say=said.append)
        assert (free("GPU-6f0c"), free("GPU-used")) == (False, True)
        gpu_lock.lock_only(held, first, used, wait_s=0.0, say=said.append)
        assert (free("GPU-6f0c"), free("GPU-used")) == (True, False)
    with ExitStack() as held:
        first = gpu_lock.lock_first(held, wait_s=0.0, say=said.append)
        assert gpu_lock.lock_only(held, first, None, wait_s=0.0, say=said.append) is None
        assert free("GPU-6f0c")
    assert free("GPU-used")
    assert said == [], "nobody had to wait"


def test_a_worker_does_not_inherit_the_lock(warm: Launcher, tmp_path: Path) -> None:
    """Else an orphan would hold it long after its harness."""
    with GpuLock("GPU-1", folder=tmp_path) as lock:
        assert not os.get_inheritable(lock._fd)


def test_two_parents_at_once_never_share_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both draw the same number at first, in the same second."""
    drawn = iter(["aaaa", "aaaa", "aaaa", "bbbb"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(drawn))

    with (
        store.create(tmp_path, SUITE, ENVIRONMENT) as one,
        store.create(tmp_path, SUITE, ENVIRONMENT) as two,
    ):
        one.append(measured(0))
        two.append(measured(1))

    assert one.run_id != two.run_id
    assert store.load(tmp_path, one.run_id).measurements == (measured(0),)
    assert store.load(tmp_path, two.run_id).measurements == (measured(1),)


# --- of the parent and its disk ----------------------------------------------------------

KILLED_AT_EVERY_WRITE = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from harness import store
from harness.tests.test_store import ENVIRONMENT, SUITE, measured

root = Path(sys.argv[1])
write, sync = os.write, os.fsync

def begin(k):
    left = [k]
    def die_in(call):
        left[0] -= 1
        if left[0] == 0:
            call()
            os.kill(os.getpid(), signal.SIGKILL)
    def dying_write(fd, data):
        die_in(lambda: None)                                       # before a byte is written
        die_in(lambda: write(fd, bytes(data)[: len(data) // 2]))   # in its middle
        die_in(lambda: write(fd, bytes(data)))                     # before the sync
        return write(fd, data)
    def dying_sync(fd):
        die_in(lambda: None)
        sync(fd)
        die_in(lambda: None)                                       # after it
    os.write, os.fsync = dying_write, dying_sync

k = 0
while True:
    k += 1
    folder = root / f"{k:03}"
    folder.mkdir()
    acknowledged = os.open(folder / "acknowledged", os.O_CREAT | os.O_WRONLY)
    pid = os.fork()
    if pid == 0:
        begin(k)
        writer = store.create(folder / "runs", SUITE, ENVIRONMENT)
        for process in range(3):
            writer.append(measured(process))
            write(acknowledged, b"x")
        writer.finish()
        os._exit(0)
    os.close(acknowledged)
    if os.waitpid(pid, 0)[1] == 0:
        break
print(k)
"""


def test_a_parent_killed_at_every_write_loses_and_doubles_nothing(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", KILLED_AT_EVERY_WRITE, str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    points = int(answer.stdout)
    assert points > 5 * 5, "five lines, each with five points to die at"

    for folder in sorted(path for path in tmp_path.iterdir()):
        kept = len((folder / "acknowledged").read_bytes())
        try:
            before = store.load(folder / "runs", "latest")
        except StoreError:
            assert kept == 0, "no run began, and nothing was promised"
            continue
        assert len(before.measurements) >= kept, "what append returned from is there"
        if not before.ended_at:
            writer, resumed = store.resume(folder / "runs", "latest")
            with writer:
                for process in range(len(resumed.measurements), 3):
                    writer.append(measured(process))
                writer.finish()
        after = store.load(folder / "runs", "latest")
        assert [m.process for m in after.measurements] == [0, 1, 2]
        assert not any("recorded again" in note for note in after.notes)


def test_evidence_that_cannot_be_written_is_said_and_costs_no_record(
    warm: Launcher, tmp_path: Path
) -> None:
    (tmp_path / evidence.FOLDER).write_text("in the way")

    (m,) = run(warm, tmp_path, make_case("raises"))

    assert m.outcome is Outcome.CRASH
    assert {f.note for f in evidence_of(m).files} == {"not written: Not a directory"}
    assert not any(f.path for f in evidence_of(m).files)


def test_evidence_on_a_full_disk_is_said_and_costs_no_record(tmp_path: Path) -> None:
    folder = evidence.Folder(tmp_path, tmp_path / "x.log")

    with test_store.file_size_limit(100):
        kept = folder.write("stacks.txt", "x" * 1000, EvidenceFile(name="python stacks"))

    assert (kept.path, kept.note) == ("", "not written: File too large")


def test_a_read_only_store_is_one_clear_error_and_the_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store.create(tmp_path, SUITE, ENVIRONMENT) as writer:
        writer.append(measured(0))

    def read_only(path: object, flags: int, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        with pytest.raises(HarnessError, match="Read-only file system\n  Copy the run"):
            store.resume(tmp_path, writer.run_id)

    assert store.load(tmp_path, writer.run_id).measurements == (measured(0),)


# --- of the clock ------------------------------------------------------------------------


def test_durations_do_not_follow_a_wall_clock_that_jumps(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: 1e9 - 3600.0 * next(hours))
    began = time.monotonic()

    (m,) = run(warm, tmp_path, make_case("moves_the_clock"))

    assert m.outcome is Outcome.OK, m.detail
    assert all(0.001 <= s < 1.0 for s in m.host_samples_s)
    assert 0 < m.wall_s < time.monotonic() - began
    assert all(0 <= p.start_s <= p.end_s <= m.wall_s for p in m.phases)


def test_a_run_knows_its_length_by_a_clock_that_nobody_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter(["2026-11-21T12:00:00+00:00"] * 3)
    with store.create(tmp_path, SUITE, ENVIRONMENT) as writer:
        monkeypatch.setattr(store, "_now", lambda: next(stamps))  # long before it began
        writer.finish()

    elapsed_s = store.load(tmp_path, "latest").elapsed_s
    assert elapsed_s is not None
    assert 0 < elapsed_s < 5


def test_no_module_measures_by_the_wall_clock() -> None:
    readers = {f for f, p in sources("harness").items() if uses(p, "time.time", "time.time_ns")}

    assert readers == {
        "harness/measure/frames.py",  # finds its looks among a profile's events
        "harness/gating/leftovers.py",  # compares with the date of a folder
    }


# --- on a GPU ----------------------------------------------------------------------------


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_real_device_memory_is_exhausted_with_its_peak_and_given_back(
    warm: Launcher, tmp_path: Path
) -> None:
    from harness.probes import nvml
    from harness.probes.occupancy import NvmlMeter

    writer = Memory(tmp_path)
    cases = [
        replace(make_good(fake), case_id=f"{fake}-{i}")
        for i, fake in enumerate(("fills_the_gpu", "faults_on_the_gpu", "multiplies_on_gpu"))
    ]
    with NvmlMeter(nvml.gpus()[0].uuid) as meter:
        run_suite(
            make_suite(*cases),
            writer=writer,
            probes=(),
            observer=Quiet(),
            launcher=warm,
            gpu=Vacancy(meter),
        )

    full, faulted, good = writer.measurements
    assert full.outcome is Outcome.OUT_OF_MEMORY
    assert evidence_of(full).peak_device_bytes is not None
    assert faulted.outcome is Outcome.CRASH
    assert "the CUDA context is lost" in faulted.detail
    assert good.outcome is Outcome.OK, good.detail
