"""The most a GPU can do by its data sheet, which model FLOPs utilisation (MFU) is a share of."""

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

# Dense bf16 and fp16 tensor-core FLOP/s with float32 accumulation, by the exact name the driver
# gives. Data sheets print them with 2:4 sparsity; ours are half. NVIDIA data sheets: A100 (2021),
# H100 (2022, 2024), H200 (2024), L40S (2023).
_PEAKS: Mapping[str, float] = {
    "NVIDIA A100-*GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
}


def peak_flops(gpu: str, dtype: torch.dtype | None) -> float | None:
    """FLOP/s of matrix products in this dtype; None for a card or a dtype we have no sheet for."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((flops for name, flops in _PEAKS.items() if fnmatchcase(gpu, name)), None)
