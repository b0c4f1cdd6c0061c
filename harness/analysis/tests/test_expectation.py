"""Peaks of cards, and measurements compared with expectations."""

from typing import Any

import pytest

from harness.analysis.expectation import Judgement, assess, peak
from harness.analysis.summary import summarise
from harness.records import Expectation, Match, Measurement, Outcome
from harness.tests.fake_runs import case, ended, environment, run, timed

CASE = case({"seq_len": 512})


# --- peaks -------------------------------------------------------------------------------


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
def test_a_card_has_the_peak_of_its_data_sheet(
    gpu: str, precision: str, flops_per_s: float
) -> None:
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
def test_an_unknown_card_or_a_slice_of_a_card_has_no_peak(gpu: str) -> None:
    assert peak(gpu, "bf16") is None


# --- expectations ------------------------------------------------------------------------


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
def test_the_whole_interval_must_be_on_one_side(
    low: float | None, high: float | None, judgement: Judgement
) -> None:
    expectation = Expectation(metric="tokens_per_s", low=low, high=high)

    assert assessed(expectation, timed(CASE, 512 / 27)).judgement is judgement


def test_a_value_outside_the_range_has_its_distance_to_both_ends() -> None:
    expectation = Expectation(metric="tokens_per_s", low=500, high=1500)

    assert assessed(expectation, timed(CASE, 512 / 11)).factors == pytest.approx(
        (500 / 11, 1500 / 11), rel=0.03
    )


def test_an_expectation_for_another_card_is_not_judged() -> None:
    expectation = Expectation(metric="tokens_per_s", low=500, gpu="A100")

    assert assessed(expectation, timed(CASE, 0.001)).judgement is Judgement.OTHER_GPU


def test_a_timeout_bounds_the_metric() -> None:
    expectation = Expectation(metric="tokens_per_s", low=500)
    timeout = ended(CASE, Outcome.TIMEOUT, lower_bound_s=51.2, tokens=512)

    a = assessed(expectation, timeout)

    assert (a.judgement, a.bound, a.factors) == (Judgement.BELOW, 10.0, (50.0,))


def test_an_expectation_of_another_provider_is_not_assessed() -> None:
    expectation = Expectation(
        metric="tokens_per_s", low=1, match=Match(criteria={"provider": ("dense",)})
    )
    r = run([CASE], lambda c: timed(c, 0.1), expectations=[expectation])

    assert assess(r.suite, r.environment, summarise(r)) == ()
