"""A run starts its workers in their order and on a machine that is fit, and leaves none running."""

import os
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from harness.errors import HarnessError
from harness.machine.gpu_idle import IdleCheck
from harness.machine.tests.test_gpu_idle import FREE, HELD, Meter, impatient  # noqa: F401  a fixture
from harness.records import Case, Clock, Evidence, Measurement, Outcome, Rule, Run, Suite
from harness.runner import forkserver
from harness.runner import run as running
from harness.runner.launcher import Launcher
from harness.runner.run import Agenda, run_suite
from harness.tests import fake_runs
from harness.tests.processes import wait_until
from harness.tests.workers import (
    GPU,
    QUICK,
    Counter,
    Memory,
    Quiet,
    descendants,
    make_case,
    make_suite,
    rig_of,
    run,
)

# --- the order of processes, which end at once -------------------------------------------


class Planned(Memory):
    """A writer of processes that end at once."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(folder)
        self.card = "one"
        self.observer = Quiet()
        self.launcher = Mock(spec=Launcher)
        monkeypatch.setattr(running, "watch", self.watch)

    def watch(self, worker: object, case: Case, process: int, **k: Any) -> Measurement:
        known = {name: k[name] for name in ("asked_by", "card")} | {"case_id": case.case_id}
        return Measurement(**known, process=process, outcome=Outcome.OK, samples_s=(1.0,))

    def run(self, suite: Suite, gpu: IdleCheck | None = None, **k: Any) -> list[Outcome]:
        rig = rig_of(self.launcher, observer=self.observer)
        rig.gpu = gpu
        run_suite(Agenda(suite, **k), rig, self)
        return [m.outcome for m in self.measurements]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    return Planned(tmp_path, monkeypatch)


def suite_of(*names: str) -> Suite:
    return make_suite(*map(make_case, names))


def test_an_open_rule_adds_a_process_to_those_that_are_planned(planned: Planned) -> None:
    settings = replace(QUICK, processes=1, most_processes=3)
    rule = Rule(name="fast", metric="step_s", go=2.0)
    suite = replace(make_suite(make_case("a", settings=settings)), rules=(rule,))
    made = fake_runs.run(suite.cases, lambda _: [], rules=(rule,))

    def read() -> Run:
        return replace(made, measurements=tuple(planned.measurements))

    planned.run(suite, read=read)

    assert [(m.asked_by, m.card) for m in planned.measurements] == [("", "one"), ("fast", "one")]
    assert planned.observer.totals == [1, 2, 2]


def test_a_process_that_slurm_ends_with_its_job_is_no_crash(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = Measurement(
        case_id="a", process=0, outcome=Outcome.CRASH, evidence=Evidence(signal="SIGTERM")
    )
    monkeypatch.setattr(running, "watch", lambda *_, **__: ended)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    late = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGTERM))
    late.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            planned.run(suite_of("a"))
    finally:
        late.join()
        signal.signal(signal.SIGTERM, before)
    assert not planned.measurements


def test_workers_search_the_pythonpath_of_their_own_variables_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = sys.path[-1]
    monkeypatch.setattr(sys, "path", [sysconfig.get_path("scripts"), own, "hook"])

    path = forkserver.search_path({"PYTHONPATH": "/of/the/case"})

    assert path == ["/of/the/case", own, "hook", str(Path.cwd())]


# --- machines that are not fit -----------------------------------------------------------


@pytest.mark.usefixtures("impatient")
def test_an_orphan_on_the_gpu_is_named_and_the_case_after_it_runs(planned: Planned) -> None:
    """A process that survives SIGKILL uses memory after the first case."""
    meter = Meter(FREE)

    def finished(measurement: Measurement) -> None:
        meter.uses = [HELD] if measurement.case_id == "a" else [FREE]

    planned.observer.finished = finished  # type: ignore[method-assign]

    outcomes = planned.run(suite_of(*"abc"), gpu=IdleCheck(meter))

    refused = planned.measurements[1]
    invalid = Outcome.INVALID_ENVIRONMENT
    assert outcomes == [Outcome.OK, invalid, Outcome.OK]
    assert "the GPU is shared: process 4711 (python of someone), 8.50 GB" in refused.detail
    assert refused.evidence
    assert refused.evidence.holders == ("process 4711 (python of someone), 8.50 GB",)


# --- a good process ----------------------------------------------------------------------

PHASES = ("start", "setup", "accuracy", "warmup", "sampling", "repeat", "profile")


def test_a_good_workload_is_measured_in_full(warm: Launcher, tmp_path: Path) -> None:
    observer, probe, case = Quiet(), Counter(), make_case("good", axes={"step_s": 0.02})

    (m,) = run(warm, tmp_path, case, probes=[probe], observer=observer)

    assert (m.outcome, m.detail, m.process) == (Outcome.OK, "", 0)
    assert m.clock is (Clock.CUDA_EVENT if GPU else Clock.HOST)
    assert (m.peak_memory_bytes is None) is not GPU
    assert (m.tokens, m.flops, m.bytes) == (64, 128, 256)
    assert len(m.samples_s) == len(m.host_samples_s) >= QUICK.min_samples
    assert len(m.warmup_s) >= 1, "the first reading is never a sample"
    assert min(m.host_samples_s) >= 0.02
    assert m.accuracy
    assert m.accuracy.tensors[0].error <= m.accuracy.tensors[0].bound
    assert m.effective == {"provider": "fake", "dtype": "float32", "start": "warm"}
    assert Path(m.log).match("logs/good-*.0.log")
    assert [p.name for p in m.phases] == [*PHASES]
    assert all(p.start_s <= p.end_s <= m.wall_s for p in m.phases)
    assert [p.end_s for p in m.phases[:-1]] == [p.start_s for p in m.phases[1:]]
    assert m.phases[-3].end_s - m.phases[-3].start_s >= sum(m.host_samples_s)
    assert len(m.samples_at_s) == len(m.samples_s)
    assert m.samples_at_s[0] == pytest.approx(m.phases[-3].start_s, abs=1e-6)
    assert all(np.diff(m.samples_at_s) >= m.host_samples_s[:-1])
    assert m.telemetry is not None
    assert m.telemetry.unavailable == probe.unavailable
    assert m.telemetry.channels["rss_bytes"][:2] == (1.0, None)
    assert len(m.telemetry.t_s) == probe.readings
    assert observer.phases == [*PHASES[1:]]
    assert observer.steps > 0


# --- the end of a run, and of its processes ----------------------------------------------


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
    cases = make_case("hangs"), make_case("good")

    with pytest.raises(KeyboardInterrupt):
        run(warm, tmp_path, *cases, observer=Interrupting())

    assert not [*tmp_path.glob("logs/good-*")]
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
    seen = {p.pid: p.info["status"] for p in psutil.process_iter(["status"])}  # one may end now
    return [pid for pid in pids if seen.get(pid, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE]


def test_a_killed_forkserver_ends_its_worker_and_is_replaced(tmp_path: Path) -> None:
    class Killing(Quiet):
        def phase(self, case: Case, process: int, name: str) -> None:
            if name == "setup":
                forkservers.append(one._warmed()._process)
                if case.case_id == "hangs":
                    forkservers[0].kill()

    forkservers: list[Any] = []
    cases, probe = (make_case("hangs"), make_case("good")), Counter()

    with Launcher() as one:
        killed, good = run(one, tmp_path, *cases, probes=[probe], observer=Killing())

    wait_until(lambda: not any(map(psutil.pid_exists, probe.pids)))
    first, second = forkservers
    assert first is not second
    assert None not in (first.poll(), second.poll()), "the launcher closed its own"
    assert (killed.outcome, good.outcome) == (Outcome.CRASH, Outcome.OK)
    assert "killed by SIGKILL" in killed.detail


# --- the launcher and its forkserver ---------------------------------------------------------


def test_an_interpreter_without_torch_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the tree under test has a module of the standard library's name."""
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in ("json", "psutil", "harness"):
        (tree / f"{name}.py").write_text("raise ImportError('not from here')")

    with Launcher([tree]) as one, pytest.raises(HarnessError, match="libcudart") as raised:
        one.launch(make_case("good"), 0, tmp_path / "log")

    assert "Is torch installed" in str(raised.value)


