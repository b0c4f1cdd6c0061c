"""The Python and native stacks of a process that hangs.

The process writes its Python stacks itself (faulthandler, on a signal), even if another thread has
the GIL. The native stacks come from py-spy if it is installed and may attach; else from /proc: the
state of each thread, and where in the kernel it waits.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness.records import EvidenceFile
from harness.runner.launcher import Worker

PYTHON_S = 2.0
"""Longest time to wait for the Python stacks."""
NATIVE_S = 2.0
"""Longest time for py-spy."""
POLL_S = 0.05
MAX_FAMILY = 8
"""Processes of a program whose stacks are taken."""

_CURRENT_THREAD = re.compile(r'Current thread.*\n  File "(.*)", line (\d+) in (.*)\n')
_PER_THREAD = ("comm", "wchan", "syscall", "stack", "status")
_STATUS = ("State", "Vm", "Sig", "voluntary", "nonvoluntary")
"""Lines of `status` to keep."""


def python_stacks(worker: Worker, log: Path) -> str:
    """Ask the worker to write its Python stacks to its log; empty if it does not."""
    if not log.exists():  # somebody removed the run
        return ""
    before = log.stat().st_size
    worker.dump_stacks()
    deadline = time.monotonic() + PYTHON_S
    while time.monotonic() < deadline:
        time.sleep(POLL_S)
        if innermost_frame(_since(log, before)):
            time.sleep(POLL_S)  # for the frames below it
            break
    return _since(log, before)


def innermost_frame(stacks: str) -> str:
    """Where the main thread is: `function (file:line)`; empty if unknown."""
    found = _CURRENT_THREAD.search(stacks)
    if not found:
        return ""
    path, line, function = found.groups()
    return f"{function} ({Path(path).name}:{line})"


def native_stacks(pids: Sequence[int]) -> tuple[str, EvidenceFile]:
    """The native stacks of processes, and the source of the first one's."""
    texts, notes = [], []
    for pid in pids:
        text, note = _py_spy(pid)
        if not text:
            text, note = _proc(pid, why=note)
        texts.append(f"process {pid}\n{text}" if len(pids) > 1 and text else text)
        notes.append(note)
    note = notes[0] if notes else "not available: no process is left"
    return "\n".join(filter(None, texts)), EvidenceFile(name="native stacks", note=note)


def family(pid: int) -> list[int]:
    """The descendants of a process, oldest first."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children[:MAX_FAMILY]]


def _py_spy(pid: int) -> tuple[str, str]:
    """What py-spy shows, and its command, or why it shows nothing."""
    beside = Path(sys.executable).parent  # of a virtual environment that is not active
    tool = shutil.which("py-spy") or shutil.which("py-spy", path=str(beside))
    if tool is None:
        return "", "py-spy is not installed"
    try:
        answer = subprocess.run(
            [tool, "dump", "--native", "--pid", str(pid)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=NATIVE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "", f"py-spy took more than {NATIVE_S:g} s"
    except OSError as error:
        return "", f"py-spy cannot be started: {error.strerror}"
    if answer.returncode:
        errors = answer.stderr.strip().splitlines() or ["no message"]
        return "", f"py-spy failed: {errors[0]}"
    return answer.stdout, "py-spy dump --native"


def _proc(pid: int, why: str) -> tuple[str, str]:
    """What /proc shows about every thread, and which of its files are readable."""
    parts: list[str] = []
    read: dict[str, None] = {}
    for thread in sorted(Path(f"/proc/{pid}/task").glob("[0-9]*"), key=lambda p: int(p.name)):
        parts.append(f"thread {thread.name}")
        for name in _PER_THREAD:
            try:
                text = (thread / name).read_text(errors="replace").strip()
            except OSError as error:
                text = f"not readable: {error.strerror}"
            else:
                read.setdefault(name)
            if name == "status":
                text = "; ".join(line for line in text.splitlines() if line.startswith(_STATUS))
            parts.append(f"  {name}: " + text.replace("\n", "\n    "))
    if not read:
        return "", f"not available: {why}, and /proc is not readable"
    return "\n".join(parts) + "\n", f"/proc ({', '.join(read)}); {why}"


def _since(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
