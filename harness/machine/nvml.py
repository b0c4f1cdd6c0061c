"""NVML: the GPUs of this machine and readings of one, without a CUDA context.

Source: NVIDIA Management Library API reference, "Device Queries".
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pynvml

from harness.analysis.recorded import POWER_CAP, THROTTLE
from harness.errors import ProbeError
from harness.processes import family
from harness.records import Gpu, of_rank

Value = TypeVar("Value")

FOREIGN_EVERY_S = 1.0
"""Interval between counts of foreign processes; readings in between repeat the last count."""

PID_NAMESPACE = Path("/proc/self/ns/pid")
HOST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, <linux/proc_ns.h>

THROTTLE_REASONS: Mapping[int, str] = {
    0x001: "GPU idle",
    0x002: "application clocks set",
    **POWER_CAP,
    **THROTTLE,
    0x100: "display clocks set",
    0x200: "board limit",
    0x400: "reliability",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons, called throttle reasons by older drivers."""

IDLE = 0x001
SETTINGS = 0x002 | 0x100
"""Bits that a person sets: a steady limit of the clock, not a fault."""


def throttle_words(mask: int) -> tuple[str, ...]:
    """The throttle reasons of a bit mask in words; a number for an unknown bit."""
    return tuple(
        THROTTLE_REASONS.get(bit, f"reason {bit:#x}")
        for bit in (1 << i for i in range(mask.bit_length()))
        if mask & bit
    )


def gpus() -> tuple[Gpu, ...]:
    """All GPUs of this machine; a ProbeError if there is none."""
    with session():
        found = range(pynvml.nvmlDeviceGetCount())
        gpus = tuple(_describe(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in found)
    if not gpus:
        raise ProbeError("NVML lists no GPU")
    return gpus


def find(uuid: str) -> Gpu:
    """The GPU with this UUID; a ProbeError as of `handle`."""
    with session():
        return _describe(handle(uuid))


def free_bytes(uuid: str) -> int:
    with session():
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle(uuid)).free)


@contextmanager
def session() -> Iterator[None]:
    """NVML initialised; its errors become ProbeErrors."""
    try:
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise ProbeError(f"NVML: {error}") from error


def handle(uuid: str) -> object:
    """NVML's handle of the GPU with this UUID, or a ProbeError; NVML must be initialised."""
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError as error:
        raise ProbeError(f"NVML does not know GPU {uuid}: {error}") from error


def _describe(device: object) -> Gpu:
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()  # 13000 is 13.0
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
    return Gpu(
        name=pynvml.nvmlDeviceGetName(device),
        uuid=pynvml.nvmlDeviceGetUUID(device),
        index=pynvml.nvmlDeviceGetIndex(device),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(device).total,
        driver=pynvml.nvmlSystemGetDriverVersion(),
        cuda_driver=f"{cuda // 1000}.{cuda % 1000 // 10}",
        compute_capability=f"{major}.{minor}",
        power_limit_w=optional(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3),
        max_sm_clock_hz=optional(
            lambda: pynvml.nvmlDeviceGetMaxClockInfo(device, pynvml.NVML_CLOCK_SM) * 1e6
        ),
        default_power_limit_w=optional(
            lambda: pynvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1e3
        ),
    )


def optional(read: Callable[[], Value]) -> Value | None:
    """The answer of NVML, or None if it has none."""
    try:
        return read()
    except (pynvml.NVMLError, ProbeError):
        return None


# --- sampling ----------------------------------------------------------------------------


