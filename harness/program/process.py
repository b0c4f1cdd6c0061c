"""The processes of a program, one or its ranks: found, started with their output in pipes, read,
and ended with all of their descendants."""

import faulthandler
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from harness.git.repository import top, try_git
from harness.messages import ASK_FOR_STACKS, rank_mark
from harness.processes import end_with, family
from harness.program.startup.sitecustomize import VARIABLE as COUNTS_IN
from harness.records import INTERPRETER, Case, Program

CHUNK_BYTES = 2**18
"""Size of the pipes and of one read."""
STDERR_BYTES = 4096
"""End of a stream that is kept for a record."""
MAX_LINE_BYTES = 2**16
"""A longer line is read up to here."""
LAST_BYTES = 200
"""Of a line that a detail shows."""
TRACEBACK, FATAL = "Traceback (most recent call last)", "Fatal Python error: "
DRAIN_S = 0.5
"""Time to read after the program's end, if a process that it left behind holds the pipe open."""

Processes = tuple["subprocess.Popen[bytes]", ...]
"""Those of a program: one, or its ranks in order."""

_RAISED = re.compile(r"^(?:\[rank\d+\]: )?\w[\w.]*(?:Error|Exception)\b.*", re.MULTILINE)
_EXCEPTION = re.compile(r"(?:[\w<>]+\.)*[A-Z]\w*(: |$)")
_ENDS = re.compile(rb"[\r\n]+")  # progress bars end a line by a carriage return


def folder(program: Program, roots: Sequence[str]) -> Path:
    """The folder a program starts in: `cwd`, relative to the working tree under test."""
    return top(roots) / program.cwd


def refusal(case: Case, program: Program, roots: Sequence[str]) -> str:
    """Why a program cannot be started; empty if it can."""
    where, tree = folder(program, roots), top(roots).resolve()
    not_in = f"is not in the tree under test, {tree}; write it relative to"
    if roots and not where.resolve().is_relative_to(tree):
        return f"cwd {program.cwd!r} {not_in} the repository's root"
    if not where.is_dir():
        return f"cwd {program.cwd!r} is not a folder in {tree}; correct it"
    if roots and (outside := _outside(program, tree)):
        return f"command names {outside}, which {not_in} cwd"
    name = program.argv[0]
    if find(case, program, where) is not None:
        return ""
    if "/" in name:
        place = f"not an executable file in {where.resolve()}"
        return f"command {name!r} is {place}; correct the name or make it executable"
    return f"command {name!r} not found on PATH; install it or give its full path"


def _outside(program: Program, tree: Path) -> str:
    """A file that the command names in the user's working tree, though `tree` has it, too."""
    git = Path(try_git(tree, "rev-parse", "--git-common-dir") or "")
    home = (tree / git).resolve().parent
    if git.name != ".git" or home == tree:
        return ""
    for word in program.argv:
        place = Path(word.rpartition("=")[2])  # --config=/home/me/repo/a.yaml
        real = place.resolve()
        outside = place.is_absolute() and not real.is_relative_to(tree)
        if outside and real.is_relative_to(home) and (tree / real.relative_to(home)).exists():
            return str(place)
    return ""


def find(case: Case, program: Program, where: Path) -> str | None:
    """The file that will be started; None if it is not found."""
    name = program.argv[0]
    if name == INTERPRETER:
        return sys.executable
    if "/" in name:
        file = where / name
        return str(file.resolve()) if file.is_file() and os.access(file, os.X_OK) else None
    return shutil.which(name, path=case.env.get("PATH", os.environ.get("PATH")))


