"""Peaks of cards by their data sheets; what a timeout or the kernels alone say of a speed."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

from harness.analysis.statistics import mapped, times_better
from harness.records import CaseSummary, Environment, Outcome, Ratio


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


def timeout_bound(summary: CaseSummary, metric: str) -> float | None:
    """The best possible value of a metric after a timeout; None if it has no bound."""
    if summary.outcome is not Outcome.TIMEOUT or not summary.lower_bound_s:
        return None
    if metric == "tokens_per_s" and summary.tokens:
        return summary.tokens / summary.lower_bound_s
    return summary.lower_bound_s if metric == "step_s" else None


def by_kernels(ours: CaseSummary, theirs: CaseSummary, metric: str) -> Ratio | None:
    """How many times faster one side is by its kernels, if the host sets the speed of one."""
    own, other = ours.known("kernel_s"), theirs.known("kernel_s")
    if own is None or other is None or not (ours.behind(metric) or theirs.behind(metric)):
        return None
    work = 1.0
    if metric == "tokens_per_s" and ours.tokens and theirs.tokens:
        work = ours.tokens / theirs.tokens
    faster = times_better(own, other, higher_is_better=False)
    return mapped(faster, lambda ratio: ratio * work)
