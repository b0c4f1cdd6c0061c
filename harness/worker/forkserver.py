"""The warm parent of all workers: it has imported torch, never touched CUDA, and forks.

A fork starts in milliseconds, without a CUDA context, thread pool or tensor. One worker lives at a
time. As "child subreaper" the forkserver inherits the processes that a worker leaves behind, so
that it can end them all. If the harness dies, the socket closes, and it ends all below it.

Protocol, over a SOCK_SEQPACKET socket, JSON objects. Requests come in a file in memory, the first
descriptor of a message; replies are short:
    <- {"ready": true}                         once, when torch is imported
    -> {"preload": [modules]}                  import them, and what every measured workload needs
    <- {"preloaded": problem}                  empty, or why this forkserver must be replaced
    -> {"env": {...}}, a newline and an Order; and two more file descriptors: answers, log
    <- {"pid": p}
    <- {"exited": code}                        as subprocess.Popen.returncode
    -> {"end": grace_s}                        end and reap all descendants
    <- {"ended": n}                            n processes could not be killed
"""

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
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from harness import messages
from harness.processes import PR_SET_CHILD_SUBREAPER, end_with, family, prctl
from harness.records import bounded
from harness.worker import answer
from harness.workload import PRELOAD

DYNAMO = "torch._dynamo"
"""Counting operators and the first step of an optimizer import it, in over a second."""
TRITON_CACHE = "triton.runtime.cache"
"""Its `triton_key` hashes Triton's files, half a gigabyte: once a process, before a launch."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's, the second in WSL
KILL_WAIT_S = 5.0
"""A process that lives longer after SIGKILL hangs in the kernel."""


def main(control_fd: int, first: Sequence[str]) -> None:
    """Serve orders until the other end of the socket closes; `first` are first on the path."""
    _require_untouched_gpu()
    _freeze()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    with socket.socket(fileno=control_fd) as control:
        _Forkserver(control, first).serve()
    os._exit(0)  # an orderly exit would take torch a second


def prepare() -> None:
    """Import what every measured workload needs, and hash Triton's files if there is a GPU."""
    importlib.import_module(DYNAMO)  # and with it much of the standard library
    if any(map(os.path.exists, DRIVERS)):  # to ask CUDA would spoil the forks
        # Without Triton there is nothing to hash; a Triton with another name does it later.
        getattr(sys.modules.get(TRITON_CACHE), "triton_key", lambda: None)()


class _Forkserver:
    def __init__(self, control: socket.socket, first: Sequence[str]) -> None:
        self._control, self._first = control, first
        self._running: int | None = None
        self._deaths, self._deaths_in = socket.socketpair()
        self._deaths.setblocking(False)
        self._deaths_in.setblocking(False)
        signal.set_wakeup_fd(self._deaths_in.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only a handler wakes select

    def serve(self) -> None:
        self._reply(ready=True)
        while True:
            ready, _, _ = select.select([self._control, self._deaths], [], [])
            if self._deaths in ready:
                self._deaths.recv(2**16)
                self._report_exit()
            if self._control in ready and not self._handle_request():
                return

    def _handle_request(self) -> bool:
        """Serve one request; False once the socket is closed."""
        data, fds, _, _ = socket.recv_fds(self._control, 1, 3, socket.MSG_CMSG_CLOEXEC)
        if not data:
            _end_descendants(grace_s=0.0)
            return False
        with os.fdopen(fds[0], "rb") as file:
            file.seek(0)
            head, _, body = file.read().partition(b"\n")
        request = json.loads(head)
        if "preload" in request:
            self._reply(preloaded=_preload(request["preload"], self._first))
        elif "end" in request:
            self._running = None
            self._reply(ended=_end_descendants(request["end"]))
        else:
            _, answers, log = fds
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
            _import_from(self._first)
            _become_worker(order, env, answers, log, parent=forkserver)
        os.close(answers)
        os.close(log)
        self._running = pid
        self._reply(pid=pid)

    def _report_exit(self) -> None:
        """Report how the worker ended. It stays a zombie until "end", so its id is not reused."""
        if self._running is None:
            return
        ended = os.waitid(os.P_PID, self._running, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None:
            self._running = None
            signalled = ended.si_code != os.CLD_EXITED
            self._reply(exited=-ended.si_status if signalled else ended.si_status)

    def _reply(self, **reply: Any) -> None:
        self._control.send(json.dumps(reply).encode())


def _become_worker(
    order: messages.Order, env: dict[str, str], answers: int, log: int, *, parent: int
) -> NoReturn:
    """Run the order in a session of its own, then exit this fork."""
    status = 1
    try:
        os.setsid()
        end_with(parent, signal.SIGKILL)
        with Path(os.devnull).open() as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        faulthandler.enable(all_threads=True)
        faulthandler.register(messages.ASK_FOR_STACKS, all_threads=True)
        os.environ.update(env)
        if _import_from(order.first) and order.roots:
            os.chdir(order.roots[0])
        answer.work(order, messages.Channel(answers))
        status = 0
    except BaseException:  # noqa: BLE001 - the parent reads the log
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()  # raises if the disk is full
        finally:
            os._exit(status)


def _import_from(folders: Sequence[str]) -> bool:
    """Put these folders first on the path; whether they were not."""
    moved = sys.path[: len(folders)] != [*folders]
    if moved:
        sys.path[:] = [*folders, *(place for place in sys.path if place not in folders)]
    return moved


def _end_descendants(grace_s: float) -> int:
    """End every descendant, with SIGTERM first; returns how many could not be killed."""
    me = os.getpid()
    if grace_s > 0:
        _signal(family(me)[1:], signal.SIGTERM, wait_s=grace_s)
    deadline = time.monotonic() + KILL_WAIT_S
    while (descendants := family(me)[1:]) and time.monotonic() < deadline:
        _signal(descendants, signal.SIGKILL, wait_s=KILL_WAIT_S)
    return len(descendants)


def _signal(processes: list[psutil.Process], number: signal.Signals, wait_s: float) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    psutil.wait_procs(processes, timeout=wait_s)  # reaps our children


def _preload(modules: list[str], first: Sequence[str] = ()) -> str:
    """Import what every measured workload needs; then, these folders first on the path, the
    factories' modules and what they name in PRELOAD. Why a fork of this process would differ from a
    fresh one, or nothing."""
    try:
        prepare()
        if modules:
            _import_from(first)
        for name in modules:
            for more in getattr(importlib.import_module(name), PRELOAD, ()):
                importlib.import_module(more)
        _require_untouched_gpu()
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything; reported
        return bounded(f"{type(error).__name__}: {error}")
    if threading.active_count() > 1:
        return f"one of {', '.join(modules)} has started a thread, which a fork would not have"
    _freeze()
    return ""


def _freeze() -> None:
    """Have a worker's collector neither walk nor copy what it shares with the forkserver."""
    gc.collect()
    gc.freeze()


def _require_untouched_gpu() -> None:
    """Raise if an import initialised the CUDA driver, which a fork would break."""
    files = (fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    if any(file.name.startswith("nvidia-uvm") for file in files):
        raise RuntimeError("CUDA was initialised by an import")
