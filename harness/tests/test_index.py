"""The index of runs: it answers what the runs say, and losing it loses nothing."""

import json
import multiprocessing
import os
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from harness import cli, console_store, index, index_schema, store
from harness.analysis import summary
from harness.errors import HarnessError, StoreError
from harness.index_query import Choice
from harness.records import Git, Outcome
from harness.studies import index_speed
from harness.tests.fake_runs import H200, case, ended, environment, run, sweep, timed

A100 = replace(H200, name="NVIDIA A100-SXM4-80GB", uuid="GPU-a100")
CASES = sweep(seq_len=[512, 1024])
CASE = CASES[0].case_id


def record(
    root: Path,
    *,
    commit: str = "a" * 40,
    gpu=H200,
    suite: str = "retest",
    step_s: float = 0.01,
    broken: Outcome | None = None,
    finish: bool = True,
) -> str:
    """A run of two cases in a store; its id."""
    env = environment(gpu=gpu, git=Git(commit=commit, branch="main"))
    whole = run(CASES, lambda c: timed(c, step_s, processes=2), env=env)
    named = replace(whole.suite, name=suite)
    with store.create(root, named, env) as writer:
        for c in CASES:
            bad = broken is not None and c is CASES[1]
            for m in ended(c, broken) if bad and broken else timed(c, step_s, processes=2):
                writer.append(m)
        if finish:
            writer.finish()
    return writer.run_id


def silent(text: str) -> None:
    raise AssertionError(f"nothing was to be said: {text}")


def ids(root: Path, choice: Choice | None = None, say: Callable[[str], None] = silent) -> list[str]:
    return [h.run_id for h in index.ask(root, lambda known: known.runs(choice), say)]


def dated(root: Path, run_id: str, at: str) -> None:
    """Move a run to another time."""
    file = root / run_id / store.RUN_FILE
    first, _, rest = file.read_text().partition("\n")
    began = {**json.loads(first), "started_at": at}
    file.write_text(json.dumps(began, ensure_ascii=False) + "\n" + rest)


# --- what it answers ---------------------------------------------------------------------


def test_a_finished_run_is_entered_at_once_where_there_is_an_index(tmp_path: Path) -> None:
    record(tmp_path)
    assert not (tmp_path / index.INDEX).exists()
    ids(tmp_path)

    run_id = record(tmp_path)

    with sqlite3.connect(tmp_path / index.INDEX) as connection:
        found = connection.execute(
            "SELECT run_id, measurements, cases FROM runs WHERE run = 2"
        ).fetchone()
    connection.close()
    assert found == (run_id, 4, 2)


def test_the_list_is_that_of_the_folders(tmp_path: Path) -> None:
    for commit in "abc":
        record(tmp_path, commit=commit * 40)
    record(tmp_path, finish=False)

    found = index.ask(tmp_path, lambda known: known.runs(), silent)

    assert tuple(replace(h, outcomes={}) for h in found) == store.headers(tmp_path)
    assert [h.state for h in found].count("unfinished") == 1
    assert found[0].outcomes == {"ok": 2}


def test_a_history_holds_what_the_runs_are_summarised_to(tmp_path: Path) -> None:
    for commit, step_s in (("a", 0.010), ("b", 0.011)):
        record(tmp_path, commit=commit * 40, step_s=step_s)

    points = index.ask(tmp_path, lambda known: known.history(CASE), silent)

    assert {p.commit[0] for p in points} == {"a", "b"}
    for p in points:
        (expected, _) = summary.summarise(store.load(tmp_path, p.run_id))
        assert p.metrics == expected.metrics
        assert p.outcome == "ok"
        assert p.device_id == H200.uuid
    one = index.ask(tmp_path, lambda known: known.history(CASE, metric="step_s"), silent)
    assert [p.metrics for p in one] == [{"step_s": p.metrics["step_s"]} for p in points]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        pytest.param(Choice(suite="smoke"), {1}, id="suite"),
        pytest.param(Choice(gpu="A100"), {2}, id="gpu"),
        pytest.param(Choice(gpu="cpu"), {3}, id="no gpu"),
        pytest.param(Choice(commit="bbbb"), {1}, id="commit"),
        pytest.param(Choice(outcome="crash"), {2}, id="outcome"),
        pytest.param(Choice(since="2026-03-02"), {2, 3}, id="since"),
        pytest.param(Choice(until="2026-03-02"), {0, 1, 2}, id="until includes its day"),
        pytest.param(Choice(until="2026-03-02T11:59"), {0, 1}, id="until a moment"),
        pytest.param(Choice(suite="retest", gpu="H200"), {0}, id="both"),
        pytest.param(Choice(commit="%"), set(), id="no pattern in a commit"),
    ],
)
def test_runs_are_chosen(tmp_path: Path, choice: Choice, expected: set[int]) -> None:
    made = [
        record(tmp_path),
        record(tmp_path, commit="b" * 40, suite="smoke"),
        record(tmp_path, gpu=A100, broken=Outcome.CRASH),
        record(tmp_path, gpu=None),
    ]
    for day, run_id in enumerate(made):
        dated(tmp_path, run_id, f"2026-03-{min(day, 1) + day // 2 + (day == 3):02d}T12:00:00+00:00")
    dated(tmp_path, made[0], "2026-03-01T09:00:00+00:00")

    assert set(ids(tmp_path, choice)) == {made[i] for i in expected}


