"""Inside a program: counts and profiles its steps.

A step ends with a line of progress that the program writes (the hook wraps the `write` of its
standard streams), or with a step of its first optimizer. After a few steps harness.measure.profile
takes the next ones. If several processes load the hook, the first answer counts.
"""

import atexit
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from harness.git import origin
from harness.measure import profile
from harness.measure.profile import StepProfile
from harness.records import LINES, OPTIMIZER

ANSWER = "answer.json"
SKIPPED_STEPS = 3
"""Steps after the setup that are not counted: they may compile, tune and fill caches."""

Note = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class HookOrder:
    step: str
    """Regular expression of a line of progress; empty without one."""
    by_lines: bool
    """Whether each such line is one step; else steps of the first optimizer count."""
    skip: int
    profile: Mapping[str, Any]
    """Fields of a ProfileRequest, without the time left."""
    ends_at: float
    """time.monotonic after which the answer is not used."""
    folders: tuple[str, ...] = ()
    """Of the tree under test; `elsewhere`: other working trees of the repository."""
    elsewhere: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """Variables whose reads are noted, as for `options`: see harness.program.startup.reads."""
    options: tuple[str, ...] = ()


def watch(order: Path, note: Note) -> None:
    """Watch the steps of this process by a HookOrder in a file; the answer goes into its folder."""
    asked, folder = HookOrder(**json.loads(order.read_text(encoding="utf-8"))), order.parent
    note(at="torch")
    hook = StepHook(asked, folder, note)
    if asked.by_lines:
        for stream in (sys.stdout, sys.stderr):
            _listen(stream, hook.line_written)
    else:
        register_optimizer_step_post_hook(lambda optimizer, *_: hook.optimizer_stepped(optimizer))
    os.register_at_fork(after_in_child=hook.forked)
    atexit.register(hook.process_ends)


class StepHook:
    def __init__(self, asked: HookOrder, folder: Path, note: Note) -> None:
        self._asked, self._folder, self._note = asked, folder, note
        self._step = re.compile(asked.step)
        self._last_count: str | None = None
        self._optimizer: Optimizer | None = None
        self._steps = 0
        self._thread = 0
        self._profiling: Generator[None, None, StepProfile] | None = None
        self._over = False

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Steps of the first optimizer count; a program may have several."""
        self._optimizer = self._optimizer or optimizer
        if optimizer is self._optimizer:
            self._step_ended()

    def line_written(self, line: str) -> None:
        """Lines of the main thread count; another thread may only log."""
        found = self._step.search(line)
        if found is None or threading.current_thread() is not threading.main_thread():
            return
        count = found.groupdict().get("step")
        if count is None or count != self._last_count:  # else a second line of the same step
            self._last_count = count
            self._step_ended()

    def forked(self) -> None:
        """A forked process, such as one that loads data, does not count."""
        self._over = True

    def process_ends(self) -> None:
        """Without an answer so far: say how many steps there were."""
        if self._steps and not self._over:
            self._note(steps=self._steps)

    def _step_ended(self) -> None:
        if self._over:
            return
        self._thread = self._thread or threading.get_ident()
        self._steps += 1
        if self._steps == 1:
            self._note(at="steps")
        if threading.get_ident() != self._thread or self._steps < self._asked.skip:
            return
        if self._profiling is None:
            left_s = self._asked.ends_at - time.monotonic()
            ask = profile.ProfileRequest(time_left_s=left_s, **self._asked.profile)
            self._profiling = profile.requests(ask)
        try:
            next(self._profiling)
        except StopIteration as done:
            self._over = True
            self._answer(done.value)
        except Exception as error:  # noqa: BLE001 - noted; the program continues uncounted
            self._over = True
            self._note(failed=f"{type(error).__name__}: {error}")

    def _answer(self, ran: StepProfile) -> None:
        if ran.counters.dispatched_ops == 0 and not ran.counters.kernel_launches:
            self._note(failed="the process that reports steps runs no operators")
            return
        asked = self._asked
        misplaced = ""
        if asked.folders:
            misplaced = origin.misplaced(origin.loaded(), asked.folders, asked.elsewhere)
        answer = {
            "ran": asdict(ran),
            "by": LINES if asked.by_lines else OPTIMIZER,
            "pid": os.getpid(),
            "torch": torch.__version__,
            "device": "cuda" if torch.cuda.is_available() else "cpu",
            "code": origin.own_packages(),
            "misplaced": misplaced,
        }
        draft = self._folder / f"{ANSWER}.{os.getpid()}"
        draft.write_text(json.dumps(answer), encoding="utf-8")
        draft.replace(self._folder / ANSWER)


def _listen(stream: Any, heard: Callable[[str], None]) -> None:
    """Pass every line written to a stream to `heard`, if the stream's `write` can be wrapped."""
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
        with suppress(AttributeError):
            stream.write = listening