def test_ctrl_c_while_torch_imports_leaves_no_forkserver(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []

    def interrupted(handle: Any) -> None:
        started.append(handle._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(forkserver.ForkserverHandle, "hear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Launcher().describe()

    assert started[0].poll() is not None


@pytest.mark.parametrize("given", ["", "active"])
def test_threads_of_workloads_wait_passively_unless_the_user_decides(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spinning threads make a step twenty times as long beside other load. Programs of a suite keep
    the user's environment."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    around = {"OMP_DISPLAY_ENV": "true"} | ({"OMP_WAIT_POLICY": given} if given else {})

    with Launcher(around=around) as one:
        (m,) = run(one, tmp_path, make_case("reads_environment"))
        output = one._warmed()._stderr
        output.seek(0)
        shown = output.read().decode()

    assert f"OMP_WAIT_POLICY = '{(given or 'passive').upper()}'" in shown
    assert m.effective["policy"] == given


def test_a_workload_module_is_imported_once_for_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every worker's own import would be overhead of its case. It tells its counts on the way."""
    source = """
import os, threading
from dataclasses import replace
from harness.tests import fake_workloads
PRELOAD = ("colorsys",)
IMPORTED_BY = os.getpid()
def where(provider, axes):
    seen = lambda: {"imported_by": IMPORTED_BY, "pid": os.getpid()}
    return replace(fake_workloads.good(provider, axes), effective=seen)
"""
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "plain.py").write_text(source)
    (tmp_path / "threaded.py").write_text(source + thread)
    monkeypatch.syspath_prepend(tmp_path)
    good, names = make_case("good"), ("plain", "threaded")
    cases = [replace(good, case_id=name, factory=f"{name}:where") for name in names]

    with Launcher() as one:
        one.preflight(make_suite(cases[0]))
        plain = [run(one, tmp_path, cases[0])[0] for _ in range(2)]
        preloaded = one.not_preloaded
        one.preflight(make_suite(cases[1]))
        (threaded,) = run(one, tmp_path, cases[1])

    assert preloaded == ""
    assert len({m.effective["imported_by"] for m in plain}) == 1
    assert len({m.effective["pid"] for m in plain}) == 2
    assert "has started a thread" in one.not_preloaded
    assert threaded.effective["imported_by"] == threaded.effective["pid"]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("import time; time.sleep(3600)", "no answer in 4 s"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        (
            "from harness.tests.fake_workloads import _channel\n"
            "import os; os.write(_channel()._fd, b'nonsense\\n')",
            "answer is garbled: b'nonsense'",
        ),
    ],
)
def test_a_module_that_cannot_be_checked_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, why: str
) -> None:
    (tmp_path / "odd.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    with Launcher() as one:
        one.describe()
        monkeypatch.setattr(forkserver, "START_S", 4.0)
        with pytest.raises(HarnessError) as raised:
            one.preflight(make_suite(replace(make_case("good"), factory="odd:good")))

    assert why in str(raised.value)
    assert "garbled" in why or "python -c 'import odd'" in str(raised.value)
    assert "exit" not in source or "in 'import odd'" in str(raised.value)


def test_variables_reach_the_worker_of_their_case_and_no_other(
    warm: Launcher, tmp_path: Path
) -> None:
    """Set in a running interpreter, PYTHONHASHSEED (or OMP_NUM_THREADS) would change nothing."""
    long = "1" * 300_000  # no message on a socket is so long
    envs = {"warm": {"NSA_TEST_FLAG": long}, "plain": {}, "cold": {"PYTHONHASHSEED": "0"}}
    cases = [replace(make_case("reads_environment", env=env), case_id=n) for n, env in envs.items()]

    flagged, plain, cold = run(warm, tmp_path, *cases)

    assert (flagged.effective["flag"], flagged.effective["start"]) == (long, "warm")
    assert plain.effective["flag"] == ""
    assert (cold.effective["start"], cold.effective["hash_randomization"]) == ("cold", False)
    with pytest.raises(HarnessError, match=r"Argument list too long\n.* shorten the variables"):
        run(warm, tmp_path, make_case("good", env={"HUGE": "1" * 140_000}))
