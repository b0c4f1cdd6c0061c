"""Each fault has its outcome and its evidence, and the next case runs.

Here: faults of one worker and of the machine. Hangs: test_hangs.py. Parents, their disk and the
clock: test_parents.py. Other ways for a worker to end: test_outcomes.py. A whole run: test_run.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from harness.machine import gpu_idle
from harness.machine.gpu_idle import GpuUse, IdleCheck
from harness.records import Measurement, NonFiniteOrigin, Outcome
from harness.runner import watchdog
from harness.runner.launcher import Launcher
from harness.runner.run import run_suite
from harness.tests.faulty import PATIENT, LeapingClock, evidence_of, file_of, make_case, run
from harness.tests.small_run import ENVIRONMENT
from harness.tests.workers import GPU, Memory, Quiet, make_suite
from harness.tests.workers import make_case as make_good

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
            "killed by SIGKILL (not by the harness",
            {"signal": "SIGKILL", "steps": "3"},
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
def test_a_fault_has_its_outcome_and_evidence_and_the_next_case_runs(
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


# --- NaN and Inf -------------------------------------------------------------------------


def origins(m: Measurement) -> tuple[NonFiniteOrigin, ...]:
    assert m.outcome is Outcome.NON_FINITE, m.detail
    return evidence_of(m).origins


def test_nan_at_step_4_is_traced_to_operator_and_module(warm: Launcher, tmp_path: Path) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_at_step", axes={"bad": 4}))

    assert "loss: 1 of 1 values are NaN or Inf, first in step 4 (counted from 0)" in m.detail
    assert evidence_of(m).steps == 5
    (origin,) = origins(m)
    assert (origin.computation, origin.value, origin.step) == ("run", "NaN", 4)
    assert (origin.precision, origin.operator) == ("float32", "aten.sub")
    assert origin.module == "second (Module)"
    assert "Inf appeared earlier, from output 0 of aten.exp in second (Module)" in origin.note


def test_nan_of_a_gradient_is_found_in_the_step_before_it_shows(
    warm: Launcher, tmp_path: Path
) -> None:
    (m,) = run(warm, tmp_path, make_case("nan_from_a_gradient"))

    (origin,) = origins(m)
    assert "first in step 3" in m.detail
    assert (origin.step, origin.value) == (2, "NaN")
    assert "in the backward pass" in origin.note


def test_the_reference_shows_whether_the_precision_is_the_cause(
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
    assert "outside torch's operators" in origin.note


def test_an_infinite_loss_is_non_finite(warm: Launcher, tmp_path: Path) -> None:
    (m,) = run(warm, tmp_path, make_case("inf_loss"))

    (origin,) = origins(m)
    assert (origin.value, origin.step, origin.operator) == ("Inf", 2, "aten.reciprocal")


def test_nan_that_does_not_recur_is_reported_as_such(warm: Launcher, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    mark.touch()

    (m,) = run(warm, tmp_path, make_case("nan_once", axes={"path": str(mark)}))

    (origin,) = origins(m)
    assert origin.value == ""
    assert origin.note == "not reproduced in 4 steps: it does not depend on the case alone"


def test_a_hanging_search_keeps_the_outcome(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = LeapingClock(tmp_path / "mark")
    monkeypatch.setattr(watchdog, "time", clock)
    axes = {"path": str(clock.mark)}
    case = make_case("hangs_in_diagnosis", axes=axes, settings=PATIENT)

    (m,) = run(warm, tmp_path, case, observer=clock)

    assert m.outcome is Outcome.NON_FINITE
    assert "first in step 2" in m.detail
    assert "the search for its origin: hang" in m.detail
    assert evidence_of(m).phase == "run"


# --- of what a worker leaves behind ------------------------------------------------------


def test_a_daemon_that_forked_twice_dies_with_its_worker(warm: Launcher, tmp_path: Path) -> None:
    path = tmp_path / "pid"

    (m,) = run(warm, tmp_path, make_case("daemonises", axes={"path": str(path)}))

    assert m.outcome is Outcome.OK, m.detail
    assert not psutil.pid_exists(int(path.read_text()))


class Meter:
    """A GPU whose use follows a script; the last reading repeats."""

    def __init__(self, *uses: GpuUse) -> None:
        self.uses = list(uses)

    def __call__(self) -> GpuUse:
        return self.uses.pop(0) if len(self.uses) > 1 else self.uses[0]


FREE = GpuUse(used_bytes=5e8, processes={})
HELD = GpuUse(used_bytes=9e9, processes={4711: "process 4711 (python of someone), 8.50 GB"})


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle, "FREE_S", 0.1)
    monkeypatch.setattr(gpu_idle, "AGAIN_S", 0.05)


@pytest.mark.usefixtures("impatient")
def test_an_orphan_on_the_gpu_is_named_and_the_case_after_it_runs(
    warm: Launcher, tmp_path: Path
) -> None:
    """A process that survives SIGKILL uses memory after the first case."""
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
        gpu=IdleCheck(meter),
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
            *(GpuUse(used_bytes=2e9),) * 2,
            "2.0 GB of the GPU are in use",
            id="unlisted",
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
def test_a_shared_gpu_is_an_invalid_environment(before: GpuUse, now: GpuUse, said: str) -> None:
    why, _ = IdleCheck(Meter(before, now)).problem()

    assert said in why
    assert bool(said) == bool(why)


def test_memory_that_is_freed_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_idle, "POLL_S", 0.001)

    assert IdleCheck(Meter(FREE, HELD, HELD, FREE)).problem() == ("", ())


@pytest.mark.parametrize(
    ("requires", "said"),
    [
        ({}, ""),
        ({"gpu": "H200", "driver": "570.*"}, ""),
        ({"driver": "580.*"}, "wrong driver: this machine has 570.86, the suite requires 580.*"),
        ({"gpu": "A100"}, "wrong gpu: this machine has NVIDIA H200"),
    ],
)
def test_the_wrong_machine_is_an_invalid_environment(
    requires: Mapping[str, str], said: str
) -> None:
    why = gpu_idle.mismatch(requires, ENVIRONMENT)

    assert why.startswith(said)
    assert bool(why) == bool(said)
    assert bool(gpu_idle.mismatch(requires, replace(ENVIRONMENT, gpu=None))) == bool(requires)


def test_on_the_wrong_machine_nothing_is_started(warm: Launcher, tmp_path: Path) -> None:
    writer, observer = Memory(tmp_path), Quiet()
    suite = make_suite(make_case("good"))

    run_suite(
        suite, writer=writer, probes=(), observer=observer, launcher=warm, unfit="wrong driver"
    )

    assert writer.outcomes == [("good", 0, Outcome.INVALID_ENVIRONMENT)]
    assert observer.phases == []


# --- on a GPU ----------------------------------------------------------------------------


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no NVIDIA GPU here")
def test_real_device_memory_is_exhausted_with_its_peak_and_given_back(
    warm: Launcher, tmp_path: Path
) -> None:
    from harness.machine import nvml
    from harness.machine.gpu_idle import nvml_meter

    writer = Memory(tmp_path)
    cases = [
        replace(make_good(fake), case_id=f"{fake}-{i}")
        for i, fake in enumerate(("fills_the_gpu", "faults_on_the_gpu", "multiplies_on_gpu"))
    ]
    with nvml_meter(nvml.gpus()[0].uuid) as meter:
        run_suite(
            make_suite(*cases),
            writer=writer,
            probes=(),
            observer=Quiet(),
            launcher=warm,
            gpu=IdleCheck(meter),
        )

    full, faulted, good = writer.measurements
    assert full.outcome is Outcome.OUT_OF_MEMORY
    assert evidence_of(full).peak_device_bytes is not None
    assert faulted.outcome is Outcome.CRASH
    assert "the CUDA context is lost" in faulted.detail
    assert good.outcome is Outcome.OK, good.detail
