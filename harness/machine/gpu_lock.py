"""One harness per GPU: two at once would measure each other.

The lock is one file per GPU (UUID) that all users of the machine share; the kernel releases it
however its holder ends. The content of the file only names the holder. Runs on the CPU take no
lock; `harness doctor` checks the load of the machine.
"""

import os
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import ProbeError

FOLDER = Path("/tmp")
"""The same for all users and sessions, independent of TMPDIR, and emptied at boot."""
POLL_S = 0.2


class GpuLock(AbstractContextManager["GpuLock"]):
    """Keeps every other harness off a GPU, until the context ends."""

    def __init__(
        self,
        uuid: str,
        *,
        wait_s: float = 0.0,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the lock, or raise a ProbeError; `waiting` receives one message before a wait."""
        self.uuid = uuid
        self.path = FOLDER / f"harness-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
        self._lock = FileLock(self.path, mode=0o666, poll_interval=POLL_S)  # for every user
        try:
            with suppress(Timeout):
                self._lock.acquire(timeout=0.0)
            if wait_s and not self._lock.is_locked:
                waiting(f"GPU {uuid} is held by {self._holder()}; waiting up to {wait_s:g} s")
                with suppress(Timeout):
                    self._lock.acquire(timeout=wait_s)
            if not self._lock.is_locked:
                raise ProbeError(
                    f"GPU {uuid} is held by another harness: {self._holder()}",
                    "Wait with --wait-for-gpu SECONDS, or choose another GPU with "
                    "CUDA_VISIBLE_DEVICES.",
                )
            self.describe("")
        except OSError as error:
            problem = f"the GPU cannot be locked: {self.path}: {error.strerror}"
            remedy = "Make the file readable and writable for every user, or remove it."
            raise ProbeError(problem, remedy) from error

    def describe(self, run_id: str) -> None:
        """Write holder and run into the file."""
        run = f", run {run_id}" if run_id else ""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        with self.path.open("r+", encoding="utf-8") as file:
            file.truncate()
            file.write(f"process {os.getpid()}{run}, since {since}")

    def __exit__(self, *_: object) -> None:
        self._lock.release()  # the file stays: another harness may be opening it

    def _holder(self) -> str:
        return self.path.read_text("utf-8") or "a process that has not written its name yet"
