"""Memory of the worker: on the device, and of its process."""

import resource

import torch


def start_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes() -> int | None:
    """Peak of allocated memory on the current device since `start_peak`; None without a device."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def describe_peak() -> str:
    """Both peaks, for the detail of an out-of-memory outcome."""
    host_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    parts = [f"peak {host_bytes / 1e9:.2f} GB in the process"]
    if (device := device_peak_bytes()) is not None:
        parts.append(f"{device / 1e9:.2f} GB on the device")
    return ", ".join(parts)
