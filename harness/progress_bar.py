"""What the command line shows while a run goes on."""

from collections.abc import Collection

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from harness import console, units
from harness.execution.progress import TimeLeft
from harness.records import Case, Measurement, Outcome, Suite


class ProgressBar:
    """Shows a run as it goes: a bar with the time left, and a line for each finished process."""

    def __init__(self, to: Console, suite: Suite, done: Collection[tuple[str, int]]) -> None:
        self._cases = {c.case_id: c for c in suite.cases}
        self._left = TimeLeft(
            (c.case_id, process)
            for c in suite.cases
            for process in range(c.settings.processes)
            if (c.case_id, process) not in done
        )
        self._to = to
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}", markup=False),
            console=to,
            transient=True,
        )
        self._task = self._bar.add_task("", left="")

    def __enter__(self) -> "ProgressBar":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def planned(self, total: int) -> None:
        self._bar.update(self._task, total=total)

    def started(self, case: Case, process: int) -> None:
        self._now(case, process, "start")

    def phase(self, case: Case, process: int, name: str) -> None:
        self._now(case, process, name)

    def progressed(self, case: Case, process: int, steps: int) -> None:
        self._now(case, process, f"{steps} steps")

    def finished(self, measurement: Measurement) -> None:
        self._left.finished(measurement)
        left_s = self._left.seconds()
        self._bar.update(
            self._task, advance=1, left=f"{units.duration(left_s)} left" if left_s else ""
        )
        case = self._cases[measurement.case_id]
        ok = measurement.outcome is Outcome.OK
        self._to.print(
            console.case_line(case, measurement.process, ""),
            f"[{'green' if ok else 'red'}]{measurement.outcome}[/]",
            units.duration(measurement.wall_s),
            console.first_line(measurement.detail),
            highlight=False,
            soft_wrap=True,
        )

    def _now(self, case: Case, process: int, what: str) -> None:
        self._bar.update(self._task, description=console.case_line(case, process, what))
