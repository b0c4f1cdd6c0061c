"""A run starts its workers in their order and from one forkserver, and leaves nothing running."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.errors import HarnessError, StoreError
from harness.records import Case, Clock, Measurement, Outcome
from harness.runner import launcher
from harness.runner.launcher import Launcher
from harness.runner.run import run_suite, settled
from harness.tests.workers import (
    GPU,
    QUICK,
    Counter,
    Memory,
    Quiet,
    descendants,
    make_case,
    make_suite,
    run,
)

# --- the order of processes --------------------------------------------------------------


def test_processes_take_turns_and_the_second_round_goes_backwards(
    warm: Launcher, tmp_path: Path
) -> None:
    settings = replace(QUICK, processes=2)
    cases = [replace(make_case("good", settings=settings), case_id=name) for name in "abc"]

    measured = run(warm, tmp_path, *cases)

    assert [(m.case_id, m.process) for m in measured] == [
        *(("a", 0), ("b", 0), ("c", 0)),
        *(("c", 1), ("b", 1), ("a", 1)),
    ]


def test_a_failed_case_is_not_measured_again(warm: Launcher, tmp_path: Path) -> None:
    settings = replace(QUICK, processes=3)
    suite = make_suite(make_case("declined", settings=settings), make_case("good"))
    writer, observer = Memory(tmp_path), Quiet()

    run_suite(suite, writer=writer, probes=(), observer=observer, launcher=warm)

    assert writer.outcomes == [
        ("declined", 0, Outcome.UNSUPPORTED),
        ("good", 0, Outcome.OK),
    ]
    assert observer.totals == [4, 2]


def test_a_resumed_run_does_only_what_is_left(warm: Launcher, tmp_path: Path) -> None:
    settings = replace(QUICK, processes=2)
    suite = make_suite(make_case("raises", settings=settings), make_case("good", settings=settings))
    before = [
        Measurement(case_id="raises", process=0, outcome=Outcome.CRASH),
        Measurement(case_id="good", process=0, outcome=Outcome.OK, samples_s=(1.0,)),
    ]
    writer = Memory(tmp_path)

    run_suite(
        suite,
        writer=writer,
        probes=(),
        observer=Quiet(),
        done=settled(suite, before),
        launcher=warm,
    )

    assert writer.outcomes == [("good", 1, Outcome.OK)]


# --- the end of a run, and of its processes ----------------------------------------------


def test_a_full_disk_stops_the_run_and_leaves_no_process(warm: Launcher, tmp_path: Path) -> None:
    class FullDisk(Memory):
        def append(self, measurement: Measurement) -> None:
            raise StoreError("no space left on device")

    suite = make_suite(make_case("good"), make_case("good"))
    observer = Quiet()

    with pytest.raises(StoreError, match="no space left"):
        run_suite(suite, writer=FullDisk(tmp_path), probes=(), observer=observer, launcher=warm)

    assert observer.phases.count("setup") == 1
    assert descendants() == []


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where it was ignored from birth (nohup)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_kills_the_worker_and_is_passed_on(
    warm: Launcher, tmp_path: Path, number: signal.Signals
) -> None:
    class Interrupting(Quiet):
        def phase(self, case: Case, process: int, name: str) -> None:
            if name == "setup":
                os.kill(os.getpid(), number)

    before = signal.getsignal(signal.SIGTERM)
    suite = make_suite(make_case("hangs"), make_case("good"))
    writer = Memory(tmp_path)

    with pytest.raises(KeyboardInterrupt):
        run_suite(suite, writer=writer, probes=(), observer=Interrupting(), launcher=warm)

    assert writer.measurements == []
    assert descendants() == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_descendants_of_a_worker_are_ended(warm: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "pids"

    (m,) = run(warm, tmp_path, make_case("leaves_orphans", axes={"path": str(path)}))

    assert m.outcome is Outcome.OK
    assert still_running(path) == []


def test_workers_die_with_a_killed_harness(tmp_path: Path) -> None:
    """Not even SIGKILL of the harness leaves a worker behind, on a GPU others want."""
    path = tmp_path / "pids"
    script = (
        "from pathlib import Path\n"
        "from harness.tests.workers import *\n"
        f"case = make_case('leaves_orphans_and_hangs', axes={{'path': {str(path)!r}}})\n"
        f"with Launcher() as one: run(one, Path({str(tmp_path)!r}), case)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script]) as parent:
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"))
        parent.kill()

    wait_until(lambda: still_running(path) == [])


def still_running(path: Path) -> list[int]:
    """Those of the process ids in a file that are alive; a zombie is not."""
    pids = [int(word) for word in path.read_text().split()]
    assert len(pids) == 3
    alive = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return [p.pid for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_until(happened: Callable[[], bool], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


@pytest.mark.usefixtures("own_forkservers")
def test_a_killed_forkserver_ends_its_worker_and_is_replaced(tmp_path: Path) -> None:
    class Killing(Quiet):
        def phase(self, case: Case, process: int, name: str) -> None:
            if case.case_id == "hangs" and name == "setup":
                (forkserver,) = set(psutil.Process().children()) - set(others)
                forkserver.kill()

    others = psutil.Process().children()
    writer, probe = Memory(tmp_path), Counter()
    suite = make_suite(make_case("hangs"), make_case("good"))

    with Launcher() as launcher:
        run_suite(suite, writer=writer, launcher=launcher, probes=[probe], observer=Killing())

    wait_until(lambda: not any(map(psutil.pid_exists, probe.pids)))
    assert set(psutil.Process().children()) == set(others), "the launcher closed its own"
    assert [m.outcome for m in writer.measurements] == [Outcome.CRASH, Outcome.OK]
    assert "killed by SIGKILL" in writer.measurements[0].detail


# --- the launcher and its forkserver ---------------------------------------------------------


def test_the_parent_never_imports_torch() -> None:
    """It must hold no CUDA context; and a fork of it would be slow."""
    script = "import sys, harness.runner.run; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.usefixtures("own_forkservers")
def test_an_interpreter_without_torch_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not found')")
    monkeypatch.syspath_prepend(tmp_path)

    with Launcher() as one, pytest.raises(HarnessError, match="libcudart") as raised:
        one.launch(make_case("good"), 0, tmp_path / "log")

    assert "Is torch installed" in str(raised.value)


def test_ctrl_c_while_torch_is_imported_leaves_no_forkserver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Any] = []
    start = launcher.start_forkserver

    def starting(*args: Any, **options: Any) -> Any:
        started.append(start(*args, **options))
        return started[0]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "start_forkserver", starting)
    monkeypatch.setattr(launcher._ForkserverHandle, "hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Launcher().describe()

    assert started[0].poll() is not None


def test_a_worker_describes_its_environment(warm: Launcher) -> None:
    assert warm.describe()["versions"]["torch"]


def test_a_workload_module_is_imported_once_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker's own import would be overhead of its case. It tells its counts on the way."""
    source = """
import os, threading
from dataclasses import replace
from harness.tests import fake_workloads
counts = fake_workloads.counts
PRELOAD = ("colorsys",)
IMPORTED_BY = os.getpid()
def where(provider, axes):
    seen = lambda: {"imported_by": IMPORTED_BY, "pid": os.getpid()}
    return replace(fake_workloads.good(provider, axes), effective=seen)
"""
    (tmp_path / "plain.py").write_text(source)
    (tmp_path / "threaded.py").write_text(
        source + "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    cases = [
        replace(make_case("good"), case_id=name, factory=f"{name}:where")
        for name in ("plain", "threaded")
    ]

    with Launcher() as one:
        work = one.preflight(make_suite(cases[0]))
        plain = [run(one, tmp_path, cases[0])[0] for _ in range(2)]
        preloaded = one.not_preloaded
        one.preflight(make_suite(cases[1]))
        (threaded,) = run(one, tmp_path, cases[1])

    assert (work["plain"].tokens, work["plain"].flops) == (64, 128)
    assert preloaded == ""
    assert len({m.effective["imported_by"] for m in plain}) == 1
    assert len({m.effective["pid"] for m in plain}) == 2
    assert "has started a thread" in one.not_preloaded
    assert threaded.effective["imported_by"] == threaded.effective["pid"]


