"""Parent side: a worker runs the self-test of clocks and counters; the parent reads the probes."""

import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from harness.analysis import self_test
from harness.machine.probes import Probe
from harness.messages import Message, PhaseBegan, SelfTested
from harness.records import Gpu, Peaks, Phase, SelfTest, SelfTestCheck
from harness.runner.forkserver import said_last
from harness.runner.launcher import Launcher
from harness.runner.telemetry import Recorder

LIMIT_S = 60.0
"""Longest time for the self-test; it takes under 4 s."""


def run_self_test(launcher: Launcher, probes: Sequence[Probe], gpu: Gpu | None) -> SelfTest:
    """Run the self-test in a worker, with the probes; nothing else may run at the same time."""
    began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        worker = launcher.self_test(log)
        recorder = Recorder(probes, worker)
        received = worker.converse(LIMIT_S, recorder.read_if_due)
        said = said_last(log)
    readings = next((m.readings for m in received if isinstance(m, SelfTested)), None)
    checks: tuple[SelfTestCheck, ...]
    if readings is None:
        checks = (SelfTestCheck(name="worker", holds=False, fact=f"it did not answer: {said}"),)
    else:
        phases = _phases(received, worker.launched_at)
        checks = self_test.judge(readings, phases, recorder.telemetry(), cuda=gpu is not None)
    return SelfTest(
        at=at,
        device=gpu.uuid if gpu else "cpu",
        checks=checks,
        peaks=readings.peaks if readings else Peaks(),
        wall_s=time.monotonic() - began,
    )


def skipped_self_test(gpu: Gpu | None, why: str) -> SelfTest:
    return SelfTest(
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        device=gpu.uuid if gpu else "cpu",
        skipped=why,
    )


def _phases(received: Sequence[Message], launched_at: float) -> tuple[Phase, ...]:
    """The worker's phases end to end, without the last one, which has no end."""
    begins = [m for m in received if isinstance(m, PhaseBegan)]
    return tuple(
        Phase(name=one.name, start_s=one.at - launched_at, end_s=following.at - launched_at)
        for one, following in pairwise(begins)
    )
