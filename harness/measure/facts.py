"""Child side: versions and settings of torch, the GPU as torch sees it, and memory, in a worker."""

import os
import resource
import sys
import warnings
from importlib import metadata
from typing import Any

import torch

from harness.records import Scalar


def describe() -> dict[str, Any]:
    """Facts that need torch, ready for JSON; None for what is absent. `gpu` is the first one, for
    machines without NVML. Uses no memory of a GPU: another process may measure there."""
    problem = _cuda_problem()
    seen = 0 if problem else torch.cuda.device_count()
    gpus = [torch.cuda.get_device_properties(i) for i in range(seen)]
    gpu = next(iter(gpus), None)
    cudnn = torch.backends.cudnn.version()  # 91900 is 9.19.0
    return {
        "versions": {
            "torch": torch.__version__,
            "triton": _version("triton"),
            "cuda": torch.version.cuda,
            "cudnn": cudnn and f"{cudnn // 10_000}.{cudnn // 100 % 100}.{cudnn % 100}",
            "flash-attn": _version("flash-attn"),
        },
        "torch_settings": _settings(on_gpu=not problem),
        "gpu_uuids": [f"GPU-{one.uuid}" for one in gpus],
        "gpu": {
            "name": gpu.name,
            "memory_bytes": gpu.total_memory,
            "compute_capability": f"{gpu.major}.{gpu.minor}",
        }
        if gpu
        else None,
        "cuda_unavailable": problem,
        "interpreter": sys.executable,
    }


def _settings(*, on_gpu: bool) -> dict[str, Scalar]:
    settings: dict[str, Scalar] = {
        "device": "cuda" if on_gpu else "cpu",
        "num_threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "allow_tf32_matmul": torch.backends.cuda.matmul.fp32_precision == "tf32",
        "allow_tf32_cudnn": torch.backends.cudnn.allow_tf32,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "anomaly_mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "debug_build": bool(getattr(torch.version, "debug", False)),
        "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
        "flash_attention_in_torch": torch.backends.cuda.is_flash_attention_available(),
    }
    if on_gpu:
        torch.cuda.init()
        in_force = torch.cuda.memory._snapshot()["allocator_settings"]  # by either variable
        settings["allocator"] = torch.cuda.memory.get_allocator_backend()
        settings["allocator_config"] = in_force["PYTORCH_CUDA_ALLOC_CONF"]
        settings["expandable_segments"] = in_force["expandable_segments"]
    return settings


def _cuda_problem() -> str:
    """Why torch cannot use a GPU, in torch's words; empty if it can."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return ""
    if caught:
        return str(caught[0].message)
    try:
        torch.cuda.init()
    except RuntimeError as error:
        return str(error)
    return "torch.cuda.is_available() is False; torch gives no reason"


def _version(distribution: str) -> str | None:
    return next((d.version for d in metadata.distributions(name=distribution)), None)


def start_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes() -> int | None:
    """Peak of allocated memory on the current device since `start_peak`; None without a device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def describe_peak() -> str:
    """Both peaks, for the detail of an out-of-memory outcome."""
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    device_bytes = device_peak_bytes()
    device = "" if device_bytes is None else f", {device_bytes / 1e9:.2f} GB on the device"
    return f"peak {host_bytes / 1e9:.2f} GB in the process{device}"
