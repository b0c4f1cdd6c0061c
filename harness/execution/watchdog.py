"""Parent side: watches one worker from launch to last trace, and says how it ended.

The probes are read while it works. Slow is not hung: a worker that reports finished runs is slow,
however slow, and has its full `timeout_s`; one that is silent for many of its own steps (see
harness.execution.pace), or for `stall_s`, is hung, and its stacks are taken before it is killed.
Where a single run outlasts `timeout_s` the timeout comes first.
"""

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.analysis import discards
from harness.execution import evidence, stacks
from harness.execution.launcher import Worker
from harness.execution.messages import (
    Answer,
    Built,
    Garbled,
    Message,
    PhaseBegan,
    Preliminary,
    Progress,
    Reader,
)
from harness.execution.pace import Pace
from harness.execution.recorder import Recorder
from harness.probes import Probe
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

EXIT_S = 20.0
"""Longest time between a worker's answer and its exit, on which drivers free what it held."""
UNREPORTED_S = 0.1
"""A run may have ended this long ago and not yet be known here; see worker.PROGRESS_INTERVAL_S."""
TIMED_PHASES = ("warmup", "sampling")
"""Phases in which the worker does nothing but run the computation."""


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
    """See a worker through. It and all its descendants are gone on return, however it returns.

    Args:
        worker: Just launched.
        case: What it measures; its settings hold the limits.
        process: Which of the case's processes it is.
        log: Where it logs; read for the stacks of one that hangs.
        run_folder: Where the evidence of a failure goes.
        probes: Read on the recorder's beat; where the case has telemetry off, not at all.
        phase: Called with the name of each phase that begins.
        progressed: Called with the number of finished runs.

    Returns:
        The worker's own answer, or what can be said without one; completed with telemetry,
        phases and evidence.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    story = _Story(worker.launched_at, case.settings, phase, progressed)
    unanswered = Measurement(case_id=case.case_id, process=process, outcome=Outcome.CRASH)
    folder = evidence.Folder(run_folder, log, worker.roots)
    try:
        recorder = Recorder(probes if case.settings.telemetry else (), worker)
        measurement = _see_through(worker, case, unanswered, story, recorder, log, folder)
    finally:
        immortal = worker.end()
    ended_at = time.monotonic()
    if immortal:
        note = f"{immortal} processes would not die of SIGKILL"
        measurement = replace(measurement, detail=f"{measurement.detail}; {note}".lstrip("; "))
    telemetry = recorder.telemetry() if case.settings.telemetry else None
    phases = story.phases(ended_at)
    measurement = replace(
        measurement,
        effective={**measurement.effective, "start": "cold" if worker.cold else "warm"},
        telemetry=telemetry,
        discarded=discards.unfit(measurement, telemetry, phases),
        phases=phases,
        started_at=started_at,
        wall_s=ended_at - worker.launched_at,
        log=str(log.relative_to(run_folder)),
    )
    return evidence.complete(measurement, case, folder, log)


def _see_through(
    worker: Worker,
    case: Case,
    unanswered: Measurement,
    story: "_Story",
    recorder: Recorder,
    log: Path,
    folder: evidence.Folder,
) -> Measurement:
    settings = case.settings
    reader = Reader(worker.answers)
    while True:
        worker.wait(seconds=recorder.next_at - time.monotonic())
        recorder.read_if_due()
        exited = worker.exit_code is not None  # asked first: what it said is then all there
        try:
            reader.drain(story.hear)
        except Garbled as error:
            detail = f"garbled answer {story.where()}: {error}"
            return replace(unanswered, detail=detail, evidence=story.evidence())

        if exited:
            if story.answer:
                return story.with_evidence(story.answer)
            code = worker.exit_code or 0
            seen = replace(story.evidence(), signal=evidence.signal_name(code))
            ended = replace(unanswered, detail=_ending(code, story.where()), evidence=seen)
            return story.or_preliminary(ended)
        now = time.monotonic()
        if story.answer:
            if now - story.heard_at <= EXIT_S:
                continue
            note = f"killed: it did not exit within {EXIT_S:g} s of its answer"
            detail = "; ".join(filter(None, (story.answer.detail, note)))
            return story.with_evidence(replace(story.answer, detail=detail))
        if now - worker.launched_at > settings.timeout_s:
            late = replace(
                story.counted(unanswered),
                outcome=Outcome.TIMEOUT,
                detail=f"not done in {settings.timeout_s:g} s, {story.where()}{story.projection()}",
                lower_bound_s=story.lower_bound_s(now),
                evidence=story.evidence(now),
            )
            return story.or_preliminary(late)
        limit_s = story.stall_limit_s
        if now - story.heard_at > limit_s:
            pids = stacks.family(worker.pid) if case.program else [worker.pid]
            seen = _stacks(worker, pids, log, folder, story.evidence(now), recorder.telemetry())
            stuck = f"stuck in {seen.frame}" if seen.frame else "it would not write its stacks"
            hung = replace(
                story.counted(unanswered),
                outcome=Outcome.HANG,
                detail=f"no sign of life for {limit_s:.3g} s, {story.where()}; {stuck}",
                lower_bound_s=story.lower_bound_s(now),
                evidence=seen,
            )
            return story.or_preliminary(hung)


def _stacks(
    worker: Worker,
    pids: Sequence[int],
    log: Path,
    folder: evidence.Folder,
    seen: Evidence,
    telemetry: Telemetry,
) -> Evidence:
    """With the stacks of a worker that hangs, while it can still be asked. The native ones are of
    the processes `pids`, for a program runs under its worker."""
    native, native_file = stacks.native_stacks_of(pids)
    python = stacks.python_stacks(worker, log)
    if python:
        kept = EvidenceFile(name="python stacks", note="faulthandler")
        python_file = folder.write("python-stacks.txt", python, kept)
    else:
        python_file = EvidenceFile(name="python stacks", note="it would not write them")
    if native:
        native_file = folder.write("native-stacks.txt", native, native_file)
    return replace(
        seen,
        frame=stacks.innermost_frame(python),
        last_kernel=evidence.last_kernel(telemetry),
        files=(*seen.files, python_file, native_file),
    )


class _Story:
    """What the worker has said so far."""

    def __init__(
        self,
        launched_at: float,
        settings: MeasureSettings,
        phase: Callable[[str], None],
        progressed: Callable[[int], None],
    ) -> None:
        self.heard_at = launched_at
        """time.monotonic of the last sign of life."""
        self.answer: Measurement | None = None
        self._launched_at = launched_at
        self._phases: list[tuple[str, float]] = [("start", launched_at)]
        self._built = Built(tokens=None, flops=None, bytes=None)
        self._preliminary: Measurement | None = None
        self._pace = Pace(settings)
        self._on_phase = phase
        self._on_progress = progressed

    def hear(self, message: Message) -> None:
        """Take in one message; Garbled if it makes no sense here."""
        self.heard_at = time.monotonic()
        match message:
            case PhaseBegan(name=name, at=at):
                if name == self._phases[-1][0]:
                    self._phases[-1] = (name, at)
                else:
                    self._phases.append((name, at))
                    self._on_phase(name)
            case Built():
                self._built = message
            case Progress():
                self._pace.ran(message.runs, message.spent_s, message.shortest_s)
                self._on_progress(message.runs)
            case Preliminary(measurement=measurement):
                self._preliminary = measurement
            case Answer(measurement=measurement) if self.answer is None:
                self.answer = measurement
            case _:
                raise Garbled(f"an unexpected {message.kind} message")

    def counted(self, unanswered: Measurement) -> Measurement:
        """With what one run does, so that a bound on its time bounds its rate."""
        built = self._built
        return replace(unanswered, tokens=built.tokens, flops=built.flops, bytes=built.bytes)

    def evidence(self, now: float | None = None) -> Evidence:
        """How far it had come and how fast it went; with `now`, its silence too."""
        known = self._timed or self._pace.runs > 0
        return Evidence(
            phase=self._phases[-1][0],
            runs=self._pace.runs if known else None,
            runs_exact=known and self._pace.exact,
            pace_s=self._pace.mean_s,
            needed_s=self._pace.needed_s,
            silent_s=None if now is None else now - self.heard_at,
            stall_limit_s=None if now is None else self.stall_limit_s,
        )

    def with_evidence(self, answer: Measurement) -> Measurement:
        """The worker's answer, with what was seen from here where it did not end OK."""
        if answer.outcome is Outcome.OK:
            return answer
        seen, told = self.evidence(), answer.evidence or Evidence()
        return replace(
            answer,
            evidence=replace(
                told,
                phase=told.phase or seen.phase,
                runs=seen.runs if told.runs is None else told.runs,
                runs_exact=seen.runs_exact if told.runs is None else told.runs_exact,
                pace_s=seen.pace_s,
                needed_s=seen.needed_s,
            ),
        )

    def or_preliminary(self, unanswered: Measurement) -> Measurement:
        """What the worker said before it searched for the cause, if it got so far."""
        if self._preliminary is None:
            return unanswered
        said = f"{self._preliminary.detail}; the search for its origin: {unanswered.outcome}, "
        files = unanswered.evidence.files if unanswered.evidence else ()
        told = self._preliminary.evidence or Evidence()
        return self.with_evidence(
            replace(
                self._preliminary,
                detail=said + unanswered.detail,
                evidence=replace(told, files=(*told.files, *files)),
            )
        )

    @property
    def _timed(self) -> bool:
        return self._phases[-1][0] in TIMED_PHASES

    @property
    def stall_limit_s(self) -> float:
        """The longest silence allowed now."""
        return self._pace.stall_limit_s(timed=self._timed)

    def projection(self) -> str:
        """That it was slow and not hung, and what it would have needed; empty if unknown."""
        needed_s = self._pace.needed_s
        if needed_s is None or not self._timed:
            return ""
        return f"; slow, not hung: the fewest samples would take {needed_s:.3g} s"

    def where(self) -> str:
        """How far it had come, in words."""
        name = self._phases[-1][0]
        if not self._timed:
            return f"in {name}"
        runs, each_s = self._pace.runs, self._pace.mean_s
        if each_s is None:
            return f"in {name}, before the first run was done"
        at_least = "" if self._pace.exact or each_s >= UNREPORTED_S else "at least "
        return f"in {name}, {at_least}{runs} run{'s'[: runs > 1]} done, {each_s:.3g} s each"

    def lower_bound_s(self, now: float) -> float | None:
        """One run takes at least this; None before the first run began.

        The shortest finished run, for the longest may have been a cold one, or the one that is
        unfinished. That one began with the last message, or up to UNREPORTED_S later.
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


def _ending(code: int, where: str) -> str:
    """An exit without an answer, in words."""
    if code >= 0:
        return f"exited with status {code} and no answer, {where}"
    hint = " (the harness did not; out of memory, perhaps)" if -code == signal.SIGKILL else ""
    return f"killed by {evidence.signal_name(code)}{hint}, {where}"
