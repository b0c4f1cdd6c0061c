"""The evidence of a process that did not end OK: files beside its log, and what they show.

If a file cannot be written, the measurement is still stored and states why.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from harness.records import Case, Evidence, EvidenceFile
from harness.runner import ranks, stacks
from harness.runner.forkserver import Worker, end_of

FOLDER = "evidence"
LOG_HEAD_BYTES = 4 * 2**20
"""Beginning of an output that its log keeps."""
LOG_TAIL_BYTES = 4 * 2**20
"""End of an output that its log keeps, at least; at most twice that."""
LEFT_OUT = b"\n[... the harness left out output of the program here ...]\n"


class Folder:
    """The folder for the evidence of one process; created with its first file."""

    def __init__(self, run_folder: Path, log: Path) -> None:
        """`log` is the log of the process, inside the run's folder."""
        self.log = log
        self._run_folder = run_folder
        self.path = run_folder / FOLDER / log.stem

    @property
    def log_name(self) -> str:
        """The log, relative to the run's folder."""
        return str(self.log.relative_to(self._run_folder))

    def write(self, name: str, text: str, kept: EvidenceFile) -> EvidenceFile:
        """Write a file; the entry with its path, or with the reason why it is missing."""
        path = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", errors="replace")
        except OSError as error:
            return replace(kept, note=f"not written: {error.strerror}")
        return replace(kept, path=str(path.relative_to(self._run_folder)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck:
    """Where a worker is that has to be ended."""

    frame: str
    files: tuple[EvidenceFile, ...]
    rank: int | None = None
    """The rank that the others wait for, if one is."""
    behind: str = ""
    """By what that is seen."""


def stuck(worker: Worker, case: Case, folder: Folder, rank_steps: Sequence[int] | None) -> Stuck:
    """Have a worker write its Python stacks. `rank_steps` are those of each rank, if its silence
    was judged."""
    several = case.program.ranks if case.program else 0
    python = stacks.python_stacks(worker, folder.log, several)
    file = EvidenceFile(name="python stacks", note="not written by the process")
    if python:
        file = folder.write("python-stacks.txt", python, replace(file, note="faulthandler"))
    own = {rank: stacks.written_stack(text) for rank, text in stacks.by_rank(python).items()}
    behind = ranks.stuck(rank_steps, own) if several and rank_steps is not None else None
    if behind is None:
        return Stuck(frame=stacks.written_stack(python).frame, files=(file,))
    rank, why = behind
    return Stuck(frame=own[rank].frame if rank in own else "", files=(file,), rank=rank, behind=why)


def cut_log(log: Path) -> None:
    """Leave out the middle of a log that has become too long; the worker may still append to it."""
    try:
        fd = os.open(log, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:  # somebody removed the run
        return
    with os.fdopen(fd, "r+b", buffering=0) as file:
        size = os.fstat(fd).st_size
        if size > LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES:
            tail = os.pread(fd, LOG_TAIL_BYTES, size - LOG_TAIL_BYTES)
            file.truncate(LOG_HEAD_BYTES)
            file.write(LEFT_OUT + tail)


def with_traceback(found: Evidence, folder: Folder) -> Evidence:
    """The evidence of a crash with the traceback in the log, in a file."""
    frame, traceback = _traceback(folder, found.rank)
    files = (*found.files, *([traceback] if traceback else []))
    return replace(found, frame=found.frame or frame, files=files)


def _traceback(folder: Folder, rank: int | None) -> tuple[str, EvidenceFile | None]:
    """The innermost frame of the traceback in the log, or in a rank's, and where it is kept."""
    if not folder.log.exists():  # somebody removed the run
        return "", None
    with folder.log.open("rb") as file:
        text = end_of(file)
    text = text if rank is None else stacks.by_rank(text).get(rank, "")
    end = start if (start := text.find("Fatal Python error: ")) >= 0 else len(text)
    raised = text.rfind("Traceback (most recent call last):", 0, end)
    if start >= 0 and not (raised >= 0 and "<no Python frame>" in text[start:]):
        note, frame, end = "faulthandler's", stacks.written_stack(text[start:]).frame, len(text)
    elif (start := raised) >= 0:
        note, frame = "Python's", stacks.raised_in(text[start:end])
    else:
        return "", None
    kept = EvidenceFile(name="traceback", note=note)
    return frame, folder.write("traceback.txt", text[start:end], kept)
