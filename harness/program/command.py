"""Runs a case's program in place of a workload, reads its output, and makes its measurement.

The samples of a program with several ranks are the steps of rank 0: under DDP all ranks end a step
together, and rank 0 is the one that prints. The worker stays the parent of the program and does not
use the GPU; the program's descendants end with it.
"""

import os
import re
import resource
import statistics
import time
from collections.abc import Sequence

import torch

from harness.git import origin
from harness.measure.failures import Failed, outcome_of, said_not_finite
from harness.messages import Built, Channel, MeasureOrder, WorkerReporter, signal_name
from harness.program import process, profile_run, ranks
from harness.program.process import LAST_BYTES, Read
from harness.program.ranks import RankOutput, first_failed
from harness.program.reported import ProgramSteps, Step, Value
from harness.records import Accuracy, Clock, Evidence, Measurement, Outcome, Program, Scalar
from harness.workload import Unsupported

ALIVE_S = 0.1
"""Least time between two signs of life."""
CUT_S = 1.0
"""A program that may be ended early is ended this long before the worker's timeout."""
POLL_S = 0.5
"""Longest time between two reads of a program without ranks."""
LEAST_SHARE = 0.8
"""Of the time from line to line that a program's own times of its steps make up, or it is noted."""


def measure(order: MeasureOrder, program: Program, channel: Channel) -> Measurement:
    """Run the program of a case and measure it, unless it needs more GPUs than there are."""
    needed = program.needs_gpus(order.device)
    if needed > max(1, seen := torch.cuda.device_count()):
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        where = "this machine has" if chosen is None else f"CUDA_VISIBLE_DEVICES={chosen} selects"
        raise Unsupported(f"needs {needed} GPUs, {where} {seen}")
    channel.send(Built(tokens=program.tokens, flops=None, bytes=None))
    session = _Session(program, order, channel)
    try:
        session.run()
    except Failed as error:
        return session.unread(error)
    finally:
        session.reporter.alive()  # with the steps that no report has yet
        process.kill(session.processes)
    measured = session.measurement()
    if measured.outcome is not Outcome.OK:
        return measured
    if order.case.settings.profile:
        session.reporter.phase("profile")
    timed, ends_at = session.timed(), session.deadline
    return profile_run.attested(measured, order, timed=timed, ends_at=ends_at, alive=session.alive)


