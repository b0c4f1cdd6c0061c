"""Forkservers for tests: forks of one process that has imported torch, which costs 3 CPU seconds.

A forkserver that needs another environment before torch is loaded is started as it always is.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from harness.runner import forkserver

READ_LATER = ("NSA_", "PYTEST_", "GITHUB_", "HARNESS_", "TORCHINDUCTOR_")
"""Prefixes of variables that are not read while torch is loaded."""
READ_LATER_NAMES = {
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TMPDIR", "XDG_CACHE_HOME"),
    *("PYTHONPATH", "PYTHONDONTWRITEBYTECODE"),
    "TRITON_INTERPRET",  # set by the tests of nsa; no kernel runs in these workers
    *("CI", "COLUMNS", "LINES", "HOME", "PWD", "OLDPWD", "GIT_CEILING_DIRECTORIES"),
}
MAX_BYTES = 2**18
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from harness.tests import forkservers; forkservers.serve(int(sys.argv[2]))"
)


class Template:
    """The process that forkservers are forked from, started when the first is needed, with the
    environment of now. A context: leaving it ends the process."""

    def __init__(self) -> None:
        self._env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
        self._path = json.dumps(sys.path)
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self.real = forkserver.start_forkserver

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._control.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait(10)

    def start_forkserver(
        self,
        path: Sequence[str],
        roots: Sequence[str],
        control: socket.socket,
        output: IO[bytes],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> "subprocess.Popen[bytes] | Forked":
        """In place of `forkserver.start_forkserver`."""
        changed = {name for name, _ in {*env.items()} ^ {*self._env.items()}}
        if not all(n in READ_LATER_NAMES or n.startswith(READ_LATER) for n in changed):
            return self.real(path, roots, control, output, env=env, cwd=cwd)
        if self._process is None:
            number = self._theirs.fileno()
            command = [sys.executable, "-c", _BOOT, self._path, str(number)]
            self._process = subprocess.Popen(
                command, env=self._env, pass_fds=[number], start_new_session=True
            )
            self._theirs.close()
        where = str((cwd or Path.cwd()).absolute())
        order = {"path": [*path], "roots": [*roots], "env": dict(env), "cwd": where}
        files = [control.fileno(), output.fileno()]
        socket.send_fds(self._control, [json.dumps(order).encode()], files)
        return Forked(int(self._control.recv(64)))


class Forked:
    """What the launcher needs of `subprocess.Popen`, for a process that is no child of ours."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def __del__(self) -> None:
        os.close(self._fd)

    def _ended(self, seconds: float | None) -> bool:
        return bool(select.select([self._fd], [], [], seconds)[0])

    def poll(self) -> int | None:
        return 0 if self._ended(0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended(timeout):
            raise subprocess.TimeoutExpired("forkserver", timeout or 0.0)
        return 0

    def kill(self) -> None:
        signal.pidfd_send_signal(self._fd, signal.SIGKILL)


def serve(control_fd: int) -> None:
    """Fork forkservers until the other end of the socket closes."""
    from harness.worker import forkserver

    forkserver.prepare()
    control, started = socket.socket(fileno=control_fd), 0
    while True:
        data, fds, _, _ = socket.recv_fds(control, MAX_BYTES, 2, socket.MSG_CMSG_CLOEXEC)
        while started and os.waitpid(-1, os.WNOHANG if data else 0)[0]:
            started -= 1
        if not data:
            os._exit(0)
        if pid := os.fork():
            control.send(str(pid).encode())
            for fd in fds:
                os.close(fd)
            started += 1
            continue
        try:
            control.close()
            os.setsid()
            _become(order := json.loads(data), *fds)
            forkserver.main(fds[0], order["roots"])
        except BaseException:  # noqa: BLE001  it must not go on as the template
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)


def _become(order: dict[str, Any], control_fd: int, output_fd: int) -> None:
    import torch

    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    os.environ.clear()
    os.environ.update(order["env"])
    if threads := order["env"].get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    os.chdir(order["cwd"])
    sys.path[:] = order["path"]
