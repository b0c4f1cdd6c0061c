"""Python processes that tests start, wait for a line of, and kill."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def running(script: str, *arguments: str, how: str = "-SEc") -> Iterator["subprocess.Popen[str]"]:
    """A Python process of its own; killed, with its pipes closed, at the end."""
    process = subprocess.Popen(
        [sys.executable, how, script, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def wait_until(happened: Callable[[], object], *, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def wait_for(process: "subprocess.Popen[str]", line: str) -> None:
    assert process.stdout is not None
    assert process.stdout.readline().strip() == line