class _Session:
    """One start of a program: its process, or its ranks."""

    def __init__(self, program: Program, order: MeasureOrder, channel: Channel) -> None:
        settings = order.case.settings
        self.program, self.order = program, order
        self.processes: process.Processes = ()
        self.ended = ""
        """Why the worker ended the program, `sampled` or `timeout`; empty if it ended by itself."""
        self.began_at = self.ended_at = self.alive_at = self.counted_at = 0.0
        self.warm = False
        self.sampling_at: float | None = None
        self.deadline = order.launched_at + settings.timeout_s - CUT_S
        self.folder = process.folder(program, order.roots)
        self.outputs = [
            RankOutput(rank, program, settings, order.launched_at)
            for rank in range(program.ranks or 1)
        ]
        self.own = self.outputs[0]
        self.metrics, self.series = self.own.metrics, self.own.series
        self.first: RankOutput | None = None
        """The rank that failed first."""
        self.reporter = WorkerReporter(channel, self.series.log.take)
        self.reporter.phase("setup")

    def run(self) -> None:
        """Run the program to its end; what it reports wrongly is Failed."""
        env = process.environment(self.order.case, self.order.first)
        self.processes = process.start(self.program, self.folder, env)
        self.began_at = time.monotonic()
        process.abort_when_asked(self.processes)
        if self.program.steps is None:
            self.reporter.since = self.began_at
            self.reporter.phase("sampling", self.began_at)
        for read in process.reads(self.processes, ALIVE_S if self.program.ranks else POLL_S):
            output = self.outputs[read.rank]
            took = output.take(read)
            if output is self.own:
                self._report(read, took)
            else:
                output.series.log.take()
            if self.program.ranks:
                counts = ranks.step_counts(self.outputs)
                if counts != self.reporter.rank_steps and read.at - self.counted_at > ALIVE_S:
                    self.counted_at, self.reporter.rank_steps = read.at, counts
                    self.reporter.alive()
                self.first = first_failed(self.outputs)
            if self.first:
                is_over = self.first.is_first(read.at)
            else:
                is_over = output.error is not None or self._may_end(read.at)
            if is_over:
                break
        ends = [o.ended_at for o in self.outputs if o.ended_at is not None]
        self.ended_at = max(ends, default=time.monotonic())
        self.first = first_failed(self.outputs)
        if self.first is not None and self.first.error is not None:
            raise self.first.error
        if not self.ended and self.first is None:
            self._require_steps()
            self.metrics.require_all()

    def _report(self, read: Read, took: Sequence[float]) -> None:
        """Report what rank 0 printed: the times of its steps, or that it lives."""
        self.reporter.last_step = self.series.last_step
        stepped = self.series.last_line_at == read.at
        if stepped or (read.lines and self.reporter.since is None):
            self.reporter.since = read.at
            self.alive_at = self.alive_at if took else 0.0  # a step of setup has no other report
        for took_s in took:
            self.reporter.ran(took_s)
        # The program may hang after its last line: the next read then reports the steps left.
        if stepped or (read.lines and not self.warm) or self.reporter.is_behind:
            self.alive()
        if self.series.warm_at is not None and not self.warm:
            self.warm = True
            self.reporter.phase("warmup", self.series.warm_at)
        if stepped:
            start = self.series.look().start
            if start < self.series.count and self.series.began_at[start] != self.sampling_at:
                self.sampling_at = self.series.began_at[start]
                self.reporter.phase("sampling", self.sampling_at)

    def alive(self) -> None:
        """Send a sign of life, at most every ALIVE_S."""
        now = time.monotonic()
        if now - self.alive_at > ALIVE_S:
            self.alive_at = now
            self.reporter.alive()

    def timed(self) -> profile_run.TimedProgram | str:
        """Times and number of steps, or why they are unknown."""
        steps, series = self.program.steps, self.series
        reported = [value.value for value in self._step_times]
        times = reported or list(series.time_s)
        if not times or (steps is None and not reported):
            return "steps cannot be counted: the suite sets neither progress nor step_s"
        return profile_run.TimedProgram(
            setup_s=(series.warm_at or self.ended_at) - self.began_at,
            step_s=statistics.median(times),
            steps=series.finished or len(reported),
            setup_steps=series.setup_steps,
            by_lines=steps is not None and series.one_by_one,
        )

    def _may_end(self, now: float) -> bool:
        if self.program.steps and self.program.steps.until == "sampled":
            if self.series.enough:
                self.ended = "sampled"
            elif self.series.must_end(now, self.deadline):
                self.ended = "timeout"
        return bool(self.ended)

    def _require_steps(self) -> None:
        steps, finished = self.program.steps, self.series.finished
        if steps is None or self._step_times or self.series.count:
            return
        if not finished:
            last = self.own.stdout.last or self.own.stderr.last
            problem = f"no step was read: no line of output matches progress '{steps.step}'"
            raise Failed(Outcome.UNSUPPORTED, f"{problem}; the last: {last[:LAST_BYTES]!r}")
        why = f"including {steps.setup_steps} of setup; a sample needs two more lines"
        if finished > steps.setup_steps + 1:
            why = "whose lines arrived together, so that their times are unknown; have it flush "
            why += "its output after each step, or print the time of each step"
        problem = f"progress: the program ended after {finished} steps, {why}"
        raise Failed(Outcome.UNSUPPORTED, problem)

    @property
    def _step_times(self) -> Sequence[Value]:
        """Values of the metric step_s."""
        return self.metrics.values.get("step_s", ())

    def unread(self, error: Failed) -> Measurement:
        """A measurement without samples, of a program whose output cannot be used."""
        failed = self.first or self.own
        which = f"rank {failed.rank}: " if self.program.ranks else ""
        after = failed.after_step() if failed.error else ""
        return self.failed(error.outcome, f"{which}{error}{after}")

    def failed(self, outcome: Outcome, detail: str) -> Measurement:
        """A measurement without samples, with the end of stderr, of the rank that failed first."""
        failed = self.first or self.own
        return Measurement(
            case_id=self.order.case.case_id,
            process=self.order.process,
            outcome=outcome,
            detail=detail,
            tokens=self.program.tokens,
            effective=self._effective(),
            ranks=ranks.records(self.outputs, self.began_at),
            evidence=Evidence(
                steps=self.series.finished if self.program.steps else None,
                last_step=self.series.last_step,
                rank=failed.rank if self.program.ranks else None,
                signal=signal_name(failed.code or 0),
            ),
        )

    def _crashed(self, failed: RankOutput) -> Measurement:
        errors, code = failed.stderr.ending, failed.code or 0
        last = failed.stderr.cause(code) or failed.stdout.last.strip()
        how = ranks.how_ended(code)
        if self.program.ranks:
            how = f"rank {failed.rank} {'was ' if code < 0 else ''}{how}"
        left = [o for o in self.outputs if o.code == 0]
        early = "".join(f"; rank {o.rank} had ended{o.after_step()}" for o in left)
        detail = f"{how}{failed.after_step()}{f': {last[:LAST_BYTES]}' if last else ''}{early}"
        places = [str(self.folder.resolve()), *self.order.first]
        if hidden := origin.hidden(errors, places):
            return self.failed(Outcome.PATH_MISMATCH, hidden)
        outcome = outcome_of(errors)
        if outcome is Outcome.OUT_OF_MEMORY:
            peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            detail += f" [peak {peak_bytes / 1e9:.2f} GB in a process]"
        if outcome is Outcome.NON_FINITE and (said := said_not_finite(errors)):
            if (rank := int(said["rank"] or failed.rank)) < len(self.outputs):
                self.first = self.outputs[rank]  # all may fail by one message
            detail = f"{said.string[:LAST_BYTES].removeprefix('error: ')}; {how}"
        return self.failed(outcome, detail)

    def measurement(self) -> Measurement:
        """The measurement of a program that has ended."""
        if self.first is not None and not self.ended:
            return self._crashed(self.first)
        case, effective = self.order.case, self._effective()
        steps, reported = self.program.steps, self._step_times
        if any(value.value <= 0 for value in reported):
            problem = "step_s: a reported time is not above 0; print more digits"
            return self.failed(Outcome.CRASH, problem)
        if reported:
            series = ProgramSteps(case.settings, setup_steps=self.series.setup_steps)
            for value in reported:
                series.add([Step(None, value.value)], value.at)
            effective["timed_by"] = "step_s, reported by the program"
        elif steps:
            series = self.series
            effective["timed_by"] = "progress lines"
        else:
            series = ProgramSteps(case.settings, setup_steps=0)
            series.add([Step(None, self.ended_at - self.began_at)], self.ended_at)
            effective["timed_by"] = "the whole program"
        division = series.finish()
        start = division.start
        if not series.time_s[start:]:
            problem = f"step_s was reported {len(reported)} times, only during setup"
            return self.failed(Outcome.UNSUPPORTED, problem)
        if self.ended == "timeout":
            effective["samples_cut"] = "timeout"
        elif steps and series.count - start < case.settings.min_samples:
            effective["samples_cut"] = "the program ended"
        if (share := self._timed_share(series)) < LEAST_SHARE:
            effective["timed_share"] = round(share, 3)
        if (raised := self.own.stderr.raised or self.own.stdout.raised) and not self.ended:
            effective["raised"] = raised[:LAST_BYTES]
        samples = tuple(series.time_s[start:])
        if steps or reported:
            self.reporter.phase("sampling", series.began_at[start])
        readings = self._readings(series.began_at[start])
        memory = readings.pop("peak_memory_bytes", ())
        tokens = self.program.tokens  # or the metric of this name, if the suite does not state them
        if tokens is None and "tokens" in readings:
            tokens = max(0, round(statistics.median(readings["tokens"])))
        return Measurement(
            case_id=case.case_id,
            process=self.order.process,
            outcome=Outcome.OK,
            clock=Clock.HOST,
            warmup_s=tuple(series.time_s[:start]),
            samples_s=samples,
            host_samples_s=samples,
            samples_at_s=tuple(t - self.order.launched_at for t in series.began_at[start:]),
            steady=division.steady if steps or reported else None,
            tokens=tokens,
            peak_memory_bytes=int(max(memory)) if memory else None,
            accuracy=Accuracy(skipped="a program is not compared with a reference"),
            effective=effective,
            code={"program": str(self.folder.resolve())},
            readings=readings,
            ranks=ranks.records(self.outputs, series.began_at[start]),
        )

    def _timed_share(self, series: ProgramSteps) -> float:
        """The times of its steps that a program reports itself, over the time from line to line; 1
        if it reports or numbers none."""
        steps, own = self.program.steps, self.series
        counted = own.finished - own.setup_steps
        if steps is None or own.last_step is None or own.warm_at is None or counted < 1:
            return 1.0
        if not (self._step_times or {"step_s", "step_ms"} & {*re.compile(steps.step).groupindex}):
            return 1.0
        took_s = (own.last_line_at or own.warm_at) - own.warm_at
        return statistics.fmean(series.time_s) * counted / max(took_s, 1e-9)

    def _readings(self, since: float) -> dict[str, tuple[float, ...]]:
        """Values of all metrics but step_s: those after `since`, or all if none is later."""
        found = {}
        for name, values in self.metrics.values.items():
            later = [v for v in values if v.at >= since] or values
            found[name] = tuple(v.value for v in later)
        found.pop("step_s", None)
        return found

    def _effective(self) -> dict[str, Scalar]:
        found = process.find(self.order.case, self.program, self.folder)
        return {"program": found or self.program.argv[0]}
