"""Who uses the GPU between two workers, by NVML."""

from types import TracebackType
from typing import Self

import psutil
import pynvml

from harness.errors import ProbeError
from harness.probes import GpuUse, nvml


class NvmlMeter:
    """Reads one GPU, by UUID. A context: leaving it lets go of NVML."""

    def __init__(self, uuid: str) -> None:
        """Open NVML.

        Raises:
            ProbeError: It does not work here, or knows no such GPU.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise ProbeError(f"NVML: {error}") from error
        try:
            self._device = nvml.handle(uuid)
        except ProbeError:
            pynvml.nvmlShutdown()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pynvml.nvmlShutdown()

    def use(self) -> GpuUse:
        """What is seen now; what cannot be read is left open."""
        return GpuUse(
            used_bytes=self._used_bytes(),
            processes=self._processes(),
            throttled_by=self._throttled_by(),
        )

    def _used_bytes(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetMemoryInfo(self._device, pynvml.nvmlMemory_v2).used)
        except pynvml.NVMLError:
            return None

    def _processes(self) -> dict[int, str] | None:
        if not nvml.sees_host_ids():
            return None
        try:
            found = pynvml.nvmlDeviceGetComputeRunningProcesses(self._device)
        except pynvml.NVMLError:
            return None
        return {p.pid: _describe(p.pid, p.usedGpuMemory) for p in found}

    def _throttled_by(self) -> tuple[str, ...]:
        try:
            mask = nvml.throttle_reasons(self._device)
        except pynvml.NVMLError:
            return ()
        return nvml.throttle_words(mask & ~(nvml.IDLE | nvml.SETTINGS))


def _describe(pid: int, used_bytes: int | None) -> str:
    """A process in words. It may be another user's, or gone by now."""
    try:
        with (process := psutil.Process(pid)).oneshot():
            what = f"{process.name()} of {process.username()}"
    except psutil.Error:
        what = "of which nothing can be read"
    holds = "" if used_bytes is None else f", {used_bytes / 1e9:.2f} GB"
    return f"process {pid} ({what}){holds}"
