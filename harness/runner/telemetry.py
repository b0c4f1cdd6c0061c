"""What the parent reads while a worker runs: the probes at a fixed interval, and what a silent
worker and everything it started do."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

import psutil

from harness.analysis.recorded import LAG_S
from harness.machine.nvml import NvmlProbe
from harness.machine.probes import Probe
from harness.processes import family
from harness.records import ActivitySample, Case, Telemetry
from harness.runner.forkserver import Worker

PROBE_INTERVAL_S = 0.05
_IS_USE = re.compile(r"gpu\d*_utilisation")


def gpus_of(case: Case) -> int:
    """The GPUs of a node with GPUs that a case uses, at least one."""
    return max(1, case.program.needs_gpus("cuda") if case.program else 1)


def of_case(probes: Sequence[Probe], case: Case) -> tuple[Probe, ...]:
    """The probes of what a case uses: of the GPUs, one for each that it needs."""
    return tuple(p for p in probes if not isinstance(p, NvmlProbe) or p.rank < gpus_of(case))


class Recorder:
    """The readings during one worker's life."""

    def __init__(self, probes: Sequence[Probe], worker: Worker) -> None:
        self._probes = probes
        self._worker = worker
        self._readings: list[tuple[float, Mapping[str, float | None]]] = []
        self.next_at = time.monotonic()
        """time.monotonic of the next reading."""
        self.gpu_used_at: float | None = None
        """time.monotonic of the first reading that shows its own use of a GPU."""
        for probe in probes:
            probe.attach(worker.pid)

    def read_if_due(self) -> float:
        """Read every probe if a reading is due; returns the time.monotonic of the next one."""
        now = time.monotonic()
        if now >= self.next_at:
            reading = {name: value for p in self._probes for name, value in p.read().items()}
            self._readings.append((now - self._worker.launched_at, reading))
            before = now - self._worker.launched_at < LAG_S["gpu_utilisation"]  # of another process
            shared = any(v for name, v in reading.items() if name.endswith("_foreign_processes"))
            used = any(v for name, v in reading.items() if _IS_USE.fullmatch(name))
            if self.gpu_used_at is None and used and not (before or shared):
                self.gpu_used_at = now
            # A late reading delays the next ones, so that no burst follows.
            self.next_at = max(self.next_at, now - PROBE_INTERVAL_S) + PROBE_INTERVAL_S
        return self.next_at

    def telemetry(self) -> Telemetry:
        """All readings so far, by channel."""
        names = {name: None for _, reading in self._readings for name in reading}
        return Telemetry(
            t_s=tuple(t_s for t_s, _ in self._readings),
            channels={n: tuple(reading.get(n) for _, reading in self._readings) for n in names},
            unavailable={n: why for probe in self._probes for n, why in probe.unavailable.items()},
        )

    def sample(self) -> ActivitySample:
        """What the worker, and everything it started, has done up to now."""
        cpu_s, io_bytes, rss_bytes = 0.0, 0, 0
        states: set[str] = set()
        for process in family(self._worker.pid):
            with suppress(psutil.Error), process.oneshot():
                cpu_s += sum(process.cpu_times()[:4])  # with children that ended
                rss_bytes += process.memory_info().rss
                states.add(process.status())
                io = process.io_counters()  # last: it may not be readable
                io_bytes += io.read_chars + io.write_chars
        # A rank that waits for another one keeps its GPU busy, so the busiest GPU counts.
        uses = [probe.use() for probe in self._probes if isinstance(probe, NvmlProbe)]
        return ActivitySample(
            at_s=time.monotonic() - self._worker.launched_at,
            cpu_s=cpu_s,
            io_bytes=io_bytes,
            rss_bytes=rss_bytes,
            states=tuple(sorted(states)),
            gpu_utilisation=max((used for used, _ in uses if used is not None), default=None),
            gpu_power=max((drawn for _, drawn in uses if drawn is not None), default=None),
        )
