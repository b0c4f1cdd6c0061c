"""An SQLite index of the recorded runs: answers in milliseconds instead of minutes.

    reports/runs/index.sqlite   made from the run folders alone; the file in place never changes

Before an answer, size and modification time of each run.jsonl are compared with the index. If a run
is new, changed or gone, an updated copy replaces the file in one step: readers need no lock, and
two processes that update it at once read a run twice at worst. An index that is missing, unreadable
or of another version is rebuilt. If the folder of the runs is not writable, the copy is temporary.
"""

import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from harness.analysis import summary
from harness.errors import HarnessError, StoreError
from harness.records import Case, CaseSummary, Estimate, Outcome, gpu_matches
from harness.store import reader
from harness.store.reader import RunHeader

INDEX = "index.sqlite"
VERSION = 9
"""Of the tables and their contents: raise it when a summary changes."""
MANY = 64
"""Number of runs to read from which a note explains the delay."""
NOT_RUN = "not run"

Answer = TypeVar("Answer")
Say = Callable[[str], None]

_TABLES = """
    CREATE TABLE runs (
        run INTEGER PRIMARY KEY,
        name TEXT NOT NULL UNIQUE,     -- of the folder
        bytes INTEGER NOT NULL,        -- size of its run.jsonl when it was read
        modified_ns INTEGER NOT NULL,
        header TEXT NOT NULL           -- JSON of the RunHeader without its folder
    );
    CREATE TABLE cases (
        case_id TEXT NOT NULL,
        run INTEGER NOT NULL,
        outcome TEXT NOT NULL,
        detail TEXT NOT NULL,
        metrics TEXT NOT NULL,         -- JSON: {metric: fields of its Estimate}
        digest TEXT NOT NULL,          -- of what was measured
        PRIMARY KEY (case_id, run)     -- the history of a case is one stretch of the file
    ) WITHOUT ROWID;
    CREATE INDEX cases_by_run ON cases (run);
"""


# --- questions and answers ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFilter:
    """Selects runs: those that match every field that is set."""

    suite: str = ""
    gpu: str = ""
    """Pattern of the device's name, as in a suite: `A100` is `*A100*`; `cpu` for no GPU."""
    commit: str = ""
    """Prefix of the commit's hash."""
    since: str = ""
    until: str = ""
    """A day (included) or a time; ISO 8601, UTC without a zone."""
    outcome: str = ""
    """Runs with a case of this outcome, or `not run`; in a history, of the case itself."""
    limit: int | None = None
    """At most this many runs, the latest."""

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
        """Whether a run matches, apart from outcome and limit."""
        # A day has at most ten characters, a time more.
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
class HistoryPoint(RunHeader):
    """One case in one run."""

    outcome: str
    """A value of Outcome, or `not run`."""
    detail: str
    digest: str
    """Equal if the case is: factory or program, axes, variables and kind of measurement."""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)


class Index:
    """An open index that agrees with the run folders."""

    def __init__(self, connection: sqlite3.Connection, root: Path) -> None:
        self._connection = connection
        self._prefix = str(root / "_")[:-1]

    def runs(self, runs: RunFilter | None = None) -> tuple[RunHeader, ...]:
        """The selected runs in the order of their folders; an unreadable one with its problem."""
        runs = runs or RunFilter()
        rows = self._connection.execute("SELECT name, header FROM runs ORDER BY name")
        headers = (RunHeader(**self._fields(name, header)) for name, header in rows)
        wanted = [h for h in headers if runs.accepts(h) and runs.outcome in ("", *h.outcomes)]
        return tuple(wanted[-(runs.limit or 0) :])

    def case_ids(self) -> tuple[str, ...]:
        # One step of the primary key per id; DISTINCT would read the whole table.
        found = self._connection.execute(
            "WITH RECURSIVE ids (id) AS (SELECT MIN(case_id) FROM cases UNION ALL"
            " SELECT (SELECT MIN(case_id) FROM cases WHERE case_id > id) FROM ids"
            " WHERE id IS NOT NULL) SELECT id FROM ids WHERE id IS NOT NULL"
        )
        return tuple(case_id for (case_id,) in found)

    def history(
        self, case_id: str, runs: RunFilter | None = None, *, metric: str | None = None
    ) -> tuple[HistoryPoint, ...]:
        """One case in the selected runs, oldest first.

        Args:
            metric: The only one to return; None for all.
        """
        runs = runs or RunFilter()
        rows = self._connection.execute(
            "SELECT name, header, outcome, detail, digest, metrics"
            " FROM cases JOIN runs USING (run) WHERE case_id = ?",
            (case_id,),
        )
        found = [
            (fields, row)
            for name, text, *row in rows
            for fields in [self._fields(name, text)]
            if runs.outcome in ("", row[0]) and runs.accepts(RunHeader(**fields))
        ]
        found.sort(key=lambda pair: (pair[0]["started_at"], pair[0]["folder"]))
        return tuple(
            HistoryPoint(
                **fields, outcome=ended, detail=why, digest=what, metrics=_metrics(metrics, metric)
            )
            for fields, (ended, why, what, metrics) in found[-(runs.limit or 0) :]
        )

    def _fields(self, name: str, header: str) -> dict[str, Any]:
        return {"folder": self._prefix + name, **json.loads(header)}


