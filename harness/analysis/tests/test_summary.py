"""Summaries of runs with a planted speed or weakness, and the statistics under them."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import polygamma

from harness import units
from harness.analysis import statistics
from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.records import (
    Breakdown,
    Case,
    CaseSummary,
    Clock,
    Decision,
    Measurement,
    Outcome,
    Phase,
    Profile,
    Rank,
    Rule,
    Telemetry,
)
from harness.report.text import note_text
from harness.tests.fake_runs import (
    FLOPS_PER_TOKEN,
    case,
    ended,
    environment,
    run,
    sweep,
    taking,
    timed,
)

CASE = case({"seq_len": 512})


def summary_of(measurements: list[Measurement], **changes: Any) -> CaseSummary:
    return summarise(run([changes.pop("case", CASE)], lambda _: measurements, **changes))[0]


def every(**changes: Any) -> list[Measurement]:
    """Three processes of a case, with these fields."""
    return [replace(m, **changes) for m in timed(CASE, 0.05)]


def probed(level: Any, channel: str, every_s: float = 0.05, until_s: float = 20.0) -> Telemetry:
    """Telemetry of one channel: a constant level, or a function of the time."""
    t = tuple(np.arange(0.0, until_s, every_s))
    values = tuple(level(x) if callable(level) else level for x in t)
    return Telemetry(t_s=t, channels={channel: values})


# --- estimates ---------------------------------------------------------------------------


def test_a_summary_finds_the_planted_speed() -> None:
    summary = summary_of(timed(CASE, 0.05, processes=5))

    step, tokens = summary.metrics["step_s"], summary.metrics["tokens_per_s"]
    assert (step.low or math.inf) < 0.05 < (step.high or 0)
    assert tokens.low == pytest.approx(512 / (step.high or 0))
    mfu = 512 * FLOPS_PER_TOKEN / step.value / 989e12
    assert summary.metrics["mfu"].value == pytest.approx(mfu)
    assert (summary.outcome, summary.notes) == (Outcome.OK, ())


def test_more_samples_in_a_process_do_not_narrow_the_interval() -> None:
    few = timed(CASE, 0.05)
    many = [replace(m, samples_s=m.samples_s * 100) for m in few]

    assert summary_of(many).metrics["step_s"].low == summary_of(few).metrics["step_s"].low


def test_an_interval_needs_two_processes() -> None:
    one, two = (statistics.arithmetic(of, samples=20) for of in ([3.0], [3.0, 5.0]))

    assert (one.value, one.low, one.high, one.n) == (3.0, None, None, 1)
    assert (two.low, two.high) == pytest.approx((4 - 12.706, 4 + 12.706), abs=1e-3)


@pytest.mark.parametrize("y", [1e-3, 0.5, 40.0])
def test_the_inverse_of_trigamma(y: float) -> None:
    assert float(polygamma(1, statistics._inverse_trigamma(y))) == pytest.approx(y, rel=1e-6)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [1.0, 0.0], [1.0, math.inf]])
def test_a_geometric_mean_needs_positive_finite_values(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        statistics.geometric(values, samples=1)


def test_the_first_process_that_is_not_ok_sets_the_outcome() -> None:
    crash = ended(CASE, Outcome.CRASH, detail="signal 11")

    summary = summary_of([*timed(CASE, 0.05, processes=2), *crash])

    assert (summary.outcome, summary.detail) == (Outcome.CRASH, "signal 11")
    assert summary.metrics["step_s"].n == 2
    assert [*map(note_text, summary.notes)] == ["numbers from the 2 of 3 processes that ended ok"]
    assert summary_of([]).outcome is None


# --- few processes -----------------------------------------------------------------------

SIX = sweep(seq_len=[2**i for i in range(6, 12)])


def drawn(cases: int, processes: int, freedom: float, seed: int = 1) -> list[Any]:
    """Values of processes whose variances scatter around 1 % squared as inverse chi-square does."""
    rng = np.random.default_rng(seed)
    sd = 0.01 * np.sqrt(freedom / rng.chisquare(freedom, size=(cases, 1)))
    return list(np.exp(sd * rng.normal(size=(cases, processes))))


@pytest.mark.parametrize(("processes", "freedom"), [(2, 3), (5, 8)])
def test_the_prior_finds_the_planted_scatter_of_variances(processes: int, freedom: float) -> None:
    prior = statistics.variance_prior(drawn(5000, processes, freedom))

    assert prior is not None
    assert prior.variance == pytest.approx(0.01**2, rel=0.15)
    assert prior.freedom == pytest.approx(freedom, rel=0.25)


def test_cases_that_scatter_alike_are_worth_all_their_processes() -> None:
    prior = statistics.variance_prior(drawn(12, 3, 1e9, seed=3))

    assert prior is not None
    assert prior.freedom > 12
    made = statistics.geometric([1.0, 1.01], samples=2, prior=prior)
    assert made.freedom == pytest.approx(min(1 + prior.freedom, 24))


@pytest.mark.parametrize("values", [[[1.0, 1.1]] * 5 + [[1.0]], [[1.0, 1.0]] * 7])
def test_few_cases_or_cases_that_do_not_scatter_say_nothing(values: list[list[float]]) -> None:
    assert statistics.variance_prior(values) is None


def test_a_case_that_does_not_scatter_hardly_weighs() -> None:
    prior = statistics.variance_prior([*drawn(11, 3, 1e9), [1.0, 1.0, 1.0]])

    assert prior is not None
    assert prior.variance > 1e-6


def test_two_processes_are_printed_as_they_are() -> None:
    for s in summarise(run(SIX, lambda c: timed(c, 0.05, cv=0.005, processes=2))):
        for name in ("step_s", "tokens_per_s", "mfu"):
            assert len(s.metrics[name].both) == 2
            assert "[" not in units.value(name, s.metrics[name])


@pytest.mark.parametrize("other", ["clock", "kind"])
def test_cases_of_another_clock_or_kind_lend_no_scatter(other: str) -> None:
    busy = Profile(breakdown=Breakdown(step_s=1.0, device_busy_s=0.05))
    changes: Any = {"clock": Clock.HOST} if other == "clock" else {"profile": busy}

    def measure(c: Case) -> list[Measurement]:
        made = timed(c, 0.05, cv=0.005, processes=2)
        return [replace(m, **changes) for m in made] if c is SIX[0] else made

    found = [s.metrics["step_s"] for s in summarise(run(SIX, measure))]
    assert not any(e.freedom for e in found), "five cases are left"
    assert [e.usual is None for e in found[:2]] == [True, False]


def test_a_case_whose_processes_differ_by_more_than_2x_has_a_finding_and_no_speed() -> None:
    def measure(c: Case) -> list[Measurement]:
        return taking(c, *((0.016, 1.6) if c is SIX[0] else (0.05, 0.0501)))

    made = run(SIX, measure, rules=[Rule(name="floor", metric="tokens_per_s", go=100.0)])
    (first, *others), verdict = (of := Study(made)).summaries, of.verdict

    assert first.outcome is Outcome.OK
    assert first.apart["step_s"].ends == (0.016, 1.6)
    assert not {"step_s", "tokens_per_s", "mfu"} & first.metrics.keys()
    assert "peak_memory_bytes" in first.metrics
    assert "not repeatable" in note_text(first.notes[-1])
    assert all(s.metrics["step_s"].freedom is None for s in others), "five cases are left"
    (floor,) = (r for r in verdict.rules if r.stated)
    assert floor.decision is Decision.INCONCLUSIVE
    assert floor.evidence == (SIX[0].case_id,)


# --- what weakens a number ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("measurements", "words"),
    [
        (timed(CASE, 0.05, processes=2), "2 of 3 processes"),
        (timed(CASE, 0.05, cv=0.2), "disagree"),
        (every(telemetry=probed(0x4, "gpu_throttle_reasons")), "power cap"),
        (
            every(telemetry=probed(lambda t: 0x40 if t < 17.5 else 0x8, "gpu_throttle_reasons")),
            "hardware slowdown, hardware thermal slowdown",
        ),
        (every(telemetry=probed(1, "gpu_foreign_processes")), "other processes"),
    ],
)
def test_a_weakness_gives_one_note(measurements: list[Measurement], words: str) -> None:
    (note,) = summary_of(measurements).notes

    assert words in note_text(note)


def test_a_weakness_of_one_gpu_names_its_rank() -> None:
    ranks = (Rank(rank=0), Rank(rank=1))

    (note,) = summary_of(every(telemetry=probed(0x8, "gpu1_throttle_reasons"), ranks=ranks)).notes

    assert note_text(note).startswith("GPU of rank 1 throttled in ")


@pytest.mark.parametrize("mask", [0x0, 0x1, 0x2, 0x100])
def test_idling_or_a_set_clock_is_not_throttling(mask: int) -> None:
    assert summary_of(every(telemetry=probed(mask, "gpu_throttle_reasons"))).notes == ()


# --- utilisation -------------------------------------------------------------------------


SAMPLING = Phase(name="sampling", start_s=1.0, end_s=2.0)
COMPILES = {
    "phases": (
        replace(SAMPLING, name="warmup", end_s=12.0),
        Phase(name="sampling", start_s=12.0, end_s=13.0),
    ),
    "warmup_s": (10.0, *(0.05,) * 20),
}
LAGGING = probed(lambda t: 0.9 if t > 1.39 else 0.01, "gpu_utilisation", until_s=2.0)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        # Readings that still describe the idle time before sampling do not count.
        ({"phases": (SAMPLING,), "telemetry": LAGGING}, 0.9),
        ({"phases": (replace(SAMPLING, end_s=1.2),), "telemetry": LAGGING}, None),
        # Too few readings may all come from one window, as one of 6 % did on a busy H200.
        ({"telemetry": probed(0.06, "gpu_utilisation", every_s=2.1)}, None),
        ({"telemetry": probed(0.06, "gpu_utilisation", every_s=1.9)}, 0.06),
        ({**COMPILES, "telemetry": probed(lambda t: 0.95 * (t > 11.2), "gpu_utilisation")}, 0.95),
        ({"telemetry": probed(lambda t: (None, 0.8)[round(t * 20) % 2], "gpu_utilisation")}, 0.8),
    ],
)
def test_only_readings_of_the_timed_steps_count(
    changes: Mapping[str, Any], found: float | None
) -> None:
    summary = summary_of(every(**changes))

    assert summary.notes == ()
    seen = summary.metrics.get("gpu_utilisation")
    assert (seen and seen.value) == (found and pytest.approx(found))


def test_float32_counts_as_tf32_only_if_the_worker_allowed_it() -> None:
    c = replace(CASE, axes={"seq_len": 512, "precision": "fp32"})
    allowed, not_allowed = (
        environment(torch_settings={"allow_tf32_matmul": allowed}) for allowed in (True, False)
    )

    tf32, fp32 = (summary_of(timed(c, 0.05), case=c, env=e) for e in (allowed, not_allowed))

    assert fp32.metrics["mfu"].value / tf32.metrics["mfu"].value == pytest.approx(494 / 67)
