"""NVML with the answers of an H200, recorded."""

from collections import Counter
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import pynvml

UUID = "GPU-b7bfa17a-3f14-3ac1-4106-fc1938c284ab"
OTHER_UUID = "GPU-b7bf0000-0000-0000-0000-000000000000"


class FakeNvml:
    """pynvml with the answers of an H200; `fails` makes functions raise instead.

    Constants and errors are the real ones, so a name that pynvml lacks fails here as well.
    """

    def __init__(self) -> None:
        self.open_sessions = 0
        self.calls: Counter[str] = Counter()
        self.fails: dict[str, pynvml.NVMLError] = {}
        self.names = ["NVIDIA H200"]
        self.uuids = [UUID, OTHER_UUID]
        self.pids: list[int] = []
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: self._count(1),
            "nvmlShutdown": lambda: self._count(-1),
            "nvmlSystemGetDriverVersion": lambda: "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13000,
            "nvmlDeviceGetCount": lambda: len(self.names),
            "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetHandleByUUID": self._by_uuid,
            "nvmlDeviceGetIndex": lambda device: device,
            "nvmlDeviceGetName": lambda device: self.names[device],
            "nvmlDeviceGetUUID": lambda device: self.uuids[device],
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetCudaComputeCapability": lambda device: (9, 0),
            "nvmlDeviceGetEnforcedPowerLimit": lambda device: 700000,
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda device: 700000,
            "nvmlDeviceGetMaxClockInfo": lambda device, clock: 1980,
            "nvmlDeviceGetUtilizationRates": lambda device: SimpleNamespace(gpu=98, memory=40),
            "nvmlDeviceGetPowerUsage": lambda device: 117915,
            "nvmlDeviceGetTotalEnergyConsumption": lambda device: 6_500_000,
            "nvmlDeviceGetClockInfo": lambda device, clock: 405,
            "nvmlDeviceGetTemperature": lambda device, sensor: 31,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda device: 0x24,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda device: 0x4,
            "nvmlDeviceGetComputeRunningProcesses": lambda device: [
                SimpleNamespace(pid=pid) for pid in self.pids
            ],
        }

    def __getattr__(self, name: str) -> Any:
        real = getattr(pynvml, name)
        if not isinstance(real, FunctionType):
            return real

        def call(*args: object) -> object:
            self.calls[name] += 1
            if name in self.fails:
                raise self.fails[name]
            return self.answers[name](*args)

        return call

    def _count(self, change: int) -> None:
        self.open_sessions += change

    def _by_uuid(self, uuid: str) -> int:
        if uuid not in self.uuids[: len(self.names)]:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.uuids.index(uuid)

    def _memory(self, device: int, version: int | None = None) -> SimpleNamespace:
        used = 3870097408 + (0 if version == pynvml.nvmlMemory_v2 else 644939776)
        return SimpleNamespace(total=150754820096, used=used)


def nvml_error(code: str) -> pynvml.NVMLError:
    return pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{code}"))