class NvmlProbe:
    """Reads one GPU while a worker uses it. `gpu_memory_bytes` excludes the reserve of the driver;
    `gpu_power_w` is the mean over one second from Ampere on, but the present value on the A100;
    `gpu_energy_j` counts from the start of the driver. The
    channels of the GPU of rank 1 are `gpu1_utilisation` and so on."""

    def __init__(self, uuid: str, *, rank: int = 0) -> None:
        """Open the GPU with this UUID; if that fails, every channel is unavailable."""
        self.uuid, self.rank = uuid, rank
        self.unavailable: dict[str, str] = {}
        self._readers: dict[str, Callable[[], float | None]] = {}
        self._limit_w: float | None = None
        self._worker: int | None = None
        self._foreign: float | None = None
        self._foreign_due_s = 0.0
        self._opened = ExitStack()
        try:
            pynvml.nvmlInit()
            self._opened.callback(pynvml.nvmlShutdown)
            device = handle(uuid)
        except (pynvml.NVMLError, ProbeError) as error:
            self.unavailable = dict.fromkeys(self._all_readers(None), str(error))
            return
        self._limit_w = optional(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3)
        for channel, read in self._all_readers(device).items():
            try:
                read()
            except (pynvml.NVMLError, ProbeError) as error:
                self.unavailable[channel] = str(error)
            else:
                self._readers[channel] = read

    def attach(self, pid: int) -> None:
        self._foreign_due_s = 0.0
        self._worker = pid

    def read(self) -> Mapping[str, float | None]:
        return {channel: optional(read) for channel, read in self._readers.items()}

    def use(self) -> tuple[float | None, float | None]:
        """GPU utilisation, and power as a share of its limit; None if unknown."""
        found = self.read()
        power_w, limit_w = found.get(of_rank("gpu_power_w", self.rank)), self._limit_w
        share = power_w / limit_w if power_w and limit_w else None
        return found.get(of_rank("gpu_utilisation", self.rank)), share

    def close(self) -> None:
        self._readers = {}  # NVML would fail from now on
        self._opened.close()

    def _all_readers(self, device: object) -> dict[str, Callable[[], float | None]]:
        core, clock = pynvml.NVML_TEMPERATURE_GPU, pynvml.NVML_CLOCK_SM
        readers = {
            "gpu_utilisation": lambda: pynvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "gpu_memory_bytes": lambda: used_bytes(device),
            "gpu_power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "gpu_energy_j": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(device) / 1e3,
            "gpu_sm_clock_hz": lambda: pynvml.nvmlDeviceGetClockInfo(device, clock) * 1e6,
            "gpu_temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(device, core),
            "gpu_throttle_reasons": lambda: throttle_reasons(device),
            "gpu_foreign_processes": lambda: self._foreign_processes(device),
        }
        return {of_rank(channel, self.rank): read for channel, read in readers.items()}

    def _foreign_processes(self, device: object) -> float | None:
        """Number of processes on the GPU, except this one and those of the worker."""
        now_s = time.monotonic()
        if now_s >= self._foreign_due_s:
            self._foreign_due_s = now_s + FOREIGN_EVERY_S
            self._foreign = None  # if the next lines fail
            ours = family(self._worker) if self._worker is not None else []
            own = {os.getpid(), *(process.pid for process in ours)}
            self._foreign = len({p.pid for p in processes(device)} - own)
        return self._foreign


def used_bytes(device: object) -> float:
    """Memory in use, without the reserve of the driver."""
    return float(pynvml.nvmlDeviceGetMemoryInfo(device, pynvml.nvmlMemory_v2).used)


def throttle_reasons(device: object) -> int:
    """Bits of THROTTLE_REASONS that apply now."""
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(device))
    except pynvml.NVMLError_FunctionNotFound:  # a driver before R535
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(device))


def processes(device: object) -> Sequence[Any]:
    """Processes that compute on the GPU, as NVML lists them; in a container, where it lists process
    ids of the host, or none, a ProbeError."""
    try:
        ids_are_ours = str(PID_NAMESPACE.readlink()) == HOST_PID_NAMESPACE
    except OSError:  # /proc is absent or incomplete
        ids_are_ours = False
    if not ids_are_ours:
        why = "NVML lists process ids of the host, but this container has ids of its own"
        raise ProbeError(why)
    return [*pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
