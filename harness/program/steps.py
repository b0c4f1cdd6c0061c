"""The steps of a program as its output reports them: setup, then warm-up and samples."""

from collections.abc import Sequence

from harness.measure.steady import EVERY_READING, StepLog, StepSeries
from harness.program.reported import Step
from harness.records import MeasureSettings


class ProgramSteps(StepSeries):
    """One reading for each line after the setup: for a line of ten steps, the mean of the ten."""

    def __init__(
        self, settings: MeasureSettings, *, setup_steps: int, launched_at: float = 0.0
    ) -> None:
        super().__init__(settings, first=0)
        self.log = StepLog(launched_at)
        """The steps after setup, with the metrics of their lines, until they are reported."""
        self.setup_steps = setup_steps
        self.last_line_at: float | None = None
        """time.monotonic of the last line that reports a step."""
        self.last_step: int | None = None
        """The program's own number of its last step, if it prints one."""
        self.finished = 0
        self.one_by_one = True
        """Whether each line reports one step."""

    def add(self, steps: Sequence[Step], at: float) -> list[float]:
        """Add the steps of lines that arrived together; the times of those after setup, of one line
        at most EVERY_READING."""
        took: list[float] = []
        untimed: list[tuple[Step, int, int]] = []
        is_setup = restarted = False
        for step in steps:
            advance = self._advance(step)
            self.finished += advance
            if self.finished <= self.setup_steps:
                is_setup = True
            elif step.time_s is not None:
                self._keep(step.time_s, at - step.time_s, step, self.finished)
                took += [step.time_s] * min(advance, EVERY_READING)
            restarted |= advance == 0
            untimed += [(step, advance, self.finished)] if step.time_s is None else []
        if untimed and self.last_line_at is not None and not (is_setup or restarted):
            each_s = (at - self.last_line_at) / sum(advance for _, advance, _ in untimed)
            done = 0
            for step, advance, number in untimed:
                self._keep(each_s, self.last_line_at + done * each_s, step, number)
                done += advance
            took += [each_s] * min(done, EVERY_READING)
        if steps:
            self.last_line_at = at
            if self.warm_at is None and self.finished >= self.setup_steps:
                self.warm_at = min(self.began_at[0], at) if self.began_at else at
        return took

    def _advance(self, step: Step) -> int:
        """How many steps a line finishes; 0 if the program's count restarts."""
        if step.count is None:
            return 1
        before, self.last_step = self.last_step, step.count
        advance = 1 if before is None else max(0, step.count - before)
        self.one_by_one &= advance <= 1
        return advance

    def _keep(self, time_s: float, began_at: float, step: Step, number: int) -> None:
        if time_s > 0:
            self.append(began_at, time_s, time_s)
            own = number if step.count is None else step.count
            self.log.add(own, time_s, began_at + time_s, step.values)
