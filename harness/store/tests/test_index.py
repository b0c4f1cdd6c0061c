"""The index follows the run folders, and can be lost without loss."""

import itertools
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from harness.analysis import summary
from harness.errors import StoreError
from harness.records import CaseSummary, Run
from harness.store import index, reader
from harness.store.writer import resume
from harness.tests.indexed import CASE, headers, ids, record, silent


def test_the_index_follows_the_folders(tmp_path: Path) -> None:
    first, second = record(tmp_path), record(tmp_path, finish=False)
    assert ids(tmp_path) == sorted([first, second])

    shutil.rmtree(tmp_path / first)
    writer, _ = resume(tmp_path, second)
    with writer:
        writer.finish()
    copied = "20200101-000000-copied-from-elsewhere-0000"
    shutil.copytree(tmp_path / second, tmp_path / copied)

    found = index.ask(tmp_path, lambda known: known.runs(), silent)
    assert [Path(h.folder).name for h in found] == [copied, second]
    assert {h.state for h in found} == {"complete"}
    assert len(index.ask(tmp_path, lambda known: known.history(CASE), silent)) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [copied, second, index.INDEX]


def test_a_run_that_cannot_be_read_or_summarised_is_listed_and_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, failing, damaged = (record(tmp_path) for _ in range(3))
    file = tmp_path / damaged / reader.RUN_FILE
    file.write_bytes(file.read_bytes().replace(b"\n", b"\n{\n", 1))
    summarise = summary.summarise

    def fails(run: Run) -> tuple[CaseSummary, ...]:
        return summarise(run) if run.run_id == whole else (1 / 0, ())[1]

    monkeypatch.setattr(summary, "summarise", fails)

    found = {h.run_id: h for h in headers(tmp_path)}

    assert (found[whole].state, found[whole].problem) == ("complete", "")
    assert found[failing].state == found[damaged].state == "unreadable"
    assert found[failing].problem.startswith("its summary fails: ZeroDivisionError")
    assert found[damaged].problem.startswith(f"{file}:2: ")
    assert index.rebuild(tmp_path, silent) == 3


def test_an_empty_store_has_no_runs_and_no_index(tmp_path: Path) -> None:
    assert ids(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
    with pytest.raises(StoreError):
        index.rebuild(tmp_path / "none", silent)


# --- it may be lost, damaged or of another version ---------------------------------------


def _garbage(path: Path) -> None:
    path.write_bytes(b"this was never a database" * 1000)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _execute(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(statement)
            connection.commit()

    return change


_no_table = _execute("DROP TABLE cases")
_wrong_cells = _execute("UPDATE cases SET metrics = 'nonsense'")
_empty_cells = _execute("UPDATE cases SET metrics = '{}'")


@pytest.mark.parametrize(
    ("damage", "stale"),
    [
        *((damage, False) for damage in (_cut, _no_table, _wrong_cells)),
        *((damage, True) for damage in (_garbage, _no_table)),
    ],
)
def test_a_damaged_index_is_rebuilt(
    tmp_path: Path, damage: Callable[[Path], None], stale: bool
) -> None:
    made = sorted(record(tmp_path) for _ in range(3))
    ids(tmp_path)
    damage(tmp_path / index.INDEX)
    if stale:
        made = sorted([*made, record(tmp_path)])
    notes: list[str] = []

    found = index.ask(tmp_path, lambda known: (known.runs(), known.history(CASE)), notes.append)

    assert [h.run_id for h in found[0]] == made
    assert len(found[1]) == len(made)
    assert len(notes) == 1
    assert ids(tmp_path) == made  # from now on without a note


@pytest.mark.parametrize("rebuild", [False, True])
def test_an_index_of_another_version_or_on_request_is_rebuilt(
    tmp_path: Path, rebuild: bool
) -> None:
    record(tmp_path)
    ids(tmp_path)
    _empty_cells(tmp_path / index.INDEX)
    assert index.ask(tmp_path, lambda known: known.history(CASE), silent)[0].metrics == {}

    if rebuild:
        assert index.rebuild(tmp_path, silent) == 1
    else:
        _execute(f"PRAGMA user_version = {index.VERSION - 1}")(tmp_path / index.INDEX)

    assert "step_s" in index.ask(tmp_path, lambda known: known.history(CASE), silent)[0].metrics


def test_reading_many_runs_gives_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "MANY", 2)
    made = sorted(record(tmp_path) for _ in range(2))
    notes: list[str] = []

    assert ids(tmp_path, say=notes.append) == made
    assert len(notes) == 1


def test_a_read_only_store_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [record(tmp_path)]
    ids(tmp_path)
    temporary = tempfile.TemporaryDirectory

    def refused(prefix: str, dir: Path | None = None):  # noqa: A002 - tempfile's own name
        if dir == tmp_path:
            raise PermissionError(13, "Permission denied", str(dir))
        return temporary(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert ids(tmp_path) == made  # it is up to date
    before = (tmp_path / index.INDEX).read_bytes()
    made = sorted([*made, record(tmp_path)])
    notes: list[str] = []

    assert ids(tmp_path, say=notes.append) == made
    assert len(notes) == 1
    assert (tmp_path / index.INDEX).read_bytes() == before
    with pytest.raises(StoreError):
        index.rebuild(tmp_path, silent)


# --- several at once -----------------------------------------------------------------------


def test_runs_can_be_recorded_while_others_ask_and_rebuild(tmp_path: Path) -> None:
    stop = threading.Event()

    def asked() -> int:
        last: set[str] = set()
        for times in itertools.count():
            if stop.is_set():
                return times
            found = set(ids(tmp_path))
            assert last <= found
            last = found
            if times % 5 == 0:
                index.rebuild(tmp_path, silent)
        raise AssertionError

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(asked) for _ in range(2)]
        recording = [pool.submit(record, tmp_path) for _ in range(8)]
        made = {one.result() for one in recording}
        stop.set()

    assert all(one.result() > 0 for one in asking)
    assert set(ids(tmp_path)) == made
    with closing(sqlite3.connect(tmp_path / index.INDEX)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
