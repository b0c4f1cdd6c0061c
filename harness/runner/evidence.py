"""What the log of a process shows that did not end OK. Before a process is killed, it writes its
Python stacks to its log (faulthandler, on a signal), even if another thread has the GIL.
"""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.messages import ASK_FOR_STACKS, RANK_MARK
from harness.processes import log_end
from harness.records import Case
from harness.runner.forkserver import Worker

LOG_HEAD_BYTES = 4 * 2**20
"""Beginning of an output that its log keeps."""
LOG_TAIL_BYTES = 4 * 2**20
"""End of an output that its log keeps, at least; at most twice that."""
LEFT_OUT = b"\n[... the harness left out output of the program here ...]\n"
PYTHON_S = 2.0
"""Longest time to wait for the stacks."""
POLL_S = 0.05

_CURRENT_THREAD = re.compile(r'Current thread.*\n((?:  File ".*", line \d+ in .*\n)+)')
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)\n')
"""As faulthandler writes it, innermost first; with a comma as in a traceback, innermost last."""
_LIBRARY = re.compile(r"^<frozen |/lib/python\d|/site-packages/|/dist-packages/")
_INNERMOST = 8
"""Frames that may show that a rank waits for the others."""
_IN_A_COLLECTIVE = re.compile(
    r"\((distributed_c10d|_functional_collectives|c10d_logger).py:|^_engine_run_backward "
)
"""DDP averages gradients inside the backward pass."""


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
    if worker.exit_code is None:
        os.kill(worker.pid, ASK_FOR_STACKS)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Where a worker is that has to be ended."""

    frame: str
    rank: int | None = None
    """The rank that the others wait for, if one is."""
    behind: str = ""
    """By what that is seen."""


def stuck(worker: Worker, case: Case, log: Path, rank_steps: Sequence[int] | None) -> Stuck:
    """Have a worker write its Python stacks to its log. `rank_steps` are those of each rank, if its
    silence was judged."""
    several = case.program.ranks if case.program else 0
    text = python_stacks(worker, log, several)
    if several and rank_steps is not None:
        own = {rank: written_stack(of_one) for rank, of_one in by_rank(text).items()}
        if found := behind(rank_steps, own):
            return found
    return Stuck(frame=written_stack(text).frame)


def behind(steps: Sequence[int], stacks: Mapping[int, ThreadStack]) -> Stuck | None:
    """The rank that is behind by its steps, or else the only one, of those with a stack, that does
    not wait in a collective, and by what that is seen; None without one."""
    inner = {rank: stack.frames[:_INNERMOST] for rank, stack in stacks.items()}
    apart = [rank for rank, seen in inner.items() if not any(map(_IN_A_COLLECTIVE.search, seen))]
    if len(set(steps)) > 1:
        rank = min(range(len(steps)), key=lambda r: (steps[r], r))
        why = f"it finished {steps[rank]} steps, others {max(steps)}"
    elif len(apart) == 1 and len(inner) > 1:
        rank, why = apart[0], "the others wait in a collective"
    else:
        return None
    return Stuck(frame=stacks[rank].frame if rank in stacks else "", rank=rank, behind=why)


def cut_log(log: Path) -> None:
    """Leave out the middle of a log that has become too long; the worker may still append to it."""
    try:
        fd = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody removed the run
        return
    with os.fdopen(fd, "r+b", buffering=0) as file:
        size = os.fstat(fd).st_size
        if size > LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES:
            tail = os.pread(fd, LOG_TAIL_BYTES, size - LOG_TAIL_BYTES)
            file.truncate(LOG_HEAD_BYTES)
            file.write(LEFT_OUT + tail)


def raised_in(log: Path, rank: int | None) -> str:
    """The innermost frame of the traceback in a log, or in that of a rank; empty without one."""
    text = log_end(log)
    text = text if rank is None else by_rank(text).get(rank, "")
    before, fatal, stacks = text.partition("Fatal Python error: ")
    _, raised, trace = before.rpartition("Traceback (most recent call last):")
    if fatal and not (raised and "<no Python frame>" in stacks):
        return written_stack(stacks).frame
    frames = _stack(_FRAME.findall(trace)[::-1]).frames
    return frames[0] if raised and frames else ""
