"""What stands beside a number: discards, cycles, floor, spread, targets, the use of time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.analysis import discards, overhead, roofline
from harness.analysis import verdict as gate
from harness.analysis.expectation import stated_peak
from harness.analysis.roofline import floor
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
    Proof,
    ProofCheck,
    Rule,
    Telemetry,
    Work,
)
from harness.report import steadiness, tables, text
from harness.tests.fake_runs import FLOPS_PER_TOKEN, case, environment, run, timed

CASE = case({"seq_len": 512})
PEAKS = Peaks(flops_per_s={"bf16": 8e14}, bytes_per_s=4e12, launch_s=2e-6)
PROOF = Proof(at="2026-11-21T07:30:13+00:00", device="GPU-5d1e0f4c", peaks=PEAKS)


def telling(channel: str, readings: Sequence[float | None], every_s: float = 0.1) -> Telemetry:
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


def found_in(m: Measurement) -> Mapping[str, tuple[int, ...]]:
    return discards.unfit(m, m.telemetry, m.phases)


# --- discards ----------------------------------------------------------------------------


def test_samples_around_a_throttled_reading_are_discarded_and_no_others() -> None:
    """The reading at 0.5 s speaks of all since the one at 0.4 s and until the one at 0.6 s."""
    masks = [0x0, 0x4, 0x1, 0x0, 0x4, 0x40, 0x0, 0x0, 0x4, 0x0, 0x0]

    found = found_in(sampled(telling("gpu_throttle_reasons", masks)))

    assert found == {"throttled": (8, 9, 10, 11)}


def test_another_process_is_counted_once_a_second_and_may_have_come_a_second_before() -> None:
    counts = [0.0] * 25 + [1.0] + [0.0] * 15

    shared = found_in(sampled(telling("gpu_foreign_processes", counts), count=80))["shared"]

    assert shared == tuple(range(shared[0], shared[-1] + 1))
    assert shared[0] * 0.05 == pytest.approx(2.5 - 1.0, abs=0.06)
    assert shared[-1] * 0.05 == pytest.approx(2.6, abs=0.06)


def test_a_dropped_clock_is_judged_by_the_process_s_own_median() -> None:
    clocks = [1.98e9] * 8 + [1.2e9] + [1.9e9] * 2

    found = found_in(sampled(telling("gpu_sm_clock_hz", clocks)))

    assert found == {"clock_dropped": (14, 15, 16, 17)}


def test_a_sample_is_discarded_for_one_reason_only() -> None:
    telemetry = Telemetry(
        t_s=(0.0, 0.5, 1.0),
        channels={
            "gpu_throttle_reasons": (0.0, 0x8, 0.0),
            "gpu_sm_clock_hz": (2e9, 1e9, 2e9),
        },
    )

    assert found_in(sampled(telemetry)) == {"throttled": tuple(range(20))}


@pytest.mark.parametrize(
    "telemetry",
    [
        telling("gpu_throttle_reasons", [None] * 11),
        Telemetry(unavailable={"gpu_throttle_reasons": "no NVML"}),
        telling("gpu_throttle_reasons", [0x4] * 11),
    ],
    ids=["failed", "unavailable", "power-cap"],
)
def test_what_was_not_read_and_the_power_cap_discard_nothing(telemetry: Telemetry) -> None:
    assert found_in(sampled(telemetry)) == {}


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


def test_an_estimate_rests_on_the_samples_that_are_left() -> None:
    clean = summarise(run([CASE], lambda _: timed(CASE, 0.05)))[0]

    summary, made = with_discards(range(12), min_samples=5)

    assert summary.metrics["step_s"].value == pytest.approx(clean.metrics["step_s"].value, rel=0.01)
    assert summary.metrics["step_s"].samples == 48
    assert "process 1: 12 of 20 samples discarded (12 throttled)" in summary.notes
    assert len(made.measurements[1].samples_s) == 20, "raw samples are kept"
    assert spreads(made)[0].discarded == 12


def test_a_process_with_too_few_samples_left_is_not_evidence() -> None:
    summary, made = with_discards(range(16), min_samples=5)

    assert summary.outcome is Outcome.OK
    assert summary.metrics["step_s"].processes == 2
    assert any("it is not evidence, and is left out" in note for note in summary.notes)
    assert spreads(made)[0].processes == 2


def test_a_case_without_evidence_is_an_invalid_environment_and_never_a_pass() -> None:
    bad = [replace(m, discarded={"shared": tuple(range(20))}) for m in timed(CASE, 0.05)]
    made = run([CASE], lambda _: bad, rules=[Rule(name="floor", metric="step_s", go=1.0)])

    summaries = summarise(made)
    verdict = gate.judge(made.suite, made.environment, summaries, ())

    assert summaries[0].outcome is Outcome.INVALID_ENVIRONMENT
    assert "process 2: 20 of 20 samples discarded (20 shared)" in summaries[0].detail
    assert summaries[0].metrics == {}
    assert verdict.decision is Decision.INCONCLUSIVE


# --- cycles and floor --------------------------------------------------------------------


def test_cycles_are_time_by_the_clock_measured_while_sampling() -> None:
    """The telemetry of a fake run is a tenth of its level before the timed phases."""
    made = run([CASE], lambda _: timed(CASE, 0.05, telemetry={"gpu_sm_clock_hz": 1.5e9}))

    metrics = summarise(made)[0].metrics

    assert metrics["step_cycles"].value == pytest.approx(metrics["step_s"].value * 1.5e9, rel=0.05)


def test_without_a_clock_there_are_no_cycles_and_it_says_why() -> None:
    made = run([CASE], lambda _: timed(CASE, 0.05))
    summary = summarise(made)[0]

    assert "step_cycles" not in summary.metrics
    said = why_absent(summary, made.measurements, made.environment, "step_cycles")
    assert said == "the SM clock was not read while sampling"


@pytest.mark.parametrize(
    ("given", "seconds", "by"),
    [
        ({"flops": int(8e12), "bytes_moved": int(4e9)}, 0.01, "compute"),
        ({"flops": int(8e12), "bytes_moved": int(8e10)}, 0.02, "bandwidth"),
        ({"flops": int(8e9), "launches": 1000}, 2e-3, "launches"),
        ({"flops": int(8e12), "precision": "fp64", "bytes_moved": int(4e9)}, 1e-3, "bandwidth"),
    ],
)
def test_the_floor_is_the_largest_of_its_terms(
    given: dict[str, Any], seconds: float, by: str
) -> None:
    known = {"flops": None, "bytes_moved": None, "launches": None, "precision": "bf16"}

    found = floor(PEAKS, **{**known, **given})

    assert found is not None
    assert found.seconds == pytest.approx(seconds)
    assert found.by == by


def test_nothing_known_is_no_floor() -> None:
    assert floor(PEAKS, flops=10, bytes_moved=None, launches=None, precision="fp64") is None
    assert floor(Peaks(), flops=10, bytes_moved=10, launches=5, precision="bf16") is None


def test_the_share_of_the_floor_stands_beside_the_time() -> None:
    made = run([CASE], lambda _: timed(CASE, 1e-3), proofs=(PROOF,))

    summary = summarise(made)[0]

    least = 512 * FLOPS_PER_TOKEN / 8e14
    assert summary.floor_s == pytest.approx(least)
    assert summary.floor_by == "compute"
    assert summary.metrics["floor_share"].value == pytest.approx(
        least / summary.metrics["step_s"].value
    )


@pytest.mark.parametrize(("share", "impossible"), [(1.01, False), (1.05, True)])
def test_a_step_under_its_floor_is_said_to_be_impossible(share: float, impossible: bool) -> None:
    """Seen on an H200: a read took 100.5 % of the time of a copy of as many bytes."""
    least = 512 * FLOPS_PER_TOKEN / 8e14
    made = run([CASE], lambda _: timed(CASE, least / share, cv=1e-4), proofs=(PROOF,))

    notes = "; ".join(summarise(made)[0].notes)

    assert ("faster than its floor (compute) allows, 105% of it" in notes) == impossible


def test_a_run_without_a_proof_has_no_floor() -> None:
    made = run([CASE], lambda _: timed(CASE, 1e-3))
    summary = summarise(made)[0]

    assert "floor_share" not in summary.metrics
    said = why_absent(summary, made.measurements, made.environment, "floor_share")
    assert said == "no peak was measured for bf16 in this run"


# --- spread ------------------------------------------------------------------------------


def test_the_planted_spreads_are_found() -> None:
    """Twelve processes 1 % apart; the samples of each spread log-normally by 1 %."""
    made = run([CASE], lambda _: timed(CASE, 0.05, processes=12, cv=0.01))

    (found,) = spreads(made)

    assert (found.processes, found.samples, found.unsteady) == (12, 240, 0)
    assert found.between == pytest.approx(0.01, rel=0.5)
    assert found.within == pytest.approx(0.0135, rel=0.3)  # quartiles of a normal: 1.35 sigma
    assert found.widest >= found.within


def test_one_process_has_no_spread_between() -> None:
    (found,) = spreads(run([CASE], lambda _: timed(CASE, 0.05, processes=1)))

    assert found.between is None


def test_every_case_with_a_number_has_a_row_of_spread() -> None:
    made = run([CASE], lambda _: timed(CASE, 0.05, steady=False), proofs=(PROOF,))

    found = steadiness.table(spreads(made), summarise(made))

    assert found is not None
    (row,) = found.rows
    assert row[0] == f"`{CASE.case_id}`"
    assert "not in 3 of 3" in row
    assert row[-1].endswith("(compute)")


# --- targets -----------------------------------------------------------------------------


def asked(*, rules: Sequence[Rule] = (), expectations: Sequence[Expectation] = ()) -> Any:
    made = run([CASE], lambda _: [], rules=rules, expectations=expectations)
    work = {CASE.case_id: Work(tokens=512, flops=512 * FLOPS_PER_TOKEN)}
    return roofline.modest(made.suite, made.environment, work)


def test_a_target_that_asks_little_of_its_card_is_known() -> None:
    """785 tokens/s of a model of 0.47 GFLOP a token is 0.12 % of an A100."""
    (target,) = asked(
        expectations=[Expectation(metric="tokens_per_s", low=785, gpu="A100", source="the runbook")]
    )

    assert target.mfu == pytest.approx(785 * FLOPS_PER_TOKEN / 312e12)
    said = text.target_text(target)
    assert "the expectation of “the runbook” asks for 785 tokens/s" in said
    assert "0.118 % MFU on A100, 850x below" in said
    assert stated_peak("*", "bf16") is None


def test_a_rule_is_held_against_the_card_at_hand() -> None:
    """`H200` fits the SXM and the NVL module; the run knows which one it has."""
    for gpu in ("*", "H200"):
        rule = Rule(name="floor", metric="tokens_per_s", go=500, abort=100, gpu=gpu)

        (target,) = asked(rules=[rule])

        assert (target.stated_by, target.tokens_per_s) == ("the rule “floor”", 500)
        assert (target.peak.gpu, target.peak.flops_per_s) == ("H200 SXM", 989e12)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(name="enough", metric="tokens_per_s", go=400_000),
        Rule(name="other metric", metric="step_s", go=100),
        Rule(name="no case", metric="tokens_per_s", go=1, match=Match(criteria={"gc": ("x",)})),
        Rule(name="no sheet", metric="tokens_per_s", go=1, gpu="B300"),
    ],
    ids=lambda rule: rule.name,
)
def test_no_other_target_draws_a_warning(rule: Rule) -> None:
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
    assert "32.7 % work" in text.time_use_sentence(used)


def test_without_a_wall_time_the_lives_of_the_processes_stand_for_it() -> None:
    used = overhead.time_use(run([CASE], lambda _: timed(CASE, 0.05)))

    assert used is not None
    assert not used.whole
    assert used.wall_s == used.lives_s
    assert " in processes:" in text.time_use_sentence(used)
    assert overhead.time_use(run([CASE], lambda _: [])) is None


def test_where_the_time_of_processes_that_told_no_phase_went_is_unknown() -> None:
    """As of a run that was imported from pytest-benchmark."""
    made = run([CASE], lambda _: timed(CASE, 0.05, processes=1, phases=(), wall_s=0.179))

    used = overhead.time_use(made)

    assert used is not None
    assert (used.work_s, used.sampling_s, used.work_share, used.overhead_s) == (None,) * 4
    assert text.time_use_sentence(used) == "179 ms in processes; phases unknown"
    assert tables.timeline(made).rows == (("unknown phases", "179 ms", "100 %"),)


# --- what sampling costs -----------------------------------------------------------------


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
    ("cost", "cv", "shown", "said"),
    [
        pytest.param(0.0, 0.001, True, "within the limit of 0.5 %", id="free"),
        pytest.param(0.03, 0.001, False, "above the limit of 0.5 %", id="dear"),
        pytest.param(0.0, 0.05, None, "measure more pairs", id="noisy"),
    ],
)
def test_a_planted_cost_of_sampling_is_found(
    cost: float, cv: float, shown: bool | None, said: str
) -> None:
    found = compared(cost, cv=cv)

    assert found is not None
    assert found.ratio == pytest.approx(1 + cost, abs=0.003 + cv / 2)
    assert found.shown is shown
    assert said in text.overhead_sentence(found, overhead.LIMIT)


def test_one_pair_shows_nothing_and_none_is_none() -> None:
    found = compared(0.0, processes=1)

    assert found is not None
    assert (found.pairs, found.shown) == (1, None)
    assert overhead.overhead(run([CASE], lambda _: [])) is None


# --- an instrument that failed -----------------------------------------------------------


def test_a_refuted_instrument_makes_every_case_an_invalid_environment() -> None:
    wrong = ProofCheck(name="spin_kernel", holds=False, fact="1,000 MHz, NVML read 1,980 MHz")
    made = run([CASE], lambda _: [], proofs=(replace(PROOF, checks=(wrong,)),), ended_at="")

    summaries = summarise(made)
    verdict = gate.judge(made.suite, made.environment, summaries, ())

    assert summaries[0].outcome is Outcome.INVALID_ENVIRONMENT
    assert "spin_kernel: 1,000 MHz" in summaries[0].detail
    assert verdict.decision.exit_status == 3
    assert steadiness.self_test_sentence(made).startswith("Failed")


def test_the_report_says_what_was_measured_and_what_was_not_asked() -> None:
    proved = steadiness.self_test_sentence(run([CASE], lambda _: [], proofs=(PROOF,)))
    skipped = steadiness.self_test_sentence(
        run([CASE], lambda _: [], proofs=(Proof(at="", device="cpu", skipped="--no-proof"),))
    )
    older = steadiness.self_test_sentence(run([CASE], lambda _: [], env=environment()))

    assert "800,000 GFLOP/s bf16, 4,000 GB/s, 2 µs a launch" in proved.replace("2.00", "2")
    assert "GPU-5d1e0f4c" in proved
    assert "Skipped (--no-proof)" in skipped
    assert older.startswith("Not recorded")


def test_kept_samples_are_those_of_no_reason() -> None:
    m = replace(
        sampled(Telemetry(), count=5),
        samples_s=(1.0, 2.0, 3.0, 4.0, 5.0),
        discarded={"throttled": (0,), "shared": (3, 4)},
    )

    assert m.kept_s == (2.0, 3.0)
    assert m.is_evidence(2)
    assert not m.is_evidence(3)
    assert np.isclose(sum(m.samples_s), 15.0)
