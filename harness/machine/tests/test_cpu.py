"""The instruments of the CPU, with real processes; and all instruments together."""

import os
import select
import subprocess
import time

import psutil
import pytest

from harness.machine import cpu, nvml
from harness.machine.cpu import CpuProbe
from harness.machine.probes import Probe, open_probes
from harness.tests.processes import running, wait_for

# --- the CPU probe -----------------------------------------------------------------------

BURN = """
import sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""


def watch(probe: CpuProbe, process: "subprocess.Popen[str]", until: str) -> float:
    """Core seconds the probe saw until the process printed a line; tells it to begin."""
    assert process.stdin is not None
    used_s, before = 0.0, time.monotonic()
    process.stdin.write("go\n")
    process.stdin.flush()
    done = False
    while not done:
        done = _readable(process)
        time.sleep(0.02)
        cores = probe.read()["cpu_utilisation"]
        now = time.monotonic()
        assert cores is not None
        assert cores >= 0
        used_s += cores * (now - before)
        before = now
    wait_for(process, until)
    return used_s


def _readable(process: "subprocess.Popen[str]") -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], 0)[0])


def test_cpu_time_is_counted_whole() -> None:
    """Summed over readings, so that a busy test machine changes nothing."""
    script = (
        BURN + "print('up', flush=True); input(); burn(0.4); print('done', flush=True); input()"
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")

    assert used_s == pytest.approx(0.4, abs=0.06)


def test_children_that_come_and_go_are_counted() -> None:
    """More often than the family is searched for: most are never seen alive."""
    script = (
        BURN
        + """
import os
print('up', flush=True); input()
for _ in range(4):
    child = os.fork()
    if not child:
        burn(0.1)
        os._exit(0)
    os.waitpid(child, 0)
print('done', flush=True); input()
"""
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")

    assert used_s == pytest.approx(0.4, abs=0.08)


def test_cpu_time_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent that ignores SIGCHLD never learns its child's time: the tree's total falls."""
    monkeypatch.setattr(cpu, "REFRESH_S", 0.0)
    script = (
        BURN
        + """
import os, signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print('up', flush=True); input()
if not os.fork():
    burn(0.3)
    os._exit(0)
try:
    os.wait()
except ChildProcessError:
    print('done', flush=True); input()
"""
    )
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        used_s = watch(probe, process, "done")  # asserts that no reading is negative

    assert used_s > 0.2


def test_memory_of_children_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "REFRESH_S", 0.0)
    script = """
import os, sys
if os.fork():
    os.wait()
else:
    held = bytearray(os.urandom(1)) * 60_000_000
    print('up', flush=True)
    sys.stdin.read()
"""
    with running(script) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)

        reading = probe.read()["rss_bytes"]

    assert reading is not None
    assert reading > 60e6


def test_a_dead_worker_reads_as_none() -> None:
    nothing = {"cpu_utilisation": None, "rss_bytes": None}
    probe = CpuProbe()
    assert probe.read() == nothing, "not attached yet"
    with running("print('up', flush=True); input()") as process:
        wait_for(process, "up")
        probe.attach(process.pid)
        assert probe.read()["rss_bytes"]

        process.kill()
        deadline = time.monotonic() + 5
        while probe.read() != nothing and time.monotonic() < deadline:
            time.sleep(0.01)

        assert probe.read() == nothing, "a zombie, not waited for"
    assert probe.read() == nothing
    probe.attach(process.pid)
    assert probe.read() == nothing, "attached too late"


def test_attach_begins_anew() -> None:
    idle = "print('up', flush=True); input()"
    busy = BURN + "burn(0.3); print('up', flush=True); input()"
    with running(busy) as first, running(idle) as second, running(busy) as third:
        probe = CpuProbe()
        for process in (first, second, third):
            wait_for(process, "up")
            probe.attach(process.pid)
            time.sleep(0.05)

            reading = probe.read()

            assert reading["cpu_utilisation"] == pytest.approx(0, abs=0.4)
            own = psutil.Process(process.pid).memory_info().rss
            assert reading["rss_bytes"] == pytest.approx(own, rel=0.1)


def test_a_reading_is_cheap_enough_for_twenty_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search = psutil.Process.children

    def counted(process: psutil.Process, *, recursive: bool) -> list[psutil.Process]:
        searches.append(process)
        return search(process, recursive=recursive)

    monkeypatch.setattr(psutil.Process, "children", counted)
    probe = CpuProbe()
    probe.attach(os.getpid())
    before_s = time.process_time()

    for _ in range(100):
        probe.read()

    assert (time.process_time() - before_s) / 100 < 0.0025  # 5 % of a core
    assert len(searches) <= 2, "the whole machine is searched only now and then"


# --- together with that of NVML ----------------------------------------------------------


def test_the_probes_cover_every_channel_of_the_telemetry() -> None:
    opened: tuple[Probe, ...] = open_probes(None, why="because")

    channels = {name for probe in opened for name in (*probe.unavailable, *probe.read())}

    assert channels == {*nvml.CHANNELS, "cpu_utilisation", "rss_bytes"}
    assert {why for probe in opened for why in probe.unavailable.values()} == {"because"}
