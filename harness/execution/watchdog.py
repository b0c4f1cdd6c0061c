"""Parent side: watches one worker from launch to last trace, and says how it ended.

The probes are read while it works. Slow is not hung: a worker that reports finished runs is slow,
however slow, and has its full `timeout_s`; one that is silent for `stall_s` is hung, and is asked
for its stacks before it is killed. Where a single run outlasts `timeout_s` the timeout comes first.
"""

import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.execution.launcher import Worker
from harness.execution.messages import Answer, Built, Garbled, Message, PhaseBegan, Progress, Reader
from harness.probes import Probe
from harness.records import Case, Measurement, Outcome, Phase, Telemetry

PROBE_INTERVAL_S = 0.05
EXIT_S = 20.0
"""Longest time between a worker's answer and its exit, on which drivers free what it held."""
STACKS_S = 2.0
"""Longest time to wait for the stacks of a worker that hangs."""
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
        probes: Read every PROBE_INTERVAL_S.
        phase: Called with the name of each phase that begins.
        progressed: Called with the number of finished runs.

    Returns:
        The worker's own answer, or what can be said without one; completed with telemetry and
        phases. `log` is left for the caller, who knows the run folder.
    """
    started_at = datetime.now(UTC).isoformat(timespec="milliseconds")
    story = _Story(worker.launched_at, phase, progressed)
    unanswered = Measurement(case_id=case.case_id, process=process, outcome=Outcome.CRASH)
    try:
        recorder = _Recorder(probes, worker)
        measurement = _see_through(worker, case, unanswered, story, recorder, log)
    finally:
        immortal = worker.end()
    ended_at = time.monotonic()
    if immortal:
        note = f"{immortal} processes would not die of SIGKILL"
        measurement = replace(measurement, detail=f"{measurement.detail}; {note}".lstrip("; "))
    return replace(
        measurement,
        effective={**measurement.effective, "start": "cold" if worker.cold else "warm"},
        telemetry=recorder.telemetry(),
        phases=story.phases(ended_at),
        started_at=started_at,
        wall_s=ended_at - worker.launched_at,
    )


def _see_through(
    worker: Worker,
    case: Case,
    unanswered: Measurement,
    story: "_Story",
    recorder: "_Recorder",
    log: Path,
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
            return replace(unanswered, detail=f"garbled answer {story.where()}: {error}")

        if exited:
            return story.answer or replace(
                unanswered, detail=_ending(worker.exit_code or 0, story.where())
            )
        now = time.monotonic()
        if story.answer:
            if now - story.heard_at <= EXIT_S:
                continue
            note = f"killed: it did not exit within {EXIT_S:g} s of its answer"
            detail = "; ".join(filter(None, (story.answer.detail, note)))
            return replace(story.answer, detail=detail)
        if now - worker.launched_at > settings.timeout_s:
            return replace(
                story.counted(unanswered),
                outcome=Outcome.TIMEOUT,
                detail=f"not done in {settings.timeout_s:g} s, {story.where()}",
                lower_bound_s=story.lower_bound_s(now),
            )
        if now - story.heard_at > settings.stall_s:
            return replace(
                story.counted(unanswered),
                outcome=Outcome.HANG,
                detail=f"no sign of life for {settings.stall_s:g} s, {story.where()}; "
                f"{_innermost_frame(worker, log)}",
                lower_bound_s=story.lower_bound_s(now),
            )


class _Story:
    """What the worker has said so far."""

    def __init__(
        self, launched_at: float, phase: Callable[[str], None], progressed: Callable[[int], None]
    ) -> None:
        self.heard_at = launched_at
        """time.monotonic of the last sign of life."""
        self.answer: Measurement | None = None
        self._launched_at = launched_at
        self._phases: list[tuple[str, float]] = [("start", launched_at)]
        self._built = Built(tokens=None, flops=None, bytes=None)
        self._progress = Progress(runs=0, spent_s=0.0, shortest_s=0.0)
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
                self._progress = message
                self._on_progress(message.runs)
            case Answer(measurement=measurement) if self.answer is None:
                self.answer = measurement
            case _:
                raise Garbled(f"an unexpected {message.kind} message")

    def counted(self, unanswered: Measurement) -> Measurement:
        """With what one run does, so that a bound on its time bounds its rate."""
        built = self._built
        return replace(unanswered, tokens=built.tokens, flops=built.flops, bytes=built.bytes)

    def where(self) -> str:
        """How far it had come, in words."""
        name = self._phases[-1][0]
        if name not in TIMED_PHASES:
            return f"in {name}"
        runs = self._progress.runs
        if runs == 0:
            return f"in {name}, before the first run was done"
        each_s = self._progress.spent_s / runs
        at_least = "at least " if each_s < UNREPORTED_S else ""
        return f"in {name}, {at_least}{runs} run{'s'[: runs > 1]} done, {each_s:.3g} s each"

    def lower_bound_s(self, now: float) -> float | None:
        """One run takes at least this; None before the first run began.

        The shortest finished run, for the longest may have been a cold one, or the one that is
        unfinished. That one began with the last message, or up to UNREPORTED_S later.
        """
        if self._phases[-1][0] not in TIMED_PHASES:
            return None
        unfinished_s = now - self.heard_at - UNREPORTED_S
        bound = max(self._progress.shortest_s, unfinished_s)
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


class _Recorder:
    """Reads the probes on a beat."""

    def __init__(self, probes: Sequence[Probe], worker: Worker) -> None:
        self._probes = probes
        self._launched_at = worker.launched_at
        self._readings: list[tuple[float, Mapping[str, float | None]]] = []
        self.next_at = time.monotonic()
        for probe in probes:
            probe.attach(worker.pid)

    def read_if_due(self) -> None:
        now = time.monotonic()
        if now < self.next_at:
            return
        reading = {name: value for probe in self._probes for name, value in probe.read().items()}
        self._readings.append((now - self._launched_at, reading))
        # A late beat moves the next ones; it is not made up for by a burst.
        self.next_at = max(self.next_at, now - PROBE_INTERVAL_S) + PROBE_INTERVAL_S

    def telemetry(self) -> Telemetry:
        names = {name: None for _, reading in self._readings for name in reading}
        return Telemetry(
            t_s=tuple(t_s for t_s, _ in self._readings),
            channels={
                name: tuple(reading.get(name) for _, reading in self._readings) for name in names
            },
            unavailable={
                name: why for probe in self._probes for name, why in probe.unavailable.items()
            },
        )


def _ending(code: int, where: str) -> str:
    """An exit without an answer, in words."""
    if code >= 0:
        return f"exited with status {code} and no answer, {where}"
    name = {s.value: s.name for s in signal.Signals}.get(-code, f"signal {-code}")
    hint = " (the harness did not; out of memory, perhaps)" if -code == signal.SIGKILL else ""
    return f"killed by {name}{hint}, {where}"


def _innermost_frame(worker: Worker, log: Path) -> str:
    """Have the worker write its stacks to its log, and read there where it is stuck."""
    before = log.stat().st_size
    worker.dump_stacks()
    deadline = time.monotonic() + STACKS_S
    pattern = rb'Current thread.*\n  File "(.*)", line (\d+) in (.*)\n'
    while time.monotonic() < deadline:
        time.sleep(PROBE_INTERVAL_S)
        with log.open("rb") as file:
            file.seek(before)
            if found := re.search(pattern, file.read()):
                path, line, function = (group.decode(errors="replace") for group in found.groups())
                time.sleep(PROBE_INTERVAL_S)  # for the stacks below it, which are for the log
                return f"stuck in {function} ({Path(path).name}:{line})"
    return "it would not write its stacks"
