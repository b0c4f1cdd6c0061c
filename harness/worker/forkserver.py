"""The warm parent of all workers: it has imported torch, never touched CUDA, and forks.

A fresh interpreter needs seconds until torch is there; a fork of this one, milliseconds. What
is forked is as fresh: no CUDA context, no thread pool, no tensor. One worker lives at a time.

It is also the undertaker. As "child subreaper" it inherits whatever a worker leaves behind, in
another process group or session too, so that ending a worker ends all of its descendants. If
the harness dies, its end of the socket closes, and the forkserver takes everything down with it.

Protocol, over a SOCK_SEQPACKET socket, JSON objects:
    <- {"ready": true}                         once, when torch is imported
    -> {"preload": [modules]}                  import what the workers will
    <- {"preloaded": why not}                  empty if all went well; else it is of no more use
    -> {"env": {...}}, a newline and an Order; and two file descriptors: answers, log
    <- {"pid": p}
    <- {"exited": code}                        as subprocess.Popen.returncode
    -> {"end": grace_s}                        kill what is left, reap it
    <- {"ended": n}                            n processes would not die
"""

import ctypes
import errno
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

import psutil

from harness import messages
from harness.worker import answer
from harness.workload import PRELOAD as PRELOAD_NAME

PRELOAD = ("torch._dynamo",)
"""Imported beside torch: the first step of any optimiser would import it, for over a second."""
MAX_ORDER_BYTES = 2**18
KILL_WAIT_S = 5.0
"""How long a process may take to die of SIGKILL; past it, it hangs in the kernel."""

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = 2**64 - 1


def main(control_fd: int) -> None:
    """Serve orders until the other end of the socket closes."""
    for name in PRELOAD:
        importlib.import_module(name)
    _require_untouched_gpu()
    gc.collect()
    gc.freeze()  # a worker's collector then neither walks nor copies what it shares with us
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=control_fd) as control:
        _Forkserver(control).serve()
    os._exit(0)  # taking torch down in order takes a second, and nothing needs it


class _Forkserver:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: int | None = None
        self._deaths, self._deaths_in = socket.socketpair()
        self._deaths.setblocking(False)
        self._deaths_in.setblocking(False)
        signal.set_wakeup_fd(self._deaths_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing wakes

    def serve(self) -> None:
        self._say(ready=True)
        while True:
            ready, _, _ = select.select([self._control, self._deaths], [], [])
            if self._deaths in ready:
                self._deaths.recv(2**16)
                self._report_exit()
            if self._control in ready and not self._obey():
                return

    def _obey(self) -> bool:
        """Do the next thing asked; False when nobody is left to ask."""
        data, fds, _, _ = socket.recv_fds(
            self._control, MAX_ORDER_BYTES, 2, socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            _end_descendants(grace_s=0.0)
            return False
        head, _, body = data.partition(b"\n")
        request = json.loads(head)
        if "preload" in request:
            self._say(preloaded=_preload(request["preload"]))
        elif "end" in request:
            self._running = None
            self._say(ended=_end_descendants(request["end"]))
        else:
            answers, log = fds
            self._fork(messages.decode_order(body), request["env"], answers, log)
        return True

    def _fork(self, order: messages.Order, env: dict[str, str], answers: int, log: int) -> None:
        forkserver = os.getpid()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for mine in (self._control, self._deaths, self._deaths_in):
                mine.close()
            _become_worker(order, env, answers, log, parent=forkserver)
        os.close(answers)
        os.close(log)
        self._running = pid
        self._say(pid=pid)

    def _report_exit(self) -> None:
        """Say how the worker ended. It stays a zombie until "end": its id cannot be reused."""
        if self._running is None:
            return
        ended = os.waitid(os.P_PID, self._running, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self._running = None
            by_itself = ended.si_code == os.CLD_EXITED
            self._say(exited=ended.si_status if by_itself else -ended.si_status)

    def _say(self, **reply: Any) -> None:
        self._control.send(json.dumps(reply).encode())


def _become_worker(
    order: messages.Order, env: dict[str, str], answers: int, log: int, *, parent: int
) -> NoReturn:
    """Turn this fork into a worker of its own session, and never return into the forkserver."""
    status = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            raise SystemExit  # orphaned before the line above could take effect
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        _let_be_traced()
        faulthandler.enable(all_threads=True)
        faulthandler.register(messages.ASK_FOR_STACKS, all_threads=True)
        os.environ.update(env)
        _enter(order.roots)
        answer.work(order, messages.Channel(answers))
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else 1
    finally:
        try:
            sys.stdout.flush()
        finally:  # the log's disk may be full
            os._exit(status)


def _enter(roots: tuple[str, ...]) -> None:
    """Look into these folders first, and stand in the first of them; a forkserver that was started
    for them does already."""
    new = [root for root in roots if root not in sys.path]
    if new:
        sys.path[:0] = new
        os.chdir(roots[0])


def _end_descendants(grace_s: float) -> int:
    """End every descendant, kindly at first; returns how many would not die."""
    me = psutil.Process()
    family = me.children(recursive=True)
    if grace_s > 0:
        _signal(family, signal.SIGTERM)
        psutil.wait_procs(family, timeout=grace_s)
    deadline = time.monotonic() + KILL_WAIT_S
    while (family := me.children(recursive=True)) and time.monotonic() < deadline:
        _signal(family, signal.SIGKILL)
        psutil.wait_procs(family, timeout=KILL_WAIT_S)  # reaps our children
    return len(family)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue  # it was faster


def _preload(modules: list[str]) -> str:
    """Import the factories' modules and what these name in PRELOAD; why forks of this process
    would not be as good as fresh, or nothing."""
    try:
        for name in modules:
            for more in getattr(importlib.import_module(name), PRELOAD_NAME, ()):
                importlib.import_module(more)
        _require_untouched_gpu()
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything; told, not hidden
        return f"{type(error).__name__}: {error}"
    if threading.active_count() > 1:
        return f"one of {', '.join(modules)} has started a thread, which no fork would have"
    gc.collect()
    gc.freeze()
    return ""


def _require_untouched_gpu() -> None:
    """A CUDA driver that was initialised before a fork is broken after it."""
    files = (fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    if any(file.name.startswith("nvidia-uvm") for file in files):
        raise RuntimeError("CUDA was initialised by an import")


def _let_be_traced() -> None:
    """Let a sibling such as py-spy read the stacks of a worker that hangs.

    Yama forbids it unless asked; a kernel without Yama knows no such request, nor the ban.
    """
    try:
        _prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option})")
