"""Writes runs: one folder per run, one line as each process ends, synced at once."""

import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from harness.errors import StoreError
from harness.records import SCHEMA_VERSION, Environment, Measurement, Run, SelfTest, Stop, Suite
from harness.store import lines
from harness.store.reader import LOG_FOLDER, RUN_FILE, SUITE_FILE, cut_notes, find, read

LOG_NAME_LENGTH = 80
"""Of a case id in a file name; a hash makes the name unique."""


@dataclass(slots=True)
class RunWriter:
    """Appends to one run; the only writer while open. A context: leaving it releases the run.
    `finish` also marks the run complete."""

    run_id: str
    folder: Path
    _fd: int
    """Locked descriptor of run.jsonl."""
    _recorded: int
    """Number of measurements in the file."""
    _began_at: float | None = None
    """time.monotonic at the start; None if another process started the run."""

    def append(self, *found: Measurement | SelfTest | lines.MeasuredIn) -> None:
        """Record measurements, and what precedes them: the self-test, the environment of a card;
        all are on the disk when this returns. After a StoreError, as for a NaN, none of them is."""
        self._write(*found)
        self._recorded += sum(isinstance(line, Measurement) for line in found)

    def finish(self, *, wall_s: float | None = None, stopped: Stop | None = None) -> None:
        """Mark the run complete and close it. `wall_s`: from the start of the command; None unless
        one command made the whole run. `stopped`: why processes are left; `resume` continues."""
        elapsed_s = None if self._began_at is None else time.monotonic() - self._began_at
        ended = lines.Ended(
            at=now(),
            measurements=self._recorded,
            elapsed_s=elapsed_s,
            wall_s=wall_s,
            stopped=stopped,
        )
        self._write(ended)
        self.close()

    def close(self) -> None:
        """Release the run, complete or not."""
        if self._fd >= 0:
            os.close(self._fd)  # and with it the lock
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_path(self, case_id: str, process: int) -> Path:
        """The file for the output of one worker process; made if absent, or a StoreError."""
        name = re.sub(r"[^\w.=-]", "_", case_id, flags=re.ASCII).lstrip(".")
        digest = hashlib.sha256(case_id.encode("utf-8", "surrogatepass")).hexdigest()[:8]
        path = self.folder / LOG_FOLDER / f"{name[:LOG_NAME_LENGTH]}-{digest}.{process}.log"
        try:
            path.parent.mkdir(exist_ok=True)  # somebody may have removed the logs
            path.touch()
        except OSError as error:
            raise self._cannot_write(path, error) from error
        return path

    def _write(self, *found: lines.Line) -> None:
        try:
            append_synced(self._fd, b"".join(map(lines.encode, found)))
            if not os.fstat(self._fd).st_nlink:
                raise FileNotFoundError
        except OSError as error:
            raise self._cannot_write(self.folder / RUN_FILE, error) from error

    def _cannot_write(self, path: Path, error: OSError) -> StoreError:
        if not (self.folder / RUN_FILE).exists():
            return StoreError(
                f"cannot write {path}: somebody removed the run while it went on",
                "Its measurements are lost. Start it again.",
            )
        return StoreError(
            f"cannot write {path}: {error.strerror}",
            "Earlier measurements are safe. Make room, then resume: "
            f"harness run --resume {self.folder}",
        )


def create(root: Path, suite: Suite, environment: Environment, *, where: str = "") -> RunWriter:
    """Start a run in a new folder, and record suite and environment; a StoreError if it cannot be
    written. `where` takes the place of the device in the id while the device is unknown."""
    began, began_at = datetime.now(UTC), time.monotonic()
    run_id = _run_id(began, suite.name, where or environment.device_name)
    first_line = lines.encode(
        lines.Started(
            schema=SCHEMA_VERSION,
            run_id=run_id,
            started_at=began.isoformat(timespec="seconds"),
            environment=environment,
            suite=suite,
        )
    )
    folder = root / run_id
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder.mkdir()  # fails if another run drew the same id
    except OSError as error:
        raise _cannot_begin(folder, error) from error
    try:
        (folder / LOG_FOLDER).mkdir()
        (folder / SUITE_FILE).write_text(suite.text, encoding="utf-8")
        fd = open_locked(folder / RUN_FILE, os.O_CREAT | os.O_EXCL)
        try:
            append_synced(fd, first_line)
            for directory in (folder, root):
                sync_directory(directory)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        shutil.rmtree(folder)
        raise _cannot_begin(folder, error) from error
    return RunWriter(run_id, folder, fd, 0, began_at)


def resume(root: Path, run_id: str | Path, *, notes: Sequence[str] = ()) -> tuple[RunWriter, Run]:
    """Continue an interrupted or stopped run, named as for `load`, with the suite that it stores; a
    StoreError if it is absent, damaged or finished, or if another process writes it. `notes`, such
    as that of another GPU, are stored. An incomplete last line is removed first."""
    writer, cut_bytes = _reopen(find(root, run_id))
    try:
        writer._write(lines.Resumed(at=now(), notes=(*cut_notes(cut_bytes), *notes)))
        run, _ = read(writer.folder)
    except BaseException:  # also Ctrl-C: the descriptor holds the lock
        writer.close()
        raise
    return writer, run


def _reopen(folder: Path) -> tuple[RunWriter, int]:
    """A writer of an unfinished run, and how many bytes of an incomplete line were removed."""
    try:
        fd = open_locked(folder / RUN_FILE)
    except BlockingIOError as error:
        raise StoreError(
            f"run {folder.name} is being written by another process",
            "Wait until it ends, or stop it first.",
        ) from error
    except OSError as error:
        raise StoreError(
            f"cannot write {folder / RUN_FILE}: {error.strerror}",
            "Copy the run to a writable folder and resume it there.",
        ) from error
    try:
        run, whole_bytes = read(folder)
        if run.ended_at and not run.stopped:
            raise StoreError(
                f"run {run.run_id} finished at {run.ended_at} and cannot be continued",
                f"Start a new one: harness run {run.suite.path}",
            )
        cut_bytes = os.fstat(fd).st_size - whole_bytes
        os.ftruncate(fd, whole_bytes)
    except BaseException:  # also Ctrl-C: the descriptor holds the lock
        os.close(fd)
        raise
    return RunWriter(run.run_id, folder, fd, len(run.measurements)), cut_bytes


def append_synced(fd: int, data: bytes) -> None:
    """Write and sync all of `data`, or leave the file unchanged."""
    before = os.fstat(fd).st_size
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    except BaseException:  # also Ctrl-C: no half line may precede the next
        os.ftruncate(fd, before)
        raise


def open_locked(path: Path, flags: int = 0) -> int:
    """A descriptor of a file for appending, locked until it is closed."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | flags, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise
    return fd


def sync_directory(directory: Path) -> None:
    """Sync a folder, so that new files in it survive a power cut."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _cannot_begin(folder: Path, error: OSError) -> StoreError:
    return StoreError(
        f"cannot start a run in {folder}: {error.strerror}",
        "Name another folder with --store, or make room on the disk.",
    )


def _run_id(began: datetime, suite: str, device: str) -> str:
    """An id that sorts by time and names suite and device."""
    device = re.sub("nvidia", "", device, flags=re.IGNORECASE)
    what, where = (re.sub(r"[^a-z0-9]+", "-", s.lower()).strip("-") for s in (suite, device))
    return f"{began:%Y%m%d-%H%M%S}-{what}-{where}-{secrets.token_hex(2)}"


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
