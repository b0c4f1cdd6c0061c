"""Parent side: watches one worker from launch to exit, and decides how it ended.

A worker that reports finished steps may be slow, and has its full `timeout_s`. One that is silent
for many of its own steps (see harness.runner.pace), or for `stall_s`, hangs: its stacks are taken,
then it is killed. If a single step outlasts `timeout_s`, the outcome is a timeout.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.analysis import discards
from harness.machine.probes import Probe
from harness.messages import (
    Answer,
    Built,
    Garbled,
    Message,
    MessageReader,
    PhaseBegan,
    Preliminary,
    StepsDone,
    signal_name,
)
from harness.records import (
    Case,
    Evidence,
    EvidenceFile,
    Measurement,
    MeasureSettings,
    Outcome,
    Phase,
    Telemetry,
)
from harness.runner import evidence, stacks
from harness.runner.launcher import Worker
from harness.runner.pace import Pace
from harness.runner.telemetry import Recorder

EXIT_S = 20.0
"""Longest time between a worker's answer and its exit; drivers free memory at exit."""
UNREPORTED_S = 0.1
"""A step may have ended this long ago without a report; see PROGRESS_INTERVAL_S of the worker."""
TIMED_PHASES = ("warmup", "sampling")
"""Phases in which the worker only runs the computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a process ended, as the parent saw it."""

    outcome: Outcome | None = None
    """None: the worker's answer has it."""
    detail: str = ""
    lower_bound_s: float | None = None
    evidence: Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What only the parent knows about one process."""

    ending: Ending
    started_at: str
    wall_s: float
    cold: bool
    phases: tuple[Phase, ...]
    telemetry: Telemetry | None
    log: str
    """Relative to the run's folder."""
    unkillable: int
    """Processes that survived SIGKILL."""


