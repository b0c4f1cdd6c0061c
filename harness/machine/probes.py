"""The probes that the parent reads while a worker runs: NVML and CPU."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import psutil

from harness.machine.nvml import NvmlProbe
from harness.processes import family
from harness.records import Gpu

REFRESH_S = 0.5
"""Interval between searches for new children; a search reads every process of the machine."""


class Probe(Protocol):
    """Reads some channels of records.Telemetry, ten times a second or more: a reading is cheap."""

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Channels that this probe should read but cannot, and why."""

    def attach(self, pid: int) -> None:
        """Watch a worker from now on: `pid` and its descendants are ours, others are foreign."""

    def read(self) -> Mapping[str, float | None]:
        """One reading of every available channel; None where it failed."""

    def close(self) -> None:
        """Release what the probe uses."""


def open_probes(gpus: Sequence[Gpu]) -> tuple[Probe, ...]:
    """The probes of each rank's GPU and of the CPU; close each when the run ends."""
    return *(NvmlProbe(gpu.uuid, rank=rank) for rank, gpu in enumerate(gpus)), CpuProbe()


class CpuProbe:
    """Reads the process tree of a worker. `cpu_utilisation` is in cores since the last reading; the
    kernel resolves 1/100 s. `rss_bytes` is the sum over the tree; shared memory counts once per
    process."""

    unavailable: Mapping[str, str] = {}

    def __init__(self) -> None:
        self._worker: psutil.Process | None = None
        self._tree: dict[int, psutil.Process] = {}
        self._cpu_s = 0.0
        self._read_at_s = 0.0
        self._refresh_due_s = 0.0

    def attach(self, pid: int) -> None:
        self._tree = {}
        self._refresh_due_s = 0.0
        try:
            self._worker = psutil.Process(pid)
        except psutil.NoSuchProcess:
            self._worker = None
            return
        self._read_at_s = time.monotonic()
        self._cpu_s, _ = self._totals(self._read_at_s)

    def read(self) -> Mapping[str, float | None]:
        now_s = time.monotonic()
        if self._worker is None or not _alive(self._worker):
            return {"cpu_utilisation": None, "rss_bytes": None}
        cpu_s, rss_bytes = self._totals(now_s)
        elapsed_s = now_s - self._read_at_s
        # The time of a child is lost if its parent ignores SIGCHLD; the difference may be negative.
        used_s = max(0.0, cpu_s - self._cpu_s)
        self._cpu_s, self._read_at_s = cpu_s, now_s
        return {
            "cpu_utilisation": used_s / elapsed_s if elapsed_s > 0 else None,
            "rss_bytes": float(rss_bytes),
        }

    def close(self) -> None:
        self._worker = None
        self._tree = {}

    def _totals(self, now_s: float) -> tuple[float, int]:
        """CPU time in seconds, including children that ended, and resident bytes of the tree."""
        assert self._worker is not None
        if now_s >= self._refresh_due_s:
            self._refresh_due_s = now_s + REFRESH_S
            # A known process stays in the tree when its parent ends.
            self._tree = {pid: p for pid, p in self._tree.items() if p.is_running()}
            for process in family(self._worker.pid):
                self._tree.setdefault(process.pid, process)
        cpu_s, rss_bytes = 0.0, 0
        for process in self._tree.values():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                cpu_s += sum(process.cpu_times()[:4])  # with children that ended
                rss_bytes += process.memory_info().rss
        return cpu_s, rss_bytes


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
