"""Analysis: plant a speed, an exponent, an effect; ask for it back."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.analysis import scaling, stats
from harness.analysis.effects import effects
from harness.analysis.expectation import Judgement, assess, peak
from harness.analysis.scaling import ScalingFit
from harness.analysis.summary import summarise, why_absent
from harness.records import CaseSummary, Expectation, Match, Measurement, Outcome, Phase, Telemetry
from harness.tests.fake_runs import FLOPS_PER_TOKEN, case, ended, environment, run, sweep, timed

CASE = case({"seq_len": 512})


def summary_of(measurements: list[Measurement], **changes: Any) -> CaseSummary:
    return summarise(run([changes.pop("case", CASE)], lambda _: measurements, **changes))[0]


# --- estimates ---------------------------------------------------------------------------


def test_the_planted_speed_is_found() -> None:
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
    """They are pseudo-replicates: each process counts once, however long it sampled."""
    few = timed(CASE, 0.05)
    many = [replace(m, samples_s=m.samples_s * 100) for m in few]

    assert summary_of(many).metrics["step_s"].low == summary_of(few).metrics["step_s"].low


def test_one_process_has_no_interval() -> None:
    step = summary_of(timed(CASE, 0.05, processes=1)).metrics["step_s"]

    assert (step.low, step.high, step.processes) == (None, None, 1)


def test_the_interval_holds_the_truth_95_times_in_a_hundred() -> None:
    rng = np.random.default_rng(1)
    draws = rng.lognormal(sigma=0.1, size=(1000, 3))

    estimates = [stats.geometric(list(d), samples=3) for d in draws]

    covered = np.mean([e.low <= 1 <= e.high for e in estimates if e.low and e.high])
    assert 0.93 < covered < 0.97


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, 0.0], [1.0, math.inf]])
def test_a_value_that_is_no_time_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="not positive, finite"):
        stats.geometric(values, samples=1)


def test_outcome_is_the_first_that_is_not_ok() -> None:
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
    """Telemetry that holds one level all the time."""
    t = tuple(np.arange(0.0, 20.0, 0.1))
    return [
        replace(m, telemetry=Telemetry(t_s=t, channels={name: (level,) * len(t)}))
        for m in measurements
    ]


@pytest.mark.parametrize(
    ("measurements", "words"),
    [
        pytest.param(timed(CASE, 0.05, processes=2), "2 of 3 processes ran", id="too-few"),
        pytest.param(timed(CASE, 0.05, steady=False), "no steady state found", id="unsteady"),
        pytest.param(timed(CASE, 0.05, cv=0.2), "processes disagree", id="disagree"),
        pytest.param(
            [replace(m, samples_s=(0.04, 0.05, 0.06) * 5) for m in timed(CASE, 0.05)],
            "samples spread widely",
            id="spread",
        ),
        pytest.param(
            with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", 0x40),
            "hardware thermal slowdown",
            id="throttled",
        ),
        pytest.param(
            with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", 0x4),
            "clock limited",
            id="power-cap",
        ),
        pytest.param(
            with_channel(timed(CASE, 0.05), "gpu_foreign_processes", 1),
            "other processes on the GPU",
            id="shared",
        ),
        pytest.param(
            [
                replace(m, telemetry=Telemetry(t_s=(17.0,), channels={"cpu_utilisation": (0.5,)}))
                for m in timed(CASE, 0.05)
            ],
            "rests on 1 reading in",
            id="few-readings",
        ),
    ],
)
def test_a_weakness_is_said(measurements: list[Measurement], words: str) -> None:
    assert words in "; ".join(summary_of(measurements).notes)


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x100])
def test_an_idle_gpu_or_a_set_clock_is_not_throttling(mask: int) -> None:
    measurements = with_channel(timed(CASE, 0.05), "gpu_throttle_reasons", mask)

    assert summary_of(measurements).notes == ()


def test_utilisation_is_taken_while_the_workload_runs() -> None:
    """Launch and imports last longer than many a measurement, and leave the GPU idle."""
    levels = {"gpu_utilisation": 0.9, "cpu_utilisation": 2.0}

    metrics = summary_of(timed(CASE, 0.05, telemetry=levels)).metrics

    assert metrics["gpu_utilisation"].value == pytest.approx(0.9, rel=0.05)
    assert metrics["cpu_utilisation"].value == pytest.approx(2.0, rel=0.05)


def test_a_utilisation_that_lags_is_not_taken_for_that_of_the_workload() -> None:
    """Seen on an H200: all readings of 0.2 s of sampling spoke of the idle time before it."""
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


def test_one_window_of_a_counter_that_lags_is_no_utilisation() -> None:
    """Seen on an H200: 6 %, by one such window, for a step that keeps the GPU busy."""
    seen = Telemetry(t_s=(16.5, 16.55, 16.6, 16.65), channels={"gpu_utilisation": (0.06,) * 4})
    measured = [replace(m, telemetry=seen) for m in timed(CASE, 0.05)]

    found = summary_of(measured)

    assert "gpu_utilisation" not in found.metrics
    assert not any("GPU utilisation" in note for note in found.notes)
    said = why_absent(found, measured, environment(), "gpu_utilisation")
    assert said == "timed too briefly for a counter that lags 0.4 s"


def test_compiling_is_not_utilisation() -> None:
    """Seen on an H200: a step that keeps the GPU busy was said to do so for 11 % of the time, for
    ten of the eleven seconds of warm-up compiled it."""
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


def test_a_failed_reading_is_not_a_zero() -> None:
    measurements = with_channel(timed(CASE, 0.05), "gpu_utilisation", 0.8)
    holes = [
        replace(
            m,
            telemetry=Telemetry(
                t_s=m.telemetry.t_s, channels={"gpu_utilisation": (0.8, None) * 100}
            ),
        )
        for m in measurements
        if m.telemetry
    ]

    assert summary_of(holes).metrics["gpu_utilisation"].value == pytest.approx(0.8)


# --- what is not known -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "changes", "env", "why"),
    [
        ("tokens_per_s", {"tokens": 0}, environment(), "counts no tokens"),
        ("mfu", {"flops": None}, environment(), "counts no FLOPs"),
        ("mfu", {}, environment(gpu=None), "no data-sheet peak for cpu"),
        ("gpu_utilisation", {}, environment(gpu=None), "no NVIDIA driver"),
        ("peak_memory_bytes", {"peak_memory_bytes": None}, environment(gpu=None), "no device"),
    ],
)
def test_an_unknown_metric_is_absent_and_says_why(
    metric: str, changes: dict[str, Any], env: Any, why: str
) -> None:
    measurements = timed(CASE, 0.05, **changes)
    summary = summary_of(measurements, env=env)

    assert metric not in summary.metrics
    assert why in why_absent(summary, measurements, env, metric)


# --- peaks and expectations --------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "precision", "flops_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100 80GB PCIe", "tf32", 156e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("NVIDIA GeForce RTX 3090", "bf16", 71e12),
    ],
)
def test_peak(gpu: str, precision: str, flops_per_s: float) -> None:
    found = peak(gpu, precision)

    assert found is not None
    assert found.flops_per_s == flops_per_s


@pytest.mark.parametrize(
    "gpu",
    [
        "cpu",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    ],
)
def test_a_card_without_a_data_sheet_here_has_no_peak(gpu: str) -> None:
    """A guess, such as the whole card's peak for a slice of it, would make MFU a lie."""
    assert peak(gpu, "bf16") is None


