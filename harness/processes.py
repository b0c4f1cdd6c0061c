"""A process and what it started, for parent and child."""

import ctypes
import os
import signal

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # <linux/prctl.h>


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, oldest first; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_with(parent: int, by: signal.Signals) -> None:
    """In a child that has just been forked: it gets this signal when its parent ends."""
    prctl(PR_SET_PDEATHSIG, by)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before the line above


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