def environment(case: Case, first: Sequence[str]) -> dict[str, str]:
    """The program's variables: Python writes line by line, and its stacks if it aborts."""
    python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env = {**os.environ, **python, **case.env}
    env.pop(COUNTS_IN, None)  # set if another harness counts this one
    if first:
        path = (*first, env.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def kill(processes: Processes) -> None:
    """Kill a program and its descendants."""
    families = [family(one.pid)[1:] for one in processes]
    for process in processes:
        process.kill()
    for process, below in zip(processes, families, strict=True):
        with process:  # at the end its pipes are closed, and it is reaped
            for one in below:
                with suppress(psutil.NoSuchProcess):
                    one.kill()


def start(program: Program, where: Path, env: Mapping[str, str]) -> Processes:
    """Start the processes of a program, each with its output in two pipes; they are killed if this
    process dies."""
    first = sys.executable if program.argv[0] == INTERPRETER else program.argv[0]
    return tuple(
        subprocess.Popen(
            [first, *program.argv[1:]],
            cwd=where,
            env={**({"OMP_NUM_THREADS": "1"} if own else {}), **env, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pipesize=CHUNK_BYTES,
            preexec_fn=partial(end_with, os.getpid(), signal.SIGKILL),
        )
        for own in variables(program.world_size)
    )


def variables(world_size: int) -> list[dict[str, str]]:
    """The variables of each rank, as torchrun sets them; none for a program without ranks."""
    if not world_size:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host, port = free.getsockname()
    shared = dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(world_size))
    shared |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
    ranks = map(str, range(world_size))
    return [{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks]


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a pipe."""

    at: float
    lines: tuple[str, ...]
    from_stderr: bool
    data: bytes
    rank: int = 0
    code: int | None = None
    """Its exit code, if the process ended with this read."""


@dataclass(slots=True)
class Tail:
    """The end of a stream, its last line that says something, and the last exception in it."""

    last: str = ""
    raised: str = ""
    _data: bytes = b""
    _in_traceback: bool = False

    @property
    def ending(self) -> str:
        return self._data.decode(errors="replace")

    def cause(self, code: int) -> str:
        """The line that says why a process ended with this code; without words if none does."""
        if code == -signal.SIGABRT:  # torch aborts as Python ends, whose stacks come last
            own = self.ending.partition(FATAL)[0]
            return next(reversed(_RAISED.findall(own)), own.strip().rpartition("\n")[2])
        if self.last and not re.search(r"\w", self.last):  # torchrun ends with a frame
            return next((line for line in _RAISED.findall(self.ending) if line[-1] != ":"), "")
        return self.last.strip()

    def add(self, read: Read) -> None:
        self._data = (self._data + read.data)[-STDERR_BYTES:]
        for line in read.lines:
            begins = line.startswith(TRACEBACK) and not self.last.startswith("Exception ignored")
            # At a fatal signal Python lists modules after the stacks.
            says = line.strip() and not line.startswith("Extension modules: ")
            self.last = line if says else self.last
            # Other threads may print between the lines of a traceback.
            ends = self._in_traceback and _EXCEPTION.match(line)
            self.raised = line if ends or line.startswith(FATAL) else self.raised
            self._in_traceback = begins or (self._in_traceback and not ends)


class Lines:
    """Cuts one stream into lines, without line ends and empty lines."""

    def __init__(self) -> None:
        self._begun = b""

    def feed(self, chunk: bytes) -> tuple[str, ...]:
        """The lines that end in a chunk; an empty one, the end of the stream, ends the last."""
        *whole, rest = _ENDS.split(self._begun + chunk)
        self._begun = rest[:MAX_LINE_BYTES]
        if not chunk:
            whole, self._begun = [rest], b""
        return tuple(x[:MAX_LINE_BYTES].decode(errors="replace") for x in whole if x)


def reads(processes: Processes, poll_s: float) -> Iterator[Read]:
    """All output of a program in order, copied to the standard output (of several ranks, with the
    rank before each line), and a read without data when a process ends and every `poll_s`."""
    woken, wake = socket.socketpair()
    woken.setblocking(False)
    wake.setblocking(False)
    before = signal.signal(signal.SIGCHLD, lambda *_: None)  # only a handler wakes select
    old = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    try:
        with selectors.DefaultSelector() as waiting:
            waiting.register(woken, selectors.EVENT_READ)
            for rank, process in enumerate(processes):
                for stream in filter(None, (process.stdout, process.stderr)):
                    pipe = rank, stream is process.stderr, Lines()
                    waiting.register(stream, selectors.EVENT_READ, pipe)
            yield from _until_end(processes, waiting, woken, poll_s)
    finally:
        signal.set_wakeup_fd(old)
        signal.signal(signal.SIGCHLD, before)
        woken.close()
        wake.close()


def _until_end(
    processes: Processes, waiting: selectors.BaseSelector, woken: socket.socket, poll_s: float
) -> Iterator[Read]:
    running = dict(enumerate(processes))
    ended_at = 0.0
    while len(waiting.get_map()) > 1 or running:
        for rank in [rank for rank, process in running.items() if process.poll() is not None]:
            ended_at = time.monotonic()
            yield Read(ended_at, (), False, b"", rank, running.pop(rank).returncode)
        if not running and time.monotonic() - ended_at > DRAIN_S:
            break
        ready = waiting.select(poll_s if running else DRAIN_S / 10)
        at = time.monotonic()
        for key, _ in ready:
            if key.fileobj is woken:
                woken.recv(2**12)
            else:
                yield _read(waiting, key, at, mark=len(processes) > 1)
        if not ready:
            yield Read(at, (), False, b"")
    for key in [*waiting.get_map().values()]:
        if key.fileobj is not woken:
            rank, is_stderr, lines = key.data
            yield Read(time.monotonic(), lines.feed(b""), is_stderr, b"", rank)


def _read(
    waiting: selectors.BaseSelector, key: selectors.SelectorKey, at: float, *, mark: bool
) -> Read:
    data, (rank, is_stderr, lines) = os.read(key.fd, CHUNK_BYTES), key.data
    if not data:
        waiting.unregister(key.fileobj)
    found = lines.feed(data)
    marked = "".join(f"{rank_mark(rank)}{line}\n" for line in found) if mark else ""
    left = memoryview(marked.encode() if mark else data)
    while left:
        left = left[os.write(1, left) :]
    return Read(at, found, is_stderr, data, rank)


def abort_when_asked(processes: Processes) -> None:
    """Abort the hanging program when stacks are asked for: its Python then writes them."""
    faulthandler.unregister(ASK_FOR_STACKS)

    def abort(*_: object) -> None:
        for one in [one for process in processes for one in family(process.pid)]:
            with suppress(psutil.Error):  # it has ended, or is another user's
                one.rlimit(psutil.RLIMIT_CORE, (0, 0))
                one.send_signal(signal.SIGABRT)

    signal.signal(ASK_FOR_STACKS, abort)
