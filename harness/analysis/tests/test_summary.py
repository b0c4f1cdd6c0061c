"""Summaries of runs with a planted speed or weakness, and the statistics under them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.analysis import statistics
from harness.analysis.summary import summarise, why_absent
from harness.records import CaseSummary, Measurement, Outcome, Phase, Telemetry
from harness.tests.fake_runs import FLOPS_PER_TOKEN, case, ended, environment, run, sweep, timed

CASE = case({"seq_len": 512})


def summary_of(measurements: list[Measurement], **changes: Any) -> CaseSummary:
    return summarise(run([changes.pop("case", CASE)], lambda _: measurements, **changes))[0]


# --- estimates ---------------------------------------------------------------------------


def test_a_summary_finds_the_planted_speed() -> None:
    summary = summary_of(timed(CASE, 0.05, processes=5))

    step, tokens = summary.metrics["step_s"], summary.metrics["tokens_per_s"]

    assert step.low is not None
    assert step.high is not None
    assert step.low < 0.05 < step.high
    assert tokens.low == pytest.approx(512 / step.high)
    assert summary.metrics["mfu"].value == pytest.approx(
        512 * FLOPS_PER_TOKEN / step.value / 989e12
    )
    assert summary.outcome is Outcome.OK
    assert summary.notes == ()


def test_more_samples_in_a_process_do_not_narrow_the_interval() -> None:
    few = timed(CASE, 0.05)
    many = [replace(m, samples_s=m.samples_s * 100) for m in few]

    assert summary_of(many).metrics["step_s"].low == summary_of(few).metrics["step_s"].low


def test_an_interval_needs_two_processes() -> None:
    one = statistics.arithmetic([3.0], samples=20)
    two = statistics.arithmetic([3.0, 5.0], samples=40)

    assert (one.value, one.low, one.high, one.processes) == (3.0, None, None, 1)
    assert (two.low, two.high) == pytest.approx((4 - 12.706, 4 + 12.706), abs=1e-3)


def test_95_of_100_intervals_contain_the_true_value() -> None:
    rng = np.random.default_rng(1)
    draws = rng.lognormal(sigma=0.1, size=(1000, 3))

    estimates = [statistics.geometric(list(d), samples=3) for d in draws]

    covered = np.mean([e.low <= 1 <= e.high for e in estimates if e.low and e.high])
    assert 0.93 < covered < 0.97


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, 0.0], [1.0, math.inf]])
def test_a_geometric_mean_needs_positive_finite_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        statistics.geometric(values, samples=1)


def test_the_first_process_that_is_not_ok_sets_the_outcome() -> None:
    crash = ended(CASE, Outcome.CRASH, detail="signal 11")

    summary = summary_of([*timed(CASE, 0.05, processes=2), *crash])

    assert (summary.outcome, summary.detail) == (Outcome.CRASH, "signal 11")
    assert summary.metrics["step_s"].processes == 2
    assert summary.notes == ("numbers from the 2 of 3 processes that ended ok",)


def test_a_case_without_a_measurement_has_no_outcome() -> None:
    assert summary_of([]).outcome is None


def test_cases_keep_the_order_of_the_suite() -> None:
    cases = sweep(seq_len=[2048, 512, 1024])
    reversed_run = run(cases, lambda c: timed(c, 0.01))
    reversed_run = replace(reversed_run, measurements=reversed_run.measurements[::-1])

    assert [s.case for s in summarise(reversed_run)] == cases


# --- what weakens a number ---------------------------------------------------------------


def with_channel(measurements: list[Measurement], name: str, level: float) -> list[Measurement]:
    """Telemetry at a constant level."""
    t = tuple(np.arange(0.0, 20.0, 0.1))
    return [
        replace(m, telemetry=Telemetry(t_s=t, channels={name: (level,) * len(t)}))
        for m in measurements
    ]


@pytest.mark.parametrize(
    ("measurements", "words"),
    [
        (timed(CASE, 0.05, processes=2), "2 of 3 processes"),
        ([replace(m, steady=m.process != 1) for m in timed(CASE, 0.05)], "in process 1"),
        (timed(CASE, 0.05, cv=0.2), "disagree"),
        ([replace(m, samples_s=(0.04, 0.05, 0.06) * 5) for m in timed(CASE, 0.05)], "spread"),
        (with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", 0x4), "power cap"),
        (with_channel(timed(CASE, 0.05), "gpu_foreign_processes", 1), "other processes"),
        (
            [
                replace(m, telemetry=Telemetry(t_s=(17.0,), channels={"cpu_utilisation": (0.5,)}))
                for m in timed(CASE, 0.05)
            ],
            "only 1 reading",
        ),
    ],
    ids=["too few", "unsteady", "disagree", "spread", "power cap", "shared", "few readings"],
)
def test_a_weakness_gives_one_note(measurements: list[Measurement], words: str) -> None:
    (note,) = summary_of(measurements).notes

    assert words in note


def test_throttling_names_every_reason_that_occurred() -> None:
    throttled = with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", 0x40)
    throttled[1:] = with_channel(throttled[1:], "gpu_throttle_reasons", 0x8)

    (note,) = summary_of(throttled).notes

    assert note.endswith("hardware slowdown, hardware thermal slowdown")


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x100])
def test_idling_or_a_set_clock_is_not_throttling(mask: int) -> None:
    measurements = with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", mask)

    assert summary_of(measurements).notes == ()


def test_utilisation_is_averaged_over_the_timed_phases() -> None:
    """Launch and imports leave the GPU idle, often for longer than the measurement takes."""
    levels = {"gpu_utilisation": 0.9, "cpu_utilisation": 2.0}

    metrics = summary_of(timed(CASE, 0.05, telemetry=levels)).metrics

    assert metrics["gpu_utilisation"].value == pytest.approx(0.9, rel=0.05)
    assert metrics["cpu_utilisation"].value == pytest.approx(2.0, rel=0.05)


def test_lagging_readings_of_the_idle_time_before_sampling_do_not_count() -> None:
    phases = (Phase(name="sampling", start_s=1.0, end_s=2.0),)
    t = tuple(np.arange(0.0, 2.0, 0.05))
    levels = tuple(0.9 if x > 1.39 else 0.01 for x in t)
    seen = Telemetry(t_s=t, channels={"gpu_utilisation": levels})
    long = timed(CASE, 0.05, phases=phases)
    long = [replace(m, telemetry=seen) for m in long]
    short = [replace(m, phases=(replace(phases[0], end_s=1.2),)) for m in long]

    assert summary_of(long).metrics["gpu_utilisation"].value == pytest.approx(0.9)
    brief = summary_of(short)
    assert "gpu_utilisation" not in brief.metrics
    assert "lags" in why_absent(brief, short, environment(), "gpu_utilisation")


def test_too_few_readings_of_a_counter_that_lags_give_no_utilisation() -> None:
    """They may all come from one window, as one of 6 % did on a busy H200."""
    seen = Telemetry(t_s=(16.5, 16.55, 16.6, 16.65), channels={"gpu_utilisation": (0.06,) * 4})
    measured = [replace(m, telemetry=seen) for m in timed(CASE, 0.05)]

    found = summary_of(measured)

    assert "gpu_utilisation" not in found.metrics
    assert found.notes == ()
    assert "lags by 0.4 s" in why_absent(found, measured, environment(), "gpu_utilisation")


def test_utilisation_leaves_out_warm_up_steps_that_compile() -> None:
    phases = (
        Phase(name="warmup", start_s=1.0, end_s=12.0),
        Phase(name="sampling", start_s=12.0, end_s=13.0),
    )
    t = tuple(np.arange(0.0, 13.0, 0.05))
    levels = tuple(0.95 if x > 11.2 else 0.0 for x in t)
    warmup_s = (10.0, *(0.05,) * 20)
    measured = [
        replace(
            m,
            phases=phases,
            warmup_s=warmup_s,
            telemetry=Telemetry(t_s=t, channels={"gpu_utilisation": levels}),
        )
        for m in timed(CASE, 0.05)
    ]

    assert summary_of(measured).metrics["gpu_utilisation"].value == pytest.approx(0.95)


def test_a_failed_reading_is_left_out() -> None:
    t = tuple(np.arange(0.0, 20.0, 0.1))
    holes = Telemetry(t_s=t, channels={"gpu_utilisation": (0.8, None) * 100})
    measurements = [replace(m, telemetry=holes) for m in timed(CASE, 0.05)]

    assert summary_of(measurements).metrics["gpu_utilisation"].value == pytest.approx(0.8)


# --- what is not known -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "changes", "env", "why"),
    [
        ("tokens_per_s", {"tokens": 0}, environment(), "tokens"),
        ("mfu", {"flops": None}, environment(), "FLOPs"),
        ("mfu", {}, environment(gpu=None), "no data-sheet peak for cpu"),
        ("gpu_utilisation", {}, environment(gpu=None), "no NVIDIA driver"),
        ("peak_memory_bytes", {"peak_memory_bytes": None}, environment(gpu=None), "no device"),
    ],
)
def test_an_absent_metric_has_a_reason(
    metric: str, changes: dict[str, Any], env: Any, why: str
) -> None:
    measurements = timed(CASE, 0.05, **changes)
    summary = summary_of(measurements, env=env)

    assert metric not in summary.metrics
    assert why in why_absent(summary, measurements, env, metric)


# --- MFU ---------------------------------------------------------------------------------


def test_float32_counts_as_tf32_only_if_the_worker_allowed_it() -> None:
    c = replace(CASE, axes={"seq_len": 512, "precision": "fp32"})
    measurements = timed(c, 0.05)
    mfu = {
        allowed: summary_of(
            measurements, case=c, env=environment(torch_settings={"allow_tf32_matmul": allowed})
        ).metrics["mfu"]
        for allowed in (True, False)
    }

    assert mfu[False].value / mfu[True].value == pytest.approx(494 / 67)
