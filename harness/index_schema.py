"""The schema of the index, as numbered migrations that are applied in order.

An index of any earlier number is brought up to date by those after it, and one of a later number
is left alone: it belongs to a later harness. A migration that adds what older indexes never read
from the runs marks all runs as stale, and the next question reads them again.

Never edit a migration that has been on main; add the next one.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

_STALE = "UPDATE runs SET bytes = -1"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    # 1: what a list of runs shows.
    (
        """
        CREATE TABLE runs (
            run INTEGER PRIMARY KEY,
            folder TEXT NOT NULL UNIQUE,   -- name under the root of the store
            bytes INTEGER NOT NULL,        -- size of run.jsonl when it was read; -1: read it again
            modified_ns INTEGER NOT NULL,
            run_id TEXT NOT NULL,
            suite TEXT NOT NULL,
            title TEXT NOT NULL,
            device TEXT NOT NULL,
            device_id TEXT NOT NULL,       -- UUID of the GPU; empty without one
            host TEXT NOT NULL,
            commit_id TEXT NOT NULL,
            branch TEXT NOT NULL,
            dirty INTEGER NOT NULL,
            cases INTEGER NOT NULL,
            measurements INTEGER,          -- NULL while the run is unfinished
            started_at TEXT NOT NULL,      -- ISO 8601, UTC: sorts as time does
            ended_at TEXT NOT NULL,
            problem TEXT NOT NULL          -- why the run cannot be read
        )
        """,
        "CREATE INDEX runs_by_suite ON runs (suite, started_at)",
        "CREATE INDEX runs_by_time ON runs (started_at)",
    ),
    # 2: every case's answer, one case's together: its history is one stretch of the file.
    (
        "CREATE TABLE names (name INTEGER PRIMARY KEY, case_id TEXT NOT NULL UNIQUE)",
        """
        CREATE TABLE cases (
            name INTEGER NOT NULL,
            run INTEGER NOT NULL,
            outcome TEXT,                  -- NULL: no process of it ran
            detail TEXT NOT NULL,
            metrics TEXT NOT NULL,         -- {metric: [value, low, high, processes, samples]}
            PRIMARY KEY (name, run)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX cases_by_run ON cases (run)",
        _STALE,
    ),
    # 3: how many cases of a run ended how; and by which reading of the runs the rows were made.
    (
        """
        CREATE TABLE outcomes (
            outcome TEXT NOT NULL,         -- `not run` where no process ran
            run INTEGER NOT NULL,
            cases INTEGER NOT NULL,
            PRIMARY KEY (outcome, run)
        ) WITHOUT ROWID
        """,
        "CREATE INDEX outcomes_by_run ON outcomes (run)",
        "CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
        _STALE,
    ),
)
VERSION = len(MIGRATIONS)


def version_of(connection: sqlite3.Connection) -> int:
    """Number of the last migration that was applied; 0 for a new file."""
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    return int(number)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All that is written inside, or none of it."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:  # Ctrl-C included: half of it must not stay
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def migrate(connection: sqlite3.Connection, *, to: int = VERSION) -> None:
    """Apply the migrations that an index lacks, each whole or not at all."""
    for number in range(version_of(connection) + 1, to + 1):
        with transaction(connection):
            for statement in MIGRATIONS[number - 1]:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
