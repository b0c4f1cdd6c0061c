"""A modelled machine, whose processes answer at once: for searches alone, and for sessions with
real commits and worktrees."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.bisect import session
from harness.bisect.search import CommitsConclusion, ExactSearch, NextBlock, NoisySearch
from harness.errors import CaseRefused
from harness.records import Case, Clock, Measurement, Outcome, Suite
from harness.tests.fake_runs import environment
from reports.studies import bisect_errors
from reports.studies.noise import QUIET, ModelledNoise


def carried_out(
    search: ExactSearch | NoisySearch,
    value: Callable[[int], float],
    noise: ModelledNoise | None = None,
    seed: int = 0,
    cannot: Callable[[int], bool] = lambda position: False,
) -> tuple[CommitsConclusion, list[NextBlock]]:
    """As in the study of errors, with noise drawn by a seed."""
    logs = noise.sequence(np.random.default_rng(seed), 1, 3000)[0] if noise else np.zeros(3000)
    return bisect_errors.carried_out(search, value, logs, cannot)


@dataclass
class Machine:
    """A quiet node."""

    answer: Callable[["Tree", Case], tuple[float, Mapping[str, Any]]]
    """A worktree and a case -> step time and other fields of the measurement."""
    noise: Sequence[float] = field(
        default_factory=lambda: QUIET.sequence(np.random.default_rng(5), 1, 2000)[0]
    )
    processes: int = 0
    interrupt_at: int | None = None
    """The number of processes before the first Ctrl-C."""
    elsewhere: Sequence[Path] = ()
    """Trees that the code must not come from."""
    checked: list[Path] = field(default_factory=list)
    """The trees of the processes that compared their outputs."""

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None: ...

    def launcher(self, roots: object, *, elsewhere: Sequence[Path], **_: object) -> "Machine":
        self.elsewhere = [*elsewhere]
        return self

    def describe(self) -> dict[str, Any]:
        return {"torch_settings": {"device": "cpu"}, "gpu_uuids": []}

    def at(self, roots: Sequence[Path]) -> "Tree":
        return Tree(self, roots[0])


@dataclass
class Tree:
    machine: Machine
    root: Path

    @property
    def kernel(self) -> str:
        return (self.root / "toy/kernel.py").read_text()

    def check(self, suite: Suite) -> None:
        module, _, function = suite.cases[0].factory.partition(":")
        file = self.root / f"{module.replace('.', '/')}.py"
        if f"def {function}(" not in file.read_text():
            reason = f"{module} has no function {function!r}"
            raise CaseRefused(suite.path, suite.cases[0].case_id, reason)

    def run(self, case: Case, process: int) -> Measurement:
        machine = self.machine
        if machine.processes == machine.interrupt_at:
            machine.interrupt_at = None
            raise KeyboardInterrupt
        if case.settings.accuracy:
            machine.checked.append(self.root)
        step_s, changes = machine.answer(self, case)
        step_s *= float(np.exp(machine.noise[machine.processes]))
        machine.processes += 1
        measured = Measurement(
            case_id=case.case_id,
            process=process,
            outcome=Outcome.OK,
            clock=Clock.HOST,
            samples_s=(step_s,) * case.settings.min_samples,
            steady=True,
            code={"toysuites": str(self.root / "toysuites/__init__.py")},
        )
        return replace(measured, **changes)


def failing(outcome: Outcome) -> Mapping[str, Any]:
    return {"outcome": outcome, "detail": "as planted", "samples_s": ()}


def install(patch: pytest.MonkeyPatch, machine: Machine) -> Machine:
    """Let sessions measure on this machine."""
    here = environment(gpu=None)
    patch.setattr("harness.runner.rig.Launcher", machine.launcher)
    patch.setattr("harness.machine.environment.capture", lambda *a, **k: here)
    patch.setattr(session, "run_one", lambda case, process, tree, *rest: tree.run(case, process))
    return machine
