"""Commits of a repository checked out side by side, in temporary worktrees.

The index, the branches and the working tree of the user do not change. A process removes its
worktrees when it ends; the next one in the same repository removes those of a killed process.
"""

import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from harness.errors import HarnessError
from harness.git.repository import Repository

SIDES = ("base", "head")
"""Folder names of baseline and candidate; of equal length, so that their paths are too."""
PREFIX = "harness-gate-"
"""First part of the name of every folder with temporary worktrees."""
HELD = ".held"
"""File in such a folder that its process keeps locked while it runs."""


@contextmanager
def checked_out(repository: Repository, *commits: str) -> Iterator[tuple[Path, ...]]:
    """One folder per commit, of one or of baseline and candidate, until the context ends."""
    with workplace(repository) as folder:
        trees = [folder / side for side in SIDES[-len(commits) :]]
        for tree, commit in zip(trees, commits, strict=True):
            check_out(repository, tree, commit)
        yield tuple(trees)


@contextmanager
def workplace(repository: Repository) -> Iterator[Path]:
    """A temporary folder for worktrees, removed with its content when the context ends."""
    sweep(repository)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    with FileLock(folder / HELD):  # before git lists a worktree that a sweep could find
        try:
            yield folder
        finally:
            _clear(repository, {folder})


def sweep(repository: Repository) -> None:
    """Remove the temporary worktrees of processes that have ended. git forgets those whose folder
    is missing by itself (`git worktree prune`)."""
    if dead := {*filter(_is_dead, {tree.parent for tree in _temporary(repository)})}:
        _clear(repository, dead)


def _temporary(repository: Repository) -> list[Path]:
    return [t for t in repository.worktrees() if t.parent.name.startswith(PREFIX)]


def _clear(repository: Repository, folders: Collection[Path]) -> None:
    """Remove folders of temporary worktrees with their content."""
    for tree in [tree for tree in _temporary(repository) if tree.parent in folders]:
        # Files first: git does not remove a folder that a killed worker still writes into.
        shutil.rmtree(tree, ignore_errors=True)
        with suppress(HarnessError):  # another process removed it first
            remove(repository, tree)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _is_dead(folder: Path) -> bool:
    """Whether a folder exists and its process has ended; False without the lock file."""
    held = folder / HELD
    with suppress(Timeout, OSError):
        if held.exists():
            with FileLock(held, timeout=0.0):
                return True
    return False


def check_out(repository: Repository, tree: Path, commit: str) -> None:
    """Make a worktree of a commit, on no branch."""
    repository.ask("worktree", "add", "--quiet", "--detach", str(tree), commit)


def remove(repository: Repository, tree: Path) -> None:
    """Remove a temporary worktree with everything built in it."""
    repository.ask("worktree", "remove", "--force", "--force", str(tree))
