"""The hook counts the steps of the process that it is in, once."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from harness.program.step_hook import ANSWER, HookOrder, StepHook
from harness.records import LINES, OPTIMIZER


class HookedSteps:
    """Steps of this process, its hook and the notes of that."""

    def __init__(self, folder: Path, *, by_lines: bool = True) -> None:
        self.folder, self.by_lines = folder, by_lines
        self.notes: list[dict[str, Any]] = []
        self.model = nn.Linear(3, 3)
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.1) for _ in range(2)]
        asked = HookOrder(
            step=r"step (?P<step>\d+)", by_lines=by_lines, skip=2,
            profile={"step_s": 0.05, "profile_s": 0.1, "more_steps": 0},
            ends_at=time.monotonic() + 60,
        )  # fmt: skip
        self.hook = StepHook(asked, folder, lambda **note: self.notes.append(note))

    def steps(self, numbers: range) -> None:
        for number in numbers:
            self.step(number)

    def step(self, number: int) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        if self.by_lines:
            for line in (f"step {number} done", f"step {number} evaluated", "saved"):
                self.hook.line_written(line)
        else:
            for optimizer in self.optimizers:
                self.hook.optimizer_stepped(optimizer)

    @property
    def answer(self) -> dict[str, Any] | None:
        path = self.folder / ANSWER
        return json.loads(path.read_text()) if path.exists() else None


def test_lines_and_optimizers_count_the_same_steps(tmp_path: Path) -> None:
    answers = []
    for by_lines in (True, False):
        folder = tmp_path / str(by_lines)
        folder.mkdir()
        hooked = HookedSteps(folder, by_lines=by_lines)
        hooked.steps(range(1, 9))
        assert hooked.answer is not None, hooked.notes
        assert hooked.answer["by"] == (LINES if by_lines else OPTIMIZER)
        answers.append(hooked.answer["ran"]["counters"])

    assert answers[0] == answers[1]
    assert answers[0]["steps"] == 2
    assert answers[0]["series"] == {}
    assert answers[0]["dispatched_ops"] > 3


def test_neither_another_thread_nor_a_process_without_operators_counts(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)
    thread = threading.Thread(target=hooked.hook.line_written, args=("step 1",))
    thread.start()
    thread.join()
    assert hooked.notes == []

    for number in range(1, 40):
        hooked.hook.line_written(f"step {number}")

    assert hooked.answer is None
    assert [{*note} for note in hooked.notes] == [{"at"}, {"failed"}]


def test_an_error_in_counting_is_noted_and_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Iterator[None]:
        yield
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr("harness.measure.profile.requests", broken)
    hooked = HookedSteps(tmp_path)
    hooked.steps(range(1, 9))

    assert hooked.notes == [{"at": "steps"}, {"failed": "RuntimeError: CUPTI is in use"}]


def test_a_program_with_too_few_steps_says_how_many_it_made(tmp_path: Path) -> None:
    hooked = HookedSteps(tmp_path)
    hooked.steps(range(1, 4))

    hooked.hook.process_ends()

    assert hooked.answer is None
    assert hooked.notes[-1] == {"steps": 3}
