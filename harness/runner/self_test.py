"""Parent side: a worker runs the self-test of clocks and counters; the parent reads the probes."""

import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from harness.analysis import self_test
from harness.machine.probes import Probe
from harness.messages import Garbled, Message, MessageReader, PhaseBegan, SelfTested
from harness.records import Gpu, Phase, SelfTest, SelfTestCheck, SelfTestReadings
from harness.runner.launcher import Launcher, last_line
from harness.runner.telemetry import Recorder

LIMIT_S = 60.0
"""Longest time for the self-test; it takes under 4 s."""


def run_self_test(launcher: Launcher, probes: Sequence[Probe], gpu: Gpu | None) -> SelfTest:
    """Run the self-test in a worker; nothing else may run at the same time.

    Args:
        launcher: Starts the worker.
        probes: Read during the test, as while a case is measured.
        gpu: The GPU of the run.
    """
    began, at = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    received: list[Message] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        worker = launcher.self_test(log)
        problem = ""
        try:
            recorder = Recorder(probes, worker)
            reader = MessageReader(worker.answers)
            while not reader.at_end and time.monotonic() - began < LIMIT_S:
                worker.wait(seconds=recorder.next_at - time.monotonic())
                recorder.read_if_due()
                reader.drain(received.append)
        except Garbled as error:
            problem = f"the worker's answer is garbled: {error}"
        finally:
            worker.end()
        readings = next((m.readings for m in received if isinstance(m, SelfTested)), None)
        checks: tuple[SelfTestCheck, ...]
        if readings is None or problem:
            problem = problem or last_line(log.read_bytes())
            checks = (
                SelfTestCheck(name="worker", holds=False, fact=f"it did not answer: {problem}"),
            )
        else:
            phases = _phases(received, worker.launched_at)
            checks = self_test.judge(readings, phases, recorder.telemetry(), cuda=gpu is not None)
    return SelfTest(
        at=at,
        device=gpu.uuid if gpu else "cpu",
        checks=checks,
        peaks=(readings or _NOTHING).peaks,
        wall_s=time.monotonic() - began,
    )


def skipped_self_test(gpu: Gpu | None, why: str) -> SelfTest:
    """The record of a skipped self-test."""
    return SelfTest(
        at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        device=gpu.uuid if gpu else "cpu",
        skipped=why,
    )


_NOTHING = SelfTestReadings(waits_s=(0.0, 0.0), host_s=(0.0, 0.0), burn_cpu_s=0.0)


def _phases(received: Sequence[Message], launched_at: float) -> tuple[Phase, ...]:
    """The worker's phases end to end, without the last one, which has no end."""
    begins = [m for m in received if isinstance(m, PhaseBegan)]
    return tuple(
        Phase(name=one.name, start_s=one.at - launched_at, end_s=following.at - launched_at)
        for one, following in pairwise(begins)
    )
