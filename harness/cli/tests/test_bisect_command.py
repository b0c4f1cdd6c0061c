"""Requests that `bisect` refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.bisect.tests.planted import CASE, SUITE_PATH, Planted, make
from harness.cli.main import app
from harness.errors import HarnessError


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("planted") / "repository"
    return folder, make(folder, Planted(commits=12, merges=(4,), caseless=()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a suite, --case and --good"),
        ([SUITE_PATH, "--good", "main", "--case", "nothing"], "matches 0 cases"),
        ([SUITE_PATH, "--good", "nowhere", "--case", CASE], "is not a commit"),
        (
            [SUITE_PATH, "--good", "main", "--case", CASE, "--counter", "syncs"],
            "has no such counter",
        ),
        (["--resume", "latest", "--set", "a=1"], "continues a search as it is"),
        (["--resume", "latest", "--case", CASE], "continues a search as it is"),
        (["--resume", "latest", "--counter", "host_syncs"], "continues a search as it is"),
        (["--resume", "latest", "--state", "empty"], "empty has no bisections"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_with_the_reason(
    history: tuple[Path, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(history[0])

    answer = CliRunner().invoke(app, ["bisect", *words])

    assert isinstance(answer.exception, HarnessError), answer.output
    with pytest.raises(HarnessError, match=message):
        raise answer.exception
