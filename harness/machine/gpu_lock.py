"""One harness per GPU: two at once would measure each other.

The lock is a file per GPU, by UUID, in a place that every user of the machine shares, and is held
by flock: the kernel lets go of it however its holder ends. What stands in the file only says who
that is. Runs on the CPU lock nothing: they share the machine with everything else anyway, and
`harness doctor` looks at its load.
"""

import fcntl
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from harness.errors import ProbeError

FOLDER = Path("/tmp")
"""The same for all users and sessions, whatever TMPDIR says, and emptied at boot."""
POLL_S = 0.2
NOTE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who has the GPU, by its own account."""

    pid: int
    run_id: str = ""
    """Empty until its run has begun."""
    since: str = ""
    """ISO 8601, UTC."""

    def __str__(self) -> str:
        run = f", run {self.run_id}" if self.run_id else ""
        return f"process {self.pid}{run}, since {self.since}"


class GpuLock:
    """Holds a GPU against every other harness. A context: leaving it lets go."""

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
            wait_s: How long to wait for whoever has it.
            folder: Where the lock files are; FOLDER if None.
            waiting: Told once, before the wait, who has it.

        Raises:
            ProbeError: Another harness has the GPU; or no lock file can be made.
        """
        self.uuid = uuid
        self.path = (folder or FOLDER) / f"harness-{re.sub(r'[^A-Za-z0-9-]', '_', uuid)}.lock"
        self._fd = _open(self.path)
        try:
            self._take(wait_s, waiting)
            self.describe("")
        except BaseException:  # Ctrl-C included: the lock would be held on
            self.release()
            raise

    def describe(self, run_id: str) -> None:
        """Write into the file who holds the GPU, and for which run."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        note = json.dumps(asdict(Holder(pid=os.getpid(), run_id=run_id, since=since))).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, note, 0)

    def release(self) -> None:
        """Let go of the GPU. The file stays: removing it would race with who opens it now."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _take(self, wait_s: float, waiting: Callable[[str], None]) -> None:
        deadline, told = time.monotonic() + wait_s, False
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    waited = f" after {wait_s:g} s of waiting" if wait_s else ""
                    raise ProbeError(
                        f"GPU {self.uuid} is held by another harness{waited}: {self._holder()}",
                        "Wait for it with --wait-for-gpu SECONDS, or choose another GPU with "
                        "CUDA_VISIBLE_DEVICES.",
                    ) from None
                if not told:
                    waiting(f"GPU {self.uuid} is held by {self._holder()}; waiting")
                    told = True
                time.sleep(POLL_S)
            else:
                return

    def _holder(self) -> str:
        try:
            return str(Holder(**json.loads(os.pread(self._fd, NOTE_BYTES, 0))))
        except (ValueError, TypeError):  # it has only just taken the lock
            return "a process that has not said who it is"


def _open(path: Path) -> int:
    """The lock file, made if need be; every user may lock it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        try:
            return os.open(path, flags)  # with O_CREAT, a sticky folder refuses another's file
        except FileNotFoundError:
            pass
        try:
            fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:  # another harness was faster
            return os.open(path, flags)
        os.fchmod(fd, 0o666)  # past the umask
    except OSError as error:
        raise ProbeError(
            f"the GPU cannot be locked: {path}: {error.strerror}",
            "Make that file readable and writable for every user, or remove it.",
        ) from error
    return fd
