"""An index over the recorded runs: answers in milliseconds what would else read every run.

    reports/runs/index.sqlite   SQLite in WAL mode: those who read and those who write do not wait
                                for each other
    reports/runs/index.lock     held shared by all who use it, and alone to make or replace it

The run folders are the truth and the index is made of nothing else. The first question makes it,
and every later one first reads the runs that are new or have changed and drops those that are gone.
An index that is missing, stale or damaged is made again, and one that cannot be used (of a later
harness, on a disk that cannot be written) is done without: the same question is then put to an
index in memory, slowly. Either is said, and neither is an error.
"""

import fcntl
import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from harness import index_schema, store
from harness.analysis import summary
from harness.errors import StoreError
from harness.index_query import NOT_RUN, Index
from harness.store import RunHeader

INDEX = "index.sqlite"
LOCK = "index.lock"
READING = 1
"""How rows are computed from runs. Raise it when a summary comes out otherwise than before: older
indexes are then read again, and those of a later harness stay as they are."""

PATIENCE_S = 10.0
"""How long to wait for another process before doing without the index."""
MANY = 64
"""Runs to read from which on it is worth starting processes, and telling somebody."""

Answer = TypeVar("Answer")
Say = Callable[[str], None]

_DAMAGE = frozenset(
    {
        sqlite3.SQLITE_ERROR,  # a table or a column is missing
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_CONSTRAINT,
        sqlite3.SQLITE_MISMATCH,
        sqlite3.SQLITE_FORMAT,
    }
)


class _Unusable(Exception):
    """The index on the disk cannot be used, and is not to be touched."""


def ask(root: Path, question: Callable[[Index], Answer], say: Say) -> Answer:
    """Put a question to the index of a store, brought up to date first.

    Args:
        root: The folder of the runs.
        question: May be put twice, where the index turns out to be damaged.
        say: Is told what was repaired, or done without.
    """
    if not root.is_dir():
        return _in_memory(root, question, say)
    for again in (False, True):
        try:
            with _connected(root) as connection:
                _refresh(connection, root, say)
                return question(Index(connection, root))
        except (sqlite3.Error, ValueError) as error:
            if not again and _is_damage(error):
                say(f"note: {root / INDEX} is damaged and made again: {error}")
                if _discard(root):
                    continue
            say(f"note: {root / INDEX} cannot be used ({error}); the runs are read instead")
            break
        except (_Unusable, OSError) as error:
            say(f"note: {root / INDEX} cannot be used ({error}); the runs are read instead")
            break
    return _in_memory(root, question, say)


def rebuild(root: Path, say: Say) -> int:
    """Make the index from the run folders alone, and put it in place of the one that is there.

    Those who use the old one meanwhile go on with it.

    Returns:
        How many runs are in it.

    Raises:
        StoreError: It cannot be written, or others use it without end.
    """
    if not root.is_dir():
        raise StoreError(f"{root} is no folder", "Name the folder of the runs with --store.")
    fresh = root / f"{INDEX}.{os.getpid()}"
    try:
        _remove(fresh)
        connection = _open(fresh)
        try:
            _refresh(connection, root, say)
            (count,) = connection.execute("SELECT COUNT(*) FROM runs").fetchone()
        finally:
            connection.close()
        with _locked(root, fcntl.LOCK_EX):
            _remove(root / INDEX)  # and what belongs to the old one
            fresh.replace(root / INDEX)
    except (sqlite3.Error, OSError, _Unusable) as error:
        raise StoreError(
            f"cannot rebuild {root / INDEX}: {error}",
            "The runs are untouched. Make room, or wait until nobody uses the index.",
        ) from error
    finally:
        _remove(fresh)
    return int(count)


# --- the file ----------------------------------------------------------------------------


