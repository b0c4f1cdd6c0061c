"""Runs as JSON lines, CSV and Parquet, and back."""

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness import exchange_tables, store
from harness.cli import main as cli
from harness.errors import HarnessError
from harness.exchange_rows import COLUMNS, NEEDED
from harness.records import Git, Measurement, Outcome, Run
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed

README = Path(__file__).resolve().parents[1] / "README.md"
GOOD, BROKEN, ABSENT = sweep(seq_len=[512, 1024, 2048])
TABLES = ["csv", "parquet"]


def measured() -> Run:
    """Disturbed, unsteady, failed and missing: all that a row must be able to say."""

    def of(case) -> list[Measurement]:
        if case is BROKEN:
            return [
                replace(
                    ended(case, Outcome.TIMEOUT)[0], detail='slow, "so" it\nsaid', lower_bound_s=9.5
                )
            ]
        if case is ABSENT:
            return []
        first, second, third = timed(case, 0.1, processes=3)
        first = replace(first, discarded={"throttled": (0, 2), "shared": (2,)}, wall_s=1 / 3)
        at = tuple(i / 3 for i in range(len(second.samples_s)))
        second = replace(second, steady=False, samples_at_s=at, host_samples_s=second.samples_s)
        return [first, second, replace(third, tokens=2**40, peak_memory_bytes=7)]

    here = environment(gpu=H200, git=Git(commit="c" * 40, branch="main", dirty_sha256="d" * 64))
    return run([GOOD, BROKEN, ABSENT], of, env=here)


def record(root: Path) -> Run:
    whole = measured()
    with store.create(root, whole.suite, whole.environment) as writer:
        for m in whole.measurements:
            writer.append(m)
        writer.finish()
    return store.load(root, writer.run_id)


def told(*arguments: str | Path) -> bytes:
    answer = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.stdout_bytes


def needs_pyarrow(form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")


# --- whole runs --------------------------------------------------------------------------


def test_runs_come_back_byte_for_byte(tmp_path: Path) -> None:
    made = [record(tmp_path / "a") for _ in range(2)]
    cut = Path(made[1].folder, store.RUN_FILE)
    whole = cut.read_bytes()
    unfinished = whole[: whole.rstrip().rindex(b"\n") + 1]
    cut.write_bytes(unfinished + b'{"kind": "e')  # it crashed while it wrote its last line
    file = tmp_path / "runs.jsonl"
    ids = [r.run_id for r in made]
    told("export", *ids, "--format", "jsonl", "-o", file, "--store", tmp_path / "a")

    for _ in range(2):  # a second time changes nothing
        assert told("import", file, "--store", tmp_path / "b").decode().split() == ids

    back = [Path(tmp_path / "b" / i / store.RUN_FILE).read_bytes() for i in ids]
    assert back[0] == Path(made[0].folder, store.RUN_FILE).read_bytes()
    assert back[1] == unfinished
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == sorted(ids)
    assert (tmp_path / "b" / ids[0] / store.SUITE_FILE).read_text() == made[0].suite.text
    assert told("export", *ids, "--format", "jsonl", "--store", tmp_path / "b") == file.read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        pytest.param(
            b'"schema": 2', b'"schema": 99', r"jsonl:1: the run has schema 99", id="later"
        ),
        pytest.param(b'"outcome": "timeout"', b'"outcome": "slow"', "outcome", id="outcome"),
        pytest.param(b'{"kind": "run"', b'{"kind": "end"', r"jsonl:1: at: Field", id="no-run"),
        pytest.param(b'"run_id": "', b'"run_id": "../', "is no run's id", id="path"),
    ],
)
def test_lines_that_were_changed_are_refused(
    tmp_path: Path, old: bytes, new: bytes, said: str
) -> None:
    made, file = record(tmp_path / "a"), tmp_path / "runs.jsonl"
    data = Path(made.folder, store.RUN_FILE).read_bytes()
    assert old in data
    file.write_bytes(data.replace(old, new, 1))

    with pytest.raises(HarnessError, match=said):
        told("import", file, "--store", tmp_path / "b")

    assert not (tmp_path / "b").exists() or not [*(tmp_path / "b").iterdir()]


def test_a_run_is_never_replaced(tmp_path: Path) -> None:
    made, file = record(tmp_path / "a"), tmp_path / "runs.jsonl"
    data = Path(made.folder, store.RUN_FILE).read_bytes()
    file.write_bytes(data.replace(b"node", b"edon"))
    assert file.read_bytes() != data

    with pytest.raises(HarnessError, match="holds something else"):
        told("import", file, "--store", tmp_path / "a")

    assert Path(made.folder, store.RUN_FILE).read_bytes() == data


# --- tables ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", TABLES)
def test_a_table_has_a_row_for_each_sample(tmp_path: Path, form: str) -> None:
    needs_pyarrow(form)
    made, file = [record(tmp_path / "a") for _ in range(2)], tmp_path / f"runs.{form}"

    ids = [r.run_id for r in made]
    told("export", *ids, "--format", form, "-o", file, "--store", tmp_path / "a")

    rows = rows_of(file)
    assert {row["run_id"] for row in rows} == set(ids)
    samples = [row for row in rows if row["case_id"] == GOOD.case_id]
    assert len(samples) == sum(len(m.samples_s) for r in made for m in r.of(GOOD.case_id))


def rows_of(file: Path) -> list[dict[str, object]]:
    if file.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return [*parquet.read_table(file).to_pylist()]
    return [*csv.DictReader(io.StringIO(file.read_text(), newline=""))]


def test_what_is_absent_has_a_row(tmp_path: Path) -> None:
    made = record(tmp_path)

    rows = [*csv.DictReader(io.StringIO(exchange_tables.to_csv([made])))]

    assert [*rows[0]] == [c.name for c in COLUMNS]
    by_case = {c.case_id: [r for r in rows if r["case_id"] == c.case_id] for c in made.suite.cases}
    assert len(by_case[GOOD.case_id]) == sum(len(m.samples_s) for m in made.of(GOOD.case_id))
    assert [r["outcome"] for r in by_case[BROKEN.case_id]] == ["timeout"]
    assert [(r["outcome"], r["process"]) for r in by_case[ABSENT.case_id]] == [("not run", "")]
    assert by_case[GOOD.case_id][2]["discarded"] == "throttled shared"


def test_without_pyarrow_parquet_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(HarnessError, match=r"pip install 'nsa-harness\[parquet\]'"):
        told("export", "latest", "--format", "parquet", "-o", "x.parquet", "--store", tmp_path)

    assert not Path("x.parquet").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "x.txt"], "unknown format"),
        (["export", "latest", "--format", "parquet"], "cannot be printed"),
        (["export", "latest", "latest", "--format", "junit"], "takes one run, not 2"),
    ],
)
def test_what_cannot_be_asked_is_said(arguments: list[str], said: str) -> None:
    with pytest.raises(HarnessError, match=said):
        told(*arguments)


def test_every_column_is_documented() -> None:
    text = README.read_text(encoding="utf-8")

    assert [c.name for c in COLUMNS if f"`{c.name}`" not in text] == []
    assert set(NEEDED) <= {c.name for c in COLUMNS}
