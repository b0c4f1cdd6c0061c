"""In the worker's place: runs a program as it is, watches its output, and answers for it.

The worker stays the program's parent and leaves the GPU alone. It reads what the program writes,
tells the watchdog of finished steps as a workload does, and makes the measurement when the program
has ended, or, where the suite says so, when there are enough samples. Whatever the program leaves
behind is ended with the worker.
"""

import re
import resource
import signal
import statistics
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from harness.git import origin
from harness.messages import Built, Channel, MeasureOrder, signal_name
from harness.program import process, profile_run
from harness.program.output import Log
from harness.program.process import Read, Tail
from harness.program.reported import Metrics, MissingMetric, NotFinite, Step, StepReader
from harness.program.steps import Series
from harness.records import Accuracy, Clock, Evidence, Measurement, Outcome, Program

ALIVE_S = 0.1
"""Lines are a sign of life at most so often."""
CUT_S = 1.0
"""So long before the worker's timeout a program that may be ended is ended."""
LAST_BYTES = 200

_OUT_OF_MEMORY = re.compile(
    r"\bOutOfMemoryError\b|CUDA out of memory|CUDA error: out of memory|\bMemoryError\b"
    r"|std::bad_alloc|can't allocate memory|Cannot allocate memory"
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")


class Reporter(Protocol):
    """Tells the parent how it goes; the worker's own."""

    def phase(self, name: str, at: float | None = None) -> None: ...

    def ran(self, seconds: float) -> None: ...

    def alive(self) -> None: ...


def measure(
    order: MeasureOrder, program: Program, channel: Channel, reporter: Reporter
) -> Measurement:
    """Run the program of a case and say how it went."""
    case = order.case
    channel.send(Built(tokens=program.tokens, flops=program.flops, bytes=None))
    reporter.phase("setup")
    session = _Session(program, order, reporter)
    try:
        session.run()
    except NotFinite as error:
        return session.failed(Outcome.NON_FINITE, f"{error}{session.at_step()}")
    except MissingMetric as error:
        return session.failed(Outcome.CRASH, f"{error}{session.at_step()}")
    finally:
        process.kill(session.process)
    measured = session.answer()
    if measured.outcome is not Outcome.OK:
        return measured
    if case.settings.census:
        reporter.phase("census")
    return profile_run.attested(
        measured,
        case,
        timed=session.timed(),
        ends_at=order.launched_at + case.settings.timeout_s - CUT_S,
        roots=order.roots,
        elsewhere=order.elsewhere,
        alive=session.alive,
    )


@dataclass(slots=True)
class _Session:
    """One life of a program."""

    program: Program
    order: MeasureOrder
    reporter: Reporter
    process: "subprocess.Popen[bytes] | None" = None
    stdout: Tail = field(default_factory=Tail)
    stderr: Tail = field(default_factory=Tail)
    ended: str = ""
    """Why the program was ended from here; empty where it ended by itself."""
    began_at: float = 0.0
    ended_at: float = 0.0
    lines: int = 0
    alive_at: float = 0.0
    warm: bool = False
    sampling_at: float | None = None
    folder: Path = field(init=False)
    metrics: Metrics = field(init=False)
    series: Series = field(init=False)

    def __post_init__(self) -> None:
        self.folder = process.folder(self.program, self.order.roots)
        self.metrics = Metrics(self.program, self.folder)
        setup_steps = self.program.steps.setup_steps if self.program.steps else 0
        self.series = Series(self.order.case.settings, setup_steps=setup_steps)

    def run(self) -> None:
        """See the program through.

        Raises:
            MissingMetric: It did not tell what it should.
            NotFinite: It told NaN or infinity.
        """
        env = process.environment(self.order.case, self.order.roots)
        self.process = process.start(self.program, self.folder, env)
        self.began_at = time.monotonic()
        process.abort_when_asked(self.process)
        finder = StepReader(self.program.steps) if self.program.steps else None
        if finder is None:
            self.reporter.phase("sampling", self.began_at)
        log = Log(1)
        reader = process.OutputReader(self.process)
        for read in reader.reads():
            log.write(read.data)
            (self.stderr if read.from_stderr else self.stdout).add(read)
            self._take(read, finder)
            if self._may_end(read.at):
                break
        self.ended_at = reader.ended_at or time.monotonic()
        if not self.ended and self.process.returncode == 0:
            self._require_steps()
            self.metrics.read_files(self.ended_at)
            self.metrics.require_all()

    def _take(self, read: Read, finder: StepReader | None) -> None:
        steps: list[Step] = []
        alive = finder is None or not self.warm
        for line in read.lines:
            self.lines += 1
            self.metrics.hear(line, read.at)
            step = finder.read(line) if finder else None
            if step is not None:
                steps.append(step)
            elif finder and not alive:
                alive = finder.is_alive(line)
        for took_s in self.series.add(steps, read.at):
            self.reporter.ran(took_s)
        if read.lines and (alive or steps):
            self.alive()
        if self.series.warm_at is not None and not self.warm:
            self.warm = True
            self.reporter.phase("warmup", self.series.warm_at)
        if steps:
            self._announce(self.series.look().start)

    def alive(self) -> None:
        """Give a sign of life, if the last one is some time ago."""
        now = time.monotonic()
        if now - self.alive_at > ALIVE_S:
            self.alive_at = now
            self.reporter.alive()

    def timed(self) -> profile_run.Timed | str:
        """What is known of its steps; or that nothing is."""
        steps, series = self.program.steps, self.series
        told = self._told_steps()
        times = told or list(series.time_s)
        if not times or (steps is None and not told):
            return "steps cannot be counted: the suite sets neither progress nor step_s"
        return profile_run.Timed(
            setup_s=(series.warm_at or self.ended_at) - self.began_at,
            step_s=statistics.median(times),
            steps=series.finished or len(told),
            setup_steps=steps.setup_steps if steps else 0,
            by_lines=series.by_the_step if steps else None,
        )

    def _announce(self, start: int) -> None:
        """Tell from when on there are samples, when that is first known or moves."""
        if start < self.series.count and self.series.began_at[start] != self.sampling_at:
            self.sampling_at = self.series.began_at[start]
            self.reporter.phase("sampling", self.sampling_at)

    def _may_end(self, now: float) -> bool:
        """Whether there is enough, and the suite lets the program be ended."""
        if self.program.steps is None or not self.program.steps.until_sampled:
            return False
        deadline = self.order.launched_at + self.order.case.settings.timeout_s - CUT_S
        if self.series.enough:
            self.ended = "sampled"
        elif self.series.must_end(now, deadline):
            self.ended = "timeout"
        return bool(self.ended)

    def _require_steps(self) -> None:
        steps = self.program.steps
        if steps is None or self._told_steps() or self.series.count:
            return
        if not self.series.finished:
            said = f"none of {self.lines} lines of output fits {steps.step!r}"
            raise MissingMetric(f"progress: {said}{self._last_words()}")
        raise MissingMetric(
            f"progress: the program ended after {self.series.finished} steps, of which "
            f"{steps.setup_steps} are setup; a sample is the time between two later lines"
        )

    def _told_steps(self) -> list[float]:
        return [v.value for v in self.metrics.values.get("step_s", ())]

    def _last_words(self) -> str:
        last = self.stdout.last or self.stderr.last
        return f"; the last is {last[:LAST_BYTES]!r}" if last else ""

    def at_step(self) -> str:
        """After which step, for a detail."""
        done = self.series.finished
        return f", after step {done}" if done else ""

    def failed(self, outcome: Outcome, detail: str) -> Measurement:
        """A measurement without samples, with what the program last wrote to stderr."""
        code = self.process.returncode if self.process else None
        return Measurement(
            case_id=self.order.case.case_id,
            process=self.order.process,
            outcome=outcome,
            detail=detail,
            tokens=self.program.tokens,
            flops=self.program.flops,
            effective=self._effective(),
            evidence=Evidence(
                runs=self.series.finished if self.program.steps else None,
                signal=signal_name(code or 0),
                stderr_tail=self.stderr.text.decode(errors="replace"),
                peak_host_bytes=resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
                if outcome is Outcome.OUT_OF_MEMORY
                else None,
            ),
        )

    def answer(self) -> Measurement:
        """What the program's end means."""
        code = self.process.returncode if self.process else None
        if not self.ended and code != 0:
            return self._ended_badly(code or 0)
        return self._measured()

    def _ended_badly(self, code: int) -> Measurement:
        said = self.stderr.text.decode(errors="replace")
        last = self.stderr.last.strip() or self.stdout.last.strip()
        how = f"killed by {signal_name(code)}" if code < 0 else f"exited with {code}"
        if 128 < code < 128 + signal.NSIG:
            how += f" (of {signal_name(128 - code)}, as a shell says it)"
        detail = f"{how}{self.at_step()}{f': {last[:LAST_BYTES]}' if last else ''}"
        outcome = Outcome.CRASH
        places = [str(self.folder.resolve()), *self.order.roots]
        if instead := origin.why_shadowed(said, places):
            return self.failed(Outcome.PATH_MISMATCH, f"{instead}; {origin.SHADOW_REMEDY}")
        if _OUT_OF_MEMORY.search(said):
            outcome = Outcome.OUT_OF_MEMORY
        elif _DISK_FULL.search(said):
            outcome = Outcome.INVALID_ENVIRONMENT
        return self.failed(outcome, detail)

    def _measured(self) -> Measurement:
        effective = self._effective()
        steps, told = self.program.steps, self.metrics.values.get("step_s")
        if told:
            series = Series(self.order.case.settings, setup_steps=steps.setup_steps if steps else 0)
            for value in told:
                series.add([Step(None, value.value)], value.at)
            if any(value.value <= 0 for value in told):
                return self.failed(Outcome.CRASH, "step_s: a step took 0 or less; print digits")
            effective["timed_by"] = "step_s, as the program told it"
        elif steps:
            series = self.series
            effective["timed_by"] = "progress lines"
        else:
            series = Series(self.order.case.settings, setup_steps=0)
            series.add([Step(None, self.ended_at - self.began_at)], self.ended_at)
            effective["timed_by"] = "the whole program"
        division = series.look(last=True)
        start = division.start
        if not series.time_s[start:]:
            return self.failed(
                Outcome.CRASH, f"step_s was reported {len(told or ())} times, all of them setup"
            )
        if series.together:
            effective["read_together"] = series.together
        if self.ended == "timeout":
            effective["samples_cut"] = "timeout"
        elif steps and series.count - start < self.order.case.settings.min_samples:
            effective["samples_cut"] = "the program ended"
        samples = tuple(series.time_s[start:])
        if series.time_s and (steps or told):
            self.reporter.phase("sampling", series.began_at[start])
        readings = self._readings(series.began_at[start])
        memory = readings.pop("peak_memory_bytes", ())
        return Measurement(
            case_id=self.order.case.case_id,
            process=self.order.process,
            outcome=Outcome.OK,
            clock=Clock.HOST,
            warmup_s=tuple(series.time_s[:start]),
            samples_s=samples,
            host_samples_s=samples,
            samples_at_s=tuple(t - self.order.launched_at for t in series.began_at[start:]),
            steady=division.steady if steps or told else None,
            tokens=self.program.tokens,
            flops=self.program.flops,
            peak_memory_bytes=int(max(memory)) if memory else None,
            accuracy=Accuracy(skipped="a program is not compared with a reference"),
            effective=effective,
            code={"program": str(self.folder.resolve())},
            readings=readings,
        )

    def _readings(self, since: float) -> dict[str, tuple[float, ...]]:
        """What was told by metric, step times apart: of warm-up only where nothing came later."""
        found = {}
        for name, values in self.metrics.values.items():
            later = [v.value for v in values if v.at >= since]
            if name != "step_s":
                found[name] = tuple(later or [v.value for v in values])
        return found

    def _effective(self) -> dict[str, bool | int | float | str]:
        found = process.find(self.order.case, self.program, self.folder)
        return {"program": found or self.program.argv[0]}
