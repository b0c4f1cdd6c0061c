"""How much memory the worker used: on the device, and in the process."""

import resource

import torch


def start_peak() -> None:
    """Forget the device's peak so far; the next `device_peak_bytes` counts from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def device_peak_bytes() -> int | None:
    """Largest sum of live tensors on the current device since `start_peak`; None without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def host_peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def describe_peak() -> str:
    """How far memory use had gone, in words, for the detail of an out-of-memory outcome."""
    parts = [f"peak {host_peak_bytes() / 1e9:.2f} GB in the process"]
    if (device := device_peak_bytes()) is not None:
        parts.append(f"{device / 1e9:.2f} GB on the device")
    return ", ".join(parts)


def release_cached() -> None:
    """Give the allocator's free blocks back to the device, so that a run starts unfragmented."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
