"""An index over the recorded runs: answers in milliseconds what takes minutes to read from them.

    reports/runs/index.sqlite   made from the run folders alone; the file in place never changes

Before every answer, the size and time of change of each run's file are compared with those in the
index. If a run is new, changed or gone, a corrected copy of the index replaces the file in one
step: readers need no lock, and two processes that correct it at once at worst read a run twice.
An index that is missing, unreadable or of another version is built again. If the folder of the
runs cannot be written, the copy is made in a temporary folder and lost after the answer.
"""

import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from harness.analysis import summary
from harness.errors import HarnessError, StoreError
from harness.records import CaseSummary, Estimate, Outcome, gpu_matches
from harness.store import reader
from harness.store.reader import RunHeader

INDEX = "index.sqlite"
VERSION = 4
"""Of the tables and of how rows follow from runs: raise it when a summary changes."""
MANY = 64
"""Runs to read from which on a note says why the answer takes long."""
NOT_RUN = "not run"

Answer = TypeVar("Answer")
Item = TypeVar("Item")
Say = Callable[[str], None]

_TABLES = """
    CREATE TABLE runs (
        run INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,     -- of the folder
        bytes INTEGER NOT NULL,        -- size of the run's file when it was read
        modified_ns INTEGER NOT NULL,
        header TEXT NOT NULL,          -- JSON of the RunHeader, but for its folder
        origin TEXT NOT NULL           -- JSON: what a Point says of the run beside its header
    );
    CREATE TABLE cases (
        case_id TEXT NOT NULL,
        run INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        detail TEXT NOT NULL,
        metrics TEXT NOT NULL,         -- JSON: {metric: values of its Estimate}
        PRIMARY KEY (case_id, run)     -- the history of a case is one stretch of the file
    ) WITHOUT ROWID;
    CREATE INDEX cases_by_run ON cases (run);
"""


# --- questions and answers ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which runs are meant. Empty fields choose all; a run must satisfy every field that is set."""

    suite: str = ""
    gpu: str = ""
    """Pattern of the device's name, as in a suite: `A100` is `*A100*`; `cpu` for no GPU."""
    commit: str = ""
    """The beginning of the commit's hash."""
    since: str = ""
    until: str = ""
    """A day, which is included, or a moment; ISO 8601, UTC if it names no zone."""
    outcome: str = ""
    """Runs with a case that ended so; in a history, runs in which this case did. `not run` too."""
    limit: int | None = None
    """Only the latest runs, at most this many."""

    def __post_init__(self) -> None:
        if self.outcome and self.outcome not in (*Outcome, NOT_RUN):
            raise HarnessError(
                f"{self.outcome!r} is not an outcome", f"Use {', '.join((*Outcome, NOT_RUN))}."
            )
        for name, value in (("since", self.since), ("until", self.until)):
            try:
                datetime.fromisoformat(value or "2026-11-21")
            except ValueError:
                raise HarnessError(
                    f"--{name} {value!r} is not a date", "Write 2026-11-21 or 2026-11-21T09:30."
                ) from None

    def accepts(self, run: RunHeader) -> bool:
        """Whether a run fits, its outcomes and the limit aside."""
        # A day is written with at most ten characters, a moment with more.
        step = timedelta(days=1) if len(self.until) <= 10 else timedelta(seconds=1)
        return (
            self.suite in ("", run.suite)
            and run.commit.startswith(self.commit.lower())
            and (not self.gpu or gpu_matches(self.gpu, run.device))
            and (not self.since or run.started_at >= _utc(self.since))
            and (not self.until or run.started_at < _utc(self.until, step))
        )


