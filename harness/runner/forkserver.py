"""The process of a forkserver and its workers, as the parent sees them: see
harness.worker.forkserver for the other side and the protocol."""

import json
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import HarnessError
from harness.messages import Garbled, MeasureOrder, Message, MessageReader, Order, encode
from harness.processes import last_line

START_S = 120.0
"""Longest time to import torch, or to describe it; a cold network disk needs half of it."""
GRACE_S = 1.0
"""Time between SIGTERM and SIGKILL."""
END_S = 15.0
"""Longest time for a forkserver to end a worker and its descendants."""
CLOSE_S = 10.0
"""Longest time for a forkserver to end its descendants."""
MAX_REPLY_BYTES = 2**15
"""JSON writes one byte of a bounded text as six at most."""

_HARNESS = str(Path(__file__).resolve().parents[2])

# The forkserver loads the parent's copy of the harness, torch and the standard library. It works in
# the tree under test, so that -P must keep this tree off the path; the roots go there later.
# What else is in the folder of the harness must not shadow it. OpenMP reads its variable when torch
# loads it. Its threads spin by default while they wait: beside other load a step of two threads
# then takes 20 times as long (reports/LOG.md). Programs of a suite do not inherit the variable.
_BOOT = (
    f"import json, os, sys; path = json.loads(sys.argv[1]); sys.path[:] = [*path, {_HARNESS!r}]; "
    "given = 'OMP_WAIT_POLICY' in os.environ; os.environ.setdefault('OMP_WAIT_POLICY', 'passive'); "
    "from harness.worker import forkserver; given or os.environ.pop('OMP_WAIT_POLICY'); "
    "sys.path[:] = path; forkserver.main(int(sys.argv[2]), sys.argv[3:])"
)


@dataclass(slots=True, kw_only=True)
class Worker:
    """A process that carries out one order, as the parent sees it."""

    forkserver: "ForkserverHandle"
    pid: int
    answers: int
    """File descriptor of its messages; non-blocking."""
    launched_at: float
    """time.monotonic at the fork, after the start of the forkserver."""
    cold: bool
    closed_pipe: bool = False
    """As at its exit, which the forkserver must report."""
    exit_code: int | None = None
    """As subprocess.Popen.returncode: minus the number of the signal that killed it."""

    def wait(self, *, seconds: float) -> None:
        """Sleep until the worker sends a message or exits, at most this long."""
        files = [] if self.closed_pipe else [self.answers]
        if self.exit_code is None:
            files.append(self.forkserver.control.fileno())
        ready, _, _ = select.select(files, [], [], max(0.0, seconds))
        if self.forkserver.control.fileno() in ready:
            self.exit_code = self.forkserver.hear().get("exited", -signal.SIGKILL)

    def converse(
        self, seconds: float, meanwhile: Callable[[], float] = lambda: math.inf
    ) -> list[Message]:
        """All its messages until it closes the pipe, at most this long; then it is ended. Between
        messages `meanwhile` is called, and returns the time.monotonic of its next call."""
        received: list[Message] = []
        reader, deadline = MessageReader(self.answers), time.monotonic() + seconds
        try:
            while not reader.at_end and time.monotonic() < deadline:
                self.wait(seconds=min(deadline, meanwhile()) - time.monotonic())
                reader.drain(received.append)
        except Garbled as error:
            remedy = "Does the code under test write to a file descriptor that it did not open?"
            raise HarnessError(f"a worker's answer is garbled: {error}", remedy) from error
        finally:
            self.end()
        return received

    def end(self) -> int:
        """End the worker and its descendants; the number of processes that survived SIGKILL."""
        os.close(self.answers)
        left = self.forkserver.end(GRACE_S)
        if self.cold or left:
            self.forkserver.close()
        return left


def search_path(env: Mapping[str, str]) -> list[str]:
    """The folders that a worker with these variables searches for modules after those of the code
    under test: PYTHONPATH of `env`, those of this Python, this folder."""
    given = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    places = [*given, *(p for p in sys.path if p != sysconfig.get_path("scripts")), ""]
    # An entry that is not a folder or an archive is a hook's word for one.
    return [*dict.fromkeys(str(Path(p).absolute()) if Path(p).exists() else p for p in places)]


