"""Progress bars, with a line for each finished process: of a run, and of a gate."""

from typing import Self

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from harness import units
from harness.analysis.study import case_names
from harness.cli import console
from harness.cli.options import err
from harness.records import Case, Measurement, Outcome, Suite
from harness.runner.watchdog import RunObserver

BAR_WIDTH = 24


class _Bar:
    """A bar on standard error, removed when it is left, and a line for each finished process."""

    def __init__(self, description: str) -> None:
        # Processes last minutes: the mean of all of them tells how long the rest takes.
        # In a log it would leave an empty line.
        self._bar = Progress(
            BarColumn(bar_width=BAR_WIDTH),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=err,
            transient=True,
            speed_estimate_period=units.DAY_S,
            disable=not err.is_terminal,
        )
        self._task = self._bar.add_task(description, total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _ended(self, process: str, measurement: Measurement) -> None:
        self._bar.advance(self._task)
        if err.is_terminal and measurement.outcome is Outcome.OK:
            return  # the bar shows it
        err.print(
            escape(process),
            console.outcome(measurement.outcome),
            units.duration(measurement.wall_s),
            escape(measurement.detail.partition("\n")[0]),
            soft_wrap=True,
        )


class ProgressBar(_Bar, RunObserver):
    """Shows a run, with the time left."""

    def __init__(self, suite: Suite) -> None:
        super().__init__("")
        self._cases = {c.case_id: c for c in suite.cases}
        self._names = case_names(suite)

    def planned(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def started(self, case: Case, process: int) -> None:
        self.phase(case, process, "start")

    def phase(self, case: Case, process: int, name: str) -> None:
        self._bar.update(self._task, description=f"{self._process_of(case, process)} {name}")

    def progressed(self, case: Case, process: int, steps: int) -> None:
        self.phase(case, process, f"{steps} steps")

    def busy(self, case: Case, process: int, what: str) -> None:
        err.print(self._process_of(case, process), escape(what), soft_wrap=True)

    def finished(self, measurement: Measurement) -> None:
        self._ended(
            self._process_of(self._cases[measurement.case_id], measurement.process), measurement
        )

    def _process_of(self, case: Case, process: int) -> str:
        """Which process of which case: `train nsa, T=512, process 1 of 3`."""
        return (
            f"{self._names[case.case_id]}, process {process + 1} of {case.settings.processes_text}:"
        )


class GateProgress(_Bar):
    """Shows a gate: `screen 5/24: sleep/nsa pair 3, candidate ok 2.41 s`."""

    def __init__(self) -> None:
        super().__init__("starting")

    def stage(self, text: str, processes: int) -> None:
        self._bar.reset(self._task, description=text, total=processes)

    def ended(self, place: str, measurement: Measurement) -> None:
        task = self._bar.tasks[0]
        of = f"{task.description} {task.completed + 1:.0f}/{task.total:.0f}"
        self._ended(f"{of}: {measurement.case_id} {place}", measurement)
