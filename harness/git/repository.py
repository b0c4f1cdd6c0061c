"""A git repository: its commits, its changed files, and what it says of the code under test."""

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.records import Git

WORKING_TREE = "."
"""Stands for a head that is not committed yet."""


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


def top(roots: Sequence[str | Path]) -> Path:
    """The root of the working tree that the first root lies in; the present folder without any."""
    if not roots:
        return Path()
    first = Path(roots[0]).resolve()
    return next((f for f in (first, *first.parents) if (f / ".git").exists()), first)


WRITTEN = ("reports", "ci/baselines")
"""Folders of a repository that runs, baselines and calibrations go to; no code is in them."""


def read_git(folder: Path) -> Git | None:
    """Where the repository around a folder stands; None without a repository, a commit or git.

    What the harness itself writes, under WRITTEN, does not make the tree dirty. A folder that
    the repository ignores, such as a virtual environment within it, is not of it.
    """
    top = _answer(folder, "rev-parse", "--show-toplevel")
    if top is None or _answer(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    root = Path(os.fsdecode(top).removesuffix("\n"))
    commit = _answer(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    branch = _answer(root, "symbolic-ref", "--short", "HEAD")
    return Git(
        commit=commit.decode().strip(),
        branch=os.fsdecode(branch).strip() if branch else "(detached)",
        dirty_sha256=_dirty_sha256(root),
    )


def _dirty_sha256(root: Path) -> str:
    """Hash of all that differs from the commit; empty when nothing does."""
    paths = ("--", ".", *(f":(exclude){folder}" for folder in WRITTEN))
    diff = (
        _answer(root, "diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", *paths) or b""
    )
    listed = _answer(root, "ls-files", "--others", "--exclude-standard", "-z", *paths) or b""
    untracked = [name for name in listed.split(b"\0") if name]
    if not diff and not untracked:
        return ""
    digest = hashlib.sha256(diff)
    for name in sorted(untracked):
        path = root / os.fsdecode(name)
        if path.is_symlink():
            content = os.fsencode(path.readlink())
        elif path.is_file():
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").digest()
        else:  # a repository within this one
            content = b""
        digest.update(name + b"\0" + hashlib.sha256(content).digest())
    return digest.hexdigest()


def _answer(folder: Path, *arguments: str) -> bytes | None:
    """What git answers; None where it refuses or is not installed."""
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None
