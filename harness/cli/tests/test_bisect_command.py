"""Requests that `bisect` refuses."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from harness.bisect.tests.planted import CASE, SUITE_PATH, Planted, make
from harness.cli.main import app
from harness.errors import HarnessError
from harness.store import reader

FROM_MAIN = (SUITE_PATH, "--good", "main", "--case")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "repository"
    make(folder, Planted(commits=12, merges=(4,), caseless=()))
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a suite, --case and --good"),
        ([*FROM_MAIN, "nothing"], "matches 0 cases"),
        ([SUITE_PATH, "--good", "nowhere", "--case", CASE], "is not a commit"),
        ([*FROM_MAIN, CASE, "--counter", "syncs"], "has no such counter"),
        ([SUITE_PATH, "--runs", "a", "b"], "--runs needs --case alone"),
        (["--runs", "a", "b", "--counter", "host_syncs"], "--runs needs --case alone"),
        (["--runs", "a", "b", "--store", "empty"], "'a'|no run"),
        (["--resume", "latest", "--set", "a=1"], "continues a search as it is"),
        (["--resume", "latest", "--case", CASE], "continues a search as it is"),
        (["--resume", "latest", "--runs", "a", "b"], "continues a search as it is"),
        (["--resume", "latest", "--counter", "host_syncs"], "continues a search as it is"),
        (["--resume", "latest", "--state", "empty"], "empty has no bisections"),
    ],
)
def test_a_request_that_cannot_be_carried_out_is_refused_with_the_reason(
    history: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(history)

    answer = CliRunner().invoke(app, ["bisect", *words])

    assert isinstance(answer.exception, HarnessError), answer.output
    with pytest.raises(HarnessError, match=message):
        raise answer.exception


def test_two_runs_give_a_suite_and_the_command_that_runs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "load", lambda _, name: SimpleNamespace(run_id=name))
    monkeypatch.setattr(
        "harness.bisect.differences.suite_of",
        lambda runs, case, path: f"# {runs[1].run_id} {case}\n# harness run {path}\nschema: 1\n",
    )
    words = ["--runs", "a", "b", "--case", CASE, "--state", str(tmp_path / "new")]

    answer = CliRunner().invoke(app, ["bisect", *words])

    path = tmp_path / "new/differences-a-b.yaml"
    assert answer.exit_code == 0, answer.output
    assert path.read_text().startswith(f"# b {CASE}")
    assert f"harness run {path}" in answer.output.replace("\n", "")
