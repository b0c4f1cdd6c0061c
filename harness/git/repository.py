"""A git repository: commits, changed files, working trees, and the state of the code under test."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError
from harness.records import Git

WORKING_TREE = "."
"""Names a candidate that is not committed yet."""
GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
"""How every git command begins: a repository's configuration and hooks start no program."""
_RECORD = "[0-9]" * 8 + "-" + "[0-9]" * 6 + "-*"
"""The name of a folder of one run or bisection, wherever its store is."""
_RECORDS = (
    ":(exclude,glob)**/reports/runs/**",
    ":(exclude,glob)**/reports/bisects/**",
    f":(exclude,glob)**/{_RECORD}/**",
)
_WRITTEN = (
    *_RECORDS,
    ":(exclude,literal)ci/baselines",
    ":(exclude,glob)**/reports/*.md",
    ":(exclude,glob)**/reports/figures/**",
)
"""Pathspecs that leave out what the harness writes, which is no code."""

_LOCAL = {
    *("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"),
    *("GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_CONFIG_PARAMETERS"),
}
"""git sets these for its hooks; with them, another repository or index would answer."""


def run_git(folder: Path, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
    """The output of a git command in a folder, without its last newline; HarnessError if git fails,
    with the last line of its message, or is not installed."""
    kept = {name: value for name, value in os.environ.items() if name not in _LOCAL}
    try:
        done = subprocess.run(
            [*GIT, *arguments],
            cwd=folder,
            # Without the optional lock, a question does not refresh the user's index.
            env={**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        raise HarnessError("git was not found on PATH", "Install git.") from None
    if done.returncode != 0:
        message = done.stderr.decode(errors="replace").strip().splitlines()
        raise HarnessError(f"git {arguments[0]}: {message[-1] if message else 'no message'}")
    return os.fsdecode(done.stdout).removesuffix("\n")


def try_git(
    folder: Path, *arguments: str, variables: Mapping[str, str] | None = None
) -> str | None:
    """As run_git; None if git fails or is not installed."""
    try:
        return run_git(folder, *arguments, variables=variables)
    except HarnessError:
        return None


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository, identified by the root of its working tree."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> "Repository":
        """The repository that contains a folder; HarnessError without one, or without git."""
        try:
            root = run_git(folder, "rev-parse", "--show-toplevel")
        except HarnessError as error:
            problem = f"{folder} is not in a git repository: {error}"
            raise HarnessError(problem, "Run this inside a clone.") from None
        return cls(Path(root))

    def ask(self, *arguments: str, variables: Mapping[str, str] | None = None) -> str:
        """As run_git, at the root."""
        return run_git(self.root, *arguments, variables=variables)

    def commit(self, ref: str) -> str:
        """The full hash of the commit that a ref names; HarnessError if it names none."""
        arguments = ("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}")
        # git would read a leading dash as an option.
        found = None if ref.startswith("-") else try_git(self.root, *arguments)
        if found is None:
            remedy = "See: git log --oneline, git branch --all"
            shallow = try_git(self.root, "rev-parse", "--is-shallow-repository") or ""
            if shallow == "true":
                remedy = "This clone is shallow; fetch more: git fetch origin main --depth=1000."
            if try_git(self.root, "rev-parse", "--verify", "--quiet", "HEAD") is None:
                remedy = "The repository has no commit yet: make one, then repeat the command."
            raise HarnessError(f"{ref!r} is not a commit of {self.root}", remedy)
        return found

    def merge_base(self, base: str, head: str) -> str:
        """The last commit that both have in common; HarnessError if there is none."""
        found = try_git(self.root, "merge-base", base, head)
        if found is None:
            problem = f"{base[:10]} and {head[:10]} have no common commit in {self.root}"
            remedy = "In a shallow clone, fetch the history: git fetch --unshallow."
            raise HarnessError(problem, remedy)
        return found

    def text(self, commit: str, path: str) -> str | None:
        """The content of a file in a commit; None if the commit does not contain it."""
        return try_git(self.root, "show", f"{commit}:{path}")

    def worktrees(self) -> tuple[Path, ...]:
        """All working trees of the repository, this one first."""
        listed = self.ask("worktree", "list", "--porcelain").split("\n\n")
        entries = [entry.splitlines() for entry in listed]
        trees = (Path(e[0].removeprefix("worktree ")) for e in entries if "bare" not in e)
        return tuple(dict.fromkeys([self.root, *trees]))

    def changed(self, before: str, after: str) -> tuple[str, ...]:
        """The files of code that two commits have in different form, by path from the root."""
        names = ("diff", "--name-only", "--no-renames", "--ignore-submodules=none", "-z")
        found = self.ask(*names, before, after, "--", ".", *_WRITTEN)
        return tuple(filter(None, found.split("\0")))

    def dirty(self) -> bool:
        """Whether the working tree has uncommitted changes of code."""
        each = "--untracked-files=all"  # git would name a new folder, whatever is excluded in it
        return bool(self.ask("status", "--porcelain", each, "--", ".", *_WRITTEN))

    def snapshot(self) -> str:
        """A commit, on no branch, of the working tree with its untracked files, by an index of its
        own; git collects the objects that it leaves."""
        with tempfile.TemporaryDirectory() as folder:
            index, beyond = Path(folder, "index"), tuple[str, ...]()
            variables = {"GIT_INDEX_FILE": str(index)}
            for who in ("AUTHOR", "COMMITTER"):
                variables[f"GIT_{who}_NAME"] = "harness gate"
                variables[f"GIT_{who}_EMAIL"] = "harness@localhost"
            self.ask("read-tree", "HEAD", variables=variables)
            if try_git(self.root, "config", "core.sparseCheckout") == "true":
                # Only the index of the user knows which files the working tree leaves out.
                shutil.copy(self.root / self.ask("rev-parse", "--git-path", "index"), index)
                beyond = ("--sparse",)
            self.ask("add", "--all", *beyond, "--", ".", *_RECORDS, variables=variables)
            tree = self.ask("write-tree", variables=variables)
            message = "Working tree measured by a gate"
            return self.ask("commit-tree", tree, "-p", "HEAD", "-m", message, variables=variables)


def top(roots: Sequence[str | Path]) -> Path:
    """The working tree that contains the first root; the current folder without roots."""
    if not roots:
        return Path()
    first = Path(roots[0]).resolve()
    return next((f for f in (first, *first.parents) if (f / ".git").exists()), first)


def home(folder: Path) -> tuple[Path, ...]:
    """Folders that the code under test is imported from first: the root of the working tree around
    a folder, and the folder."""
    here = folder.resolve()
    return tuple(dict.fromkeys((top([here]), here)))


def read_git(folder: Path) -> Git | None:
    """Commit, branch and uncommitted changes, without what the harness writes, of the repository
    around a folder; None without git or a commit, and for a folder that its repository ignores."""
    root = try_git(folder, "rev-parse", "--show-toplevel")
    if root is None or try_git(folder, "check-ignore", "--quiet", ".") is not None:
        return None
    tree = Path(root)
    commit = try_git(tree, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    branch = try_git(tree, "symbolic-ref", "--short", "HEAD") or "(detached)"
    return Git(commit=commit, branch=branch, dirty_sha256=_dirty_sha256(tree))


def _dirty_sha256(root: Path) -> str:
    """Hash of everything that differs from the commit; empty if nothing does."""
    code = ("--", ".", *_WRITTEN)
    asked = ("diff", "HEAD", "--binary", "--no-ext-diff", "--no-textconv", *code)
    with tempfile.TemporaryDirectory() as folder:  # for git writes the index that it compares with
        index = root / (try_git(root, "rev-parse", "--git-path", "index") or "")
        variables = {}
        if index.is_file():
            variables = {"GIT_INDEX_FILE": shutil.copy2(index, folder)}
        diff = try_git(root, *asked, variables=variables) or ""
    listed = try_git(root, "ls-files", "--others", "--exclude-standard", "-z", *code) or ""
    untracked = sorted(os.fsencode(name) for name in listed.split("\0") if name)
    if not diff and not untracked:
        return ""
    digest = hashlib.sha256(os.fsencode(diff))
    for name in untracked:
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
