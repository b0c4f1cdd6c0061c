"""The index of runs follows their folders, and losing it loses nothing."""

import multiprocessing
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import index, index_schema, store
from harness.errors import StoreError
from harness.index_query import Choice
from harness.tests.indexed import CASE, ids, record, silent

# --- it follows the folders --------------------------------------------------------------


def test_it_follows_the_folders(tmp_path: Path) -> None:
    first, second = record(tmp_path), record(tmp_path, finish=False)
    assert ids(tmp_path) == sorted([first, second])

    shutil.rmtree(tmp_path / first)
    writer, _ = store.resume(tmp_path, second)
    with writer:
        writer.finish()
    copied = "20200101-000000-copied-from-elsewhere-0000"
    shutil.copytree(tmp_path / second, tmp_path / copied)

    found = index.ask(tmp_path, lambda known: known.runs(), silent)
    assert [Path(h.folder).name for h in found] == [copied, second]
    assert {h.state for h in found} == {"complete"}


def test_a_damaged_run_is_listed_with_its_problem(tmp_path: Path) -> None:
    whole, broken = record(tmp_path), record(tmp_path)
    file = tmp_path / broken / store.RUN_FILE
    lines = file.read_bytes().split(b"\n")
    file.write_bytes(b"\n".join([lines[0], b"{", *lines[1:]]))

    found = index.ask(tmp_path, lambda known: known.runs(), silent)

    assert {h.run_id: h.state for h in found} == {whole: "complete", broken: "unreadable"}


