"""Reads the probes at a fixed interval while a worker runs."""

import time
from collections.abc import Mapping, Sequence

from harness.machine.probes import Probe
from harness.records import Telemetry
from harness.runner.launcher import Worker

PROBE_INTERVAL_S = 0.05


class Recorder:
    """The readings during one worker's life."""

    def __init__(self, probes: Sequence[Probe], worker: Worker) -> None:
        self._probes = probes
        self._launched_at = worker.launched_at
        self._readings: list[tuple[float, Mapping[str, float | None]]] = []
        self.next_at = time.monotonic()
        """time.monotonic of the next reading."""
        for probe in probes:
            probe.attach(worker.pid)

    def read_if_due(self) -> float:
        """Read every probe if a reading is due; returns the time.monotonic of the next one."""
        now = time.monotonic()
        if now >= self.next_at:
            reading = {name: value for p in self._probes for name, value in p.read().items()}
            self._readings.append((now - self._launched_at, reading))
            # A late reading delays the next ones, so that no burst follows.
            self.next_at = max(self.next_at, now - PROBE_INTERVAL_S) + PROBE_INTERVAL_S
        return self.next_at

    def telemetry(self) -> Telemetry:
        """All readings so far, by channel."""
        names = {name: None for _, reading in self._readings for name in reading}
        return Telemetry(
            t_s=tuple(t_s for t_s, _ in self._readings),
            channels={
                name: tuple(reading.get(name) for _, reading in self._readings) for name in names
            },
            unavailable={
                name: why for probe in self._probes for name, why in probe.unavailable.items()
            },
        )