def test_the_latest_of_a_suite(tmp_path: Path) -> None:
    made = [record(tmp_path, suite=suite) for suite in ("smoke", "smoke", "retest")]

    found = index.ask(tmp_path, lambda known: known.latest("smoke"), silent)

    assert found is not None
    assert found.run_id == max(made[:2])
    assert index.ask(tmp_path, lambda known: known.latest("none"), silent) is None


def test_a_history_by_outcome(tmp_path: Path) -> None:
    crashed = record(tmp_path, broken=Outcome.CRASH)
    record(tmp_path)
    lost = record(tmp_path, finish=False)
    file = tmp_path / lost / store.RUN_FILE
    file.write_text(file.read_text().partition("\n")[0] + "\n")
    other = CASES[1].case_id

    def history(outcome: str) -> list[str]:
        choice = Choice(outcome=outcome)
        found = index.ask(tmp_path, lambda known: known.history(other, choice), silent)
        return [p.run_id for p in found]

    assert history("crash") == [crashed]
    assert history("not run") == [lost]


@pytest.mark.parametrize("wrong", [{"outcome": "crashed"}, {"since": "yesterday"}])
def test_a_choice_that_means_nothing_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(HarnessError):
        Choice(**wrong)


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


# --- the commands ------------------------------------------------------------------------


def told(*arguments: str) -> str:
    answer = CliRunner().invoke(cli.app, list(arguments))
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_the_list_names_how_the_cases_ended(tmp_path: Path) -> None:
    crashed = record(tmp_path, broken=Outcome.CRASH)
    record(tmp_path)

    shown = told("list", "--outcome", "crash", "--store", str(tmp_path))

    assert crashed in shown
    assert "1 crash, 1 ok" in shown
    assert "suites" not in shown
    document = json.loads(told("list", "runs", "--json", "-n", "1", "--store", str(tmp_path)))
    assert len(document["runs"]) == 1


@pytest.mark.parametrize("width", [80, 160])
def test_no_row_is_folded(tmp_path: Path, width: int) -> None:
    made = [record(tmp_path), record(tmp_path, gpu=A100)]
    console = Console(width=width)
    found = index.ask(tmp_path, lambda known: (known.runs(), known.history(CASE)), silent)

    with console.capture() as shown:
        console.print(console_store.runs(found[0]))
        console.print(console_store.history(CASE, "step_s", found[1]))

    lines = shown.get().splitlines()
    for run_id in made:
        (listed, followed) = (line for line in lines if run_id in line)
        assert "2 ok" in listed
        assert "ms" in followed
        assert ("NVIDIA" in listed, "NVIDIA" in followed) == (width == 160,) * 2
    assert sum("other device" in line for line in lines) == 1


def test_a_history_is_shown_beside_what_was_before(tmp_path: Path) -> None:
    for commit, step_s in (("a", 0.010), ("b", 0.020)):
        dated(
            tmp_path,
            record(tmp_path, commit=commit * 40, step_s=step_s),
            f"2026-03-0{1 + (commit == 'b')}T12:00:00+00:00",
        )

    shown = told("history", "seq_len=512", "--store", str(tmp_path))

    rows = [line for line in shown.splitlines() if "NVIDIA H200" in line]
    assert ["aaaaaaaaaa" in rows[0], "bbbbbbbbbb" in rows[1]] == [True, True]
    assert "2.0x" in rows[1]
    assert shown.startswith(CASE)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["history", "seq_len"], "fits 2 cases", id="two"),
        pytest.param(["history", "train/nsa/seq_len=513"], f"like it:\n    {CASE}", id="none"),
        pytest.param(["history", CASE, "-m", "step"], "There is step_s", id="metric"),
        pytest.param(["list", "suites", "--gpu", "A100"], "suites are all listed", id="suites"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, arguments: list[str], message: str) -> None:
    record(tmp_path)

    with pytest.raises(HarnessError, match=message):
        CliRunner().invoke(cli.app, [*arguments, "--store", str(tmp_path)], catch_exceptions=False)


def test_case_ids_that_look_like_patterns_are_found(tmp_path: Path) -> None:
    odd = case({"name": "a[b]*"})
    env = environment()
    whole = run([odd], lambda c: timed(c, 0.01))
    with store.create(tmp_path, whole.suite, env) as writer:
        for m in whole.measurements:
            writer.append(m)
        writer.finish()

    assert odd.case_id in told("history", odd.case_id, "--store", str(tmp_path))


# --- the study of a large store ----------------------------------------------------------


def test_the_study_asks_what_its_store_can_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index_speed.make(tmp_path, runs=24, cases=8)
    index.rebuild(tmp_path, silent)
    expected = {
        "list all runs": 24,
        "list the latest 20": 20,
        "latest of a suite": 1,
        "by GPU": 8,
        "by commit": 0,
        "by date": 0,
        "by outcome": 2,
        "history of a case": 24,
        "history on one GPU": 8,
        "history, latest 20": 20,
        "ids of all cases": 8,
    }

    assert {name: index_speed.ask(tmp_path, name)[2] for name in index_speed.QUESTIONS} == expected
    assert capsys.readouterr().err == ""