def test_a_store_without_runs(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()


# --- it may be lost, damaged, old or too new ---------------------------------------------


def _garbage(path: Path) -> None:
    path.write_bytes(b"this was never a database" * 1000)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _no_table(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE cases")
    connection.close()


def _overwritten(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)


def _wrong_cells(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE cases SET metrics = 'nonsense'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize("damage", [_garbage, _cut, _no_table, _overwritten, _wrong_cells])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    made = sorted(record(tmp_path) for _ in range(3))
    ids(tmp_path)
    connection = sqlite3.connect(tmp_path / index.INDEX)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    damage(tmp_path / index.INDEX)
    said: list[str] = []

    found = index.ask(tmp_path, lambda known: (known.runs(), known.history(CASE)), said.append)

    assert [h.run_id for h in found[0]] == made
    assert len(found[1]) == 3
    assert ["made again" in text for text in said] == [True]
    assert ids(tmp_path) == made  # and from now on in silence


def test_an_index_of_a_later_harness_is_left_alone(tmp_path: Path) -> None:
    made = record(tmp_path)
    ids(tmp_path)
    connection = sqlite3.connect(tmp_path / index.INDEX)
    connection.execute(f"PRAGMA user_version = {index_schema.VERSION + 1}")
    connection.execute("CREATE TABLE of_the_future (x)")
    connection.close()
    said: list[str] = []

    second = record(tmp_path)

    assert ids(tmp_path, say=said.append) == sorted([made, second])
    assert [f"schema {index_schema.VERSION + 1}" in text for text in said] == [True]
    connection = sqlite3.connect(tmp_path / index.INDEX)
    assert connection.execute("SELECT COUNT(*) FROM of_the_future").fetchone() == (0,)
    connection.close()


def test_without_a_place_for_it_the_runs_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path)
    for path in tmp_path.glob("index.*"):
        path.unlink()
    opened = os.open

    def refused(path, flags, *rest, **named):
        if str(path).endswith(index.LOCK):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refused)
    said: list[str] = []

    assert ids(tmp_path, say=said.append) == [made]
    assert len(said) == 1
    assert "Permission denied" in said[0]


def test_an_index_that_others_hold_does_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = record(tmp_path)
    ids(tmp_path)
    monkeypatch.setattr(index, "PATIENCE_S", 0.05)
    holder = sqlite3.connect(tmp_path / index.INDEX, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")

    second = record(tmp_path)  # recorded all the same
    said: list[str] = []
    found = ids(tmp_path, say=said.append)
    holder.execute("ROLLBACK")
    holder.close()

    assert found == sorted([first, second])
    assert len(said) == 1
    assert "locked" in said[0]
    assert ids(tmp_path) == found


@pytest.mark.parametrize("number", range(index_schema.VERSION))
def test_every_earlier_schema_is_brought_up_to_date(tmp_path: Path, number: int) -> None:
    made = sorted(record(tmp_path) for _ in range(2))
    rows = index.ask(tmp_path, _everything, silent)
    for path in tmp_path.glob("index.*"):
        path.unlink()
    old = sqlite3.connect(tmp_path / index.INDEX, isolation_level=None)
    index_schema.migrate(old, to=number)
    if number:  # the row as that schema knew it, up to date with the folder
        stat = (tmp_path / made[0] / store.RUN_FILE).stat()
        old.execute(
            "INSERT INTO runs VALUES (7, ?, ?, ?, ?, 's', 't', 'd', '', '', '', '', 0, 2, 4, '',"
            " '', '')",
            (made[0], stat.st_size, stat.st_mtime_ns, made[0]),
        )
    old.close()

    assert index.ask(tmp_path, _everything, silent) == rows


def _everything(known):
    return known.runs(), known.case_ids(), [known.history(c) for c in known.case_ids()]


def test_a_migration_is_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = (*index_schema.MIGRATIONS[1], "CREATE TABLE runs (twice)")
    monkeypatch.setattr(index_schema, "MIGRATIONS", (index_schema.MIGRATIONS[0], broken))
    connection = sqlite3.connect(":memory:", isolation_level=None)

    with pytest.raises(sqlite3.OperationalError):
        index_schema.migrate(connection, to=2)

    assert index_schema.version_of(connection) == 1
    tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    connection.close()
    assert tables == [("runs",)]


def test_rows_of_an_earlier_reading_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = record(tmp_path)
    ids(tmp_path)
    connection = sqlite3.connect(tmp_path / index.INDEX)
    connection.execute("UPDATE cases SET metrics = '{}'")
    connection.commit()
    connection.close()
    assert index.ask(tmp_path, lambda known: known.history(CASE), silent)[0].metrics == {}

    monkeypatch.setattr(index, "READING", index.READING + 1)

    (point,) = index.ask(tmp_path, lambda known: known.history(CASE), silent)
    assert point.run_id == made
    assert "step_s" in point.metrics


def test_rebuilt_from_the_folders_alone(tmp_path: Path) -> None:
    made = sorted(record(tmp_path) for _ in range(2))
    before = index.ask(tmp_path, _everything, silent)
    connection = sqlite3.connect(tmp_path / index.INDEX)
    connection.execute("UPDATE runs SET suite = 'a lie'")  # the stamps still fit
    connection.commit()
    connection.close()
    assert ids(tmp_path, Choice(suite="a lie")) == made

    assert index.rebuild(tmp_path, silent) == 2

    assert index.ask(tmp_path, _everything, silent) == before
    assert sorted(p.name for p in tmp_path.glob("index.*")) == [index.LOCK, index.INDEX]


def test_many_runs_are_read_by_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sorted(record(tmp_path) for _ in range(3))
    monkeypatch.setattr(index, "MANY", 2)
    said: list[str] = []

    assert index.rebuild(tmp_path, said.append) == 3

    assert ids(tmp_path) == made
    assert said == [f"reading 3 runs into the index of {tmp_path}"]


def test_a_rebuild_without_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no folder"):
        index.rebuild(tmp_path / "none", silent)


# --- several processes -------------------------------------------------------------------

RUNS_EACH = 6


def _record_some(root: str, gate) -> None:
    gate.wait()
    for _ in range(RUNS_EACH):
        record(Path(root))


def _ask_meanwhile(root: str, gate, stop, seen) -> None:
    gate.wait()
    last: set[str] = set()
    problems: list[str] = []
    times = 0
    while not stop.is_set():
        found = set(ids(Path(root), say=problems.append))
        if not last <= found:
            problems.append(f"lost {last - found}")
        last, times = found, times + 1
        if times % 5 == 0:
            index.rebuild(Path(root), problems.append)
    seen.put((times, problems))


def test_some_processes_record_while_others_ask_and_rebuild(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("fork")
    gate, stop, seen = spawn.Barrier(4), spawn.Event(), spawn.Queue()
    writers = [spawn.Process(target=_record_some, args=(str(tmp_path), gate)) for _ in range(2)]
    readers = [
        spawn.Process(target=_ask_meanwhile, args=(str(tmp_path), gate, stop, seen))
        for _ in range(2)
    ]
    for process in (*writers, *readers):
        process.start()
    for process in writers:
        process.join(60)
    stop.set()
    answers = [seen.get(timeout=60) for _ in readers]
    for process in readers:
        process.join(60)

    assert [p.exitcode for p in (*writers, *readers)] == [0] * 4
    assert all(times > 0 and problems == [] for times, problems in answers), answers
    assert len(ids(tmp_path)) == 2 * RUNS_EACH
    connection = sqlite3.connect(tmp_path / index.INDEX)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()