def _metrics(text: str, only: str | None) -> dict[str, Estimate]:
    found = {n: e for n, e in json.loads(text).items() if only in (None, n)}
    for estimate in found.values():
        estimate["both"] = tuple(estimate["both"])
        estimate["ends"] = estimate["ends"] and tuple(estimate["ends"])
    return {name: Estimate(**estimate) for name, estimate in found.items()}


# --- the file ----------------------------------------------------------------------------


def ask(root: Path, question: Callable[[Index], Answer], say: Say, *, anew: bool = False) -> Answer:
    """The answer of a store's index, which is updated first.

    Args:
        root: The folder of the runs.
        question: Called a second time if the index is damaged.
        say: Receives notes about a rebuild.
        anew: Rebuild the index from the run folders.

    Raises:
        StoreError: The index cannot be built.
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
        say(f"note: {root / INDEX} cannot be used ({error}); rebuilding it")
    return ask(root, question, say, anew=True)


def rebuild(root: Path, say: Say) -> int:
    """Rebuild the index from the run folders, and return the number of runs in it.

    Raises:
        StoreError: The folder is absent or not writable.
    """
    if not os.access(root, os.W_OK):
        raise StoreError(
            f"{root} is not a writable folder", "Name the folder of the runs with --store."
        )
    return ask(root, lambda known: len(known.runs()), say, anew=True)


@contextmanager
def _current(root: Path, say: Say, *, anew: bool) -> Iterator[sqlite3.Connection]:
    """The index in place if it agrees with the run folders, else an updated copy."""
    path, there = root / INDEX, _stamps(root)
    anew = anew or not path.exists()
    if not anew:
        uri = f"{path.absolute().as_uri()}?mode=ro&immutable=1"  # it never changes, so no lock
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
            connection.execute("PRAGMA journal_mode = OFF")  # a failed draft is deleted
            if anew:
                connection.executescript(f"{_TABLES} PRAGMA user_version = {VERSION};")
            _update(connection, root, there, say)
            if draft.parent.parent == root:
                draft.replace(path)
            yield connection


def _folder(root: Path, say: Say) -> tempfile.TemporaryDirectory[str]:
    """A new folder beside the runs; if they are not writable, in the system's temporary folder."""
    try:
        return tempfile.TemporaryDirectory(prefix=".index-", dir=root)
    except OSError as error:
        if root.is_dir():
            say(f"note: cannot write {root} ({error.strerror}): the index is temporary")
        return tempfile.TemporaryDirectory(prefix="harness-index-")


# --- from folders to rows ----------------------------------------------------------------


def _update(
    connection: sqlite3.Connection, root: Path, there: Mapping[str, tuple[int, int]], say: Say
) -> None:
    """Read new and changed runs, and delete the rows of those that are gone."""
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
    """Folder name -> size and modification time of run.jsonl when it was read."""
    rows = connection.execute("SELECT name, bytes, modified_ns FROM runs")
    return {name: (size, modified) for name, size, modified in rows}


def _stamps(root: Path) -> dict[str, tuple[int, int]]:
    """Folder name -> size and modification time of run.jsonl now."""
    found = {}
    for name in os.listdir(root) if root.is_dir() else ():  # noqa: PTH208 - ten thousand of them
        try:
            stat = os.stat(f"{root}/{name}/{reader.RUN_FILE}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            continue  # not a run, or just removed
        found[name] = (stat.st_size, stat.st_mtime_ns)
    return found


def _enter(connection: sqlite3.Connection, folder: Path, stamp: tuple[int, int]) -> None:
    """Add the rows of one run; of an unreadable one, its problem."""
    rows: list[tuple[str, str, str, str, str]] = []
    try:
        run = reader.load(folder.parent, folder)
        cases = summary.summarise(run)
        rows = [_row(case) for case in cases]
        outcomes = Counter(outcome for _, outcome, *_ in rows)
        header = replace(reader.header_of(run), outcomes=dict(outcomes))
    except Exception as error:  # noqa: BLE001 - listed with the run; one record must not stop others
        reason = "" if isinstance(error, StoreError) else f"its summary fails: {error!r}"
        problem = reason or str(error).partition("\n")[0]
        header = RunHeader(run_id=folder.name, folder="", problem=problem)
    fields = asdict(header)
    del fields["folder"]  # the store may be moved
    row = connection.execute(
        "INSERT INTO runs (name, bytes, modified_ns, header) VALUES (?, ?, ?, ?)",
        (folder.name, *stamp, json.dumps(fields)),
    ).lastrowid
    for case_id, *fields_of_case in rows:
        connection.execute(
            "INSERT INTO cases VALUES (?, ?, ?, ?, ?, ?)", (case_id, row, *fields_of_case)
        )


def _row(case: CaseSummary) -> tuple[str, str, str, str, str]:
    """Id, outcome, detail, metrics and digest; ValueError if a metric is NaN or infinite."""
    fields = {name: asdict(e) for name, e in case.metrics.items()}
    detail = case.detail.partition("\n")[0]
    metrics = json.dumps(fields, allow_nan=False)
    outcome = str(case.outcome or NOT_RUN)
    return case.case.case_id, outcome, detail, metrics, digest_of(case.case)


def digest_of(case: Case) -> str:
    """Of what is measured, not how often."""
    how = (case.settings.flush_l2, case.settings.rotate_inputs, case.settings.graph)
    what = (case.program.argv, case.program.cwd) if case.program else case.factory
    asked = what, case.provider, sorted(case.axes.items()), sorted(case.env.items()), how
    return hashlib.sha256(repr(asked).encode()).hexdigest()[:16]