def test_float32_is_tf32_only_where_the_worker_allowed_it() -> None:
    c = replace(CASE, axes={"seq_len": 512, "precision": "fp32"})
    measurements = timed(c, 0.05)
    mfu = {
        allowed: summary_of(
            measurements, case=c, env=environment(torch_settings={"allow_tf32_matmul": allowed})
        ).metrics["mfu"]
        for allowed in (True, False)
    }

    assert mfu[False].value / mfu[True].value == pytest.approx(494 / 67)


def assessed(expectation: Expectation, measurements: list[Measurement], **env: Any) -> Any:
    r = run([CASE], lambda _: measurements, expectations=[expectation], env=environment(**env))
    return assess(r.suite, r.environment, summarise(r))[0]


@pytest.mark.parametrize(
    ("low", "high", "judgement"),
    [
        (500, 1500, Judgement.BELOW),
        (None, 10, Judgement.ABOVE),
        (20, 40, Judgement.MET),
        (27, None, Judgement.UNDECIDED),
        (20, 27, Judgement.UNDECIDED),
    ],
)
def test_judgement_needs_the_whole_interval(
    low: float | None, high: float | None, judgement: Judgement
) -> None:
    expectation = Expectation(metric="tokens_per_s", low=low, high=high)

    assert assessed(expectation, timed(CASE, 512 / 27)).judgement is judgement


def test_the_distance_is_given_to_both_ends() -> None:
    """The users' "45-136x slower": 11 tokens/s where 500 to 1500 were expected."""
    expectation = Expectation(metric="tokens_per_s", low=500, high=1500)

    near, far = assessed(expectation, timed(CASE, 512 / 11)).factors

    assert near == pytest.approx(45, rel=0.03)
    assert far == pytest.approx(136, rel=0.03)