def watch(
    worker: Worker,
    case: Case,
    process: int,
    *,
    log: Path,
    run_folder: Path,
    probes: Sequence[Probe],
    phase: Callable[[str], None] = lambda _: None,
    progressed: Callable[[int], None] = lambda _: None,
) -> Measurement:
    """Watch a worker to its end. On return, it and its descendants are gone.

    Args:
        worker: Just launched.
        case: What it measures; its settings have the limits.
        process: Index of the case's process.
        log: The worker's log; the stacks of a hang are read from it.
        run_folder: The evidence of a failure is written here.
        probes: Read at a fixed interval, unless the case switches telemetry off.
        phase: Called with the name of each phase that begins.
        progressed: Called with the number of finished steps.

    Returns:
        The worker's answer, or a measurement of its failure, with telemetry, phases and evidence.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    story = Story(worker.launched_at, case.settings, phase, progressed)
    folder = evidence.Folder(run_folder, log, worker.roots)
    try:
        recorder = Recorder(probes if case.settings.telemetry else (), worker)
        ending = _see_through(worker, case, story, recorder, log, folder)
    finally:
        unkillable = worker.end()
    ended_at = time.monotonic()
    observed = Observed(
        ending=ending,
        started_at=started_at,
        wall_s=ended_at - worker.launched_at,
        cold=worker.cold,
        phases=story.phases(ended_at),
        telemetry=recorder.telemetry() if case.settings.telemetry else None,
        log=str(log.relative_to(run_folder)),
        unkillable=unkillable,
    )
    return evidence.complete(completed(story, observed, case, process), case, folder, log)


def completed(story: "Story", observed: Observed, case: Case, process: int) -> Measurement:
    """The worker's answer joined to the parent's observations."""
    ending = observed.ending
    detail, found = ending.detail, ending.evidence
    if ending.outcome is None and story.answer is not None:
        answer = story.answer
        detail = "; ".join(filter(None, (answer.detail, detail)))
    elif ending.outcome is not None and story.preliminary is not None:
        answer = story.preliminary
        detail = f"{answer.detail}; the search for its origin: {ending.outcome}, {detail}"
    else:
        timed = ending.outcome in (Outcome.TIMEOUT, Outcome.HANG)
        built = story.built if timed else Built(tokens=None, flops=None, bytes=None)
        answer = Measurement(
            case_id=case.case_id,
            process=process,
            outcome=ending.outcome or Outcome.CRASH,
            tokens=built.tokens,  # a bound on a step's time then bounds its rate
            flops=built.flops,
            bytes=built.bytes,
            lower_bound_s=ending.lower_bound_s,
        )
    if answer.evidence is not None:
        found = replace(
            answer.evidence,
            phase=answer.evidence.phase or found.phase,
            steps=found.steps if answer.evidence.steps is None else answer.evidence.steps,
            pace_s=found.pace_s,
            needed_s=found.needed_s,
            files=(*answer.evidence.files, *found.files),
        )
    if observed.unkillable:
        note = f"{observed.unkillable} processes survived SIGKILL"
        detail = "; ".join(filter(None, (detail, note)))
    return replace(
        answer,
        detail=detail,
        effective={**answer.effective, "start": "cold" if observed.cold else "warm"},
        telemetry=observed.telemetry,
        discarded=discards.unfit(answer, observed.telemetry, observed.phases),
        phases=observed.phases,
        started_at=observed.started_at,
        wall_s=observed.wall_s,
        log=observed.log,
        evidence=None if answer.outcome is Outcome.OK else found,
    )


def _see_through(
    worker: Worker,
    case: Case,
    story: "Story",
    recorder: Recorder,
    log: Path,
    folder: evidence.Folder,
) -> Ending:
    reader = MessageReader(worker.answers)
    while True:
        worker.wait(seconds=recorder.next_at - time.monotonic())
        recorder.read_if_due()
        exit_code = worker.exit_code  # read first: then all its messages have arrived
        try:
            reader.drain(lambda message: story.hear(message, time.monotonic()))
        except Garbled as error:
            return Ending(
                outcome=Outcome.CRASH,
                detail=f"garbled answer {story.where()}: {error}",
                evidence=story.evidence(),
            )
        ending = story.ending(time.monotonic(), exit_code)
        if ending is None:
            continue
        if ending.outcome is Outcome.HANG:
            pids = stacks.family(worker.pid) if case.program else [worker.pid]
            seen = _stacks(worker, pids, log, folder, ending.evidence, recorder.telemetry())
            stuck = f"stuck in {seen.frame}" if seen.frame else "its stacks could not be taken"
            return replace(ending, detail=f"{ending.detail}; {stuck}", evidence=seen)
        return ending


def _stacks(
    worker: Worker,
    pids: Sequence[int],
    log: Path,
    folder: evidence.Folder,
    seen: Evidence,
    telemetry: Telemetry,
) -> Evidence:
    """The evidence with the Python stacks of a hanging worker and the native stacks of `pids`."""
    native, native_file = stacks.native_stacks_of(pids)
    python = stacks.python_stacks(worker, log)
    if python:
        kept = EvidenceFile(name="python stacks", note="faulthandler")
        python_file = folder.write("python-stacks.txt", python, kept)
    else:
        python_file = EvidenceFile(name="python stacks", note="not written by the process")
    if native:
        native_file = folder.write("native-stacks.txt", native, native_file)
    return replace(
        seen,
        frame=stacks.innermost_frame(python),
        last_kernel=evidence.last_kernel(telemetry),
        files=(*seen.files, python_file, native_file),
    )


class Story:
    """What one worker has reported so far, and what its silence means."""

    def __init__(
        self,
        launched_at: float,
        settings: MeasureSettings,
        phase: Callable[[str], None] = lambda _: None,
        progressed: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.heard_at = launched_at
        """time.monotonic of the last message."""
        self.answer: Measurement | None = None
        self.preliminary: Measurement | None = None
        """The answer, sent before a search for the cause that may itself fail."""
        self.built = Built(tokens=None, flops=None, bytes=None)
        self._settings = settings
        self._launched_at = launched_at
        self._phases: list[tuple[str, float]] = [("start", launched_at)]
        self._pace = Pace(settings)
        self._on_phase = phase
        self._on_progress = progressed

    def hear(self, message: Message, heard_at: float) -> None:
        """Process one message; raise Garbled if it is not expected now."""
        self.heard_at = heard_at
        match message:
            case PhaseBegan(name=name, at=at):
                if name == self._phases[-1][0]:
                    self._phases[-1] = (name, at)
                else:
                    self._phases.append((name, at))
                    self._on_phase(name)
            case Built():
                self.built = message
            case StepsDone():
                self._pace.ran(message.steps, message.spent_s, message.shortest_s)
                self._on_progress(message.steps)
            case Preliminary(measurement=measurement):
                self.preliminary = measurement
            case Answer(measurement=measurement) if self.answer is None:
                self.answer = measurement
            case _:
                raise Garbled(f"an unexpected {message.kind} message")

    def ending(self, now: float, exit_code: int | None) -> Ending | None:
        """How the process ended; None if it may go on.

        Args:
            now: On the clock of time.monotonic.
            exit_code: None while the process lives.
        """
        limit_s, timeout_s = self.stall_limit_s, self._settings.timeout_s
        if exit_code is not None:
            if self.answer:
                return Ending(evidence=self.evidence())
            seen = replace(self.evidence(), signal=signal_name(exit_code))
            detail = _exit_without_answer(exit_code, self.where())
            return Ending(outcome=Outcome.CRASH, detail=detail, evidence=seen)
        if self.answer:
            if now - self.heard_at <= EXIT_S:
                return None
            note = f"killed: it did not exit within {EXIT_S:g} s of its answer"
            return Ending(detail=note, evidence=self.evidence())
        if now - self._launched_at > timeout_s:
            outcome = Outcome.TIMEOUT
            detail = f"not done in {timeout_s:g} s, {self.where()}{self.projection()}"
        elif now - self.heard_at > limit_s:
            outcome = Outcome.HANG
            detail = f"no message for {limit_s:.3g} s, {self.where()}"
        else:
            return None
        return Ending(
            outcome=outcome,
            detail=detail,
            lower_bound_s=self.lower_bound_s(now),
            evidence=self.evidence(now),
        )

    def evidence(self, now: float | None = None) -> Evidence:
        """Its progress and pace; with `now`, its silence too."""
        known = self._timed or self._pace.steps > 0
        return Evidence(
            phase=self._phases[-1][0],
            steps=self._pace.steps if known else None,
            pace_s=self._pace.mean_s,
            needed_s=self._pace.needed_s,
            silent_s=None if now is None else now - self.heard_at,
            stall_limit_s=None if now is None else self.stall_limit_s,
        )

    @property
    def _timed(self) -> bool:
        return self._phases[-1][0] in TIMED_PHASES

    @property
    def stall_limit_s(self) -> float:
        """The longest silence allowed now."""
        return self._pace.stall_limit_s(timed=self._timed)

    def projection(self) -> str:
        """The time that a slow worker would have needed; empty if unknown."""
        needed_s = self._pace.needed_s
        if needed_s is None or not self._timed:
            return ""
        return f"; slow, not hung: the fewest samples would take {needed_s:.3g} s"

    def where(self) -> str:
        """Its progress, in words."""
        name = self._phases[-1][0]
        if not self._timed:
            return f"in {name}"
        each_s = self._pace.mean_s
        if each_s is None:
            return f"in {name}, before the end of the first step"
        return f"in {name}, at least {self._pace.steps} steps finished, {each_s:.3g} s each"

    def lower_bound_s(self, now: float) -> float | None:
        """The least time of one step; None before the first step began.

        It is the shortest finished step (the longest may have been a cold one), or the unfinished
        one, which began at most UNREPORTED_S after the last message.
        """
        if not self._timed:
            return None
        unfinished_s = now - self.heard_at - UNREPORTED_S
        bound = max(self._pace.shortest_s, unfinished_s)
        return bound if bound > 0 else None

    def phases(self, ended_at: float) -> tuple[Phase, ...]:
        """The phases end to end, in seconds since the launch."""
        if self.answer is not None:
            ended_at = self.heard_at
        begins = [at - self._launched_at for _, at in self._phases]
        ends = [*begins[1:], ended_at - self._launched_at]
        return tuple(
            Phase(name=name, start_s=begin, end_s=end)
            for (name, _), begin, end in zip(self._phases, begins, ends, strict=True)
        )


def _exit_without_answer(code: int, where: str) -> str:
    if code >= 0:
        return f"exited with status {code} and no answer, {where}"
    hint = " (not by the harness; perhaps out of memory)" if -code == signal.SIGKILL else ""
    return f"killed by {signal_name(code)}{hint}, {where}"
