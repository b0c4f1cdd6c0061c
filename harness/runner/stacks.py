"""The Python and native stacks of a process that finishes no step.

While it may go on, py-spy reads the frames of one thread without stopping it, if it is installed
and may read the process; /proc names the function of the kernel in which it waits. Before the
process is killed, it writes all its Python stacks (faulthandler, on a signal), even if another
thread has the GIL, and py-spy shows the native ones.
"""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.messages import RANK_MARK
from harness.records import EvidenceFile
from harness.runner.forkserver import Worker

PYTHON_S = 2.0
"""Longest time to wait for the Python stacks."""
FRAMES_S, NATIVE_S = 2.0, 10.0
"""Longest times for py-spy, without native stacks and with them."""
POLL_S = 0.05
MAX_FAMILY = 8
"""Processes of a program whose stacks are taken."""
MAX_FRAMES = 40
"""Frames of a thread that are kept."""

_CURRENT_THREAD = re.compile(r'Current thread.*\n((?:  File ".*", line \d+ in .*\n)+)')
_FRAME = re.compile(r'  File "(.*)", line (\d+),? in (.*)\n')
"""As faulthandler writes it, innermost first; with a comma as in a traceback, innermost last."""
_LIBRARY = re.compile(r"^<frozen |/lib/python\d|/site-packages/|/dist-packages/")


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """Frames of one thread, innermost first: `function (file:line)`."""

    frames: tuple[str, ...] = ()
    frame: str = ""
    """The innermost one outside of the standard library and of installed packages, if any is."""
    holds_gil: bool = False


def thread_stack(pid: int) -> ThreadStack:
    """The thread of a Python process that holds the GIL, else the main thread; empty if py-spy
    cannot read it."""
    threads = json.loads(_py_spy(pid, FRAMES_S, "--json", "--nonblocking")[0] or "[]")
    threads.sort(key=lambda t: (not t["owns_gil"], t["os_thread_id"] != pid))
    for thread in threads[:1]:
        frames = [(f["name"], f["filename"], f["line"]) for f in thread["frames"]]
        return _stack(frames, holds_gil=thread["owns_gil"])
    return ThreadStack()


def written_stack(text: str) -> ThreadStack:
    """The current thread of stacks that a process wrote; empty without one."""
    found = _CURRENT_THREAD.search(text)
    return _stack(_frames(found.group(1))) if found else ThreadStack()


def raised_in(traceback: str) -> str:
    """The innermost frame of a traceback of Python; empty without one."""
    return next(iter(_stack(_frames(traceback)[::-1]).frames), "")


def _frames(text: str) -> list[tuple[str, str, int]]:
    return [(function, path, int(line)) for path, line, function in _FRAME.findall(text)]


def _stack(frames: Sequence[tuple[str, str, int]], *, holds_gil: bool = False) -> ThreadStack:
    named = [f"{f.rpartition('.')[2]} ({Path(path).name}:{line})" for f, path, line in frames]
    own = [n for n, (_, path, _) in zip(named, frames, strict=True) if not _LIBRARY.search(path)]
    return ThreadStack(tuple(named[:MAX_FRAMES]), (*own, *named, "")[0], holds_gil)


def by_rank(text: str) -> dict[int, str]:
    """The output of each rank, from that of all."""
    lines: dict[int, str] = {}
    for line in text.splitlines(keepends=True):
        if mark := RANK_MARK.match(line):
            lines[int(mark[1])] = lines.get(int(mark[1]), "") + line[mark.end() :]
    return lines


def waits_in(pid: int) -> str:
    """The function of the kernel in which a process's main thread waits; empty if it runs or that
    is unknown."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text().strip("0")
    except OSError:
        return ""


def python_stacks(worker: Worker, log: Path, ranks: int = 0) -> str:
    """Ask the worker, or its program's ranks, to write their Python stacks to its log; empty
    without an answer."""
    if not log.exists():  # somebody removed the run
        return ""
    before = log.stat().st_size
    worker.dump_stacks()
    deadline = time.monotonic() + PYTHON_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        found = _since(log, before)
        own = [*by_rank(found).values()] if ranks else [found]
        if len(own) >= ranks and all(written_stack(text).frames for text in own):
            time.sleep(POLL_S)  # for the frames below it
            break
    return _since(log, before)


def native_stacks(pids: Sequence[int]) -> tuple[str, EvidenceFile]:
    """The native stacks of processes, and the source of the first one's."""
    found = [_py_spy(pid, NATIVE_S, "--native") for pid in pids] or [("", "no process is left")]
    text = "\n".join(text for text, _ in found if text)
    return text, EvidenceFile(name="native stacks", note=found[0][1])


def _py_spy(pid: int, within_s: float, *how: str) -> tuple[str, str]:
    """What py-spy shows, and its command, or why it shows nothing."""
    beside = Path(sys.executable).parent  # of a virtual environment that is not active
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(beside))
    if tool is None:
        return "", "py-spy is not installed"
    try:
        answer = subprocess.run(
            [tool, "dump", *how, "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy took more than {within_s:g} s"
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    if answer.returncode:
        errors = answer.stderr.strip().splitlines() or ["no message"]
        return "", f"py-spy failed: {errors[0]}"
    return answer.stdout, " ".join(("py-spy dump", *how))


def _since(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
