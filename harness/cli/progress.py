"""What the command line shows while a run goes on."""

from collections.abc import Collection, Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from harness import units
from harness.cli import console
from harness.records import Case, Measurement, Outcome, Suite


class TimeLeft:
    """Estimates the remaining wall time of a run.

    A case that has been measured before is expected to take as long again; one that has not
    is expected to take the mean of all that have. A case that ended other than ok runs no
    more processes, so it leaves the plan.
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

    @property
    def processes(self) -> int:
        """Processes still to run."""
        return len(self._planned)

    def seconds(self) -> float | None:
        """Expected wall time of the rest; None before anything has finished."""
        if not self._wall_s:
            return None
        mean_s = sum(self._wall_s.values()) / len(self._wall_s)
        return sum(self._wall_s.get(case_id, mean_s) for case_id, _ in self._planned)


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
