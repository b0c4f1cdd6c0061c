"""Peaks of cards, and measurements compared with what a rule expects."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.analysis.bounds import peak
from harness.analysis.summary import summarise
from harness.analysis.verdict import by_case
from harness.records import Decision, Finding, Measurement, Outcome, Rule
from harness.tests.fake_runs import case, ended, run, timed, to

CASE = case({"seq_len": 512})


@pytest.mark.parametrize(
    ("gpu", "precision", "flops_per_s"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 PCIe", "tf32", 378e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("cpu", "bf16", None),
        ("NVIDIA GH200 480GB", "bf16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
    ],
)
def test_a_card_has_the_peak_of_its_data_sheet_and_a_slice_has_none(
    gpu: str, precision: str, flops_per_s: float | None
) -> None:
    assert peak(gpu, precision) == flops_per_s


def found(measurements: list[Measurement], **expected: Any) -> Sequence[Finding]:
    expectation = Rule(**{"name": "a source", "metric": "tokens_per_s", **expected})
    return by_case(expectation, summarise(run([CASE], lambda _: measurements)))


@pytest.mark.parametrize(
    ("expected", "decision"),
    [
        ({"low": 500, "high": 1500}, Decision.NO_GO),
        ({"high": 10}, Decision.NO_GO),
        ({"low": 20, "high": 40}, Decision.GO),
        ({"low": 27}, Decision.INCONCLUSIVE),
        ({"low": 20, "high": 27}, Decision.INCONCLUSIVE),
    ],
)
def test_an_interval_must_be_on_one_side(expected: dict[str, Any], decision: Decision) -> None:
    (one,) = found(timed(CASE, 512 / 27), **expected)

    assert one.decision is decision


@pytest.mark.parametrize(
    ("outcome", "expected", "decision", "bound"),
    [
        (Outcome.TIMEOUT, {"low": 500}, Decision.NO_GO, 10.0),
        (Outcome.TIMEOUT, {"metric": "step_s", "high": 25.6}, Decision.NO_GO, 51.2),
        (Outcome.TIMEOUT, {"metric": "mfu", "low": 0.1}, Decision.INCONCLUSIVE, None),
        (Outcome.HANG, {"low": 500}, Decision.INCONCLUSIVE, None),
    ],
)
def test_a_timeout_bounds_the_metric_and_a_hang_nothing(
    outcome: Outcome, expected: dict[str, Any], decision: Decision, bound: float
) -> None:
    (one,) = found(ended(CASE, outcome, lower_bound_s=51.2, tokens=512), **expected)

    assert (one.decision, one.bound) == (decision, bound)


def test_an_expectation_of_another_provider_is_not_assessed() -> None:
    assert found(timed(CASE, 0.1), low=1, match=to(provider="dense")) == []
