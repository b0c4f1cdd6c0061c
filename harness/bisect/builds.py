"""Worktrees of the commits that are measured: created on request, built, a few at a time."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from harness.bisect.journal import Build
from harness.git import worktrees
from harness.git.repository import Repository

SLOTS = tuple(f"tree{n}" for n in range(7))
"""Names of the worktrees that exist at once; equally long, so that paths have equal lengths."""
SHOWN_LINES = 3
"""Last lines of a failed build's log that its message shows."""


class BuildFailed(Exception):
    """A commit cannot be built."""


class BuiltTrees:
    """The worktrees of the last few commits, built."""

    def __init__(self, repository: Repository, folder: Path, build: Build, logs: Path) -> None:
        """`folder` is a workplace."""
        self._repository = repository
        self._folder = folder
        self._build = build
        self._logs = logs
        self._trees: dict[str, Path] = {}  # by commit, the least recently used first

    def of(self, commit: str, keep: Collection[str] = ()) -> Path:
        """The worktree of a commit, built. Those of the commits to keep, fewer than SLOTS, stay.

        Raises:
            BuildFailed: The build failed.
            HarnessError: git cannot check it out.
        """
        if commit in self._trees:
            self._trees[commit] = self._trees.pop(commit)
            return self._trees[commit]
        if len(self._trees) >= len(SLOTS):
            self._drop(next(c for c in self._trees if c not in keep))
        free = next(s for s in SLOTS if self._folder / s not in self._trees.values())
        tree = self._folder / free
        worktrees.check_out(self._repository, tree, commit)
        self._trees[commit] = tree
        try:
            self._make(commit, tree)
        except BaseException:  # Ctrl-C included: an incomplete build must not be measured
            self._drop(commit)
            raise
        return tree

    def _drop(self, commit: str) -> None:
        worktrees.remove(self._repository, self._trees.pop(commit))

    def _make(self, commit: str, tree: Path) -> None:
        if not self._build.command:
            return
        kept = self._kept(commit) if self._build.key else None
        if kept is not None and kept.is_dir():
            for file in kept.rglob("*"):
                if file.is_symlink() or file.is_file():
                    _link(file, tree / file.relative_to(kept))
            return
        _run(self._build, tree, self._logs / f"build-{commit[:10]}.log")
        if kept is not None:
            draft = kept.with_name(f".{kept.name}.{os.getpid()}")
            listed = Repository(tree).ask("ls-files", "--others", "-z")
            for name in filter(None, listed.split("\0")):
                if "__pycache__" not in name:
                    _link(tree / name, draft / name)
            draft.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another bisection created it first
                draft.rename(kept)
            shutil.rmtree(draft, ignore_errors=True)

    def _kept(self, commit: str) -> Path:
        """Folder of the build products of all commits whose files of the key are the same. It can
        be deleted at any time."""
        listed = self._repository.ask("ls-tree", "-r", "-z", commit).split("\0")
        files = [entry.partition("\t") for entry in listed if entry]
        depends = [
            f"{how} {name}"
            for how, _, name in files
            if any(fnmatchcase(name, pattern) for pattern in self._build.key)
        ]
        words = [str(self._repository.root), sys.version, self._build.command, *depends]
        digest = hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return home / "harness" / "bisect" / digest[:24]


def _run(build: Build, tree: Path, log: Path) -> None:
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", build.command],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait(build.timeout_s)
        except subprocess.TimeoutExpired:
            raise BuildFailed(f"the build took more than {build.timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-SHOWN_LINES:]
        raise BuildFailed(f"the build ended with status {status}: {' / '.join(last)}")


def _link(source: Path, target: Path) -> None:
    """Hard-link a file; copy it to another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
