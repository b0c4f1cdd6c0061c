"""Inside a program that is counted: its own steps, from one mark to the next.

A mark is a line of progress that the program writes, or the end of a step of its first optimizer.
Nothing of the program is changed for it: its standard streams are listened to, and PyTorch tells
of optimizers. After a few steps the pass of harness.measure.profile begins at a mark, is resumed at
each, and its answer is written where the harness looks for it. Of all processes that load this
one counts at a time: the first to make a mark, and another only once that one has ended.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from harness.measure import profile
from harness.measure.profile import WhatRan
from harness.records import LINES, OPTIMIZER

ANSWER = "answer.json"
CLAIM = "claim"
"""Holds the id of the process that counts."""
UNHEARD = "unheard"
"""Exists once the harness has read lines of progress that no mark was made of."""
SKIPPED_STEPS = 3
"""Steps after the setup that are not counted: they still compile, tune and fill caches."""

Note = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOrder:
    """What the harness wants to know."""

    step: str
    """Regular expression of a line of progress; empty where there is none."""
    by_lines: bool
    """Whether each such line is one step; else a step is one of the first optimizer."""
    skip: int
    """Steps to leave alone."""
    step_s: float
    """What one takes, typically."""
    profile_s: float
    """Time to fill with profiled steps."""
    ends_at: float
    """time.monotonic by which the answer is of use."""
    packages: tuple[str, ...] = ()
    """Top-level names whose modules' files are to be told."""
    folders: tuple[str, ...] = ()
    """Folders whose modules are to be told, whatever their names."""


def watch(order: Path, note: Note) -> None:
    """Wait for marks in this process, and in those it forks.

    Args:
        order: Holds what is `HookOrder`; the answer goes into its folder.
        note: Adds a note to the folder.
    """
    asked, folder = HookOrder(**json.loads(order.read_text(encoding="utf-8"))), order.parent
    note(at="torch")
    marks = Marks(asked, folder, note)
    register_optimizer_step_post_hook(lambda optimizer, *_: marks.stepped(optimizer))
    if asked.by_lines:
        for stream in (sys.stdout, sys.stderr):
            _listen(stream, marks.wrote)
    os.register_at_fork(after_in_child=marks.forked)
    atexit.register(marks.left)


class Marks:
    """Counts the steps of one process, if it is the first."""

    def __init__(self, asked: HookOrder, folder: Path, note: Note) -> None:
        self._asked = asked
        self._folder = folder
        self._note = note
        self._step = re.compile(asked.step)
        self._told: str | None = None
        self._lines = 0
        self._optimizer: Optimizer | None = None
        self._optimizer_steps = 0
        self._by = ""
        self._thread = 0
        self._steps = 0
        self._asking: Generator[None, None, WhatRan] | None = None
        self._over = False

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped. The first one's steps count: a program may have several."""
        if self._over:
            return
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer:
            return
        self._optimizer_steps += 1
        if not self._asked.by_lines or (self._folder / UNHEARD).exists():
            self._mark(OPTIMIZER, self._optimizer_steps)

    def wrote(self, line: str) -> None:
        """A line of output is complete. One of a thread that only reports marks nothing."""
        if self._over or threading.current_thread() is not threading.main_thread():
            return
        found = self._step.search(line)
        if found is None:
            return
        told = found.groupdict().get("step")
        if told is not None and told == self._told:
            return  # a second line of the same step
        self._told = told
        self._lines += 1
        self._mark(LINES, self._lines)

    def forked(self) -> None:
        """In a child: the parent counts, if it has begun to."""
        self._over |= bool(self._by)

    def left(self) -> None:
        """The process ends before it could answer: another one may."""
        if self._by and not self._over:
            self._note(steps=self._steps)
            (self._folder / CLAIM).unlink()

    def _mark(self, by: str, steps: int) -> None:
        me = threading.get_ident()
        if not self._by and not self._claim():
            return
        self._by, self._thread = self._by or by, self._thread or me
        if (by, me) != (self._by, self._thread):
            return
        self._steps = steps
        if steps < self._asked.skip:
            return
        if self._asking is None:
            left_s = self._asked.ends_at - time.monotonic()
            self._asking = profile.asked(
                step_s=self._asked.step_s, time_left_s=left_s, profile_s=self._asked.profile_s
            )
        try:
            next(self._asking)
        except StopIteration as done:
            self._over = True
            self._answer(done.value)
        except Exception as error:  # noqa: BLE001 - noted; a user's program must go on uncounted
            self._over = True
            self._note(failed=f"{type(error).__name__}: {error}")

    def _claim(self) -> bool:
        """Whether this is now the process that counts."""
        claim = self._folder / CLAIM
        try:
            fd = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            if _lives(claim):
                return False
            claim.unlink(missing_ok=True)
            return self._claim()
        with open(fd, "w", encoding="utf-8") as file:  # noqa: PTH123  a descriptor
            file.write(str(os.getpid()))
        return True

    def _answer(self, ran: WhatRan) -> None:
        if ran.counters.dispatched_ops == 0 and not ran.counters.kernel_launches:
            self._note(failed="the process that tells of steps runs no operators; another does")
            return
        answer = {
            "ran": asdict(ran),
            "by": self._by,
            "torch": torch.__version__,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "places": _places(self._asked.packages, self._asked.folders),
        }
        draft = self._folder / f"{ANSWER}.{os.getpid()}"
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(self._folder / ANSWER)


def _listen(stream: Any, heard: Callable[[str], None]) -> None:
    """Hear every line that is written to a stream; one that cannot be listened to is left."""
    write = getattr(stream, "write", None)
    begun = ""

    def listening(text: str) -> Any:
        nonlocal begun
        written = write(text)  # type: ignore[misc]
        if isinstance(text, str):
            *whole, begun = re.split(r"[\r\n]+", begun + text)
            for line in whole:
                heard(line)
        return written

    if write is not None:
        try:
            stream.write = listening
        except AttributeError:
            return


def _lives(claim: Path) -> bool:
    """Whether the process that wrote this has not ended."""
    try:
        pid = claim.read_text(encoding="utf-8")
        state = Path("/proc", pid or "self", "stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return state.rpartition(")")[2].split()[0] not in ("Z", "X")


def _places(packages: Sequence[str], folders: Sequence[str]) -> dict[str, str]:
    """Module -> file, of the packages and folders asked for."""
    inside = tuple(os.path.join(os.path.realpath(folder), "") for folder in folders)  # noqa: PTH118
    found = {name: getattr(module, "__file__", None) for name, module in [*sys.modules.items()]}
    return {
        name: file
        for name, file in found.items()
        if isinstance(file, str)
        and (
            name.partition(".")[0] in packages
            or (inside and os.path.realpath(file).startswith(inside))
        )
    }