@contextmanager
def _connected(root: Path) -> Iterator[sqlite3.Connection]:
    """The index on the disk, made or migrated if need be.

    Raises:
        _Unusable: It is of a later harness, or others hold it without end.
        OSError: The store cannot be written.
        sqlite3.Error: It is damaged, or busy.
    """
    path = root / INDEX
    if not path.exists():
        with _locked(root, fcntl.LOCK_EX):
            _open(path).close()
    with _locked(root, fcntl.LOCK_SH):
        connection = _connect(path)
        try:
            number = index_schema.version_of(connection)
            if number == index_schema.VERSION:
                yield connection
                return
        finally:
            connection.close()
    if number > index_schema.VERSION:
        raise _Unusable(f"schema {number}, and this harness knows {index_schema.VERSION}")
    with _locked(root, fcntl.LOCK_EX):
        _open(path).close()
    with _locked(root, fcntl.LOCK_SH):
        connection = _connect(path)
        try:
            yield connection
        finally:
            connection.close()


def _open(path: Path) -> sqlite3.Connection:
    """A connection to an index that is made, or brought up to date, first; nobody else has it."""
    connection = _connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        index_schema.migrate(connection)
    except BaseException:  # Ctrl-C included: the file would stay open
        connection.close()
        raise
    return connection


def _connect(path: Path | str) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=PATIENCE_S, isolation_level=None)
    # A power cut may cost the last entries, which are made again; it cannot tear the file.
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


@contextmanager
def _locked(root: Path, how: int) -> Iterator[None]:
    """Hold the lock of a store's index: shared to use it, alone to make or replace it."""
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _Unusable("others use it without end") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _is_damage(error: Exception) -> bool:
    if isinstance(error, ValueError):
        return True  # a cell that holds what was never written there
    code = getattr(error, "sqlite_errorcode", None)
    return isinstance(error, sqlite3.DatabaseError) and (code is None or code & 0xFF in _DAMAGE)


def _discard(root: Path) -> bool:
    """Remove a damaged index; False where that cannot be."""
    try:
        with _locked(root, fcntl.LOCK_EX):
            _remove(root / INDEX)
    except (OSError, _Unusable):
        return False
    return True


def _remove(path: Path) -> None:
    """Remove an index with what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _in_memory(root: Path, question: Callable[[Index], Answer], say: Say) -> Answer:
    connection = _connect(":memory:")
    try:
        index_schema.migrate(connection)
        _refresh(connection, root, say)
        return question(Index(connection, root))
    finally:
        connection.close()


# --- from folders to rows ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """All that the index knows of one run."""

    folder: str
    stamp: tuple[int, int]
    """Size and time of change of run.jsonl, taken before it was read."""
    header: RunHeader
    device_id: str = ""
    host: str = ""
    branch: str = ""
    dirty: bool = False
    cases: tuple[tuple[str, str | None, str, str], ...] = ()
    """Id, outcome, detail and metrics of each case."""
    outcomes: Mapping[str, int] = field(default_factory=dict)


def _refresh(connection: sqlite3.Connection, root: Path, say: Say) -> None:
    """Read the runs that are new or have changed, and drop those that are gone."""
    (reading,) = connection.execute(
        "SELECT MAX(CAST(value AS INTEGER)) FROM about WHERE key = 'reading'"
    ).fetchone()
    if reading is None or reading < READING:
        with index_schema.transaction(connection):
            connection.execute("UPDATE runs SET bytes = -1")
            connection.execute("INSERT OR REPLACE INTO about VALUES ('reading', ?)", (READING,))
    there = _stamps(root)
    known = {
        folder: (size, modified)
        for folder, size, modified in connection.execute(
            "SELECT folder, bytes, modified_ns FROM runs"
        )
    }
    if gone := [name for name in known if name not in there]:
        with index_schema.transaction(connection):
            for name in gone:
                _drop(connection, name)
    changed = [root / name for name, stamp in there.items() if known.get(name) != stamp]
    if len(changed) < MANY:
        _write(connection, map(_read, changed))
        return
    say(f"reading {len(changed):,} runs into the index of {root}")
    _write(connection, _read_many(changed))


def _stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of every run's file, by the name of its folder."""
    found = {}
    if root.is_dir():
        with os.scandir(root) as entries:
            folders = [(entry.name, entry.path) for entry in entries]
        for name, path in folders:
            try:
                found[name] = _stamp(path)
            except (FileNotFoundError, NotADirectoryError):
                continue  # no run, or one that was just removed
    return dict(sorted(found.items()))


