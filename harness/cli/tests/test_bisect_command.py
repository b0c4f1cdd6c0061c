"""Requests that `bisect` refuses."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.bisect.journal import BisectRequest
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
        (["--resume", "latest", "--set", "a=1"], "--set would change it"),
        (["--resume", "latest", "--case", CASE], "--case would change it"),
        (["--resume", "latest", "--counter", "host_syncs"], "--counter would change it"),
        (["--resume", "latest", "--no-enter-merges"], "--no-enter-merges would change it"),
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


@pytest.mark.parametrize(
    ("words", "entered"), [([], True), (["--enter-merges"], True), (["--no-enter-merges"], False)]
)
def test_merges_are_entered_unless_denied(
    history: tuple[Path, tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    entered: bool,
) -> None:
    monkeypatch.chdir(history[0])
    asked: list[BisectRequest] = []

    def seen(request: BisectRequest, resources: object) -> None:
        asked.append(request)
        raise HarnessError("seen")

    monkeypatch.setattr("harness.bisect.session.run", seen)
    good = history[1][0]
    CliRunner().invoke(app, ["bisect", SUITE_PATH, "--good", good, "--case", CASE, *words])

    assert [request.enter_merges for request in asked] == [entered]
