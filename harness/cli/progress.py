"""Progress bars: of a run, and of the processes that a gate starts."""

from collections.abc import Collection, Iterable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from harness import units
from harness.cli import console
from harness.cli.options import err, say
from harness.records import Case, Measurement, Outcome, Suite
from harness.runner.run import RunObserver

BAR_WIDTH = 24


class TimeLeft:
    """Estimates the remaining wall time of a run.

    A measured case is expected to take as long again; any other takes the mean of the measured
    ones. A case that did not end ok runs no more processes, so it leaves the plan.
    """

    def __init__(self, planned: Iterable[tuple[str, int]]) -> None:
        self._planned = set(planned)
        self._wall_s: dict[str, float] = {}

    def finished(self, measurement: Measurement) -> None:
        """Take one process off the plan."""
        self._wall_s[measurement.case_id] = measurement.wall_s
        self._planned.discard((measurement.case_id, measurement.process))
        if not measurement.samples_s:
            self._planned = {p for p in self._planned if p[0] != measurement.case_id}

    def seconds(self) -> float | None:
        """Expected wall time of the rest; None before the first process has finished."""
        if not self._wall_s:
            return None
        mean_s = sum(self._wall_s.values()) / len(self._wall_s)
        return sum(self._wall_s.get(case_id, mean_s) for case_id, _ in self._planned)


class _Bar:
    """A bar on a console, removed when it is left."""

    def __init__(self, to: Console, *columns: ProgressColumn, description: str) -> None:
        self._bar = Progress(*columns, console=to, transient=True)
        self._task = self._bar.add_task(description, total=None, left="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class ProgressBar(_Bar, RunObserver):
    """Shows a run: a bar with the time left, and a line for each finished process."""

    def __init__(self, to: Console, suite: Suite, done: Collection[tuple[str, int]]) -> None:
        super().__init__(
            to,
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            description="",
        )
        self._cases = {c.case_id: c for c in suite.cases}
        self._left = TimeLeft(
            (c.case_id, process)
            for c in suite.cases
            for process in range(c.settings.processes)
            if (c.case_id, process) not in done
        )
        self._to = to

    def planned(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def started(self, case: Case, process: int) -> None:
        self.phase(case, process, "start")

    def phase(self, case: Case, process: int, name: str) -> None:
        self._bar.update(self._task, description=f"{console.process_of(case, process)}: {name}")

    def progressed(self, case: Case, process: int, steps: int) -> None:
        self.phase(case, process, f"{steps} steps")

    def finished(self, measurement: Measurement) -> None:
        self._left.finished(measurement)
        left_s = self._left.seconds()
        left = f"{units.duration(left_s)} left" if left_s else ""
        self._bar.update(self._task, advance=1, left=left)
        self._to.print(
            console.process_of(self._cases[measurement.case_id], measurement.process),
            console.outcome(measurement.outcome),
            units.duration(measurement.wall_s),
            console.first_line(measurement.detail),
            highlight=False,
            soft_wrap=True,
        )


class GateProgress(_Bar):
    """Shows a gate: a bar, and a line for each process that did not end ok."""

    def __init__(self) -> None:
        super().__init__(
            err,
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            description="starting",
        )

    def stage(self, text: str, processes: int) -> None:
        self._bar.reset(self._task, description=text, total=processes)

    def ended(self, side: str, measurement: Measurement) -> None:
        self._bar.advance(self._task)
        if measurement.outcome is not Outcome.OK:
            detail = measurement.detail.partition("\n")[0]
            say(f"{side}: {measurement.case_id}: {measurement.outcome}: {detail}")
