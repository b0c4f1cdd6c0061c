"""The CPU probe with real processes."""

import select
import time
from types import SimpleNamespace

import psutil
import pytest

from harness.machine import probes
from harness.machine.probes import CpuProbe
from harness.tests.processes import running, wait_for

BURN = """
import os, signal, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
"""
CHILDREN = """
print('up', flush=True); input()
burn(0.1)
for _ in range(2):
    child = os.fork()
    if not child:
        burn(0.1)
        os._exit(0)
    os.waitpid(child, 0)
print('done', flush=True); input()
"""
IDLE = "print('up', flush=True); input()"


def test_all_cpu_time_counts_also_of_children_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that both read: on a busy machine, time passes between two looks at one."""
    before = time.monotonic()
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: before))
    with running(BURN + CHILDREN) as process:
        wait_for(process, "up")
        probe = CpuProbe()
        probe.attach(process.pid)
        assert process.stdin
        assert process.stdout
        used_s = 0.0
        process.stdin.write("go\n")
        process.stdin.flush()
        done = False
        while not done:
            done = bool(select.select([process.stdout], [], [], 0.02)[0])
            last, before = before, time.monotonic()
            cores = probe.read()["cpu_utilisation"]
            assert cores is not None
            assert cores >= 0
            used_s += cores * (before - last)
        wait_for(process, "done")

    assert used_s == pytest.approx(0.3, abs=0.07)


def test_memory_of_children_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "REFRESH_S", 0.0)
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

        assert (probe.read()["rss_bytes"] or 0) > 60e6


def test_a_dead_worker_reads_as_none() -> None:
    nothing = dict.fromkeys(("cpu_utilisation", "rss_bytes"))
    probe = CpuProbe()
    assert probe.read() == nothing, "not attached yet"
    with running(IDLE) as process:
        wait_for(process, "up")
        probe.attach(process.pid)
        assert probe.read()["rss_bytes"]

        process.kill()
        deadline = time.monotonic() + 5
        while probe.read() != nothing and time.monotonic() < deadline:
            time.sleep(0.01)

        assert probe.read() == nothing, "a zombie"
    assert probe.read() == nothing
    probe.attach(process.pid)
    assert probe.read() == nothing, "attached too late"


def test_attach_starts_from_zero() -> None:
    busy = BURN + "burn(0.2); print('up', flush=True); input()"
    probe = CpuProbe()
    with running(busy) as first, running(IDLE) as second:
        for process in (first, second):
            wait_for(process, "up")
            probe.attach(process.pid)
            time.sleep(0.05)

            reading = probe.read()

            assert reading["cpu_utilisation"] == pytest.approx(0, abs=0.4)
            own = psutil.Process(process.pid).memory_info().rss
            assert reading["rss_bytes"] == pytest.approx(own, rel=0.1)