def test_an_expectation_for_another_card_is_not_judged() -> None:
    expectation = Expectation(metric="tokens_per_s", low=500, gpu="A100")

    assert assessed(expectation, timed(CASE, 0.001)).judgement is Judgement.OTHER_GPU


def test_a_timeout_bounds_what_was_expected() -> None:
    expectation = Expectation(metric="tokens_per_s", low=500)
    timeout = ended(CASE, Outcome.TIMEOUT, lower_bound_s=51.2, tokens=512)

    a = assessed(expectation, timeout)

    assert (a.judgement, a.bound, a.factors) == (Judgement.BELOW, 10.0, (50.0,))


# --- scaling -----------------------------------------------------------------------------


def fitted(
    exponent: float, *, limit_s: float = math.inf, cv: float = 0.005, **changes: Any
) -> ScalingFit:
    """One group of six lengths with a planted exponent; past the limit, timeouts."""
    cases = sweep(workload="forward", seq_len=[128, 256, 512, 1024, 2048, 4096])

    def measure(c: Any) -> list[Measurement]:
        step = 0.01 * (c.axes["seq_len"] / 128) ** exponent
        if step > limit_s:
            return ended(c, Outcome.TIMEOUT, lower_bound_s=limit_s)
        return timed(c, step, cv=cv, **changes)

    (fit,) = scaling.fit(summarise(run(cases, measure)))
    return fit


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.7, 2.0])
@pytest.mark.parametrize("limit_s", [math.inf, 0.3])
def test_the_planted_exponent_is_found(exponent: float, limit_s: float) -> None:
    fit = fitted(exponent, limit_s=limit_s)

    assert fit.exponent is not None
    assert fit.exponent.low is not None
    assert fit.exponent.high is not None
    assert fit.exponent.value == pytest.approx(exponent, abs=0.02)
    assert fit.exponent.low < exponent < fit.exponent.high
    assert fit.at(512) == pytest.approx(0.01 * 4**exponent, rel=0.02)
    assert fit.group == "forward/nsa"


def test_a_timeout_steepens_the_fit_that_leaves_it_out() -> None:
    """Three points say linear; the fourth took at least eight times what they foretell."""
    cases = sweep(seq_len=[128, 256, 512, 1024])

    def measure(c: Any) -> list[Measurement]:
        if c.axes["seq_len"] == 1024:
            return ended(c, Outcome.TIMEOUT, lower_bound_s=0.64)
        return timed(c, 0.01 * c.axes["seq_len"] / 128, cv=0.05)

    summaries = summarise(run(cases, measure))
    (with_it,) = scaling.fit(summaries)
    (without,) = scaling.fit(summaries[:3])

    assert with_it.exponent is not None
    assert without.exponent is not None
    assert with_it.exponent.value > without.exponent.value + 0.3
    assert with_it.censored == 1


def test_a_bound_far_under_the_line_changes_nothing() -> None:
    x, y = np.log([128.0, 256, 512, 1024]), np.log([0.01, 0.021, 0.039, 0.082])

    plain = scaling._least_squares(x, y)
    censored = scaling._tobit(x, y, np.log([2048.0]), np.log([1e-6]))

    assert censored == pytest.approx(plain, abs=2e-3)


def test_the_censored_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    x = np.log([128.0, 256, 512, 1024, 2048, 4096])
    limit = 1.7 * math.log(1500)
    covered = 0
    draws = 150
    for _ in range(draws):
        y = 1.7 * x + rng.normal(0, 0.1, x.size)
        seen = y < limit
        hidden = x[~seen]
        _, low, high, _ = scaling._tobit(x[seen], y[seen], hidden, np.full(hidden.shape, limit))
        covered += low <= 1.7 <= high

    assert 0.88 < covered / draws < 0.99


def test_two_measured_points_are_no_fit() -> None:
    fit = fitted(2.0, limit_s=0.05)

    assert fit.exponent is None
    assert fit.reason == "2 measured values of seq_len; a fit needs 3"
    with pytest.raises(ValueError, match="a fit needs 3"):
        fit.at(512)


def test_a_hang_is_not_a_slow_point() -> None:
    cases = sweep(seq_len=[128, 256, 512, 1024])

    def measure(c: Any) -> list[Measurement]:
        if c.axes["seq_len"] == 1024:
            return ended(c, Outcome.HANG, lower_bound_s=120.0)
        return timed(c, 0.01 * c.axes["seq_len"] / 128, cv=0.002)

    (fit,) = scaling.fit(summarise(run(cases, measure)))

    assert fit.censored == 0
    assert fit.exponent is not None
    assert fit.exponent.value == pytest.approx(1, abs=0.03)


