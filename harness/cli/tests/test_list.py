"""Which stored runs are listed."""

from pathlib import Path

import pytest

from harness.records import Outcome
from harness.tests.command_line import harness
from harness.tests.stored_runs import A100, record


@pytest.fixture
def made(tmp_path: Path) -> list[str]:
    return [
        record(tmp_path, commit="a" * 40),
        record(tmp_path, commit="b" * 40, suite="smoke", finish=False),
        record(tmp_path, commit="c" * 40),
        record(tmp_path, commit="d" * 40, gpu=A100, broken=Outcome.CRASH),
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
