"""Faults of the parent, of two parents and of their disk.

No measurement is lost or recorded twice.
"""

import errno
import os
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.errors import HarnessError, ProbeError, StoreError
from harness.machine import gpu_lock
from harness.runner.rig import Rig
from harness.store import lines, reader
from harness.store import writer as store_writer
from harness.tests.processes import running, wait_for
from harness.tests.small_run import ENVIRONMENT, SUITE, measured

FACTS = {"torch_settings": {"device": "cuda"}, "gpu_uuids": ["GPU-used", "GPU-other"]}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "FOLDER", tmp_path)


def free(uuid: str) -> bool:
    try:
        with gpu_lock.GpuLock(uuid):
            return True
    except ProbeError:
        return False


# --- of two parents ----------------------------------------------------------------------

HOLD = """
import pathlib, sys, time
from harness.machine import gpu_lock
gpu_lock.FOLDER = pathlib.Path(sys.argv[1])
lock = gpu_lock.GpuLock('GPU-1')
lock.describe('20261121-smoke')
print('held', flush=True)
time.sleep(3600)
"""


def test_a_second_harness_on_a_gpu_is_refused_or_waits_until_a_killed_holder_lets_go(
    tmp_path: Path,
) -> None:
    said: list[str] = []

    def waiting(text: str) -> None:
        said.append(text)
        other.kill()

    with running(HOLD, str(tmp_path), how="-c") as other:
        wait_for(other, "held")
        assert free("GPU-2")
        with pytest.raises(ProbeError) as refused:
            gpu_lock.GpuLock("GPU-1")
        with gpu_lock.GpuLock("GPU-1", wait_s=20, waiting=waiting) as lock:
            holder = lock.path.read_text()

    held = f"held by another harness: process {other.pid}, run 20261121-smoke, since 20"
    assert held in str(refused.value)
    assert "--wait-for-gpu" in str(refused.value)
    assert len(said) == 1
    assert f"process {os.getpid()}, since 20" in holder
    assert free("GPU-1")


def test_a_lock_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "harness-GPU-1.lock").mkdir()

    with pytest.raises(ProbeError, match=r"cannot be locked.*Is a directory"):
        gpu_lock.GpuLock("GPU-1")


def test_a_run_holds_the_gpu_of_its_workers_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run on the CPU holds none, and neither does one that only counts."""
    monkeypatch.setattr("harness.machine.environment.capture", lambda *_, **__: ENVIRONMENT)
    said: list[str] = []

    def described(rig: Rig) -> None:
        rig.launcher = Mock(describe=lambda: FACTS)
        rig.describe(SUITE, command=(), repository=None)

    with Rig(say=said.append) as rig:
        described(rig)
        described(rig)  # as both sides of a gate
        assert (free("GPU-used"), free("GPU-other")) == (False, True)
        rig.measures("20261121-smoke")
        assert "run 20261121-smoke" in (tmp_path / "harness-GPU-used.lock").read_text()
    assert free("GPU-used")
    with gpu_lock.GpuLock("GPU-used"), pytest.raises(ProbeError, match="another harness"):
        described(Rig(say=said.append))
    for unlocked in (Rig("cpu", say=said.append), Rig(say=said.append, alone=False)):
        with unlocked:
            described(unlocked)
            assert free("GPU-used")
    assert said == []


def test_a_child_does_not_inherit_the_lock() -> None:
    """An orphan would keep it after the harness ends."""
    with gpu_lock.GpuLock("GPU-1"):
        child = subprocess.Popen(["sleep", "60"], close_fds=False)
    with child:
        try:
            assert free("GPU-1")
        finally:
            child.kill()


def test_two_parents_that_draw_one_id_do_not_share_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "dated", lambda *_: "drawn")

    with store_writer.create(tmp_path, SUITE, ENVIRONMENT) as one:
        one.append(measured(0))
        with pytest.raises(StoreError, match="drawn: File exists"):
            store_writer.create(tmp_path, SUITE, ENVIRONMENT)

    assert reader.load(tmp_path, "drawn").measurements == (measured(0),)


# --- of the disk -------------------------------------------------------------------------


def test_a_read_only_store_is_one_clear_error_and_the_record_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_writer.create(tmp_path, SUITE, ENVIRONMENT) as writer:
        writer.append(measured(0))

    def read_only(path: object, flags: int, *_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", read_only)
        with pytest.raises(HarnessError, match="Read-only file system\n  Copy the run"):
            store_writer.resume(tmp_path, writer.run_id)

    assert reader.load(tmp_path, writer.run_id).measurements == (measured(0),)
