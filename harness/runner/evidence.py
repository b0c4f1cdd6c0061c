"""What the log of a process that did not end OK shows; the log itself is the evidence."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.records import Case
from harness.runner import ranks, stacks
from harness.runner.forkserver import Worker, end_of

LOG_HEAD_BYTES = 4 * 2**20
"""Beginning of an output that its log keeps."""
LOG_TAIL_BYTES = 4 * 2**20
"""End of an output that its log keeps, at least; at most twice that."""
LEFT_OUT = b"\n[... the harness left out output of the program here ...]\n"


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
    python = stacks.python_stacks(worker, log, several)
    own = {rank: stacks.written_stack(text) for rank, text in stacks.by_rank(python).items()}
    behind = ranks.stuck(rank_steps, own) if several and rank_steps is not None else None
    if behind is None:
        return Stuck(frame=stacks.written_stack(python).frame)
    rank, why = behind
    return Stuck(frame=own[rank].frame if rank in own else "", rank=rank, behind=why)


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
    if not log.exists():  # somebody removed the run
        return ""
    with log.open("rb") as file:
        text = end_of(file)
    text = text if rank is None else stacks.by_rank(text).get(rank, "")
    fatal = text.find("Fatal Python error: ")
    before = text[:fatal] if fatal >= 0 else text
    raised = before.rfind("Traceback (most recent call last):")
    if fatal >= 0 and not (raised >= 0 and "<no Python frame>" in text[fatal:]):
        return stacks.written_stack(text[fatal:]).frame
    return stacks.raised_in(before[raised:]) if raised >= 0 else ""
