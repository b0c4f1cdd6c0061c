"""Worktrees of the commits that are measured: created on request, built, a few at a time."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path

from harness.bisect.criteria import Unreadable
from harness.git import worktrees
from harness.git.repository import Repository
from harness.processes import log_end

SLOTS = tuple(f"tree{n}" for n in range(7))
"""Names of the worktrees that exist at once; equally long, so that paths have equal lengths."""
TIMEOUT_S = 3600.0
"""Longest build."""


class BuiltTrees:
    """The worktrees of the last few commits, built."""

    def __init__(self, repository: Repository, folder: Path, build: str, logs: Path) -> None:
        """`folder` is a workplace, `build` a command for a shell."""
        self._repository = repository
        self._folder = folder
        self._build = build
        self._logs = logs
        self._trees: dict[str, Path] = {}  # by commit, the least recently used first

    def of(self, commit: str, keep: Collection[str] = ()) -> Path:
        """The worktree of a commit, built; Unreadable if the build fails, or a HarnessError if git
        cannot check it out. Those of the commits to keep, fewer than SLOTS, stay."""
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
            if self._build:
                _run(self._build, tree, self._logs / f"build-{commit[:10]}.log")
        except BaseException:  # Ctrl-C included: an incomplete build must not be measured
            self._drop(commit)
            raise
        return tree

    def _drop(self, commit: str) -> None:
        worktrees.remove(self._repository, self._trees.pop(commit))


def _run(build: str, tree: Path, log: Path) -> None:
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["/bin/sh", "-c", build],
            cwd=tree,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise Unreadable(f"the build took more than {TIMEOUT_S:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0:
        last = log_end(log).strip().splitlines()[-3:]
        raise Unreadable(f"the build ended with status {status}: {' / '.join(last)}")
