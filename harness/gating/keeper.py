"""Removes a gate's worktrees when the gate is gone, however it went.

Run as a file of its own, in a session of its own: `keeper.py REPOSITORY FOLDER NAME...`. It says
`ready`, then waits for the end of its standard input, which comes when the gate closes it, or
dies of anything at all, SIGKILL included. The user's own worktrees are not touched. All the while
it holds FOLDER/.held, so that others can tell whether it lives: see harness.gating.leftovers.
"""

import fcntl
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

HELD = ".held"
"""File in the folder of the trees that its keeper has locked for as long as it lives."""

LIMIT_S = 60.0
"""Longest time to try; workers of a gate that was killed write into its trees for a few seconds."""


def main(repository: Path, folder: Path, names: list[str]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    held = (folder / HELD).open("w")  # closed by the end of this process
    fcntl.flock(held, fcntl.LOCK_EX)
    sys.stdout.write("ready\n")
    sys.stdout.close()
    sys.stdin.buffer.read()
    deadline = time.monotonic() + LIMIT_S
    while folder.exists() and time.monotonic() < deadline:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.1)
    for name in names:
        # Forced twice: also where it was locked. The folder is gone, its entry is left.
        command = ["git", "-C", str(repository), "worktree", "remove", "--force", "--force"]
        subprocess.run([*command, str(folder / name)], capture_output=True, check=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
