"""Which stored runs are listed, and how a case changed over them."""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.records import Outcome
from harness.tests.command_line import harness
from harness.tests.fake_runs import H200
from harness.tests.stored_runs import A100, CASE, CASES, dated, record


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    other = replace(H200, uuid="GPU-other")
    return [
        record(tmp_path, commit="a" * 40, step_s=0.01),
        record(tmp_path, commit="b" * 40, step_s=0.02, suite="smoke", finish=False),
        record(tmp_path, commit="c" * 40, step_s=0.03, gpu=other),
        record(tmp_path, commit="d" * 40, step_s=0.04, gpu=A100, broken=Outcome.CRASH),
        record(tmp_path, commit="e" * 40, gpu=None),
    ]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], {0, 1, 2, 3, 4}),
        (["--suite", "smoke"], {1}),
        (["--gpu", "A100"], {3}),
        (["--gpu", "cpu"], {4}),
        (["--commit", "cccc"], {2}),
        (["--suite", "retest", "--gpu", "H200"], {0, 2}),
        (["--suite", "nope"], set()),
    ],
)
def test_a_list_has_the_runs_that_match(
    tmp_path: Path, made: list[str], options: list[str], wanted: set[int]
) -> None:
    shown = harness("list", "runs", *options, "--store", ".", cwd=tmp_path).stdout

    assert {i for i, run_id in enumerate(made) if run_id in shown} == wanted
    assert ("2 ok, 1 crash" in shown) is (3 in wanted)
    assert ("unfinished: 4 ok" in shown) is (1 in wanted)
    assert ("no matching runs" in shown) is (not wanted)


def test_a_history_shows_the_change_from_the_previous_run(tmp_path: Path, made: list[str]) -> None:
    for day, run_id in enumerate(made, 1):
        new = f"2026030{day}-{run_id}"
        dated(tmp_path, run_id, f"2026-03-0{day}T12:00:00+00:00")
        (tmp_path / run_id).rename(tmp_path / new)

    shown = harness("history", "seq_len=512", "--store", ".", cwd=tmp_path).stdout

    _, *rows = shown.splitlines()
    assert [[c * 10 in row for c in "abcde"].index(True) for row in rows] == [0, 1, 2, 3, 4]
    assert "2.0x" in rows[1]
    assert ["other card" in row for row in rows] == [False, False, True, False, False]
    assert "+50 %" in rows[2], "against the other card of the model"
    assert all(CASE in row for row in rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seq_len=513"], "harness show RUN"),
        (["seq_len", "--gpu", "B200"], "harness show RUN"),
        ([CASES[0].case_id, "-m", "stop_s"], "Did you mean 'step_s'"),
    ],
)
def test_a_history_of_nothing_is_refused(
    tmp_path: Path, made: list[str], arguments: list[str], said: str
) -> None:
    refused = harness("history", *arguments, "--store", ".", cwd=tmp_path)

    assert refused.returncode == 2
    assert said in refused.stderr
