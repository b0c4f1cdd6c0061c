"""The Python stacks that a process writes to its log (faulthandler): before it is killed, on a
signal, even if another thread has the GIL; and those of a traceback."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.messages import RANK_MARK
from harness.runner.forkserver import Worker

PYTHON_S = 2.0
"""Longest time to wait for the stacks."""
POLL_S = 0.05

_CURRENT_THREAD = re.compile(r'Current thread.*\n((?:  File ".*", line \d+ in .*\n)+)')
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)\n')
"""As faulthandler writes it, innermost first; with a comma as in a traceback, innermost last."""
_LIBRARY = re.compile(r"^<frozen |/lib/python\d|/site-packages/|/dist-packages/")


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Frames of one thread, innermost first: `function (file:line)`."""

    frames: tuple[str, ...] = ()
    frame: str = ""
    """The innermost one outside of the standard library and of installed packages, if any is."""


def written_stack(text: str) -> ThreadStack:
    """The current thread of stacks that a process wrote; empty without one."""
    found = _CURRENT_THREAD.search(text)
    return _stack(_FRAME.findall(found.group(1))) if found else ThreadStack()


def raised_in(traceback: str) -> str:
    """The innermost frame of a traceback of Python; empty without one."""
    return next(iter(_stack(_FRAME.findall(traceback)[::-1]).frames), "")


def _stack(found: Sequence[tuple[str, str, str]]) -> ThreadStack:
    """The stack of (path, line, function)."""
    named = [f"{f.rpartition('.')[2]} ({Path(path).name}:{line})" for path, line, f in found]
    own = [n for n, (path, _, _) in zip(named, found, strict=True) if not _LIBRARY.search(path)]
    return ThreadStack(tuple(named), (*own, *named, "")[0])


def by_rank(text: str) -> dict[int, str]:
    """The output of each rank, from that of all."""
    lines: dict[int, str] = {}
    for line in text.splitlines(keepends=True):
        if mark := RANK_MARK.match(line):
            lines[int(mark[1])] = lines.get(int(mark[1]), "") + line[mark.end() :]
    return lines


def python_stacks(worker: Worker, log: Path, ranks: int = 0) -> str:
    """Ask the worker, or its program's ranks, to write their Python stacks to its log; empty
    without an answer."""
    if not log.exists():  # somebody removed the run
        return ""
    before = log.stat().st_size
    worker.dump_stacks()
    deadline = time.monotonic() + PYTHON_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = _since(log, before)
        own = [*by_rank(found).values()] if ranks else [found]
        if len(own) >= ranks and all(written_stack(text).frames for text in own):
            time.sleep(POLL_S)  # for the frames below it
            break
    return _since(log, before)


def _since(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