def test_nsa_variables_reach_a_warm_worker_and_only_that_one(
    warm: Launcher, tmp_path: Path
) -> None:
    flagged, plain = run(
        warm,
        tmp_path,
        make_case("reads_environment", env={"NSA_TEST_FLAG": "1"}),
        replace(make_case("reads_environment"), case_id="plain"),
    )

    assert (flagged.effective["flag"], flagged.effective["start"]) == ("1", "warm")
    assert plain.effective["flag"] == ""


def test_variables_that_are_read_at_start_take_effect(warm: Launcher, tmp_path: Path) -> None:
    """Set in a running interpreter, PYTHONHASHSEED (or OMP_NUM_THREADS) would change nothing."""
    (cold,) = run(warm, tmp_path, make_case("reads_environment", env={"PYTHONHASHSEED": "0"}))

    assert cold.effective["start"] == "cold"
    assert cold.effective["hash_randomization"] is False


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_a_forked_worker_can_use_the_gpu(warm: Launcher, tmp_path: Path) -> None:
    """A driver initialised before the fork would be broken after it."""
    (m,) = run(warm, tmp_path, make_case("multiplies_on_gpu"))

    assert (m.outcome, m.clock) == (Outcome.OK, Clock.CUDA_EVENT), m.detail
    assert m.peak_memory_bytes is not None
    assert m.peak_memory_bytes >= 3 * 4 * 1024**2


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
@pytest.mark.parametrize(
    ("fake", "outcome", "said"),
    [
        ("fills_the_gpu", Outcome.OUT_OF_MEMORY, "GB on the device"),
        ("faults_on_the_gpu", Outcome.CRASH, "CUDA error"),
    ],
)
def test_a_gpu_error_stays_in_its_process(
    warm: Launcher, tmp_path: Path, fake: str, outcome: Outcome, said: str
) -> None:
    bad, following = run(warm, tmp_path, make_case(fake), make_case("multiplies_on_gpu"))

    assert bad.outcome is outcome, bad.detail
    assert said in bad.detail
    assert following.outcome is Outcome.OK
