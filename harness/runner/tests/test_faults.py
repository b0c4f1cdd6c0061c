"""Each fault of a worker has its outcome and its evidence, and the next case runs.

Hangs: test_hangs.py. Parents and their disk: test_parents.py. A whole run, and machines that are
not fit: test_run.py. Errors that Python reports: harness/worker/tests/test_answer.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.machine import nvml
from harness.machine.gpu_idle import IdleCheck, nvml_meter
from harness.records import Clock, Outcome
from harness.runner import evidence
from harness.runner.launcher import Launcher
from harness.runner.run import Agenda, run_suite
from harness.tests.faulty import PATIENT, LeapingClock, evidence_of, make_case, run
from harness.tests.workers import QUICK, Memory, make_suite, rig_of
from harness.tests.workers import make_case as make_good

RUN, READ = r"run \(fake_workloads.py:\d+\)", r"read \(timing.py:\d+\)"

# --- of the worker -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fake", "outcome", "said", "seen"),
    [
        ("raises", Outcome.CRASH, "ValueError: block_size=3", {"phase": "warmup", "frame": RUN}),
        ("wrong", Outcome.INCORRECT, "o: error 0.01", {"phase": "accuracy"}),
        ("segfaults", Outcome.CRASH, "killed by SIGSEGV", {"signal": "SIGSEGV", "frame": READ}),
        ("exits_politely", Outcome.CRASH, "status 0 and no answer", {"signal": "$"}),
        ("scribbles_on_the_pipe", Outcome.CRASH, "garbled answer in warmup", {}),
        ("kills_itself", Outcome.CRASH, "SIGKILL (not by the harness", {"steps": "3"}),
        ("exhausts_host_memory", Outcome.OUT_OF_MEMORY, "GB in the process", {}),
        ("slows_the_clock", Outcome.INVALID_ENVIRONMENT, "the samples add up to", {}),
    ],
)
def test_a_fault_has_its_outcome_and_evidence_and_the_next_case_runs(
    warm: Launcher, tmp_path: Path, fake: str, outcome: Outcome, said: str, seen: Mapping[str, str]
) -> None:
    (m,) = run(warm, tmp_path, make_case(fake))

    assert (m.outcome, said in m.detail) == (outcome, True), m.detail
    found = evidence_of(m)
    for name, pattern in seen.items():
        assert re.match(pattern, str(getattr(found, name))), (name, found)
    if "frame" in seen:
        text = (tmp_path / m.log).read_text()
        assert re.search(r"^(Traceback \(most recent|Fatal Python error: Segm)", text, re.MULTILINE)


def test_what_a_workload_prints_or_forks_is_no_answer(warm: Launcher, tmp_path: Path) -> None:
    fakes = ("prints", "forks", "prints_to_a_full_disk")
    prints, forks, full = run(warm, tmp_path, *map(make_case, fakes))

    assert (prints.outcome, forks.outcome) == (Outcome.OK, Outcome.OK)
    log = (tmp_path / prints.log).read_text(errors="replace")
    assert "no message at all" in log
    assert '{"kind": "phase"' in log
    assert full.outcome is Outcome.INVALID_ENVIRONMENT
    assert "No space left on device" in full.detail


def test_a_stopped_worker_is_killed(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can neither write its stacks nor take SIGTERM."""
    monkeypatch.setattr(evidence, "PYTHON_S", 0.1)
    (m,) = run(warm, tmp_path, make_case("stops_itself", settings=replace(QUICK, stall_s=0.5)))

    assert m.outcome is Outcome.HANG
    assert "a signal stopped it" in m.detail
    assert "survived SIGKILL" not in m.detail


def test_a_hanging_search_keeps_the_outcome(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    axes = {"path": str(clock.mark)}
    case = make_case("hangs_in_diagnosis", axes=axes, settings=PATIENT)

    (m,) = run(warm, tmp_path, case, observer=clock)

    assert m.outcome is Outcome.NON_FINITE
    assert "first in step 2" in m.detail
    assert "the search for its origin: hang" in m.detail
    assert evidence_of(m).phase == "run"


# --- on a GPU ----------------------------------------------------------------------------


@pytest.mark.free_gpu
@pytest.mark.gpu
def test_errors_of_a_gpu_stay_in_their_process(warm: Launcher, tmp_path: Path) -> None:
    """Its memory is exhausted and given back, and a lost context is replaced. A driver initialised
    before the fork would be broken after it."""
    writer = Memory(tmp_path)
    cases = [make_good(f) for f in ("fills_the_gpu", "faults_on_the_gpu", "multiplies_on_gpu")]
    with nvml_meter(nvml.gpus()[0].uuid) as meter:
        rig = rig_of(warm)
        rig.gpu = IdleCheck(meter)
        run_suite(Agenda(make_suite(*cases)), rig, writer)

    full, faulted, good = writer.measurements
    assert full.outcome is Outcome.OUT_OF_MEMORY
    assert "GB on the device" in full.detail
    assert (faulted.outcome, "CUDA error" in faulted.detail) == (Outcome.CRASH, True)
    assert (good.outcome, good.clock) == (Outcome.OK, Clock.CUDA_EVENT), good.detail
    assert good.peak_memory_bytes is not None
    assert good.peak_memory_bytes >= 3 * 4 * 1024**2
