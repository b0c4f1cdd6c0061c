"""Repositories: what they answer, and worktrees that leave nothing behind."""

import os
from pathlib import Path

import pytest

from harness.errors import HarnessError
from harness.git.repository import Repository, read_git
from harness.git.worktrees import checked_out
from harness.tests.gate_repositories import KERNEL, commit, fingerprint, git, repository, write
from harness.tests.processes import running


def test_two_commits_are_checked_out_and_the_users_tree_does_not_change(toys: Path) -> None:
    commit(toys, {"toy/kernel.py": KERNEL + "# new\n"}, branch="change")
    write(toys, {"toy/kernel.py": "half done", "notes.txt": "untracked"})
    repo = Repository.around(toys)
    repo.dirty()
    before = fingerprint(toys)

    with checked_out(repo, repo.commit("main"), repo.commit("change")) as (base, head):
        texts = [(tree / "toy/kernel.py").read_text() for tree in (base, head)]
        folder = base.parent

    assert texts == [KERNEL, KERNEL + "# new\n"]
    assert (fingerprint(toys), folder.exists()) == (before, False)


def test_a_question_does_not_refresh_the_users_index(toys: Path) -> None:
    """git does so where a file is newer than its entry, although its content is the same."""
    os.utime(toys / "toy/kernel.py", (2e9, 2e9))
    index = (toys / ".git/index").read_bytes()

    Repository.around(toys).dirty()
    read_git(toys)

    assert (toys / ".git/index").read_bytes() == index


def test_a_snapshot_contains_uncommitted_files_but_not_ignored_ones(toys: Path) -> None:
    write(toys, {"toy/kernel.py": "half done", "toy/more.py": "untracked", "reports/x": "ignored"})
    repo = Repository.around(toys)
    before = fingerprint(toys)

    with checked_out(repo, repo.snapshot()) as (head,):
        assert (head / "toy/kernel.py").read_text() == "half done"
        assert (head / "toy/more.py").exists()
        assert not (head / "reports").exists()

    assert fingerprint(toys) == before

    git(toys, "sparse-checkout", "set", "--no-cone", "/*", "!/toy/more.py", "!/.gitignore")
    files = git(toys, "ls-tree", "-r", "--name-only", repo.snapshot()).split()
    assert {"toy/kernel.py", "toy/more.py", ".gitignore"} <= {*files}


@pytest.mark.parametrize("ref", ["nowhere", "--upload-pack=touch x", ""])
def test_a_ref_that_is_not_a_commit_is_refused(ref: str, toys: Path) -> None:
    with pytest.raises(HarnessError, match="is not a commit"):
        Repository.around(toys).commit(ref)


def test_under_a_hook_the_folder_decides_which_repository_answers(
    toys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"toy/kernel.py": "other"})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git/index"))

    assert Repository.around(toys).root == toys


def test_no_hook_or_monitor_of_a_repository_runs(toys: Path, tmp_path: Path) -> None:
    hook = toys / ".git/hooks/post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    hook.chmod(0o755)
    git(toys, "config", "core.fsmonitor", str(hook))
    repo = Repository.around(toys)

    with checked_out(repo, repo.commit("main")):
        repo.dirty()
        repo.snapshot()

    assert not (tmp_path / "ran").exists()


HOLD = """\
import sys, time
from pathlib import Path
from harness.git.repository import Repository, read_git
from harness.git.worktrees import checked_out
repo = Repository.around(Path(sys.argv[1]))
with checked_out(repo, repo.commit("main"), repo.commit("main")) as trees:
    print(trees[0].parent, flush=True)
    time.sleep(60)
"""


def test_worktrees_of_a_killed_process_are_removed_by_the_next_one(toys: Path) -> None:
    before, repo = fingerprint(toys), Repository.around(toys)

    with running(HOLD, str(toys), how="-c") as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        with checked_out(repo, repo.commit("main")) as (mine,):
            assert (folder / "base").is_dir()  # the process is alive
            process.kill()
            process.wait(timeout=30)
            with checked_out(repo, repo.commit("main")):
                assert not folder.exists()
                assert mine.is_dir()

    assert fingerprint(toys) == before
