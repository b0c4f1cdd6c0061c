"""Where a process stands: the Python and the native stacks of one that hangs.

The Python stacks are written by the process itself (faulthandler, on a signal), whatever holds the
GIL. The native ones come from py-spy where it is installed and may attach; else what /proc tells of
each thread: its state, and where in the kernel it waits.
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
INTERPRETER = sys.executable
"""py-spy may lie beside it, in a virtual environment that is not active."""

_CURRENT_THREAD = re.compile(r'Current thread.*\n  File "(.*)", line (\d+) in (.*)\n')
_PER_THREAD = ("comm", "wchan", "syscall", "stack", "status")


def python_stacks(worker: Worker, log: Path) -> str:
    """Have the worker write its Python stacks to its log; what came, or nothing."""
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
    """Where the main thread is by faulthandler's account: `function (file:line)`; or nothing."""
    found = _CURRENT_THREAD.search(stacks)
    if not found:
        return ""
    path, line, function = found.groups()
    return f"{function} ({Path(path).name}:{line})"


def native_stacks(pid: int) -> tuple[str, EvidenceFile]:
    """The native stacks of a process, and by which means they were had."""
    name = "native stacks"
    text, why = _py_spy(pid)
    if text:
        return text, EvidenceFile(name=name, note="py-spy dump --native")
    text, read = _proc(pid)
    if text:
        return text, EvidenceFile(name=name, note=f"/proc ({', '.join(read)}); {why}")
    return "", EvidenceFile(name=name, note=f"not available: {why}, and /proc tells nothing")


def native_stacks_of(pids: Sequence[int]) -> tuple[str, EvidenceFile]:
    """The native stacks of several processes, and by which means those of the first were had."""
    if not pids:
        return "", EvidenceFile(name="native stacks", note="not available: no process is left")
    found = [native_stacks(pid) for pid in pids]
    texts = [f"process {pid}\n{text}" for pid, (text, _) in zip(pids, found, strict=True) if text]
    return found[0][0] if len(pids) == 1 else "\n".join(texts), found[0][1]


def family(pid: int) -> list[int]:
    """The processes under one, the first started first; not itself."""
    try:
        children = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [child.pid for child in children[:MAX_FAMILY]]


def _py_spy(pid: int) -> tuple[str, str]:
    """What py-spy shows; or nothing, and why."""
    beside = Path(INTERPRETER).with_name("py-spy")
    tool = shutil.which("py-spy") or (str(beside) if beside.is_file() else None)
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
        said = answer.stderr.strip().splitlines() or ["nothing"]
        return "", f"py-spy said: {said[0]}"
    return answer.stdout, ""


def _proc(pid: int) -> tuple[str, tuple[str, ...]]:
    """What /proc shows of every thread, and which of its files could be read."""
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
                text = "; ".join(line for line in text.splitlines() if _telling(line))
            parts.append(f"  {name}: " + text.replace("\n", "\n    "))
    return "\n".join(parts) + "\n" if read else "", tuple(read)


def _telling(status_line: str) -> bool:
    return status_line.startswith(("State", "Vm", "Sig", "voluntary", "nonvoluntary"))


def _since(log: Path, offset: int) -> str:
    with log.open("rb") as file:
        file.seek(offset)
        return file.read().decode(errors="replace")
