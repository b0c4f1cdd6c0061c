"""Peaks of cards by their data sheets, and measurements compared with expectations."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from harness.analysis.statistics import settle
from harness.records import (
    METRICS,
    CaseSummary,
    Environment,
    Estimate,
    Expectation,
    Outcome,
    Suite,
    gpu_matches,
)


def _flops(bf16: float, tf32: float, fp32: float) -> Mapping[str, float]:
    return {"bf16": bf16, "fp16": bf16, "tf32": tf32, "fp32": fp32}


# Dense peak FLOP/s with float32 accumulation, by exact NVML name (fnmatch, so that a MIG slice
# or a "Ti" gets none). Data sheets give tensor-core numbers with 2:4 sparsity; these are half.
# NVIDIA data sheets: A100 (2021), H100 (2022, 2024), H200 (2024), L40S (2023); RTX 3090 from the
# GA102 whitepaper, table 3, "FP16 with FP32 accumulate" and TF32, both dense.
_PEAKS: tuple[tuple[str, Mapping[str, float]], ...] = (
    ("NVIDIA A100-*GB", _flops(312e12, 156e12, 19.5e12)),
    ("NVIDIA A100 80GB PCIe", _flops(312e12, 156e12, 19.5e12)),
    ("NVIDIA H100 PCIe", _flops(756e12, 378e12, 51e12)),
    ("NVIDIA H100 NVL", _flops(835e12, 417e12, 60e12)),
    ("NVIDIA H100 80GB HBM3", _flops(989e12, 494e12, 67e12)),
    ("NVIDIA H200 NVL", _flops(835e12, 417e12, 60e12)),
    ("NVIDIA H200", _flops(989e12, 494e12, 67e12)),
    ("NVIDIA L40S", _flops(362e12, 183e12, 91.6e12)),
    ("NVIDIA GeForce RTX 3090", _flops(71e12, 35.6e12, 35.6e12)),
)

_DTYPES = ("bf16", "fp16", "fp32", "fp64")
_ALIASES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float64": "fp64",
}


def peak(gpu_name: str, precision: str | None) -> float | None:
    """Dense peak FLOP/s of the card with this NVML name; None without a data sheet for it."""
    for pattern, flops in _PEAKS:
        if fnmatchcase(gpu_name, pattern):
            return flops.get(precision or "")
    return None


def precision_of(
    axes: Mapping[str, object], effective: Mapping[str, object], environment: Environment
) -> str | None:
    """Precision of the matrix products: the observed one, or the one in the axes, or None.

    float32 counts as TF32 if the worker allowed it.
    """
    for source in (effective, axes):
        for name in ("precision", "dtype"):
            stated = str(source.get(name, "")).removeprefix("torch.").lower()
            precision = _ALIASES.get(stated, stated)
            if precision == "fp32" and environment.torch_settings.get("allow_tf32_matmul") is True:
                return "tf32"
            if precision in _DTYPES:
                return precision
    return None


class Judgement(StrEnum):
    """How a measurement compares with an expectation."""

    MET = "met"
    BELOW = "below"
    ABOVE = "above"
    UNDECIDED = "undecided"
    OTHER_GPU = "other_gpu"  # for another card: shown, not judged
    NOT_MEASURED = "not_measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """One expectation, compared with one case."""

    expectation: Expectation
    case_id: str
    judgement: Judgement
    likely: Judgement | None = None
    """If it is undecided: what one process says, or several near the expected range."""
    actual: Estimate | None = None
    bound: float | None = None
    """From a timeout: the best possible value of the metric."""
    factors: tuple[float, ...] = ()
    """Ratio of the actual value to the nearer and to the farther end of the expected range; one
    number if only one end is stated; empty inside the range."""


def assess(
    suite: Suite, environment: Environment, summaries: Sequence[CaseSummary]
) -> tuple[Assessment, ...]:
    """Every expectation for every case that it matches, in the suite's order."""
    return tuple(
        _assess(expectation, summary, environment)
        for expectation in suite.expectations
        for summary in summaries
        if expectation.match.accepts(summary.case)
    )


def timeout_bound(summary: CaseSummary, metric: str) -> float | None:
    """The best possible value of a metric after a timeout; None if it has no bound."""
    if summary.outcome is not Outcome.TIMEOUT or not summary.lower_bound_s:
        return None
    if metric == "tokens_per_s" and summary.tokens:
        return summary.tokens / summary.lower_bound_s
    return summary.lower_bound_s if metric == "step_s" else None


def _assess(expectation: Expectation, summary: CaseSummary, environment: Environment) -> Assessment:
    bound = timeout_bound(summary, expectation.metric)
    actual = summary.known(expectation.metric) if summary.outcome is Outcome.OK else None
    judgement, likely = _judge(expectation, actual, bound)
    if not gpu_matches(expectation.gpu, environment.device_name):
        judgement, likely = Judgement.OTHER_GPU, None
    return Assessment(
        expectation=expectation,
        case_id=summary.case.case_id,
        judgement=judgement,
        likely=likely,
        actual=actual,
        bound=bound,
        factors=_factors(expectation, actual.value if actual else bound),
    )


def _range(expectation: Expectation) -> tuple[float, float]:
    low, high = expectation.low, expectation.high
    return -math.inf if low is None else low, math.inf if high is None else high


def _judge(
    expectation: Expectation, actual: Estimate | None, bound: float | None
) -> tuple[Judgement, Judgement | None]:
    """The judgement, and if it is undecided what is likely."""
    low, high = _range(expectation)
    metric = METRICS[expectation.metric]

    def side(bottom: float, top: float) -> Judgement | None:
        if top < low:
            return Judgement.BELOW
        if bottom > high:
            return Judgement.ABOVE
        return Judgement.MET if low <= bottom and top <= high else None

    if actual is not None:
        found, sure = settle(actual, side, linear=metric.signed)
        return (found, None) if found and sure else (Judgement.UNDECIDED, found)
    if bound is None:
        return Judgement.NOT_MEASURED, None
    ends = (-math.inf, bound) if metric.higher_is_better else (bound, math.inf)
    return side(*ends) or Judgement.UNDECIDED, None


def _factors(expectation: Expectation, value: float | None) -> tuple[float, ...]:
    low, high = _range(expectation)
    if value is None or value <= 0 or low <= value <= high:
        return ()
    ends = [end for end in (low, high) if 0 < end < math.inf]
    return tuple(sorted(max(end / value, value / end) for end in ends))