def _stamp(folder: Path | str) -> tuple[int, int]:
    stat = os.stat(f"{folder}/{store.RUN_FILE}")  # noqa: PTH116 - before an answer, ten thousand
    return stat.st_size, stat.st_mtime_ns


def _read_many(folders: Sequence[Path]) -> Iterator[_Entry]:
    """Entries of many runs, read by as many processes as there are CPUs."""
    workers = min(os.cpu_count() or 1, 8)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_deaf)
    try:
        yield from pool.map(_read, folders, chunksize=8)
    finally:
        pool.shutdown(cancel_futures=True)


def _deaf() -> None:
    """Ctrl-C is for the parent, which then stops the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read(folder: Path) -> _Entry:
    """What the index knows of a run; of one that cannot be read, why."""
    stamp = (-1, -1)
    try:
        stamp = _stamp(folder)
        run = store.load(folder.parent, folder)
    except (StoreError, OSError) as error:
        problem = str(error).partition("\n")[0]
        header = RunHeader(run_id=folder.name, folder=str(folder), problem=problem)
        return _Entry(folder=folder.name, stamp=stamp, header=header)
    here, cases = run.environment, summary.summarise(run)
    outcomes: dict[str, int] = {}
    for case in cases:
        name = str(case.outcome) if case.outcome else NOT_RUN
        outcomes[name] = outcomes.get(name, 0) + 1
    return _Entry(
        folder=folder.name,
        stamp=stamp,
        header=store.header_of(run),
        device_id=here.gpu.uuid if here.gpu else "",
        host=here.hostname,
        branch=here.git.branch if here.git else "",
        dirty=here.uncommitted,
        cases=tuple(
            (
                c.case.case_id,
                str(c.outcome) if c.outcome else None,
                c.detail.partition("\n")[0],
                json.dumps(
                    {
                        name: (e.value, e.low, e.high, e.processes, e.samples)
                        for name, e in c.metrics.items()
                    },
                    separators=(",", ":"),
                ),
            )
            for c in cases
        ),
        outcomes=outcomes,
    )


# --- rows --------------------------------------------------------------------------------


def _write(connection: sqlite3.Connection, entries: Iterable[_Entry]) -> None:
    """Put entries in place of what was known of their runs, some at a time."""
    batch: list[_Entry] = []
    for entry in entries:
        batch.append(entry)
        if len(batch) == MANY:
            _put(connection, batch)
            batch = []
    if batch:
        _put(connection, batch)


def _put(connection: sqlite3.Connection, entries: Iterable[_Entry]) -> None:
    with index_schema.transaction(connection):
        for entry in entries:
            _drop(connection, entry.folder)
            h = entry.header
            row = connection.execute(
                "INSERT INTO runs (folder, bytes, modified_ns, run_id, suite, title, device,"
                " device_id, host, commit_id, branch, dirty, cases, measurements, started_at,"
                " ended_at, problem) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
                (
                    *(entry.folder, *entry.stamp, h.run_id, h.suite, h.title, h.device),
                    *(entry.device_id, entry.host, h.commit, entry.branch, entry.dirty),
                    *(h.cases, h.measurements, h.started_at, h.ended_at, h.problem),
                ),
            ).lastrowid
            connection.executemany(
                "INSERT OR IGNORE INTO names (case_id) VALUES (?)", [(c[0],) for c in entry.cases]
            )
            connection.executemany(
                "INSERT INTO cases (name, run, outcome, detail, metrics)"
                " VALUES ((SELECT name FROM names WHERE case_id = ?), ?, ?, ?, ?)",
                [(case_id, row, *rest) for case_id, *rest in entry.cases],
            )
            connection.executemany(
                "INSERT INTO outcomes (outcome, run, cases) VALUES (?, ?, ?)",
                [(outcome, row, count) for outcome, count in entry.outcomes.items()],
            )


def _drop(connection: sqlite3.Connection, folder: str) -> None:
    found = connection.execute("SELECT run FROM runs WHERE folder = ?", (folder,)).fetchone()
    if found is not None:
        for table in ("cases", "outcomes", "runs"):
            connection.execute(f"DELETE FROM {table} WHERE run = ?", found)
