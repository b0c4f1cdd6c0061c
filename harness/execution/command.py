"""In the worker's place: runs a program as it is, watches its output, and answers for it.

The worker stays the program's parent and needs no torch. It reads what the program writes, tells
the watchdog of finished steps as a workload does, and makes the measurement when the program has
ended, or, where the suite says so, when there are enough samples. Whatever the program leaves
behind is ended with the worker.
"""

import ctypes
import faulthandler
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from harness.execution import evidence
from harness.execution.messages import Built, Channel, Order
from harness.execution.output import Lines, Log
from harness.execution.series import Series
from harness.execution.told import Metrics, NotFinite, Step, StepReader, Untold
from harness.program import INTERPRETER, Program
from harness.records import Accuracy, Case, Clock, Evidence, Measurement, Outcome

CHUNK_BYTES = 2**18
"""Size of the pipes, and the most that is read from one at once."""
ALIVE_S = 0.1
"""Lines are a sign of life at most so often."""
DRAIN_S = 0.5
"""How long to read on after the program's end, if a process it left behind holds the pipe."""
CUT_S = 1.0
"""So long before the worker's timeout a program that may be ended is ended."""
STDERR_BYTES = 4096
LAST_BYTES = 200

_OUT_OF_MEMORY = re.compile(
    r"\bOutOfMemoryError\b|CUDA out of memory|CUDA error: out of memory|\bMemoryError\b"
    r"|std::bad_alloc|can't allocate memory|Cannot allocate memory"
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Reporter(Protocol):
    """Tells the parent how it goes; the worker's own."""

    def phase(self, name: str, at: float | None = None) -> None: ...

    def ran(self, seconds: float) -> None: ...

    def alive(self) -> None: ...


def refusal(case: Case, program: Program) -> str:
    """Why a program cannot be started, seen before anything is; empty where it can."""
    folder = Path(program.cwd)
    if not folder.is_dir():
        return f"cwd {program.cwd!r} is no folder in {Path.cwd()}; correct it or change there"
    name = program.argv[0]
    if name == INTERPRETER or find(case, program) is not None:
        return ""
    if "/" in name:
        return f"command {name!r} is no program in {folder.resolve()}; correct it, or make it so"
    return f"command {name!r} is no program on PATH; install it, or write the way to it"


def find(case: Case, program: Program) -> str | None:
    """The program's file, as it will be started."""
    name = program.argv[0]
    if name == INTERPRETER:
        return sys.executable
    if "/" in name:
        file = Path(program.cwd, name)
        return str(file.resolve()) if file.is_file() and os.access(file, os.X_OK) else None
    return shutil.which(name, path=case.env.get("PATH", os.environ.get("PATH")))


def environment(case: Case, roots: tuple[str, ...]) -> dict[str, str]:
    """The program's variables. Python's output comes line by line, and its stacks if it aborts;
    what it imports by name comes from the trees under test before all else."""
    python = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    env = {**os.environ, **python, **case.env}
    if roots:
        path = (*roots, env.get("PYTHONPATH", ""))
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    return env


def measure(case: Case, order: Order, channel: Channel, reporter: Reporter) -> Measurement:
    """Run the program of a case and say how it went."""
    program = case.program
    if program is None:
        raise ValueError(f"{case.case_id} has no program")
    channel.send(Built(tokens=program.tokens, flops=program.flops, bytes=None))
    reporter.phase("setup")
    session = _Session(case, program, order, reporter)
    try:
        session.run()
    except NotFinite as error:
        return session.failed(Outcome.NON_FINITE, f"{error}{session.at_step()}")
    except Untold as error:
        return session.failed(Outcome.CRASH, f"{error}{session.at_step()}")
    finally:
        kill(session.process)
    return session.answer()


def kill(process: "subprocess.Popen[bytes] | None") -> None:
    """End a program and what is under it, now."""
    if process is None:
        return
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    if process.returncode is None:
        process.kill()
        process.wait()
    for one in family:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue


def start(case: Case, program: Program, env: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start the program with its output in two pipes; it dies with this process."""
    libc = ctypes.CDLL(None)
    first = sys.executable if program.argv[0] == INTERPRETER else program.argv[0]
    return subprocess.Popen(
        [first, *program.argv[1:]],
        cwd=program.cwd,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pipesize=CHUNK_BYTES,
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0),
    )


@dataclass(frozen=True, slots=True)
class Read:
    """What one read of a pipe brought."""

    at: float
    lines: tuple[str, ...]
    from_stderr: bool
    data: bytes


class Reader:
    """Reads both pipes of a program until it has ended; wakes up for its death too."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.ended_at: float | None = None
        """time.monotonic at the end of the program."""

    def reads(self, poll_s: float = 0.5) -> Iterator[Read]:
        """All output in order; a read without lines at least every `poll_s`."""
        woken, wake = socket.socketpair()
        woken.setblocking(False)
        wake.setblocking(False)
        before = signal.signal(signal.SIGCHLD, lambda *_: None)  # without one nothing wakes
        old = signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        try:
            with selectors.DefaultSelector() as waiting:
                waiting.register(woken, selectors.EVENT_READ)
                for stream in (self._process.stdout, self._process.stderr):
                    if stream is not None:
                        waiting.register(stream, selectors.EVENT_READ, Lines())
                yield from self._until_end(waiting, woken, poll_s)
        finally:
            signal.set_wakeup_fd(old)
            signal.signal(signal.SIGCHLD, before)
            woken.close()
            wake.close()

    def _until_end(
        self, waiting: selectors.BaseSelector, woken: socket.socket, poll_s: float
    ) -> Iterator[Read]:
        while len(waiting.get_map()) > 1 or self.ended_at is None:
            if self.ended_at is None and self._process.poll() is not None:
                self.ended_at = time.monotonic()
            if self.ended_at is not None and time.monotonic() - self.ended_at > DRAIN_S:
                break
            ready = waiting.select(poll_s if self.ended_at is None else DRAIN_S / 10)
            at = time.monotonic()
            for key, _ in ready:
                if key.fileobj is woken:
                    woken.recv(2**12)
                else:
                    yield self._read(waiting, key, at)
            if not ready:
                yield Read(at, (), False, b"")
        for key in [*waiting.get_map().values()]:
            if key.fileobj is not woken:
                yield Read(time.monotonic(), tuple(key.data.rest()), self._is_err(key), b"")

    def _read(self, waiting: selectors.BaseSelector, key: selectors.SelectorKey, at: float) -> Read:
        data = os.read(key.fd, CHUNK_BYTES)
        lines: Lines = key.data
        if not data:
            waiting.unregister(key.fileobj)
        found = tuple(lines.feed(data) if data else lines.rest())
        return Read(at, found, self._is_err(key), data)

    def _is_err(self, key: selectors.SelectorKey) -> bool:
        return key.fileobj is self._process.stderr


@dataclass(slots=True)
class _Tail:
    """The end of what a stream said."""

    text: bytes = b""
    last: str = ""

    def add(self, read: Read) -> None:
        self.text = (self.text + read.data)[-STDERR_BYTES:]
        for line in read.lines:
            self.last = line if line.strip() else self.last


@dataclass(slots=True)
class _Session:
    """One life of a program."""

    case: Case
    program: Program
    order: Order
    reporter: Reporter
    process: "subprocess.Popen[bytes] | None" = None
    stdout: _Tail = field(default_factory=_Tail)
    stderr: _Tail = field(default_factory=_Tail)
    ended: str = ""
    """Why the program was ended from here; empty where it ended by itself."""
    began_at: float = 0.0
    ended_at: float = 0.0
    lines: int = 0
    alive_at: float = 0.0
    warm: bool = False
    sampling_at: float | None = None
    metrics: Metrics = field(init=False)
    series: Series = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.program, Path(self.program.cwd))
        setup_steps = self.program.steps.setup_steps if self.program.steps else 0
        self.series = Series(self.case.settings, setup_steps=setup_steps)

    def run(self) -> None:
        """See the program through.

        Raises:
            Untold: It did not tell what it should.
            NotFinite: It told NaN or infinity.
        """
        self.process = start(self.case, self.program, environment(self.case, self.order.roots))
        self.began_at = time.monotonic()
        _abort_when_asked(self.process)
        finder = StepReader(self.program.steps) if self.program.steps else None
        if finder is None:
            self.reporter.phase("sampling", self.began_at)
        log = Log(1)
        reader = Reader(self.process)
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
        if read.lines and (alive or steps) and read.at - self.alive_at > ALIVE_S:
            self.alive_at = read.at
            self.reporter.alive()
        if self.series.warm_at is not None and not self.warm:
            self.warm = True
            self.reporter.phase("warmup", self.series.warm_at)
        if steps:
            self._announce(self.series.look().start)

    def _announce(self, start: int) -> None:
        """Tell from when on there are samples, when that is first known or moves."""
        if start < self.series.count and self.series.began_at[start] != self.sampling_at:
            self.sampling_at = self.series.began_at[start]
            self.reporter.phase("sampling", self.sampling_at)

    def _may_end(self, now: float) -> bool:
        """Whether there is enough, and the suite lets the program be ended."""
        if self.program.steps is None or not self.program.steps.until_sampled:
            return False
        deadline = self.order.launched_at + self.case.settings.timeout_s - CUT_S
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
            raise Untold(f"progress: {said}{self._last_words()}")
        raise Untold(
            f"progress: the program ended after {self.series.finished} steps, of which "
            f"{steps.setup_steps} are setup; a sample lies between two lines that come after it"
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
        known = self.program.steps is not None
        return Measurement(
            case_id=self.case.case_id,
            process=self.order.process,
            outcome=outcome,
            detail=detail,
            tokens=self.program.tokens,
            flops=self.program.flops,
            effective=self._effective(),
            evidence=Evidence(
                runs=self.series.finished if known else None,
                runs_exact=known,
                signal=evidence.signal_name(code or 0),
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
        how = f"killed by {evidence.signal_name(code)}" if code < 0 else f"exited with {code}"
        if 128 < code < 128 + signal.NSIG:
            how += f" (of {evidence.signal_name(128 - code)}, as a shell says it)"
        detail = f"{how}{self.at_step()}{f': {last[:LAST_BYTES]}' if last else ''}"
        outcome = Outcome.CRASH
        if _OUT_OF_MEMORY.search(said):
            outcome = Outcome.OUT_OF_MEMORY
        elif _DISK_FULL.search(said):
            outcome = Outcome.INVALID_ENVIRONMENT
        return self.failed(outcome, detail)

    def _measured(self) -> Measurement:
        effective = self._effective()
        steps, told = self.program.steps, self.metrics.values.get("step_s")
        if told:
            series = Series(self.case.settings, setup_steps=steps.setup_steps if steps else 0)
            for value in told:
                series.add([Step(None, value.value)], value.at)
            if any(value.value <= 0 for value in told):
                return self.failed(Outcome.CRASH, "step_s: a step took 0 or less; print digits")
            effective["timed_by"] = "step_s, as the program told it"
        elif steps:
            series = self.series
            effective["timed_by"] = "progress lines"
        else:
            series = Series(self.case.settings, setup_steps=0)
            series.add([Step(None, self.ended_at - self.began_at)], self.ended_at)
            effective["timed_by"] = "the whole program"
        division = series.look(last=True)
        start = division.start
        if not series.time_s[start:]:
            return self.failed(Outcome.CRASH, f"step_s was told {len(told or ())} times, of setup")
        if series.together:
            effective["read_together"] = series.together
        if self.ended == "timeout":
            effective["samples_cut"] = "timeout"
        elif steps and series.count - start < self.case.settings.min_samples:
            effective["samples_cut"] = "the program ended"
        samples = tuple(series.time_s[start:])
        if series.time_s and (steps or told):
            self.reporter.phase("sampling", series.began_at[start])
        readings = self._readings(series.began_at[start])
        memory = readings.pop("peak_memory_bytes", ())
        return Measurement(
            case_id=self.case.case_id,
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
            code={"program": str(Path(self.program.cwd).resolve())},
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
        return {"program": find(self.case, self.program) or self.program.argv[0]}


def _abort_when_asked(process: "subprocess.Popen[bytes]") -> None:
    """Let the signal that asks a worker for its stacks abort the program, whose Python then writes
    them. It is only asked of one that hangs and is about to be killed."""
    faulthandler.unregister(signal.SIGUSR1)

    def abort(*_: object) -> None:
        try:
            me = psutil.Process(process.pid)
            family = [me, *me.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for one in family:
            try:
                one.rlimit(psutil.RLIMIT_CORE, (0, 0))
                one.send_signal(signal.SIGABRT)
            except psutil.Error:
                continue  # it is gone, or another user's

    signal.signal(signal.SIGUSR1, abort)
