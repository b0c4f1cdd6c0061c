"""The study of a foreign repository, small: the repository, and the answers that take a second."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from harness.conftest import forked_forkservers  # noqa: F401  a fixture
from harness.suite import load as suites
from harness.tests.command_line import harness
from harness.tests.gate_repositories import git
from reports.studies import foreign_repository as study
from reports.studies.foreign_files import PLANTED, SUITE_PATH
from reports.studies.foreign_repository import Newcomer


def here(words: Sequence[str], folder: Path, env: Mapping[str, str]) -> CompletedProcess[str]:
    """The command in this process, with nothing of this checkout to import."""
    with pytest.MonkeyPatch.context() as patch:
        root = str(study.ROOT)
        patch.setattr(sys, "path", [place for place in sys.path if place not in ("", root)])
        return harness(*words, cwd=folder, env={"PYTHONPATH": None, **env})


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory: pytest.TempPathFactory) -> Newcomer:
    folder = tmp_path_factory.mktemp("foreign")
    return study.begin(folder, first_s=1.0, stall_s=1.0, timeout_s=60.0, call=here)


def test_the_history_is_as_planted(newcomer: Newcomer) -> None:
    repo, line = newcomer.repository, newcomer.line
    merges = git(repo, "rev-list", "--merges", "main").split()
    files = git(repo, "ls-tree", "-r", "--name-only", "main").split()

    assert len(line) == PLANTED.commits + 1
    assert {line.index(sha) for sha in merges} == {*PLANTED.merges}
    assert files == [".gitignore", "nsa/attention.py", "nsa/bench.py", "train.py"]
    for position, sha in enumerate(line):
        text = git(repo, "show", f"{sha}:nsa/attention.py")
        assert ("does_not_exist" in text) == (position in PLANTED.unbuildable)
        assert (f"SYNCS = {1 + (position >= PLANTED.sync_at)}\n") in text
    cases = suites.load(str(repo / SUITE_PATH)).cases
    modes = {case.program.argv[3] for case in cases if case.program}
    assert modes == {"plain", "first", "deadlock", "endless", "select"}


def test_the_quick_answers_are_right_and_nothing_of_the_newcomer_changes(
    newcomer: Newcomer,
) -> None:
    rows = ("shadowed", "records", "gate")

    found = [*study.answers(newcomer, rows)]

    assert [a.said for a in found if not a.right] == []
    assert study.page(found, "CPU").count("| yes |") == len(rows) + 1
