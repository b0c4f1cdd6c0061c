"""Worktrees of gates that are no more, and whose keeper is no more either.

harness.gating.keeper removes a gate's trees however the gate ends. Where the keeper was killed
with it (a container that is stopped, an empty memory), the next gate in the repository does.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from harness.gating.keeper import HELD

PREFIX = "harness-gate-"
"""Begins the name of every folder that holds trees of ours."""
ELSEWHERE_S = 86_400.0
"""Where the folder is not on this machine, another one may have it: so long it is left alone."""


def sweep(repository: Path, variables: Mapping[str, str]) -> tuple[Path, ...]:
    """Remove the worktrees that no keeper watches over any more; those removed.

    Args:
        repository: Its root.
        variables: The environment for git.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        run = subprocess.run(command, env=variables, capture_output=True, check=False)
        return os.fsdecode(run.stdout)

    listed = git("worktree", "list", "--porcelain").splitlines()
    trees = [
        Path(line.removeprefix("worktree ")) for line in listed if line.startswith("worktree ")
    ]
    ours = [tree for tree in trees if tree.parent.name.startswith(PREFIX)]
    forsaken = [folder for folder in dict.fromkeys(t.parent for t in ours) if _forsaken(folder)]
    entries = repository / git("rev-parse", "--git-common-dir").strip() / "worktrees"
    removed = []
    for tree in ours:
        if tree.parent in forsaken or (not tree.parent.exists() and _is_old(entries, tree)):
            git("worktree", "remove", "--force", "--force", str(tree))
            removed.append(tree)
    for folder in forsaken:
        shutil.rmtree(folder, ignore_errors=True)
    return tuple(removed)


def _forsaken(folder: Path) -> bool:
    """Whether a folder is here, and nobody holds it. Without the file nobody can tell."""
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
