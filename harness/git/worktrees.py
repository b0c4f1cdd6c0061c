"""Commits of a repository checked out side by side, without touching the user's files.

Each commit is checked out into a temporary worktree, detached, and removed at the end. Worktrees
of a process that was killed are removed by the next one that makes some in the same repository.
Index, branches and working tree stay as they are.
"""

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from harness.errors import HarnessError
from harness.git.repository import Repository

SIDES = ("base", "head")
"""Names of the two folders: of one length, so that no path is longer on one side."""
PREFIX = "harness-gate-"
"""Begins the name of every folder that holds temporary worktrees."""
HELD = ".held"
"""File in such a folder that its process keeps locked while it lives."""
ELSEWHERE_S = 86_400.0
"""A folder that is missing here may be on another machine: its worktrees are kept this long."""


@contextmanager
def checked_out(repository: Repository, *commits: str) -> Iterator[tuple[Path, ...]]:
    """One folder per commit, for as long as the context lasts.

    Args:
        commits: At most as many as there are SIDES: the base, then the head.

    Raises:
        HarnessError: git cannot check one of them out.
    """
    with workplace(repository) as folder:
        trees = [folder / side for side in SIDES[-len(commits) :]]
        for tree, commit in zip(trees, commits, strict=True):
            check_out(repository, tree, commit)
        yield tuple(trees)


@contextmanager
def workplace(repository: Repository) -> Iterator[Path]:
    """A temporary folder for worktrees, removed at the end with all that is in it."""
    sweep(repository)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with (folder / HELD).open("w") as held:  # first: once a worktree is listed, a sweep may look
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            _clear(repository, [tree for tree in _temporary(repository) if tree.parent == folder])
            shutil.rmtree(folder, ignore_errors=True)


def sweep(repository: Repository) -> None:
    """Remove the temporary worktrees of processes that are dead."""
    trees = _temporary(repository)
    dead = {folder for folder in {tree.parent for tree in trees} if _is_dead(folder)}
    common = repository.root / repository.ask("rev-parse", "--git-common-dir")
    _clear(
        repository,
        [
            tree
            for tree in trees
            if tree.parent in dead
            or (not tree.parent.exists() and _is_old(common / "worktrees", tree))
        ],
    )
    for folder in dead:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary(repository: Repository) -> list[Path]:
    return [t for t in repository.worktrees() if t.parent.name.startswith(PREFIX)]


def _clear(repository: Repository, trees: Iterable[Path]) -> None:
    for tree in trees:
        # The files first: git refuses to remove a folder that a killed worker still writes into.
        shutil.rmtree(tree, ignore_errors=True)
        with suppress(HarnessError):  # another process's sweep was faster
            remove(repository, tree)


def _is_dead(folder: Path) -> bool:
    """Whether a folder is here and its process is gone; without the file it is unknown."""
    try:
        fd = os.open(folder / HELD, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _is_old(entries: Path, tree: Path) -> bool:
    """Whether git made a worktree's entry long ago."""
    for entry in entries.glob("*/gitdir"):
        try:
            if Path(entry.read_text().strip()).parent == tree:
                return time.time() - entry.stat().st_mtime > ELSEWHERE_S
        except OSError:
            continue
    return False


def check_out(repository: Repository, tree: Path, commit: str) -> None:
    """Make a worktree of a commit, on no branch.

    Raises:
        HarnessError: git cannot.
    """
    # A hook of the user's would run at checkout.
    repository.ask(
        *("-c", "core.hooksPath=/dev/null"),
        *("worktree", "add", "--quiet", "--detach", str(tree), commit),
    )


def remove(repository: Repository, tree: Path) -> None:
    """Remove a worktree of ours with all that was built in it.

    Raises:
        HarnessError: git cannot.
    """
    repository.ask("worktree", "remove", "--force", "--force", str(tree))
