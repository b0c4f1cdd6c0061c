"""A process, what it started and the end of its log, for parent and child."""

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil

from harness.records import bounded

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>
LOG_END_BYTES = 2**16  # of a log that are read as its end


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, oldest first; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def log_end(log: Path) -> str:
    """The end of a log; empty if somebody removed it."""
    with suppress(FileNotFoundError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_END_BYTES))
        return file.read().decode(errors="replace")
    return ""


def last_line(log: Path) -> str:
    """The last line of a log; of a traceback, that is the error."""
    lines = log_end(log).strip().splitlines()
    return bounded(lines[-1]) if lines else "its log is empty"


def end_with(parent: int, by: signal.Signals) -> None:
    """In a child that has just been forked: it gets this signal when its parent ends."""
    prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
