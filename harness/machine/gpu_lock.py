"""One harness per GPU: two at once would measure each other.

The lock is an flock on one file per GPU (UUID) that all users of the machine share; the kernel
releases it however its holder ends. The content of the file only names the holder. Runs on the CPU
take no lock; `harness doctor` checks the load of the machine.
"""

import fcntl
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from harness.errors import ProbeError

FOLDER = Path("/tmp")
"""The same for all users and sessions, independent of TMPDIR, and emptied at boot."""
POLL_S = 0.2
NOTE_BYTES = 4096


class GpuLock:
    """Keeps every other harness off a GPU, until the context ends."""

    def __init__(
        self,
        uuid: str,
        *,
        wait_s: float = 0.0,
        folder: Path | None = None,
        waiting: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Take the lock.

        Args:
            uuid: The GPU's.
            wait_s: Longest wait for another holder.
            folder: Where the lock files are; FOLDER if None.
            waiting: Receives one message before a wait.

        Raises:
            ProbeError: Another harness holds the GPU, or the lock file cannot be made.
        """
        self.uuid = uuid
        self.path = (folder or FOLDER) / f"harness-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
        self._fd = _open(self.path)
        try:
            self._take(wait_s, waiting)
            self.describe("")
        except BaseException:  # also Ctrl-C: the lock would stay taken
            self.release()
            raise

    def describe(self, run_id: str) -> None:
        """Write holder and run into the file."""
        run = f", run {run_id}" if run_id else ""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()}{run}, since {since}".encode(), 0)

    def release(self) -> None:
        """Release the GPU. The file stays: another harness may be opening it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _take(self, wait_s: float, waiting: Callable[[str], None]) -> None:
        deadline, announced = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    waited = f" after {wait_s:g} s of waiting" if wait_s else ""
                    raise ProbeError(
                        f"GPU {self.uuid} is held by another harness{waited}: {self._holder()}",
                        "Wait with --wait-for-gpu SECONDS, or choose another GPU with "
                        "CUDA_VISIBLE_DEVICES.",
                    ) from None
                if not announced:
                    waiting(f"GPU {self.uuid} is held by {self._holder()}; waiting")
                    announced = True
                time.sleep(POLL_S)
            else:
                return

    def _holder(self) -> str:
        note = os.pread(self._fd, NOTE_BYTES, 0).decode(errors="replace")
        return note or "a process that has not written its name yet"


def _open(path: Path) -> int:
    """The lock file, made if absent; every user may lock it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        with suppress(FileNotFoundError):
            return os.open(path, flags)  # O_CREAT fails on another user's file in a sticky folder
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another harness made it first
            return os.open(path, flags)
        os.fchmod(fd, 0o666)  # the umask does not apply here
    except OSError as error:
        raise ProbeError(
            f"the GPU cannot be locked: {path}: {error.strerror}",
            "Make the file readable and writable for every user, or remove it.",
        ) from error
    return fd
