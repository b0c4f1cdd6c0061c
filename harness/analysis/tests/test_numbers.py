"""Discards, cycles, the roofline, spread, targets, the use of time, the cost of sampling."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from harness.analysis import discards, overhead, roofline
from harness.analysis import verdict as gate
from harness.analysis.expectation import stated_peak
from harness.analysis.roofline import bound
from harness.analysis.summary import spreads, summarise, why_absent
from harness.records import (
    CaseSummary,
    Decision,
    Expectation,
    Match,
    Measurement,
    MeasureSettings,
    Outcome,
    Peaks,
    Phase,
    Rule,
    SelfTest,
    SelfTestCheck,
    Telemetry,
    Work,
)
from harness.tests.fake_runs import FLOPS_PER_TOKEN, case, run, timed

CASE = case({"seq_len": 512})
PEAKS = Peaks(flops_per_s={"bf16": 8e14}, bytes_per_s=4e12, launch_s=2e-6)
PROOF = SelfTest(at="2026-11-21T07:30:13+00:00", device="GPU-5d1e0f4c", peaks=PEAKS)


def telemetry_of(channel: str, readings: Sequence[float | None], every_s: float = 0.1) -> Telemetry:
    return Telemetry(
        t_s=tuple(i * every_s for i in range(len(readings))),
        channels={channel: tuple(readings)},
    )


def sampled(telemetry: Telemetry, *, count: int = 20, each_s: float = 0.05) -> Measurement:
    """Samples end to end from 0 s on."""
    return Measurement(
        case_id=CASE.case_id,
        process=0,
        outcome=Outcome.OK,
        samples_s=(each_s,) * count,
        host_samples_s=(each_s,) * count,
        samples_at_s=tuple(each_s * i for i in range(count)),
        phases=(Phase(name="sampling", start_s=0.0, end_s=each_s * count),),
        telemetry=telemetry,
    )


def discarded(m: Measurement) -> Mapping[str, tuple[int, ...]]:
    return discards.unfit(m, m.telemetry, m.phases)


# --- discards ----------------------------------------------------------------------------


def test_only_samples_around_a_throttled_reading_are_discarded() -> None:
    """The reading at 0.5 s covers the time from the one at 0.4 s to the one at 0.6 s."""
    masks = [0x0, 0x4, 0x1, 0x0, 0x4, 0x40, 0x0, 0x0, 0x4, 0x0, 0x0]

    found = discarded(sampled(telemetry_of("gpu_throttle_reasons", masks)))

    assert found == {"throttled": (8, 9, 10, 11)}


def test_samples_up_to_a_second_before_another_process_was_seen_are_discarded() -> None:
    counts = [0.0] * 25 + [1.0] + [0.0] * 15

    shared = discarded(sampled(telemetry_of("gpu_foreign_processes", counts), count=80))["shared"]

    assert shared == tuple(range(shared[0], shared[-1] + 1))
    assert shared[0] * 0.05 == pytest.approx(2.5 - 1.0, abs=0.06)
    assert shared[-1] * 0.05 == pytest.approx(2.6, abs=0.06)


def test_a_dropped_clock_is_relative_to_the_median_of_the_process() -> None:
    clocks = [1.98e9] * 8 + [1.2e9] + [1.9e9] * 2

    found = discarded(sampled(telemetry_of("gpu_sm_clock_hz", clocks)))

    assert found == {"clock_dropped": (14, 15, 16, 17)}


def test_a_sample_is_discarded_for_the_first_of_its_reasons() -> None:
    telemetry = Telemetry(
        t_s=(0.0, 0.5, 1.0),
        channels={
            "gpu_throttle_reasons": (0.0, 0x8, 0.0),
            "gpu_sm_clock_hz": (2e9, 1e9, 2e9),
        },
    )

    assert discarded(sampled(telemetry)) == {"throttled": tuple(range(20))}


@pytest.mark.parametrize(
    "telemetry",
    [
        telemetry_of("gpu_throttle_reasons", [None] * 11),
        Telemetry(unavailable={"gpu_throttle_reasons": "no NVML"}),
        telemetry_of("gpu_throttle_reasons", [0x4] * 11),
    ],
    ids=["failed", "unavailable", "power-cap"],
)
def test_failed_readings_and_the_power_cap_discard_nothing(telemetry: Telemetry) -> None:
    assert discarded(sampled(telemetry)) == {}


def with_discards(indices: Sequence[int], *, min_samples: int) -> tuple[CaseSummary, Any]:
    """A case of three processes; in process 1 the discarded samples took ten times as long."""
    measured = timed(CASE, 0.05)
    slow = [s * 10 if i in indices else s for i, s in enumerate(measured[1].samples_s)]
    measured[1] = replace(
        measured[1], samples_s=tuple(slow), discarded={"throttled": tuple(indices)}
    )
    judged = replace(CASE, settings=MeasureSettings(min_samples=min_samples))
    made = run([judged], lambda _: measured)
    return summarise(made)[0], made


def test_estimates_use_the_kept_samples_only() -> None:
    clean = summarise(run([CASE], lambda _: timed(CASE, 0.05)))[0]

    summary, made = with_discards(range(12), min_samples=5)

    assert summary.metrics["step_s"].value == pytest.approx(clean.metrics["step_s"].value, rel=0.01)
    assert summary.metrics["step_s"].samples == 48
    assert "process 1: 12 of 20 samples discarded (12 throttled)" in summary.notes
    assert spreads(made)[0].discarded == 12


def test_a_process_that_kept_too_few_samples_does_not_count() -> None:
    summary, made = with_discards(range(16), min_samples=5)

    assert summary.outcome is Outcome.OK
    assert summary.metrics["step_s"].processes == 2
    assert len(summary.notes) == 1
    assert spreads(made)[0].processes == 2


def test_a_case_without_evidence_is_an_invalid_environment() -> None:
    bad = [replace(m, discarded={"shared": tuple(range(20))}) for m in timed(CASE, 0.05)]
    made = run([CASE], lambda _: bad, rules=[Rule(name="floor", metric="step_s", go=1.0)])

    summaries = summarise(made)
    verdict = gate.judge(made.suite, made.environment, summaries, ())

    assert summaries[0].outcome is Outcome.INVALID_ENVIRONMENT
    assert "process 2: 20 of 20 samples discarded (20 shared)" in summaries[0].detail
    assert summaries[0].metrics == {}
    assert verdict.decision is Decision.INCONCLUSIVE


# --- cycles and roofline -----------------------------------------------------------------


def test_cycles_are_step_time_times_the_clock_while_sampling() -> None:
    """The telemetry of a fake run is a tenth of its level before the timed phases."""
    made = run([CASE], lambda _: timed(CASE, 0.05, telemetry={"gpu_sm_clock_hz": 1.5e9}))

    metrics = summarise(made)[0].metrics

    assert metrics["step_cycles"].value == pytest.approx(metrics["step_s"].value * 1.5e9, rel=0.05)


@pytest.mark.parametrize(
    ("metric", "why"), [("step_cycles", "SM clock"), ("roofline_share", "no peak was measured")]
)
def test_without_a_clock_or_measured_peaks_a_metric_is_absent(metric: str, why: str) -> None:
    made = run([CASE], lambda _: timed(CASE, 0.05))
    summary = summarise(made)[0]

    assert metric not in summary.metrics
    assert why in why_absent(summary, made.measurements, made.environment, metric)


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
    known = {"flops": None, "bytes_moved": None, "launches": None, "precision": "bf16"}

    found = bound(PEAKS, **{**known, **given})

    assert found is not None
    assert found.seconds == pytest.approx(seconds)
    assert found.by == by


def test_without_a_known_term_there_is_no_bound() -> None:
    assert bound(PEAKS, flops=10, bytes_moved=None, launches=None, precision="fp64") is None
    assert bound(Peaks(), flops=10, bytes_moved=10, launches=5, precision="bf16") is None


def test_a_summary_has_the_bound_and_the_share_of_the_roofline() -> None:
    made = run([CASE], lambda _: timed(CASE, 1e-3), self_tests=(PROOF,))

    summary = summarise(made)[0]

    least = 512 * FLOPS_PER_TOKEN / 8e14
    assert summary.roofline_s == pytest.approx(least)
    assert summary.roofline_by == "compute"
    assert summary.metrics["roofline_share"].value == pytest.approx(
        least / summary.metrics["step_s"].value
    )


@pytest.mark.parametrize(("share", "notes"), [(1.01, 0), (1.05, 1)])
def test_a_step_faster_than_the_roofline_gets_a_note(share: float, notes: int) -> None:
    least = 512 * FLOPS_PER_TOKEN / 8e14
    made = run([CASE], lambda _: timed(CASE, least / share, cv=1e-4), self_tests=(PROOF,))

    assert len(summarise(made)[0].notes) == notes


# --- spread ------------------------------------------------------------------------------


def test_spreads_find_the_planted_scatter() -> None:
    """Twelve processes 1 % apart; the samples of each spread log-normally by 1 %."""
    made = run([CASE], lambda _: timed(CASE, 0.05, processes=12, cv=0.01))

    (found,) = spreads(made)

    assert (found.processes, found.samples, found.unsteady) == (12, 240, 0)
    assert found.between == pytest.approx(0.01, rel=0.5)
    assert found.within == pytest.approx(0.0135, rel=0.3)  # quartiles of a normal: 1.35 sigma
    assert found.widest >= found.within
    (alone,) = spreads(run([CASE], lambda _: timed(CASE, 0.05, processes=1)))
    assert alone.between is None


# --- targets -----------------------------------------------------------------------------


def asked(*, rules: Sequence[Rule] = (), expectations: Sequence[Expectation] = ()) -> Any:
    made = run([CASE], lambda _: [], rules=rules, expectations=expectations)
    work = {CASE.case_id: Work(tokens=512, flops=512 * FLOPS_PER_TOKEN)}
    return roofline.modest(made.suite, made.environment, work)


def test_a_target_far_below_the_peak_is_found() -> None:
    """785 tokens/s of a model of 0.47 GFLOP a token is 0.12 % of an A100."""
    (target,) = asked(
        expectations=[Expectation(metric="tokens_per_s", low=785, gpu="A100", source="the runbook")]
    )

    assert target.mfu == pytest.approx(785 * FLOPS_PER_TOKEN / 312e12)
    assert (target.tokens_per_s, target.peak.gpu) == (785, "A100")
    assert stated_peak("*", "bf16") is None


@pytest.mark.parametrize("gpu", ["*", "H200"])
def test_a_rule_is_compared_with_the_card_of_the_run(gpu: str) -> None:
    """`H200` matches the SXM and the NVL module; the run knows which one it has."""
    (target,) = asked(rules=[Rule(name="floor", metric="tokens_per_s", go=500, gpu=gpu)])

    assert (target.tokens_per_s, target.peak.gpu) == (500, "H200 SXM")


@pytest.mark.parametrize(
    "rule",
    [
        Rule(name="enough", metric="tokens_per_s", go=400_000),
        Rule(name="other metric", metric="step_s", go=100),
        Rule(name="no case", metric="tokens_per_s", go=1, match=Match(criteria={"gc": ("x",)})),
        Rule(name="unknown card", metric="tokens_per_s", go=1, gpu="B300"),
    ],
    ids=lambda rule: rule.name,
)
def test_other_targets_are_not_suspicious(rule: Rule) -> None:
    assert asked(rules=[rule]) == ()


# --- time --------------------------------------------------------------------------------


def test_the_use_of_time_adds_up() -> None:
    """Each fake process: 6.7 s start, 1.2 s setup, 0.9 s accuracy, 8 s warm-up, 2 s of samples."""
    made = run([CASE], lambda _: timed(CASE, 0.05), wall_s=100.0)

    used = overhead.time_use(made)

    assert used is not None
    assert used.work_s == pytest.approx(3 * 10.9, rel=0.01)
    assert used.sampling_s == pytest.approx(3 * 2.0, rel=0.01)
    assert used.work_share == pytest.approx(0.327, rel=0.01)
    assert used.overhead_s == pytest.approx(6.7 + 1.2 + 0.4, rel=0.01)


def test_without_wall_time_and_phases_only_the_lifetimes_are_known() -> None:
    """As in a run imported from pytest-benchmark."""
    made = run([CASE], lambda _: timed(CASE, 0.05, processes=1, phases=(), wall_s=0.179))

    used = overhead.time_use(made)

    assert used is not None
    assert (used.whole, used.wall_s, used.lives_s) == (False, 0.179, 0.179)
    assert (used.work_s, used.sampling_s, used.work_share, used.overhead_s) == (None,) * 4
    assert overhead.time_use(run([CASE], lambda _: [])) is None


# --- the cost of sampling ----------------------------------------------------------------


def compared(cost: float, *, processes: int = 24, cv: float = 0.001) -> overhead.Overhead | None:
    suite = overhead.arranged(run([CASE], lambda _: []).suite, processes=processes)
    with_it, without = suite.cases

    def measure(c: Any) -> list[Measurement]:
        step = 0.05 * (1 + cost) if c is with_it else 0.05
        return timed(c, step, processes=processes, cv=cv)

    assert (with_it.settings.telemetry, without.settings.telemetry) == (True, False)
    assert (with_it.axes, with_it.factory) == (CASE.axes, CASE.factory)
    return overhead.overhead(run(suite.cases, measure))


@pytest.mark.parametrize(
    ("cost", "cv", "within_limit"),
    [
        pytest.param(0.0, 0.001, True, id="free"),
        pytest.param(0.03, 0.001, False, id="expensive"),
        pytest.param(0.0, 0.05, None, id="noisy"),
    ],
)
def test_the_planted_cost_of_sampling_is_found(
    cost: float, cv: float, within_limit: bool | None
) -> None:
    found = compared(cost, cv=cv)

    assert found is not None
    assert found.ratio == pytest.approx(1 + cost, abs=0.003 + cv / 2)
    assert found.shown is within_limit


def test_one_pair_decides_nothing() -> None:
    found = compared(0.0, processes=1)

    assert found is not None
    assert (found.pairs, found.shown) == (1, None)
    assert overhead.overhead(run([CASE], lambda _: [])) is None


def test_a_failed_self_test_makes_every_case_an_invalid_environment() -> None:
    wrong = SelfTestCheck(name="spin_kernel", holds=False, fact="1,000 MHz, NVML read 1,980 MHz")
    made = run([CASE], lambda _: [], self_tests=(replace(PROOF, checks=(wrong,)),), ended_at="")

    (summary,) = summarise(made)

    assert summary.outcome is Outcome.INVALID_ENVIRONMENT
    assert "spin_kernel: 1,000 MHz" in summary.detail


def test_kept_samples_are_those_without_a_reason_to_discard() -> None:
    m = replace(
        sampled(Telemetry(), count=5),
        samples_s=(1.0, 2.0, 3.0, 4.0, 5.0),
        discarded={"throttled": (0,), "shared": (3, 4)},
    )

    assert m.kept_s == (2.0, 3.0)
    assert m.is_evidence(2)
    assert not m.is_evidence(3)
