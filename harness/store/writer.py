"""Writes runs: one folder per run, one line as each process ends, synced at once."""

import re
import shutil
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import StoreError
from harness.records import SCHEMA_VERSION, Environment, Measurement, Run, SelfTest, Stop, Suite
from harness.store import lines
from harness.store.reader import RUN_FILE, SUITE_FILE, cut_notes, find, read


class RunWriter(lines.LineFile):
    """Appends to one run. `finish` also marks the run complete."""

    def __init__(self, folder: Path, first: bytes = b"", began_at: float | None = None) -> None:
        """`began_at`: time.monotonic at the start; None if another process started the run."""
        safe = "Earlier measurements are safe. Make room, then resume: harness run --resume"
        super().__init__(folder / RUN_FILE, f"{safe} {folder}", first)
        self.run_id = folder.name
        self.recorded = 0
        """Number of measurements in the file."""
        self._began_at = began_at

    def append(self, *found: Measurement | SelfTest | lines.MeasuredIn) -> None:
        """Record measurements, and what precedes them: the self-test, the environment of a card;
        all are on the disk when this returns. After a StoreError, as for a NaN, none of them is."""
        self.add(b"".join(map(lines.encode, found)))
        self.recorded += sum(isinstance(line, Measurement) for line in found)

    def finish(self, *, wall_s: float | None = None, stopped: Stop | None = None) -> None:
        """Mark the run complete and close it. `wall_s`: from the start of the command; None unless
        one command made the whole run. `stopped`: why processes are left; `resume` continues."""
        elapsed_s = None if self._began_at is None else time.monotonic() - self._began_at
        ended = lines.Ended(
            at=now(),
            measurements=self.recorded,
            elapsed_s=elapsed_s,
            wall_s=wall_s,
            stopped=stopped,
        )
        self.add(lines.encode(ended))
        self.close()


def create(root: Path, suite: Suite, environment: Environment, *, where: str = "") -> RunWriter:
    """Start a run in a new folder, and record suite and environment; a StoreError if it cannot be
    written. `where` takes the place of the device in the id while the device is unknown."""
    began, began_at = datetime.now(UTC), time.monotonic()
    device = re.sub("nvidia", "", where or environment.device_name, flags=re.IGNORECASE)
    run_id = lines.dated(began, suite.name, device)
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
        try:
            (folder / lines.LOG_FOLDER).mkdir()
            (folder / SUITE_FILE).write_text(suite.text, encoding="utf-8")
            made = RunWriter(folder, first_line, began_at)
            made.card = environment.card
            return made
        except OSError:
            shutil.rmtree(folder)
            raise
    except OSError as error:
        problem = f"cannot start a run in {folder}: {error.strerror}"
        remedy = "Name another folder with --store, or make room on the disk."
        raise StoreError(problem, remedy) from error


def resume(
    root: Path,
    run_id: str | Path,
    *,
    notes: Sequence[str] = (),
    here: Environment | None = None,
) -> tuple[RunWriter, Run]:
    """Continue an interrupted or stopped run, named as for `load`, with the suite that it stores; a
    StoreError if it is absent, damaged or finished, or if another process writes it. `notes`, such
    as that of another GPU, are stored, and so is `here` if its GPU is another. An incomplete last
    line is removed first."""
    folder = find(root, run_id)
    try:
        writer = RunWriter(folder)
    except BlockingIOError as error:
        problem = f"run {folder.name} is being written by another process"
        raise StoreError(problem, "Wait until it ends, or stop it first.") from error
    except OSError as error:
        problem = f"cannot write {folder / RUN_FILE}: {error.strerror}"
        remedy = "Copy the run to a writable folder and resume it there."
        raise StoreError(problem, remedy) from error
    try:
        run = read(folder)
        if run.ended_at and not run.stopped:
            problem = f"run {run.run_id} finished at {run.ended_at} and cannot be continued"
            raise StoreError(problem, f"Start a new one: harness run {run.suite.path}")
        writer.run_id, writer.recorded = run.run_id, len(run.measurements)
        notes = (*cut_notes(writer.cut()), *notes)
        writer.add(lines.encode(lines.Resumed(at=now(), notes=notes)))
        writer.card = here.card if here else ""
        known = run.environments or (run.environment,)
        if here and here.card not in [e.card for e in known]:
            new = (here,) if run.environments else (run.environment, here)
            writer.append(*(lines.MeasuredIn(environment=e) for e in new))
        return writer, read(folder)
    except BaseException:  # also Ctrl-C: the descriptor holds the lock
        writer.close()
        raise


def now() -> str:
    """The current time, ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