def _utc(text: str, later: timedelta = timedelta()) -> str:
    moment = datetime.fromisoformat(text)
    moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return (moment + later).isoformat(timespec="seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One case in one run."""

    run_id: str
    folder: str
    suite: str
    started_at: str
    commit: str
    branch: str
    dirty: bool
    device: str
    device_id: str
    """UUID of the GPU; empty without one."""
    host: str
    outcome: str
    """A value of Outcome, or `not run`."""
    detail: str
    metrics: Mapping[str, Estimate] = field(default_factory=dict)


class Index:
    """An open index that agrees with the run folders, and the questions that it answers."""

    def __init__(self, connection: sqlite3.Connection, root: Path) -> None:
        self._connection = connection
        self._prefix = str(root / "_")[:-1]

    def runs(self, choice: Choice | None = None) -> tuple[RunHeader, ...]:
        """The chosen runs in the order of their folders; an unreadable one with its problem."""
        choice = choice or Choice()
        rows = self._connection.execute("SELECT name, header FROM runs ORDER BY name")
        headers = (self._header(name, header) for name, header in rows)
        wanted = [
            h
            for h in headers
            if choice.accepts(h) and (not choice.outcome or choice.outcome in h.outcomes)
        ]
        return tuple(_last(wanted, choice.limit))

    def case_ids(self) -> tuple[str, ...]:
        """The id of every case that a run has."""
        # From one id to the next by the primary key; DISTINCT would read the whole table.
        found = self._connection.execute(
            "WITH RECURSIVE ids (id) AS (SELECT MIN(case_id) FROM cases UNION ALL"
            " SELECT (SELECT MIN(case_id) FROM cases WHERE case_id > id) FROM ids"
            " WHERE id IS NOT NULL) SELECT id FROM ids WHERE id IS NOT NULL"
        )
        return tuple(case_id for (case_id,) in found)

    def history(
        self, case_id: str, choice: Choice | None = None, *, metric: str | None = None
    ) -> tuple[Point, ...]:
        """One case over the chosen runs, oldest first.

        Args:
            metric: The only one that is wanted; None for all.
        """
        choice = choice or Choice()
        rows = self._connection.execute(
            "SELECT name, header, origin, outcome, detail, metrics"
            " FROM cases JOIN runs USING (run) WHERE case_id = ? ORDER BY name",
            (case_id,),
        )
        wanted = [
            (h, origin, outcome, detail, metrics)
            for name, header, origin, outcome, detail, metrics in rows
            if choice.outcome in ("", outcome) and choice.accepts(h := self._header(name, header))
        ]
        wanted.sort(key=lambda row: row[0].started_at)
        return tuple(
            Point(
                run_id=h.run_id,
                folder=h.folder,
                suite=h.suite,
                started_at=h.started_at,
                commit=h.commit,
                device=h.device,
                outcome=outcome,
                detail=detail,
                metrics=_metrics(metrics, metric),
                **json.loads(origin),
            )
            for h, origin, outcome, detail, metrics in _last(wanted, choice.limit)
        )

    def _header(self, name: str, header: str) -> RunHeader:
        return RunHeader(folder=self._prefix + name, **json.loads(header))


def _last(items: list[Item], limit: int | None) -> list[Item]:
    return items if limit is None else items[-limit:]


def _metrics(text: str, only: str | None) -> dict[str, Estimate]:
    return {
        name: Estimate(value=value, low=low, high=high, processes=processes, samples=samples)
        for name, (value, low, high, processes, samples) in json.loads(text).items()
        if only in (None, name)
    }


# --- the file ----------------------------------------------------------------------------


def ask(root: Path, question: Callable[[Index], Answer], say: Say, *, anew: bool = False) -> Answer:
    """Put a question to the index of a store, which is brought up to date first.

    Args:
        root: The folder of the runs.
        question: Called a second time if the index turns out to be damaged.
        say: Receives notes about what is built, and where.
        anew: Build the index from the run folders alone, whatever is in place.

    Raises:
        StoreError: No index can be built.
    """
    try:
        with _current(root, say, anew=anew) as connection:
            return question(Index(connection, root))
    except (sqlite3.Error, OSError, json.JSONDecodeError) as error:
        if anew:
            raise StoreError(
                f"cannot build an index of {root}: {error}",
                f"Make room there, or in {tempfile.gettempdir()}.",
            ) from error
        say(f"note: {root / INDEX} cannot be used ({error}); building it again")
    return ask(root, question, say, anew=True)


def rebuild(root: Path, say: Say) -> int:
    """Make the index from the run folders alone, in place of the one that is there.

    Returns:
        How many runs are in it.

    Raises:
        StoreError: The folder is absent or cannot be written.
    """
    if not os.access(root, os.W_OK):
        raise StoreError(
            f"{root} is not a folder that can be written", "Name the folder of the runs: --store."
        )
    return ask(root, lambda known: len(known.runs()), say, anew=True)


@contextmanager
def _current(root: Path, say: Say, *, anew: bool) -> Iterator[sqlite3.Connection]:
    """The index in place if it agrees with the run folders, else a corrected copy of it."""
    path, there = root / INDEX, _stamps(root)
    anew = anew or not path.exists()
    if not anew:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"  # it never changes: needs no lock
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == VERSION and _known(connection) == there:
                yield connection
                return
        anew = version != VERSION
    with _folder(root, say) as folder:
        draft = Path(folder, INDEX)
        if not anew:
            shutil.copyfile(path, draft)
        with closing(sqlite3.connect(draft)) as connection:
            connection.execute("PRAGMA journal_mode = OFF")  # a draft that fails is thrown away
            if anew:
                connection.executescript(f"{_TABLES} PRAGMA user_version = {VERSION};")
            _correct(connection, root, there, say)
            if draft.parent.parent == root:
                draft.replace(path)
            yield connection


def _folder(root: Path, say: Say) -> tempfile.TemporaryDirectory[str]:
    """A new folder beside the runs; in the system's temporary folder if that cannot be."""
    try:
        return tempfile.TemporaryDirectory(prefix=".index-", dir=root)
    except OSError as error:
        if root.is_dir():
            say(f"note: cannot write {root} ({error.strerror}): the index is built elsewhere")
        return tempfile.TemporaryDirectory(prefix="harness-index-")


# --- from folders to rows ----------------------------------------------------------------


def _correct(
    connection: sqlite3.Connection, root: Path, there: Mapping[str, tuple[int, int]], say: Say
) -> None:
    """Read the runs that are new or changed, and drop the rows of those that are gone."""
    known = _known(connection)
    for name, stamp in known.items():
        if there.get(name) != stamp:
            (run,) = connection.execute("SELECT run FROM runs WHERE name = ?", (name,)).fetchone()
            connection.execute("DELETE FROM cases WHERE run = ?", (run,))
            connection.execute("DELETE FROM runs WHERE run = ?", (run,))
    changed = sorted(name for name, stamp in there.items() if known.get(name) != stamp)
    if len(changed) >= MANY:
        say(f"reading {len(changed):,} runs into the index of {root}")
    for name in changed:
        _enter(connection, root / name, there[name])
    connection.commit()


def _known(connection: sqlite3.Connection) -> dict[str, tuple[int, int]]:
    """Size and time of change that each run's file had when it was read, by folder name."""
    rows = connection.execute("SELECT name, bytes, modified_ns FROM runs")
    return {name: (size, modified) for name, size, modified in rows}


def _stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of each run's file now, by folder name."""
    found = {}
    for name in os.listdir(root) if root.is_dir() else ():  # noqa: PTH208 - ten thousand of them
        try:
            stat = os.stat(f"{root}/{name}/{reader.RUN_FILE}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            continue  # not a run, or one that was just removed
        found[name] = (stat.st_size, stat.st_mtime_ns)
    return found


def _enter(connection: sqlite3.Connection, folder: Path, stamp: tuple[int, int]) -> None:
    """Add the rows of one run; of one that cannot be read, why."""
    cases: tuple[CaseSummary, ...] = ()
    origin: dict[str, object] = {}
    try:
        run = reader.load(folder.parent, folder)
    except StoreError as error:
        problem = str(error).partition("\n")[0]
        header = RunHeader(run_id=folder.name, folder="", problem=problem)
    else:
        cases, here = summary.summarise(run), run.environment
        outcomes = dict(Counter(map(_outcome, cases)))
        header = replace(reader.header_of(run), outcomes=outcomes)
        origin = {
            "device_id": here.gpu.uuid if here.gpu else "",
            "host": here.hostname,
            "branch": here.git.branch if here.git else "",
            "dirty": here.uncommitted,
        }
    shown = asdict(header)
    del shown["folder"]  # the store may be moved
    row = connection.execute(
        "INSERT INTO runs (name, bytes, modified_ns, header, origin) VALUES (?, ?, ?, ?, ?)",
        (folder.name, *stamp, json.dumps(shown), json.dumps(origin)),
    ).lastrowid
    for c in cases:
        metrics = json.dumps({name: astuple(e) for name, e in c.metrics.items()})
        detail = c.detail.partition("\n")[0]
        connection.execute(
            "INSERT INTO cases VALUES (?, ?, ?, ?, ?)",
            (c.case.case_id, row, _outcome(c), detail, metrics),
        )


def _outcome(case: CaseSummary) -> str:
    return str(case.outcome) if case.outcome else NOT_RUN
