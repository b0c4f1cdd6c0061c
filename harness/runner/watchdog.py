"""Parent side: watches one worker from launch to exit, and decides how it ended.

A worker that is slow or busy has its full `timeout_s`. One that is silent for longer than its own
budget is sampled, and hangs if it stands still (see harness.runner.silence): its stacks are taken,
then it is killed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.analysis.recorded import TIMED
from harness.machine.probes import Probe
from harness.messages import (
    Answer,
    Built,
    Garbled,
    Message,
    MessageReader,
    PhaseBegan,
    StepsDone,
    signal_name,
)
from harness.records import ActivitySample, Case, Evidence, Measurement, Outcome, Phase
from harness.runner import evidence
from harness.runner.forkserver import Worker
from harness.runner.joined import Answered, Ending, joined
from harness.runner.silence import Activity, Pace, Silence, reason
from harness.runner.telemetry import Recorder, of_case
from harness.units import rounded_up

EXIT_S = 20.0
"""Longest time between a worker's answer and its exit; drivers free memory at exit."""
UNREPORTED_S = 0.1
"""A step may have ended this long ago without a report; see PROGRESS_INTERVAL_S of the worker."""
PHASES = ("setup", "accuracy", *TIMED, "repeat", "profile", "diagnosis")
"""All that a worker reports when it measures a case."""


class RunObserver:
    """Follows a run, as the progress bar of the command line does. This one ignores it."""

    def planned(self, total: int) -> None:
        """The number of processes, at the start and after each; fewer once a case is dropped."""

    def started(self, case: Case, process: int) -> None:
        """A process is about to start."""

    def phase(self, case: Case, process: int, name: str) -> None:
        """A phase of a process begins."""

    def progressed(self, case: Case, process: int, steps: int) -> None:
        """The number of finished steps, including warm-up."""

    def busy(self, case: Case, process: int, what: str) -> None:
        """A process has finished no step for long; what it does."""

    def finished(self, measurement: Measurement) -> None:
        """One process has ended, and its measurement is stored."""


def watch(
    worker: Worker,
    case: Case,
    process: int,
    *,
    log: Path,
    probes: Sequence[Probe],
    observer: RunObserver,
    **known: str,
) -> Measurement:
    """Watch a worker to its end; then all it started is gone. `known`: fields of its record."""
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    recorder = Recorder(of_case(probes, case), worker)
    story = Story(worker.launched_at, case, process, recorder.sample, observer)
    try:
        ending = _see_through(worker, story, recorder, log)
        if worker.exit_code is None:
            ending = _with_evidence(ending, worker, case, story, log)
    finally:
        survivors = worker.end()
        evidence.cut_log(log)
    ended_at = time.monotonic()
    return joined(
        story.answered,
        ending,
        log,
        phases=story.phases(ended_at),
        telemetry=recorder.telemetry(),
        survivors=survivors,
        cold=worker.cold,
        started_at=started_at,
        wall_s=ended_at - worker.launched_at,
        **known,
    )


def _see_through(worker: Worker, story: "Story", recorder: Recorder, log: Path) -> Ending:
    """Read messages and probes until the worker ends or has to be ended."""
    reader = MessageReader(worker.answers)
    while True:
        worker.wait(seconds=recorder.next_at - time.monotonic())
        recorder.read_if_due()
        evidence.cut_log(log)
        exit_code = worker.exit_code  # read first: then all its messages have arrived
        try:
            reader.drain(lambda message: story.hear(message, time.monotonic()))
        except Garbled as error:
            detail = f"garbled answer {story.where()}: {error}"
            return Ending(outcome=Outcome.CRASH, detail=detail, evidence=story.evidence())
        worker.closed_pipe = reader.at_end
        story.gpu_used_at = recorder.gpu_used_at
        if ending := story.ending(time.monotonic(), exit_code):
            return ending


def _with_evidence(ending: Ending, worker: Worker, case: Case, story: "Story", log: Path) -> Ending:
    """The ending of a worker that still lives, with where it is."""
    seen, samples = story.silence.seen, story.silence.samples
    said = [ending.detail]
    stuck = evidence.stuck(worker, case, log, story.answered.rank_steps if seen else None)
    if stuck.behind:
        said.append(f"rank {stuck.rank} is behind: {stuck.behind}")
    elif ending.outcome is Outcome.HANG and seen:
        said.append(reason(seen, samples))
    said.append(f"last in {stuck.frame}" if stuck.frame else "its stacks could not be taken")
    return replace(
        ending,
        detail="; ".join(filter(None, (*said, ending.advice))),
        evidence=replace(ending.evidence, activity=samples, rank=stuck.rank, frame=stuck.frame),
    )


