"""Runs as tables in CSV and Parquet."""

import csv
import io
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from harness.cli import main as cli
from harness.errors import HarnessError
from harness.records import Git, Measurement, Outcome, Run, Stop
from harness.store import frames, reader
from harness.store.frames import COLUMNS
from harness.tests.fake_runs import H200, ended, environment, run, sweep, timed
from harness.tests.stored_runs import store

README = Path(__file__).resolve().parents[1] / "README.md"
GOOD, BROKEN, ABSENT = sweep(seq_len=[512, 1024, 2048])


def measured() -> Run:
    """Disturbed, unsteady, failed and missing processes."""

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
    return reader.load(root, store(root, measured()))


def output(*arguments: str | Path) -> bytes:
    answer = CliRunner().invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.stdout_bytes


def test_a_table_has_every_sample_with_all_digits_and_a_row_where_there_is_none(
    tmp_path: Path,
) -> None:
    made = record(tmp_path)

    rows = [*csv.DictReader(io.StringIO(frames.to_csv([made])))]

    assert [*rows[0]] == [*COLUMNS]
    by_case = {c.case_id: [r for r in rows if r["case_id"] == c.case_id] for c in made.suite.cases}
    assert len(by_case[GOOD.case_id]) == sum(len(m.samples_s) for m in made.of(GOOD.case_id))
    assert [r["outcome"] for r in by_case[BROKEN.case_id]] == ["timeout"]
    absent = ("outcome", "process", "detail")
    assert [[r[n] for n in absent] for r in by_case[ABSENT.case_id]] == [["not run", "", ""]]
    stopped = frames.to_csv([replace(made, stopped=Stop(rule="floor"))])
    (row,) = (r for r in csv.DictReader(io.StringIO(stopped)) if r["case_id"] == ABSENT.case_id)
    assert row["detail"] == "decided by rule “floor”"
    assert by_case[GOOD.case_id][2]["discarded"] == "throttled shared"
    for m in made.of(GOOD.case_id):
        of_process = [r for r in by_case[GOOD.case_id] if r["process"] == str(m.process)]
        assert tuple(float(r["sample_s"]) for r in of_process) == m.samples_s
        assert {r["wall_s"] for r in of_process} == {str(m.wall_s)}
        assert {r["tokens"] for r in of_process} == {str(m.tokens) if m.tokens else ""}
    assert by_case[BROKEN.case_id][0]["detail"] == made.of(BROKEN.case_id)[0].detail
    assert {(r["device_id"], r["commit"]) for r in rows} == {(H200.uuid, "c" * 40)}


@pytest.mark.parametrize("start", "=+-@\t")
def test_no_text_in_a_table_is_a_formula_or_commands_a_terminal(start: str, tmp_path: Path) -> None:
    nasty = f"{start}HYPERLINK()\x1b[2J"
    store(tmp_path, run([GOOD], lambda c: ended(c, Outcome.CRASH, detail=nasty)))

    text = output("export", "latest", "--format", "csv", "--store", tmp_path).decode()

    (row,) = csv.DictReader(io.StringIO(text))
    assert row["detail"] == f"'{start}HYPERLINK()\N{REPLACEMENT CHARACTER}[2J"


def test_parquet_has_the_rows_of_csv(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    made = record(tmp_path)
    frames.to_parquet([made], tmp_path / "runs.parquet")

    typed = pd.read_parquet(tmp_path / "runs.parquet")

    pd.testing.assert_frame_equal(typed, frames.table(made))


def test_without_pyarrow_the_error_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(HarnessError, match=r"nsa-harness\[parquet\]"):
        output("export", "latest", "--format", "parquet", "-o", "x.parquet", "--store", tmp_path)

    assert not Path("x.parquet").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["export", "latest", "--format", "parquet"],
        ["export", "latest", "latest", "--format", "junit"],
    ],
)
def test_an_impossible_exchange_is_refused(arguments: list[str]) -> None:
    with pytest.raises(HarnessError):
        output(*arguments)


def test_every_column_is_documented() -> None:
    text = README.read_text(encoding="utf-8")

    assert [name for name in COLUMNS if f"`{name}`" not in text] == []
