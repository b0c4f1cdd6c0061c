"""Discards, cycles, the roofline, spread, targets, the use of time, the cost of sampling."""

from dataclasses import replace
from typing import Any

import pytest

from harness import units
from harness.analysis import recorded
from harness.analysis.roofline import bound
from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.records import (
    Case,
    CaseSummary,
    Counters,
    Decision,
    Measurement,
    MeasureSettings,
    Outcome,
    Peaks,
    Phase,
    Profile,
    Rule,
    SelfTest,
    SelfTestCheck,
    Telemetry,
    Use,
)
from harness.report.text import note_text, why_ended
from harness.tests.fake_runs import FLOPS_PER_TOKEN, case, run, timed

CASE = case({"seq_len": 512})
PEAKS = Peaks(flops_per_s={"bf16": 8e14}, bytes_per_s=4e12, launch_s=2e-6)
SELF_TEST = SelfTest(at="2026-11-21T07:30:13+00:00", device="GPU-5d1e0f4c", peaks=PEAKS)
LEAST_S = 512 * FLOPS_PER_TOKEN / 8e14
"""The roofline bound of CASE."""


# --- discards ----------------------------------------------------------------------------

REASONS, CLOCK = "gpu_throttle_reasons", "gpu_sm_clock_hz"


@pytest.mark.parametrize(
    ("channels", "found"),
    [
        # The reading at 0.5 s covers the time from the one at 0.4 s to the one at 0.6 s.
        ({REASONS: (0, 0x4, 0x1, 0, 0x4, 0x40, 0, 0, 0x4, 0, 0)}, {"throttled": (8, 9, 10, 11)}),
        # A dropped clock is relative to the median of the process.
        ({CLOCK: (*[1.98e9] * 8, 1.2e9, *[1.9e9] * 2)}, {"clock_dropped": (14, 15, 16, 17)}),
        # A sample is discarded for the first of its reasons.
        ({REASONS: (0, 0x8, *[0] * 9), CLOCK: (2e9, 1e9, *[2e9] * 9)}, {"throttled": (0, 1, 2, 3)}),
        # The other ranks wait for the GPU of rank 1; each clock has its own median.
        (
            {CLOCK: (2e9,) * 11, "gpu1_sm_clock_hz": (*[1.2e9] * 8, 0.9e9, 1.2e9, 1.2e9)},
            {"clock_dropped": (14, 15, 16, 17)},
        ),
        ({REASONS: (0,) * 11, "gpu1_throttle_reasons": (0x8, *[0] * 10)}, {"throttled": (0, 1)}),
        ({REASONS: (None,) * 11}, {}),
        ({REASONS: (0x4,) * 11}, {}),  # the power cap
        ({}, {}),
    ],
)
def test_only_samples_around_a_bad_reading_are_discarded(
    channels: dict[str, tuple[float, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    assert discarded(channels) == found


def test_samples_up_to_a_second_before_another_process_was_seen_are_discarded() -> None:
    counts = (*[0.0] * 25, 1.0, *[0.0] * 15)

    shared = discarded({"gpu_foreign_processes": counts}, samples=80)["shared"]

    assert shared == tuple(range(shared[0], shared[-1] + 1))
    assert (shared[0] * 0.05, shared[-1] * 0.05) == pytest.approx((2.5 - 1.0, 2.6), abs=0.06)


def discarded(channels: dict[str, tuple[float, ...]], samples: int = 20) -> Any:
    """Of samples of 0.05 s, end to end from 0 s on, with a reading of each channel every 0.1 s."""
    count = max([0, *map(len, channels.values())])
    measured = Measurement(
        case_id=CASE.case_id,
        process=0,
        outcome=Outcome.OK,
        samples_s=(0.05,) * samples,
        host_samples_s=(0.05,) * samples,
        samples_at_s=tuple(0.05 * i for i in range(samples)),
    )
    telemetry = Telemetry(t_s=tuple(i * 0.1 for i in range(count)), channels=channels)
    sampling = Phase(name="sampling", start_s=0.0, end_s=0.05 * samples)
    return recorded.unfit(measured, telemetry, [sampling])


@pytest.mark.parametrize(("lost", "counts"), [(0, True), (1, True), (2, False), (4, False)])
def test_a_process_that_took_few_samples_may_lose_one_of_four(lost: int, counts: bool) -> None:
    (m,) = timed(CASE, 0.05, processes=1)
    discarded = {"clock_dropped": tuple(range(lost))} if lost else {}

    found = replace(m, samples_s=m.samples_s[:4], discarded=discarded)

    assert found.is_evidence(5) is counts


@pytest.mark.parametrize(("count", "processes"), [(15, 3), (16, 2)])
def test_a_process_that_kept_too_few_samples_does_not_count(count: int, processes: int) -> None:
    """In process 1 the discarded samples took ten times as long."""
    first, second, third = timed(CASE, 0.05)
    slow = [s * 10 if i < count else s for i, s in enumerate(second.samples_s)]
    discarded = {"throttled": tuple(range(count))}
    second = replace(second, samples_s=tuple(slow), discarded=discarded)
    judged = replace(CASE, settings=MeasureSettings(min_samples=5))

    (summary,) = summarise(run([judged], lambda _: [first, second, third]))

    assert summary.outcome is Outcome.OK
    assert summary.metrics["step_s"].n == processes
    assert summary.metrics["step_s"].value == pytest.approx(0.05, rel=0.01)
    (note,) = summary.notes
    assert f"process 1: {count} of 20 samples discarded ({count} throttled)" in note_text(note)


def test_a_case_without_evidence_is_an_invalid_environment() -> None:
    bad = [replace(m, discarded={"shared": tuple(range(20))}) for m in timed(CASE, 0.05)]
    made = run([CASE], lambda _: bad, rules=[Rule(name="floor", metric="step_s", go=1.0)])

    (one,), verdict = (of := Study(made)).summaries, of.verdict

    assert (one.outcome, one.metrics) == (Outcome.INVALID_ENVIRONMENT, {})
    assert "process 2: 20 of 20 samples discarded (20 shared)" in why_ended(one)
    assert verdict.decision is Decision.INCONCLUSIVE


def test_a_failed_self_test_makes_every_case_an_invalid_environment() -> None:
    wrong = SelfTestCheck(name="spin_kernel", holds=False, fact="1,000 MHz, NVML read 1,980 MHz")

    proof = replace(SELF_TEST, checks=(wrong,))
    (summary,) = summarise(run([CASE], lambda _: [], self_tests=(proof,), ended_at=""))

    assert summary.outcome is Outcome.INVALID_ENVIRONMENT
    assert "spin_kernel: 1,000 MHz" in why_ended(summary)


# --- cycles and roofline -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds", "by"),
    [
        ({"flops": int(8e12), "bytes_moved": int(4e9)}, 0.01, "compute"),
        ({"flops": int(8e12), "bytes_moved": int(8e10)}, 0.02, "bandwidth"),
        ({"flops": int(8e9), "launches": 1000}, 2e-3, "launches"),
        ({"flops": int(8e12), "precision": "fp64", "bytes_moved": int(4e9)}, 1e-3, "bandwidth"),
    ],
)
def test_the_roofline_bound_is_the_largest_of_its_terms(
    given: dict[str, Any], seconds: float, by: str
) -> None:
    known = {"flops": None, "bytes_moved": None, "launches": None, "precision": "bf16", **given}

    found = bound(PEAKS, **known)

    assert found is not None
    assert found.seconds == pytest.approx(seconds)
    assert found.by == by
    assert bound(Peaks(), **known) is None


@pytest.mark.parametrize(
    ("share", "moved", "flush", "why"),
    [
        (1.01, None, False, None),
        (1.04, None, False, "(compute: 104 %): the work"),
        (1.04, 2**40, True, "(bandwidth: 104 %): the work"),
        (1.3, 2**40, False, "(bandwidth: 130 %): the step read part of its data from the cache"),
    ],
)
def test_a_step_faster_than_the_roofline_gets_a_note(
    share: float, moved: int | None, flush: bool, why: str | None
) -> None:
    one = replace(CASE, settings=replace(CASE.settings, flush_l2=flush))
    step_s = (moved / 4e12 if moved else LEAST_S) / share
    found = at_speed(one, step_s, moved)

    assert found.outcome is Outcome.OK
    assert len(found.notes) == bool(why)
    assert all(why and why in note_text(note) for note in found.notes)


def at_speed(case: Case, step_s: float, moved: int | None) -> CaseSummary:
    """One case that moves so many bytes in a step."""
    measured = [replace(m, bytes=moved) for m in timed(case, step_s, cv=1e-4)]
    return summarise(run([case], lambda _: measured, self_tests=(SELF_TEST,)))[0]


@pytest.mark.parametrize("moved", [None, 2**40])
def test_a_step_far_faster_than_a_cold_cache_allows_has_no_speed(moved: int | None) -> None:
    one = replace(CASE, settings=replace(CASE.settings, flush_l2=True))

    found = at_speed(one, (moved / 4e12 if moved else LEAST_S) / 1.06, moved)

    assert found.outcome is Outcome.IMPOSSIBLE
    assert "106 %): the work that the workload states" in why_ended(found)
    assert not found.metrics
    assert found.notes == ()
    wrong = [replace(m, bytes=moved) for m in timed(one, 1e-6, cv=1e-4)]
    wrong[1] = replace(wrong[1], outcome=Outcome.INCORRECT, samples_s=())
    (mixed,) = summarise(run([one], lambda _: wrong, self_tests=(SELF_TEST,)))
    assert mixed.outcome is Outcome.INCORRECT, "it hides no failure"


# --- time and energy ---------------------------------------------------------------------


@pytest.mark.parametrize(("sampled_s", "lost", "known"), [(2.5, 0, 1), (1.5, 0, 0), (2.5, 1e4, 0)])
def test_energy_is_the_mean_power_of_two_seconds_of_sampling(
    sampled_s: float, lost: float, known: int
) -> None:
    times_s = [x / 10 for x in range(60)]  # 90 W, then 600 W while sampling from 2 s on
    energy_j = [90 * min(t, 2.0) + 600 * max(0.0, t - 2.0) - lost * (t > 4) for t in times_s]
    channels = {"gpu_energy_j": (*energy_j[:30], None, *energy_j[31:])}
    read = Telemetry(t_s=(*times_s,), channels=channels)
    phases = (Phase(name="sampling", start_s=2.0, end_s=2.0 + sampled_s),)
    made = timed(CASE, 0.05, cv=1e-6, tokens=100, phases=phases)
    (found,) = summarise(run([CASE], lambda _: [replace(m, telemetry=read) for m in made]))

    energy = [found.metrics[n].value for n in ("energy_j", "energy_per_token_j") if known]
    assert energy == pytest.approx([600 * 0.05, 0.3][: 2 * known], rel=0.02)
    assert ("energy_j" in found.metrics) == known


# --- counters ----------------------------------------------------------------------------

OK = Measurement(case_id="a", process=0, outcome=Outcome.OK, samples_s=(1.0,))


def counted(process: int = 0, **changes: object) -> Measurement:
    known = {"dispatched_ops": 12, "host_syncs": 0, "steps": 2}
    values = Counters(**{**known, **changes})  # type: ignore[arg-type]
    return replace(OK, process=process, counters=values)


def test_an_exact_count_is_an_interval_of_width_zero() -> None:
    found = recorded.estimates([counted(unknown={"kernel_launches": "no GPU"})])

    known = {name: (e.low, e.value, e.high) for name, e in found.items()}
    assert known == {"dispatched_ops": (12, 12, 12), "host_syncs": (0, 0, 0)}


@pytest.mark.parametrize("second", [{"dispatched_ops": 13}, {"steps": 1}])
def test_a_count_that_is_not_exact_is_absent_with_a_reason(second: dict[str, object]) -> None:
    ok = [counted(), counted(1, **second)]

    assert "dispatched_ops" not in recorded.estimates(ok)
    assert recorded.exact_counters(ok).absent["dispatched_ops"]


def test_processes_that_count_differently_are_noted() -> None:
    (note,) = recorded.disagreements([counted(), counted(1, dispatched_ops=1300)])

    assert "12 to 1,300" in note_text(note)


def test_a_count_that_varies_is_its_range_over_all_steps() -> None:
    steps = {"dispatched_ops": (12, 30, 18)}
    one = counted(series=steps, steps=3)
    uses = [Use(name=name, calls=calls, time_s=1.0) for name, calls in (("add", 2.5), ("mm", 2.0))]
    ok = [replace(one, profile=Profile(operators=tuple(uses))), counted(1)]

    found = recorded.estimates(ok)["dispatched_ops"]
    (note,) = recorded.disagreements(ok)

    assert (found.low, found.value, found.high, found.samples) == (12, 12, 30, 5)
    assert "12 to 30 in 5 steps (12, 30, 18, 12, 12)" in note_text(note)
    assert note_text(note).endswith("alike: add")
    assert units.value("dispatched_ops", found) == "12 (12 to 30 in 5 steps)"