class Story:
    """What one worker has reported so far, and what its silence means."""

    def __init__(
        self,
        launched_at: float,
        case: Case,
        process: int,
        take: Callable[[], ActivitySample],
        observer: RunObserver,
    ) -> None:
        self.heard_at = launched_at
        """time.monotonic of the last message."""
        self.answered = Answered(case_id=case.case_id, process=process)
        self._case, self._process = case, process
        self._settings = case.settings
        self._launched_at = launched_at
        self._phases: list[tuple[str, float]] = [("start", launched_at)]
        self._stepped_at = launched_at
        self._reports = False
        self._since: float | None = None
        self.gpu_used_at: float | None = None
        """When the use of a GPU was first seen."""
        self._last_step: int | None = None
        self._pace = Pace(case.settings)
        self._observer = observer
        self._told_at = 0.0
        self.silence = Silence(take)

    def hear(self, message: Message, heard_at: float) -> None:
        """Process one message; raise Garbled if it is not expected now."""
        self.heard_at = heard_at
        match message:
            case PhaseBegan(name=name, at=at) if name in PHASES:
                again = name == self._phases[-1][0]
                if again:
                    self._phases.pop()
                self._phases.append((name, max(self._phases[-1][1], min(at, heard_at))))
                if not again:
                    self._observer.phase(self._case, self._process, name)
            case Built():
                self.answered.built = message
            case StepsDone():
                if message.steps > self._pace.steps or message.last_step != self._last_step:
                    self._stepped_at = heard_at
                self._last_step = message.last_step
                self.answered.rank_steps = message.rank_steps
                self._reports, self._since = True, message.since
                self.answered.over_steps += [message.over_steps] if message.over_steps else []
                self._pace.ran(message.steps, message.spent_s, message.shortest_s)
                self._observer.progressed(self._case, self._process, message.steps)
            case Answer(measurement=measurement, final=False):
                self.answered.preliminary = self._own(measurement)
            case Answer(measurement=measurement) if self.answered.final is None:
                self.answered.final = self._own(measurement)
                self.answered.between_s = message.between_s
            case _:
                raise Garbled(f"an unexpected {message.kind} message")

    def _own(self, measurement: Measurement) -> Measurement:
        """The measurement; Garbled if it is not of the case and process that were asked."""
        named = measurement.case_id, measurement.process
        if named != (self._case.case_id, self._process):
            raise Garbled(f"an answer for another process: {named[0][:80]!r}, process {named[1]}")
        return measurement

    def ending(self, now: float, exit_code: int | None) -> Ending | None:
        """How the process ended by `now`, a time.monotonic; None if it may go on. Without an exit
        code it lives."""
        if exit_code is not None:
            if self.answered.final:
                return Ending(evidence=self.evidence())
            name = signal_name(exit_code)
            hint = " (not by the harness; perhaps out of memory)" if name == "SIGKILL" else ""
            exited = f"exited with status {exit_code} and no answer"
            how = f"killed by {name}{hint}" if name else exited
            seen, detail = replace(self.evidence(), signal=name), f"{how}, {self.where()}"
            return Ending(outcome=Outcome.CRASH, detail=detail, evidence=seen)
        if self.answered.final:
            if now - self.heard_at <= EXIT_S:
                return None
            note = f"killed: it did not exit within {EXIT_S:g} s of its answer"
            return Ending(detail=note, evidence=self.evidence())
        silent_s, silence = now - self.heard_at, self.silence
        ends_at = self._launched_at + self._settings.timeout_s
        silence.look(now, self.heard_at, ends_at, self._pace.limits)
        over, busy = silent_s > silence.limit_s, silence.seen is Activity.BUSY
        advice, working = "", None
        if now > ends_at:
            outcome = Outcome.TIMEOUT
            detail, advice = self._timed_out(now)
            reports = self._reports and not silence.seen  # it was never silent for long
            working = busy or reports or self._is_slow(now)
        elif over and silence.seen and not busy:
            outcome, limit_s = Outcome.HANG, silence.limit_s
            detail = f"no progress for {silent_s:.3g} s (limit {limit_s:.3g} s), {self.where()}"
            if silence.seen is Activity.IDLE:
                enough_s = rounded_up(2 * silent_s, 2)
                advice = f"if it may be idle for so long, set stall_s to {enough_s:g}"
        else:
            if over and busy and self._told_at != self.heard_at:
                self._told_at = self.heard_at
                self._observer.busy(self._case, self._process, self._unfinished(now))
            return None
        return Ending(
            outcome=outcome,
            detail=detail,
            advice=advice,
            lower_bound_s=self.lower_bound_s(now),
            evidence=replace(self.evidence(now), working=working),
        )

    def _is_slow(self, now: float) -> bool:
        """Whether it finishes steps."""
        mean_s = self._pace.mean_s
        soon_s = max(5 * UNREPORTED_S, 2 * self._pace.slowest_s, mean_s or 0.0)
        return mean_s is not None and (not self._timed or now - self._stepped_at < soon_s)

    def _timed_out(self, now: float) -> tuple[str, str]:
        """Why the time did not suffice, and what to set."""
        timeout_s = self._settings.timeout_s
        timed_at = next((at for name, at in self._phases if name in TIMED), now)
        step_s = max(self._pace.mean_s or 0.0, now - max(timed_at, self._stepped_at))
        fewest_s = (1 + self._settings.min_samples) * step_s
        needed_s = 1.25 * (timed_at - self._launched_at + fewest_s)
        enough_s = rounded_up(max(needed_s, 1.5 * timeout_s), 2)
        advice = f"set timeout_s to {enough_s:g} or more"
        program = self._case.program
        if self._pace.steps and program and program.steps and program.steps.until == "exit":
            advice = f"add until: sampled to progress, or {advice}"
        if self._is_slow(now):
            return f"slow: not done in {timeout_s:g} s, {advice}; {self.where()}", ""
        return self._unfinished(now), f"if it is not stuck, {advice}"

    def _unfinished(self, now: float) -> str:
        """For how long no step has finished, and what the process does, in words."""
        seen = self.silence.seen
        said = f"no step finished in {now - self._stepped_at:.3g} s, {self.where()}"
        return f"{seen}: {said}; {reason(seen, self.silence.samples)}" if seen else said

    def evidence(self, now: float | None = None) -> Evidence:
        """Its progress and pace; with `now`, its silence too."""
        known = self._timed or self._pace.steps > 0
        return Evidence(
            phase=self._phases[-1][0],
            steps=self._pace.steps if known else None,
            last_step=self._last_step,
            silent_s=None if now is None else now - self.heard_at,
        )

    @property
    def _timed(self) -> bool:
        return self._phases[-1][0] in TIMED

    def where(self) -> str:
        """Its progress, in words."""
        name, each_s = self._phases[-1][0], self._pace.mean_s
        if self._last_step is not None:
            each = f", {each_s:.3g} s each" if each_s else ""
            return f"in {name}, after its step {self._last_step}{each}"
        if each_s is None:
            return f"in {name}; no step is known yet"
        return f"in {name}, {self._pace.steps} or more steps finished, {each_s:.3g} s each"

    def lower_bound_s(self, now: float) -> float | None:
        """The least time of a typical step; None before the first step began. It is the shortest
        finished step, as others may have been cold; without any, the unfinished one, which began at
        most UNREPORTED_S after the last message. The first step of a program begins with its output
        or its use of a GPU, whichever is later."""
        if self._case.program and self._phases[-1][0] == "setup":
            began = [at for at in (self._since, self.gpu_used_at) if at is not None]
        else:
            began = [self._since or self.heard_at] if self._timed else []
        shortest_s = self._pace.shortest_s if self._timed else 0.0
        return shortest_s or max(0.0, now - max(began, default=now) - UNREPORTED_S) or None

    def phases(self, ended_at: float) -> tuple[Phase, ...]:
        """The phases end to end, in seconds since the launch."""
        if self.answered.final is not None:
            ended_at = self.heard_at
        begins = [at - self._launched_at for _, at in self._phases]
        ends = [*begins[1:], ended_at - self._launched_at]
        return tuple(
            Phase(name=name, start_s=begin, end_s=end)
            for (name, _), begin, end in zip(self._phases, begins, ends, strict=True)
        )