def test_a_curve_that_does_not_move_is_suspicious_unless_the_axis_was_seen_to_arrive() -> None:
    assert "which did reach the workload: a fixed cost" in fitted(0.0).note
    assert "did the axis reach the workload?" in fitted(0.0, effective={}).note
    assert fitted(1.0).note == ""


def test_a_curve_that_steepens_is_no_power_law() -> None:
    """As on a GPU: launching kernels costs the same at every length, until the work outgrows it."""
    steps = {128: 0.037, 256: 0.037, 512: 0.039, 1024: 0.053, 2048: 0.099}
    cases = sweep(workload="forward", seq_len=list(steps))

    (fit,) = scaling.fit(summarise(run(cases, lambda c: timed(c, steps[int(c.axes["seq_len"])]))))

    assert "steepens, with exponent 0." in fit.note
    assert "from seq_len 1024 to 2048" in fit.note


def test_groups_differ_in_all_other_axes() -> None:
    cases = sweep(seq_len=[128, 256, 512], gc=["off", "on"], batch=[1, 2])

    fits = scaling.fit(summarise(run(cases, lambda c: timed(c, 1e-4 * float(c.axes["seq_len"])))))

    assert [f.group for f in fits] == [
        f"train/nsa/gc={gc}/batch={batch}" for gc in ("off", "on") for batch in (1, 2)
    ]
    assert {f.axis for f in fits} == {"seq_len"}


# --- effects -----------------------------------------------------------------------------


def test_the_planted_effect_is_found_over_pairs() -> None:
    cases = sweep(seq_len=[512, 2048], gc=["off", "on"])

    def measure(c: Any) -> list[Measurement]:
        step = 0.1 * c.axes["seq_len"] / 512 * (1.24 if c.axes["gc"] == "on" else 1)
        return timed(c, step, cv=0.005)

    found = {e.axis: e for e in effects(summarise(run(cases, measure)))}

    gc, length = found["gc"], found["seq_len"]
    assert (gc.base, gc.value, gc.pairs) == ("off", "on", 2)
    assert gc.low is not None
    assert gc.high is not None
    assert gc.low < 1.24 < gc.high
    assert length.ratio == pytest.approx(1, abs=0.02)  # per token
    assert not gc.negligible


def test_each_provider_is_compared_with_the_first_that_ran() -> None:
    slower = {"first": 1.0, "ours": 1.0, "dense": 4.0, "peer": 2.0}
    cases = [
        case({"seq_len": n}, provider=provider)
        for provider in slower
        for n in ((512, 2048) if provider != "peer" else (2048,))
    ]

    def measure(c: Any) -> list[Measurement]:
        if c.provider == "first":
            return ended(c, Outcome.CRASH)
        return timed(c, slower[c.provider] * 1e-4 * c.axes["seq_len"], cv=0.005)

    found = effects(summarise(run(cases, measure)))

    by_provider = {(e.base, e.value): e for e in found if e.axis == "provider"}
    assert [*by_provider] == [("ours", "dense"), ("ours", "peer")]
    assert [e.pairs for e in by_provider.values()] == [2, 1]
    assert by_provider["ours", "dense"].ratio == pytest.approx(4, rel=0.02)


def test_axes_that_change_together_have_no_effect_of_their_own() -> None:
    cases = [case({"a": 0, "b": 0}), case({"a": 1, "b": 1})]

    assert effects(summarise(run(cases, lambda c: timed(c, 0.1)))) == ()


def test_a_pair_with_a_failed_half_is_no_pair() -> None:
    cases = sweep(gc=["off", "on"])

    def measure(c: Any) -> list[Measurement]:
        return timed(c, 0.1) if c.axes["gc"] == "off" else ended(c, Outcome.CRASH)

    assert effects(summarise(run(cases, measure))) == ()


def test_a_flag_without_effect_is_called_so() -> None:
    cases = sweep(NSA_USE_FA2=[0, 1])

    (effect,) = effects(summarise(run(cases, lambda c: timed(c, 0.1, cv=0.001, processes=5))))

    assert effect.negligible


def test_an_effect_of_single_processes_has_no_interval() -> None:
    cases = sweep(gc=["off", "on"])

    (effect,) = effects(summarise(run(cases, lambda c: timed(c, 0.1, processes=1))))

    assert (effect.low, effect.negligible) == (None, False)


def test_a_match_on_provider_is_a_match() -> None:
    expectation = Expectation(
        metric="tokens_per_s", low=1, match=Match(criteria={"provider": ("dense",)})
    )
    r = run([CASE], lambda c: timed(c, 0.1), expectations=[expectation])

    assert assess(r.suite, r.environment, summarise(r)) == ()
