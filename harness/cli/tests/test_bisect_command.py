"""Requests that `bisect` refuses, and a slowdown planted in a history."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError
from harness.tests.gate_repositories import git
from reports.studies import planted_branch
from reports.studies.planted_branch import Plant
from reports.studies.planted_history import CASE, SUITE_PATH, Planted, make

PLANT = Plant(file="toy/kernel.py", after=r"time\.sleep", insert="x.sum().item()")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    folder = tmp_path_factory.mktemp("planted") / "repository"
    return folder, make(folder, Planted(commits=12, merges=(4,), caseless=()))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a suite, --case and --good"),
        ([SUITE_PATH, "--case", CASE], "needs a suite"),
        ([SUITE_PATH, "--good", "main", "--case", "nothing"], "matches 0 cases"),
        ([SUITE_PATH, "--good", "nowhere", "--case", CASE], "is not a commit"),
        ([SUITE_PATH, "--good", "main", "--case", CASE, "--counter", "syncs"], "has none"),
        ([SUITE_PATH, "--runs", "a", "b"], "--runs takes suite and code"),
        (["--runs", "a", "b", "--store", "empty"], "'a'|no run"),
        (["--resume", "latest", "--case", CASE], "--case would change it"),
        (["--resume", "latest", "--counter", "host_syncs"], "--counter would change it"),
        (["--resume", "latest", "--enter-merges"], "--enter-merges would change it"),
        (["--resume", "latest", "--state", "empty"], "matches 0 bisections"),
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


def test_a_planted_commit_is_at_its_place_and_later_ones_keep_its_line(
    history: tuple[Path, tuple[str, ...]], tmp_path: Path
) -> None:
    source, line = history
    clone = tmp_path / "clone"

    good, planted = planted_branch.make(source, clone, PLANT, commits=8, at=5)

    there = git(clone, "rev-list", "--first-parent", "--reverse", f"{good}..planted").split()
    assert good == line[4]
    assert there[:4] == list(line[5:9])
    assert there[4] == planted
    assert len(there) == 9
    assert git(clone, "diff", "--stat", line[8], planted).endswith("1 insertion(+)")
    for old, new in zip(line[9:], there[5:], strict=True):
        changed = git(clone, "diff", "--name-only", old, new)
        assert changed == "toy/kernel.py"
        assert git(clone, "log", "-1", "--format=%s %an %ad", new) == git(
            clone, "log", "-1", "--format=%s %an %ad", old
        )
    text = git(clone, "show", f"{planted}:toy/kernel.py")
    assert "    time.sleep(STEP_S)\n    x.sum().item()\n    return" in text
    assert git(source, "branch", "--all") == "* main"


@pytest.mark.parametrize("after", ["no such line", "import|SYNCS"])
def test_a_line_without_a_unique_place_is_not_planted(after: str) -> None:
    with pytest.raises(ValueError, match=r"lines of toy/kernel\.py, not one"):
        Plant(file="toy/kernel.py", after=after, insert="x").into("import time\nSYNCS = 1\n")
