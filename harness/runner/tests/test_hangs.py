"""A hang is not a slow case; its stacks are kept, and the next case runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.machine import nvml
from harness.machine.probes import open_probes
from harness.records import Measurement, Outcome, Scalar
from harness.runner import silence, watchdog
from harness.runner.launcher import Launcher
from harness.tests import workers
from harness.tests.faulty import PATIENT, LeapingClock, evidence_of, make_case, run
from harness.tests.workers import QUICK, Quiet


def hang(
    warm: Launcher, folder: Path, fake: str, clock: LeapingClock, **changes: object
) -> Measurement:
    """The measurement of a workload that hangs; a good one runs after it."""
    axes = {"path": str(clock.mark)}
    case = make_case(fake, axes=axes, settings=PATIENT, **changes)
    (m,) = run(warm, folder, case, observer=clock)
    assert m.outcome is Outcome.HANG, m.detail
    return m


def test_a_hang_at_step_5_is_seen_and_its_stacks_are_kept(
    warm: Launcher, tmp_path: Path, clock: LeapingClock
) -> None:
    m = hang(warm, tmp_path, "hangs_at_5", clock, env={"NSA_TEST_FLAG": "a 'quoted' value"})

    found = evidence_of(m)
    assert (found.steps, found.last_step) == (5, 5)
    assert m.over_steps
    assert m.over_steps.step == (1, 2, 3, 4, 5)
    assert m.over_steps.values == {"loss": (0.0, 1.0, 2.0, 3.0, 4.0)}
    assert found.silent_s is not None
    assert found.silent_s > QUICK.stall_s
    assert len(found.activity) == 1 + silence.WINDOWS
    assert "it stands still; last in wait_for_godot" in m.detail
    assert found.frame.startswith("wait_for_godot (fault_workloads.py:")
    assert "wait_for_godot" in (tmp_path / m.log).read_text()


def test_a_process_in_which_triton_has_compiled_writes_its_stacks(
    tmp_path: Path, clock: LeapingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # the kernels' tests set it

    with Launcher() as compiling:
        m = hang(compiling, tmp_path, "hangs_after_compiling", clock)

    assert "wait_for_godot" in (tmp_path / m.log).read_text()


BRIEF = replace(QUICK, min_samples=10, stall_s=0.2, accuracy=False)


@pytest.mark.parametrize(
    ("how", "when", "outcome", "said"),
    [
        ("waits_for_a_queue", "start-up", Outcome.HANG, "; it stands still"),
        ("waits_for_a_queue", "step", Outcome.HANG, "; it stands still"),
        ("waits_for_a_queue", "teardown", Outcome.OK, "did not exit within 0.2 s of its answer"),
        ("waits_for_a_peer", "start-up", Outcome.HANG, "; it stands still"),
        ("waits_for_a_peer", "step", Outcome.HANG, "; it stands still"),
        ("holds_the_gil", "step", Outcome.HANG, "; it stands still"),
        ("spins", "start-up", Outcome.TIMEOUT, "in setup; no step is known yet; it uses"),
        ("spins", "step", Outcome.TIMEOUT, "busy: no step finished in"),
        ("spins", "teardown", Outcome.OK, "did not exit within 0.2 s of its answer"),
    ],
)
def test_a_process_that_finishes_no_step_is_named_at_start_up_in_a_step_and_in_teardown(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, when: str,
    outcome: Outcome, said: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(watchdog, "EXIT_S", 0.2)
    settings = replace(BRIEF, timeout_s=1.8 if how == "spins" else 60.0)
    axes, observer = {"how": how, "when": when, "path": str(tmp_path / "group")}, Quiet()
    case = make_case("stands_still", axes=axes, settings=settings)

    forkserver = warm._warm

    (m,) = run(warm, tmp_path, case, observer=observer)

    assert (m.outcome, said in m.detail) == (outcome, True), m.detail
    assert warm._warm is forkserver, "it is not replaced"
    assert f"; last in _{how} (fault_workloads.py:" in m.detail
    assert observer.said or outcome is not Outcome.TIMEOUT


@pytest.mark.free_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("fake", "axes", "stall_s", "outcome"),
    [
        ("spins_on_the_gpu", {}, 2.0, Outcome.HANG),
        ("computes_on_the_gpu", {"products": 500, "wait_s": 0.0}, 1.0, Outcome.OK),
        ("computes_on_the_gpu", {"products": 1, "wait_s": 45.0}, 30.0, Outcome.OK),
    ],
)
def test_a_kernel_that_does_not_end_is_a_hang_and_a_long_step_is_not(
    warm: Launcher, tmp_path: Path, fake: str, axes: dict[str, Scalar], stall_s: float,
    outcome: Outcome,
) -> None:  # fmt: skip
    """In real time, because NVML sees a kernel late. Kernels that compute may take any time; one
    that only waits, as long as a busy process."""
    settings = replace(BRIEF, stall_s=stall_s, timeout_s=200.0, min_samples=2, max_samples=4)
    case = make_case(fake, axes={"path": str(tmp_path / "mark"), **axes}, settings=settings)
    probes = open_probes(nvml.gpus()[:1])

    (m,) = workers.run(warm, tmp_path, case, probes=probes)

    for probe in probes:
        probe.close()
    assert m.outcome is outcome, (m.detail, m.evidence and m.evidence.activity)
    hung = outcome is Outcome.HANG
    assert ("one kernel keeps the GPU busy" in m.detail) is hung
    assert hung or max((*m.warmup_s, *m.samples_s)) > 1.2 * stall_s
