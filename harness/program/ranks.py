"""The ranks of a distributed program: what each prints, its steps, and which failed first. Its
failure breaks the collectives of the others, so it is awaited for a moment, and one that names a
broken connection for longer: the rank that broke it may still be ending.
"""

import math
import re
import signal
import statistics
from collections.abc import Sequence
from dataclasses import replace

from harness.measure.failures import Failed, NonFinite
from harness.messages import signal_name
from harness.program.process import Read, Tail
from harness.program.reported import ProgramSteps, ReportedMetrics, step_in
from harness.records import MeasureSettings, Program, Rank

SETTLE_S, SECONDARY_S = 0.3, 3.0
"""Time to wait for an earlier failure of another rank; after a broken connection."""

_SECONDARY = re.compile(
    r"Connection (closed|reset) by peer|Broken pipe|Dist(Backend|Network|Store)Error"
    r"|remote process exited|NCCL communicator was aborted|Timed out waiting .* for (recv|send)"
)


def how_ended(code: int) -> str:
    """`killed by SIGKILL`, `exited with 1`."""
    how = f"killed by {signal_name(code)}" if code < 0 else f"exited with {code}"
    if 128 < code < 128 + signal.NSIG:
        how += f" (a shell's code for {signal_name(128 - code)})"
    return how


class RankOutput:
    """What one rank has printed; of a program without ranks, its only process."""

    def __init__(
        self, rank: int, program: Program, settings: MeasureSettings, began: float
    ) -> None:
        self.rank = rank
        self.stdout, self.stderr = Tail(), Tail()
        self._steps = program.steps
        self.metrics = ReportedMetrics(program)
        setup_steps = program.steps.setup_steps if program.steps else 0
        self.series = ProgramSteps(settings, setup_steps=setup_steps, launched_at=began)
        self.code: int | None = None
        self.ended_at: float | None = None
        self.error: Failed | None = None
        """NaN or infinity that it reported, or a line that is garbled."""
        self.error_at: int | None = None
        """The program's own number of that step."""
        self.failed_at: float | None = None
        self._unfinished: dict[str, float] = {}
        """Metrics reported since the last step."""

    def take(self, read: Read) -> list[float]:
        """Take in what it prints, up to an `error`; the times of the steps after setup."""
        (self.stderr if read.from_stderr else self.stdout).add(read)
        if read.code is not None:
            self.code, self.ended_at = read.code, read.at
            self.failed_at = self.failed_at or (read.at if read.code else None)
        steps = []
        for line in read.lines:
            step = None
            try:
                step = step_in(line, self._steps) if self._steps else None
                self._unfinished |= self.metrics.read_line(line, read.at)
            except Failed as error:
                own_step = step.count if step else None
                if own_step is not None and isinstance(error, NonFinite):
                    self.series.log.note(own_step, {error.source: math.nan})
                if self.error is None:
                    self.error, self.error_at, self.failed_at = error, own_step, read.at
                break
            if step:
                steps.append(replace(step, values=self._unfinished))
                self._unfinished = {}
        return self.series.add(steps, read.at)

    @property
    def is_secondary(self) -> bool:
        """Whether it failed because another rank did."""
        by_signal = self.code is not None and self.code < 0 and self.code != -signal.SIGABRT
        return not (self.error or by_signal) and bool(_SECONDARY.search(self.stderr.ending))

    def is_first(self, now: float) -> bool:
        """Whether no earlier failure will be seen, if this one is the first so far."""
        wait_s = SECONDARY_S if self.is_secondary else SETTLE_S
        return self.failed_at is not None and now - self.failed_at > wait_s

    def after_step(self) -> str:
        """The last finished step, by the program's own number if it prints one, for a detail."""
        done, own = self.series.finished, self.series.last_step
        if self.error_at is not None:
            return f", at its step {self.error_at}"
        if own is not None:
            return f", after its step {own}"
        return f", after step {done}" if done else ""


def first_failed(outputs: Sequence[RankOutput]) -> RankOutput | None:
    """The rank whose failure is not the consequence of another one's. NaN of one rank reaches the
    others in its next step."""

    def order(o: RankOutput) -> tuple[object, ...]:
        nan = isinstance(o.error, NonFinite)
        return o.is_secondary, not nan, o.series.finished if nan else 0, o.failed_at

    return min((o for o in outputs if o.failed_at is not None), key=order, default=None)


def step_counts(outputs: Sequence[RankOutput]) -> tuple[int, ...]:
    """The steps of each rank by its lines; zeros unless every rank prints them."""
    counts = tuple(o.series.finished for o in outputs)
    return counts if all(counts) else (0,) * len(counts)


def records(outputs: Sequence[RankOutput], since: float) -> tuple[Rank, ...]:
    """The ranks, with their steps that ended after `since`, a time.monotonic; none of a single
    process."""
    if len(outputs) < 2:
        return ()
    found = []
    for o, steps in zip(outputs, step_counts(outputs), strict=True):
        steps_of = zip(o.series.began_at, o.series.time_s, strict=True)
        times = [time_s for began_at, time_s in steps_of if began_at + time_s > since]
        step_s = statistics.fmean(times) if steps and times else None
        ended = how_ended(o.code) if o.code else ""
        found.append(Rank(rank=o.rank, steps=steps or None, step_s=step_s, ended=ended))
    return tuple(found)
