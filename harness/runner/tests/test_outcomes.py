"""Each way for a worker to end has its outcome, and the next case runs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.analysis.dead_axes import oddities
from harness.analysis.summary import summarise
from harness.records import Clock, Outcome, PathRule
from harness.runner import stacks, watchdog
from harness.runner.launcher import Launcher
from harness.runner.run import run_suite
from harness.tests import fake_runs
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

PHASES = ("start", "setup", "accuracy", "warmup", "sampling", "profile")


@pytest.mark.parametrize(
    ("fake", "outcome", "said"),
    [
        ("declined", Outcome.UNSUPPORTED, "fake wants even head sizes, head_dim=7"),
        ("checked_nan", Outcome.NON_FINITE, "o: 64 of 64 values"),
        ("returned_inf", Outcome.NON_FINITE, "loss: 1 of 2 values"),
        ("python_memory_error", Outcome.OUT_OF_MEMORY, "MemoryError"),
        ("torch_memory_error", Outcome.OUT_OF_MEMORY, "GB in the process"),
        ("prints", Outcome.OK, ""),
        ("prints_to_a_full_disk", Outcome.INVALID_ENVIRONMENT, "No space left on device"),
        ("returns_no_workload", Outcome.CRASH, "returned a dict, not a Workload"),
        ("exits_at_once", Outcome.CRASH, "exited with status 3 and no answer, in warmup"),
        ("forks", Outcome.OK, ""),
        ("scribbles_on_the_pipe", Outcome.CRASH, "garbled answer in warmup"),
        ("ignores_its_axis", Outcome.PATH_MISMATCH, "head_dim: asked for 7, ran with 8"),
        ("tells_an_object", Outcome.CRASH, "'dtype' a dtype, not a scalar"),
        ("tells_no_bool", Outcome.CRASH, "'NSA_READ' a str, not a bool"),
        ("no_such_factory", Outcome.CRASH, "has no 'no_such_factory'"),
        ("not_a_function", Outcome.CRASH, "is of type int, not a function"),
    ],
)
def test_each_fault_has_its_outcome_and_the_next_case_runs(
    warm: Launcher, tmp_path: Path, fake: str, outcome: Outcome, said: str
) -> None:
    bad, following = run(warm, tmp_path, make_case(fake), make_case("good"))

    assert (bad.outcome, said in bad.detail) == (outcome, True), bad.detail
    assert following.outcome is Outcome.OK
    assert descendants() == []


@pytest.mark.parametrize(
    ("env", "outcome", "read"),
    [
        ({"NSA_READ": "1"}, Outcome.OK, {"NSA_READ": True}),
        # It may be for torch or CUDA.
        ({"NSA_READ": "1", "NSA_OTHER": "1"}, Outcome.OK, {"NSA_READ": True}),
        (
            {"NSA_READ": "1", "NSA_UNREAD": "3"},
            Outcome.PATH_MISMATCH,
            {"NSA_READ": True, "NSA_UNREAD": False},
        ),
    ],
)
def test_a_flag_that_is_set_and_never_read_is_a_mismatch(
    warm: Launcher,
    tmp_path: Path,
    env: Mapping[str, str],
    outcome: Outcome,
    read: Mapping[str, bool],
) -> None:
    (m,) = run(warm, tmp_path, make_case("reads_a_flag", env=env))

    assert (m.outcome, m.flags_read) == (outcome, read), m.detail
    if outcome is Outcome.PATH_MISMATCH:
        assert m.samples_s == ()
        assert "NSA_UNREAD=3 was set" in m.detail


def test_an_exported_flag_may_stay_unread(warm: Launcher, tmp_path: Path) -> None:
    """It is recorded, but no case asked for it."""
    (m,) = run(warm, tmp_path, make_case("reads_a_flag", axes={"exported": "NSA_UNREAD"}))

    assert (m.outcome, m.flags_read) == (Outcome.OK, {"NSA_UNREAD": False})


def test_processes_of_a_case_give_the_same_digest(warm: Launcher, tmp_path: Path) -> None:
    twice = make_case("good", settings=replace(QUICK, processes=2))
    first, second = run(warm, tmp_path, twice)

    assert first.output_digest == second.output_digest
    assert [(d.name, d.shape) for d in first.output_digest] == [("", (64,))]


def test_a_worker_without_the_gpu_of_the_run_does_not_measure(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_device", "cuda")
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if GPU else {}

    (m,) = run(warm, tmp_path, make_case("good", env=hidden))

    assert m.outcome is Outcome.INVALID_ENVIRONMENT
    assert "cannot see one" in m.detail


def test_a_good_workload_is_measured_in_full(warm: Launcher, tmp_path: Path) -> None:
    writer, observer, probe = Memory(tmp_path), Quiet(), Counter()

    run_suite(
        make_suite(make_case("good", axes={"step_s": 0.02})),
        writer=writer,
        probes=[probe],
        observer=observer,
        launcher=warm,
    )

    (m,) = writer.measurements
    assert (m.outcome, m.detail, m.process) == (Outcome.OK, "", 0)
    assert m.clock is (Clock.CUDA_EVENT if GPU else Clock.HOST)
    assert (m.peak_memory_bytes is None) is not GPU
    assert (m.tokens, m.flops, m.bytes) == (64, 128, 256)
    assert len(m.samples_s) == len(m.host_samples_s) >= QUICK.min_samples
    assert len(m.warmup_s) >= 1, "the first reading is never a sample"
    assert min(m.host_samples_s) >= 0.02
    assert m.accuracy is not None
    assert m.accuracy.tensors[0].error <= m.accuracy.tensors[0].bound
    assert m.effective == {"provider": "fake", "dtype": "float32", "start": "warm"}
    assert m.log == "good.0.log"
    assert [p.name for p in m.phases] == [*PHASES]
    assert all(p.start_s <= p.end_s <= m.wall_s for p in m.phases)
    assert [p.end_s for p in m.phases[:-1]] == [p.start_s for p in m.phases[1:]]
    assert m.phases[-2].end_s - m.phases[-2].start_s >= sum(m.host_samples_s)
    assert len(m.samples_at_s) == len(m.samples_s)
    assert m.samples_at_s[0] == pytest.approx(m.phases[-2].start_s, abs=1e-6)
    assert all(np.diff(m.samples_at_s) >= m.host_samples_s[:-1])
    assert m.telemetry is not None
    assert m.telemetry.unavailable == probe.unavailable
    assert m.telemetry.channels["rss_bytes"][:2] == (1.0, None)
    assert len(m.telemetry.t_s) == probe.readings
    assert observer.phases == [*PHASES[1:]]
    assert observer.steps > 0


def test_samples_taken_while_the_gpu_was_throttled_are_marked_and_kept(
    warm: Launcher, tmp_path: Path
) -> None:
    class Throttled(Counter):
        def read(self) -> Mapping[str, float | None]:
            return {"gpu_throttle_reasons": float(0x40)}

    writer = Memory(tmp_path)
    case = make_case("good", settings=replace(QUICK, sample_s=0.2, max_samples=1000))

    run_suite(
        make_suite(case), writer=writer, probes=[Throttled()], observer=Quiet(), launcher=warm
    )

    (m,) = writer.measurements
    assert m.discarded == {"throttled": tuple(range(len(m.samples_s)))}
    assert (m.kept_s, m.is_evidence(QUICK.min_samples)) == ((), False)


def test_probes_are_not_read_if_telemetry_is_off(warm: Launcher, tmp_path: Path) -> None:
    writer, probe = Memory(tmp_path), Counter()
    case = make_case("good", settings=replace(QUICK, telemetry=False))

    run_suite(make_suite(case), writer=writer, probes=[probe], observer=Quiet(), launcher=warm)

    (m,) = writer.measurements
    assert (m.telemetry, probe.readings, probe.pids) == (None, 0, [])


def test_an_impossible_graph_is_unsupported_and_nothing_is_timed(
    warm: Launcher, tmp_path: Path
) -> None:
    (m,) = run(warm, tmp_path, make_case("good", settings=replace(QUICK, graph=True)))

    assert (m.outcome, m.samples_s) == (Outcome.UNSUPPORTED, ())
    assert m.detail.startswith("graph: ")


def test_what_a_workload_prints_is_in_its_log(warm: Launcher, tmp_path: Path) -> None:
    (m,) = run(warm, tmp_path, make_case("prints"))

    log = (tmp_path / m.log).read_text(errors="replace")
    assert "no message at all" in log
    assert '{"kind": "phase"' in log


# --- hung, slow, or done and still there -------------------------------------------------


@pytest.mark.parametrize("fake", ["stops_itself", "shrugs_off_sigterm"])
def test_a_worker_that_ignores_signals_is_killed(
    warm: Launcher, tmp_path: Path, fake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "PYTHON_S", 0.2)
    (hang,) = run(warm, tmp_path, make_case(fake, settings=replace(QUICK, stall_s=0.5)))

    assert hang.outcome is Outcome.HANG
    assert "survived SIGKILL" not in hang.detail
    assert descendants() == []


def test_too_few_samples_at_the_time_limit_are_kept(warm: Launcher, tmp_path: Path) -> None:
    settings = replace(QUICK, min_samples=1000, timeout_s=4.0)

    (slow,) = run(warm, tmp_path, make_case("good", axes={"step_s": 0.4}, settings=settings))

    assert slow.outcome is Outcome.OK, slow.detail
    assert slow.effective["samples_cut"] == "timeout"
    assert len(slow.samples_s) >= 2


def test_a_worker_stuck_at_exit_keeps_its_answer(
    warm: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "EXIT_S", 0.3)

    (m,) = run(warm, tmp_path, make_case("never_exits"))

    assert m.outcome is Outcome.OK
    assert "did not exit" in m.detail
    assert descendants() == []


# --- what ran ----------------------------------------------------------------------------

SEEN = replace(QUICK, profile=True)


def test_counters_and_profile_are_equal_in_every_process(warm: Launcher, tmp_path: Path) -> None:
    case = make_case("multiplies", settings=replace(SEEN, processes=2), axes={})

    one, two = run(warm, tmp_path, case)

    assert one.outcome is two.outcome is Outcome.OK
    assert one.counters
    assert one.counters.exact
    assert one.counters == two.counters
    assert one.counters.dispatched_ops == 4  # mm, twice select, and the read
    if not GPU:
        assert one.counters.host_syncs == 1
    assert one.profile
    assert two.profile
    assert one.profile.fingerprint == two.profile.fingerprint
    assert ("aten::mm", "product", 1.0) in {
        (u.name, u.where, u.calls) for u in one.profile.operators
    }
    assert one.profile.breakdown
    assert set(one.profile.breakdown.host_by_range) == {"product", ""}


def test_a_forbidden_operator_is_a_path_mismatch_without_samples(
    warm: Launcher, tmp_path: Path
) -> None:
    case = make_case("multiplies", settings=SEEN, axes={})
    stated = PathRule(must=("aten::mm",), must_not=("aten::_local_scalar_dense",))

    bad, following = run(
        warm, tmp_path, replace(case, operators=stated, case_id="stated"), make_case("good")
    )

    assert bad.outcome is Outcome.PATH_MISMATCH
    assert bad.samples_s == ()
    assert "'aten::_local_scalar_dense' ran, and 'aten::_local_scalar_dense' must" in bad.detail
    assert bad.profile
    assert "aten::mm" in {u.name for u in bad.profile.operators}
    assert following.outcome is Outcome.OK


def test_an_axis_that_reaches_nothing_is_dead_and_one_that_adds_a_read_is_not(
    warm: Launcher, tmp_path: Path
) -> None:
    cases = [
        replace(
            make_case("multiplies", settings=SEEN, axes={"ignored": ignored, "extra": extra}),
            case_id=f"ignored={ignored} extra={extra}",
            swept=("ignored", "extra"),
        )
        for ignored in ("a", "b")
        for extra in (0, 1)
    ]

    recorded = fake_runs.run(cases, lambda _: [])
    recorded = replace(recorded, measurements=tuple(run(warm, tmp_path, *cases)))

    (dead,) = oddities(recorded, summarise(recorded)).dead
    assert (dead.axes, dead.values, dead.pairs) == (("ignored",), (("a",), ("b",)), 2)
    assert dead.without_kernels is not GPU
