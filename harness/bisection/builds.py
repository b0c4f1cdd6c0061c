"""Worktrees of the commits that are measured: made when asked for, built, few at a time."""

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path

from harness.bisection.journal import Build
from harness.gating import worktrees
from harness.gating.worktrees import Repository

SLOTS = tuple(f"tree{n}" for n in range(6))
"""Worktrees that stand at once: of one length, so that no path is longer in one of them."""
SAID_LINES = 3


class NotBuilt(Exception):
    """A commit cannot be built."""


class Trees:
    """Keeps worktrees by commit."""

    def __init__(self, repository: Repository, folder: Path, build: Build, logs: Path) -> None:
        """`folder` is a workplace with room for SLOTS."""
        self._repository = repository
        self._folder = folder
        self._build = build
        self._logs = logs
        self._standing: dict[str, Path] = {}  # the longest unused first

    def of(self, commit: str, keep: Collection[str] = ()) -> Path:
        """The worktree of a commit, built.

        Args:
            commit: Its full hash.
            keep: Commits whose trees must stand meanwhile; fewer than SLOTS.

        Raises:
            NotBuilt: The build failed.
            HarnessError: git cannot check it out.
        """
        if commit in self._standing:
            self._standing[commit] = self._standing.pop(commit)
            return self._standing[commit]
        if len(self._standing) >= len(SLOTS):
            self._drop(next(c for c in self._standing if c not in keep))
        free = next(s for s in SLOTS if self._folder / s not in self._standing.values())
        tree = self._folder / free
        worktrees.check_out(self._repository, tree, commit)
        self._standing[commit] = tree
        try:
            self._make(commit, tree)
        except BaseException:  # Ctrl-C included: half a build must not be measured
            self._drop(commit)
            raise
        return tree

    def _drop(self, commit: str) -> None:
        worktrees.remove(self._repository, self._standing.pop(commit))

    def _make(self, commit: str, tree: Path) -> None:
        if not self._build.command:
            return
        kept = self._kept(commit) if self._build.key else None
        if kept is not None and kept.is_dir():
            _copy(kept, tree)
            return
        _run(self._build, tree, self._logs / f"build-{commit[:10]}.log")
        if kept is not None:
            draft = kept.with_name(f".{kept.name}.{os.getpid()}")
            listed = self._repository_of(tree).ask("ls-files", "--others", "-z")
            for name in filter(None, listed.split("\0")):
                if "__pycache__" not in name:
                    _link(tree / name, draft / name)
            draft.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # another bisection was faster
                draft.rename(kept)
            shutil.rmtree(draft, ignore_errors=True)

    def _repository_of(self, tree: Path) -> Repository:
        return Repository(tree)

    def _kept(self, commit: str) -> Path:
        """Where what is built lies, for all commits whose files of the key are the same."""
        listed = self._repository.ask("ls-tree", "-r", "-z", commit).split("\0")
        files = [entry.partition("\t") for entry in listed if entry]
        depends = [
            f"{how} {name}"
            for how, _, name in files
            if any(fnmatchcase(name, pattern) for pattern in self._build.key)
        ]
        words = [str(self._repository.root), sys.version, self._build.command, *depends]
        digest = hashlib.sha256("\0".join(words).encode("utf-8", "surrogateescape")).hexdigest()
        return cache_folder() / digest[:24]


def cache_folder() -> Path:
    """Where built products are kept from one bisection to the next; delete it at will."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "harness" / "bisect"


@contextmanager
def standing(repository: Repository, build: Build, logs: Path) -> Iterator[Trees]:
    """Trees for as long as the context lasts; however it ends, none is left."""
    with worktrees.workplace(repository, SLOTS) as folder:
        yield Trees(repository, folder, build, logs)


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
            raise NotBuilt(f"the build took more than {build.timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-SAID_LINES:]
        raise NotBuilt(f"the build ended with status {status}: {' / '.join(said)}")


def _copy(kept: Path, tree: Path) -> None:
    for file in kept.rglob("*"):
        if file.is_symlink() or file.is_file():
            _link(file, tree / file.relative_to(kept))


def _link(source: Path, target: Path) -> None:
    """One file in two places; a copy where they are on two disks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except FileExistsError:
        return
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
