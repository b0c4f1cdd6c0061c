"""Commits of a repository checked out side by side, without touching the user's files.

Each commit is checked out into a temporary worktree, detached, and removed at the end. Worktrees
of a process that was killed are removed by the next one that makes some in the same repository.
Index, branches and working tree stay as they are.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from harness.environment import WRITTEN
from harness.errors import HarnessError

WORKING_TREE = "."
"""Stands for a head that is not committed yet."""
SIDES = ("base", "head")
"""Names of the two folders: of one length, so that no path is longer on one side."""
PREFIX = "harness-gate-"
"""Begins the name of every folder that holds temporary worktrees."""
HELD = ".held"
"""File in such a folder that its process keeps locked while it lives."""
ELSEWHERE_S = 86_400.0
"""A folder that is missing here may be on another machine: its worktrees are kept this long."""

# What git sets for its hooks; under them it would speak of another repository or index.
_LOCAL = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_CONFIG",
    "GIT_CONFIG_PARAMETERS",
    "GIT_CONFIG_COUNT",
    "GIT_OBJECT_DIRECTORY",
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_REPLACE_REF_BASE",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_COMMON_DIR",
)


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository, by the root of its working tree."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> "Repository":
        """The repository that a folder lies in.

        Raises:
            HarnessError: There is none, or no git.
        """
        try:
            top = _git(folder, "rev-parse", "--show-toplevel")
        except HarnessError as error:
            raise HarnessError(
                f"{folder} is in no git repository: {error}",
                "It is commits that are compared; run it in a clone.",
            ) from None
        return cls(Path(top))

    def ask(self, *arguments: str) -> str:
        """What git answers here, less its last newline.

        Raises:
            HarnessError: With what git said.
        """
        return _git(self.root, *arguments)

    def commit(self, ref: str) -> str:
        """The commit that a ref names.

        Raises:
            HarnessError: It names none here.
        """
        try:
            if ref.startswith("-"):
                raise HarnessError(ref)  # git would take it for an option
            return _git(self.root, "rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        except HarnessError:
            raise HarnessError(
                f"{ref!r} names no commit of {self.root}",
                "In a shallow clone fetch it first: git fetch origin main --depth=1000.",
            ) from None

    def merge_base(self, base: str, head: str) -> str:
        """The last commit that both have in common: what came to the base since is no change.

        Raises:
            HarnessError: They have none.
        """
        try:
            return _git(self.root, "merge-base", base, head)
        except HarnessError:
            raise HarnessError(
                f"{base[:10]} and {head[:10]} have no commit in common here",
                "A shallow clone may lack it: git fetch --unshallow.",
            ) from None

    def changed(self, base: str, head: str) -> tuple[str, ...]:
        """Paths from the root that differ; of a moved file both the old and the new."""
        names = _git(
            self.root, "diff", "--name-only", "--no-renames", "--no-ext-diff", "-z", base, head
        )
        return tuple(name for name in names.split("\0") if name)

    def text(self, commit: str, path: str) -> str | None:
        """A file as it stands in a commit; None where it is not in there."""
        try:
            return _git(self.root, "show", f"{commit}:{path}", strip=False)
        except HarnessError:
            return None

    def worktrees(self) -> tuple[Path, ...]:
        """All working trees of the repository, this one first."""
        listed = self.ask("worktree", "list", "--porcelain").split("\n\n")
        places = [entry.splitlines() for entry in listed]
        trees = (
            Path(place[0].removeprefix("worktree ")) for place in places if "bare" not in place
        )
        return tuple(dict.fromkeys([self.root, *trees]))

    def dirty(self) -> bool:
        """Whether the working tree holds what is not committed, but for what the harness writes."""
        code = (f":(exclude){folder}" for folder in WRITTEN)
        return bool(_git(self.root, "status", "--porcelain", "--", ".", *code))

    def snapshot(self) -> str:
        """A commit of the working tree as it is, untracked files included; on no branch.

        It is made with an index of its own; the objects it leaves are git's to collect.
        """
        with tempfile.TemporaryDirectory() as folder:
            mine = {
                "GIT_INDEX_FILE": str(Path(folder, "index")),
                **{f"GIT_{who}_NAME": "harness gate" for who in ("AUTHOR", "COMMITTER")},
                **{f"GIT_{who}_EMAIL": "harness@localhost" for who in ("AUTHOR", "COMMITTER")},
            }
            _git(self.root, "read-tree", "HEAD", variables=mine)
            _git(self.root, "add", "--all", variables=mine)
            tree = _git(self.root, "write-tree", variables=mine)
            said = "The working tree, as a gate saw it"
            return _git(self.root, "commit-tree", tree, "-p", "HEAD", "-m", said, variables=mine)


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


def _git(
    folder: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    strip: bool = True,
) -> str:
    """What git answers, less its last newline.

    Raises:
        HarnessError: With what git said.
    """
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=_environment(variables or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise HarnessError(
            "git is not installed", "Commits are read with it; install it."
        ) from None
    if answer.returncode != 0:
        said = answer.stderr.decode(errors="replace").strip().splitlines()
        raise HarnessError(f"git {arguments[0]}: {said[-1] if said else 'it said nothing'}")
    text = os.fsdecode(answer.stdout)
    return text.removesuffix("\n") if strip else text


def _environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _LOCAL}
    return {**kept, "LC_ALL": "C", **(variables or {})}
