"""A process and what it started, for parent and child."""

import ctypes
import signal
from collections.abc import Callable

import psutil

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, oldest first; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def ending_with_parent(by: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn`: the child gets this signal when its parent ends."""
    libc = ctypes.CDLL(None)
    return lambda: libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(by), 0, 0, 0)