class ForkserverHandle:
    """The process of a forkserver and the socket to it."""

    def __init__(self, env: Mapping[str, str], first: Sequence[str], cwd: Path | None) -> None:
        """Start one under `env` and wait until torch is imported there."""
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed by close()
        env, served = {**os.environ, **env}, theirs.fileno()
        words = [json.dumps(search_path(env)), str(served), *first]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOT, *words],
                    cwd=cwd,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=self._stderr,
                    stderr=self._stderr,
                    pass_fds=[served],
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends it
                )
        except OSError as error:
            self.control.close()
            self._stderr.close()
            problem = f"no worker can be started with {sys.executable}: {error.strerror}"
            remedy = "If the list of arguments is too long, shorten the variables in `env`."
            raise HarnessError(problem, remedy) from error
        self.prepared = False
        """Whether it has imported what each measured workload needs."""
        self.control.settimeout(START_S)
        try:
            if "ready" not in self.hear():
                said = last_line(Path(f"/proc/self/fd/{self._stderr.fileno()}"))
                problem = f"no worker can be started with {sys.executable}: {said}"
                raise HarnessError(problem, "Is torch installed there?")
        except BaseException:  # also Ctrl-C: the process would outlive us
            self.close()
            raise

    @property
    def closed(self) -> bool:
        return self._process.poll() is not None

    def fork(
        self, order: Order, log: Path, env: Mapping[str, str] | None = None, *, cold: bool = False
    ) -> Worker:
        """Fork a worker, whose output is appended to `log`."""
        answers, write_end = os.pipe()
        os.set_blocking(answers, False)
        try:
            with log.open("ab") as log_file:
                self._send({"env": dict(env or {})}, encode(order), write_end, log_file.fileno())
                reply = self.hear()
        finally:
            os.close(write_end)
        if "pid" not in reply:
            raise HarnessError("the forkserver died", "Is memory exhausted?")
        launched_at = order.launched_at if isinstance(order, MeasureOrder) else time.monotonic()
        return Worker(
            forkserver=self,
            pid=int(reply["pid"]),
            answers=answers,
            launched_at=launched_at,
            cold=cold,
        )

    def preload(self, modules: Sequence[str]) -> str:
        """Have it import these, and what each measured workload needs; why it must be replaced, or
        nothing. An import that does not end is a HarnessError."""
        self._send({"preload": modules})
        self.control.settimeout(START_S)
        began, reply = time.monotonic(), self.hear()
        if not reply and time.monotonic() - began >= START_S:
            self._process.kill()  # in an import it does not hear that it should end
            trying = f"import {', '.join(modules)}"
            problem = f"no worker can be started: {trying}: no answer in {START_S:g} s"
            remedy = f"Try the import alone: python -c {shlex.quote(trying)}"
            raise HarnessError(problem, remedy)
        problem = str(reply.get("preloaded", "the forkserver died"))
        self.prepared = not problem
        return problem

    def _send(self, request: Mapping[str, Any], order: bytes = b"", *fds: int) -> None:
        """Send a request in a file in memory, for the kernel limits the size of a message. If the
        forkserver is dead, `hear` is empty."""
        with os.fdopen(os.memfd_create("request"), "wb") as file, suppress(ConnectionError):
            file.write(json.dumps(request).encode() + b"\n" + order)
            file.flush()
            socket.send_fds(self.control, [b"."], [file.fileno(), *fds])

    def hear(self) -> dict[str, Any]:
        """The next reply; empty if it takes too long or the forkserver is dead."""
        try:
            data = self.control.recv(MAX_REPLY_BYTES)
        except (TimeoutError, ConnectionError):
            data = b""
        return dict(json.loads(data or b"{}"))

    def end(self, grace_s: float) -> int:
        """End its descendants; the number that survived SIGKILL."""
        self._send({"end": grace_s})
        self.control.settimeout(END_S)
        while reply := self.hear():
            if "ended" in reply:
                self.control.settimeout(START_S)
                return int(reply["ended"])
        self.close()  # it is dead, and the kernel killed its worker with it
        return 0

    def close(self) -> None:
        """Closing the socket makes it end its descendants and itself."""
        self.control.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()
