"""Measures cases on one or two sides, process by process, and stores every measurement.

With two sides the processes run in pairs, one of the baseline and one of the candidate, next to
each other in time: A B, B A, A B, ... The cases alternate too, forwards and backwards. A case that
fails in the candidate is not measured further; one that the baseline cannot run is measured in the
candidate alone.
"""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from harness.analysis.recorded import readings
from harness.records import Case, Environment, Measurement, Outcome, Pair, Suite
from harness.runner.launcher import Launcher
from harness.runner.rig import Rig
from harness.runner.run import run_one
from harness.runner.self_test import run_self_test
from harness.store.writer import RunWriter, create


class Observer(Protocol):
    def stage(self, text: str, processes: int) -> None:
        """A stage with at most this many processes begins."""

    def ended(self, place: str, measurement: Measurement) -> None:
        """One process has ended, and its measurement is stored: `pair 3, candidate`."""


@dataclass(slots=True, eq=False)
class Side:
    """One tree to measure: a launcher for its code, and a stored run per suite."""

    name: str
    roots: Sequence[Path]
    launcher: Launcher
    environment: Environment
    writers: dict[str, RunWriter] = field(default_factory=dict)
    measured: dict[tuple[str, str], list[Measurement]] = field(default_factory=dict)
    """(suite, case id) -> its measurements, in order."""
    cannot: dict[tuple[str, str], str] = field(default_factory=dict)
    """Cases that this tree refuses before they run -> the reason."""

    def of(self, task: "Task") -> list[Measurement]:
        return self.measured.get(task.key, [])

    def broken(self, task: "Task") -> bool:
        """A process of the case did not end OK here."""
        return any(m.outcome is not Outcome.OK for m in self.of(task))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A case to measure, and its suite."""

    suite: str
    case: Case
    attest: bool = False
    """Profile every process, not only the first."""

    @property
    def key(self) -> tuple[str, str]:
        return self.suite, self.case.case_id


@dataclass(slots=True, eq=False)
class Bench:
    """Measures processes on the sides."""

    sides: Sequence[Side]
    """The candidate is the last."""
    rig: Rig
    observer: Observer
    held: ExitStack
    """Closes the stored runs."""

    def record(self, root: Path, side: Side, suite: Suite, key: str) -> None:
        """Create the stored run of a side and a suite."""
        writer = create(root, suite, side.environment)
        self.held.callback(writer.close)
        side.writers[key] = writer

    @property
    def writers(self) -> list[RunWriter]:
        return [writer for side in self.sides for writer in side.writers.values()]

    def run_self_test(self, *, ask: bool = True) -> tuple[str, ...]:
        """The failed checks of a self-test on the candidate's side; if not asked, it is recorded as
        skipped."""
        head, skip = self.sides[-1], "" if ask else "not requested"
        shown = run_self_test(head.launcher, self.rig.probes, head.environment.gpu, skip=skip)
        for writer in self.writers:
            writer.append(shown)
        return tuple(f"{check.name}: {check.fact}" for check in shown.refuted)

    def finish(self) -> None:
        """Mark all stored runs as complete."""
        for writer in self.writers:
            writer.finish()

    def rounds(self, plan: Sequence[tuple[Task, range]], text: str) -> None:
        """Measure each task's processes of these indices, on all sides in turn. At Ctrl-C at most
        the current process is lost."""
        self.observer.stage(text, sum(len(r) for _, r in plan) * len(self.sides))
        head = self.sides[-1]
        for index in sorted({i for _, indices in plan for i in indices}):
            tasks = [task for task, indices in plan if index in indices]
            for task in tasks if index % 2 == 0 else tasks[::-1]:
                if head.broken(task):
                    continue  # the baseline would have nothing to be compared with
                for side in self.sides if index % 2 == 0 else self.sides[::-1]:
                    if task.key not in side.cannot and not side.broken(task):
                        self._process(task, side, index)

    def _process(self, task: Task, side: Side, index: int) -> None:
        writer = side.writers[task.suite]
        # Accuracy is checked in every process: a race may spoil only some of them.
        given = task.case.settings
        settings = replace(given, profile=given.profile and (index == 0 or task.attest))
        case = replace(task.case, settings=settings)
        measurement = run_one(case, index, side.launcher, writer, self.rig)
        writer.append(measurement)
        side.measured.setdefault(task.key, []).append(measurement)
        turn = f"pair {index + 1}, {side.name}" if self.sides[1:] else f"process {index + 1}"
        self.observer.ended(turn, measurement)


def pairs(task: Task, base: Side, head: Side) -> tuple[tuple[Pair, ...], int]:
    """A case's pairs, and the number left out as unsteady or disturbed."""
    of_base: Mapping[int, Measurement] = {m.process: m for m in base.of(task)}
    found, unsteady = [], 0
    for candidate in head.of(task):
        baseline = of_base.get(candidate.process)
        if baseline is None or not (baseline.outcome is candidate.outcome is Outcome.OK):
            continue
        if not (usable(baseline, task.case) and usable(candidate, task.case)):
            unsteady += 1
            continue
        pair = Pair(
            baseline_s=baseline.step_s,
            candidate_s=candidate.step_s,
            baseline_hz=clock(baseline),
            candidate_hz=clock(candidate),
            wall_s=(baseline.wall_s + candidate.wall_s) or None,
            swapped=candidate.process % 2 == 1,  # see Bench.rounds
        )
        found.append(pair)
    return tuple(found), unsteady


def usable(measurement: Measurement, case: Case) -> bool:
    """The process was not seen to be unsteady, and enough of its samples are undisturbed."""
    return measurement.steady is not False and measurement.is_evidence(case.settings.min_samples)


def clock(measurement: Measurement) -> float | None:
    """Mean SM clock during sampling; None if it was not read."""
    clocks = readings(measurement, "gpu_sm_clock_hz", ("sampling",))
    return statistics.fmean(clocks) or None if clocks else None
