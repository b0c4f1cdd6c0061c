"""Messages between parent and worker: one JSON object per line, over a pipe of their own.

The worker's stdout and stderr go to its log, so output of a workload cannot be taken for an answer.
Times are readings of time.monotonic, which parent and child share on Linux.
"""

import json
import math
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Annotated, Any, Literal

import pydantic

from harness.records import (
    MIN_STEP_S,
    Case,
    Measurement,
    OverSteps,
    SelfTestReadings,
    require_counts,
    require_times,
)

ASK_FOR_STACKS = signal.SIGRTMIN + 3
"""On this signal a worker writes the Python stacks of its threads to its log. Not SIGUSR1 or 2:
LLVM takes over both in every process in which Triton has compiled something."""
MAX_LINE_BYTES = 64 * 2**20
"""More than any answer has."""
MAX_DRAIN_BYTES = 2**21
"""Read at once: more than a pipe holds, so that nothing is left of a process that has ended; little
enough that the time limits of one that writes without end are looked at."""

PROGRESS_INTERVAL_S = 0.02
"""Least time between two reports of progress, after the first REPORTED_STEPS."""
REPORTED_STEPS = 32
"""Steps that are all reported: the parent derives its limit for a hang from them."""
RANK_MARK = re.compile(r"^\[rank (\d+)\] ", re.MULTILINE)
"""Before each line of output of a program with several ranks; see `rank_mark`."""
NUMBERED_STEP_S = 1e-3
"""A step of a training run that takes as long is always reported, so that a hang loses none."""


def rank_mark(rank: int) -> str:
    return f"[rank {rank}] "


class Garbled(Exception):
    """A line from the pipe is not a message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOrder:
    """Where a worker imports from."""

    roots: tuple[str, ...] = ()
    """Folders from which the code under test must be loaded; empty allows any."""
    home: tuple[str, ...] = ()
    """Without roots: folders to import from first; other code may come from elsewhere."""

    @property
    def first(self) -> tuple[str, ...]:
        return self.roots or self.home


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOrder(WorkerOrder):
    """Parent to worker: measure this case."""

    kind: Literal["measure"] = "measure"
    case: Case
    process: int
    launched_at: float
    device: str = ""
    """`cuda` if the run started on a GPU: a worker that cannot see one must not measure."""
    elsewhere: tuple[str, ...] = ()
    """Other working trees of the repository: a module of the roots may not come from there."""
    trace: str = ""
    """File for a Chrome trace of the profiled steps; empty if none is wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOrder(WorkerOrder):
    """Ask the workloads of these cases whether they can run."""

    kind: Literal["check"] = "check"
    cases: tuple[Case, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTestOrder(WorkerOrder):
    """Test the clocks and counters that measure."""

    kind: Literal["self_test"] = "self_test"


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeOrder(WorkerOrder):
    """Describe the environment, as far as torch knows it."""

    kind: Literal["describe"] = "describe"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegan:
    """A phase began. Sending the current phase again moves its start."""

    kind: Literal["phase"] = "phase"
    name: str
    at: float
    """May be in the past: sampling starts with the first of the readings found to be steady. The
    parent bounds it by the start of the phase before and by now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The workload is built. What one step does is known even if no step finishes."""

    kind: Literal["built"] = "built"
    tokens: int | None
    flops: int | None
    """Floating-point operations that one step needs mathematically."""
    bytes: int | None = None

    def __post_init__(self) -> None:
        require_counts(self, "tokens", "flops", "bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """A sign of life, with the steps finished so far in warmup and sampling."""

    kind: Literal["progress"] = "progress"
    steps: int
    spent_s: float
    """Total time of the finished steps."""
    shortest_s: float
    """Shortest finished step; 0 before the first."""
    last_step: int | None = None
    """A program's own number of its last step, if it prints one."""
    rank_steps: tuple[int, ...] = ()
    """Steps that each rank of a program has finished, if it has several."""
    since: float | None = None
    """Of a program: when its unfinished step began, at the latest: the end of the step before, or
    the first line of output; None before that."""
    over_steps: OverSteps | None = None
    """What the steps since the last report recorded; None if nothing."""

    def __post_init__(self) -> None:
        require_times(self, "spent_s", least=0.0)
        require_times(self, "shortest_s", least=MIN_STEP_S if self.shortest_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The worker's result; the parent completes it with what only the parent can see."""

    kind: Literal["answer"] = "answer"
    measurement: Measurement
    final: bool = True
    """False before a search for the cause that may itself fail."""
    between_s: float | None = None
    """Time of the sampling phase that the worker spent between steps; None if it timed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """The answer to a DescribeOrder: harness.measure.facts.describe()."""

    kind: Literal["described"] = "described"
    facts: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a case cannot run, found before the run starts."""

    case_id: str
    problem: str
    remedy: str = ""
    of_factory: bool = False
    """Whether the cause is the suite's `factory:`, not the case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    kind: Literal["checked"] = "checked"
    refusals: tuple[Refusal, ...]
    work: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Case id -> FLOPs and bytes of a step, if they are known before it is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTested:
    kind: Literal["self_tested"] = "self_tested"
    readings: SelfTestReadings


Order = MeasureOrder | CheckOrder | SelfTestOrder | DescribeOrder
Message = PhaseBegan | Built | StepsDone | Answer | Described | Checked | SelfTested

_message: pydantic.TypeAdapter[Message] = pydantic.TypeAdapter(
    Annotated[Message, pydantic.Discriminator("kind")]
)
decode_order = pydantic.TypeAdapter[Order](
    Annotated[Order, pydantic.Discriminator("kind")]
).validate_json


def encode(sent: Order | Message) -> bytes:
    """As JSON; a lone surrogate, which is no Unicode text, becomes "?"."""
    return json.dumps(asdict(sent), ensure_ascii=False).encode("utf-8", "replace")


def signal_name(exit_code: int) -> str:
    """`SIGSEGV` for -11; empty for an exit without a signal."""
    if exit_code >= 0:
        return ""
    return {s.value: s.name for s in signal.Signals}.get(-exit_code, f"signal {-exit_code}")


class Channel:
    """The worker's end of the pipe. Only the process that opened it may send."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._owner = os.getpid()

    def send(self, message: Message) -> None:
        """Write one complete message; a RuntimeError in a process that the workload forked, a
        TypeError if JSON cannot represent the message."""
        if os.getpid() != self._owner:
            raise RuntimeError("a process forked by the workload tried to answer for the worker")
        line = memoryview(encode(message) + b"\n")
        while line:
            line = line[os.write(self._fd, line) :]


class WorkerReporter:
    """Sends phases and progress to the parent, at a limited rate."""

    def __init__(
        self, channel: Channel, recorded: Callable[[], OverSteps | None] = lambda: None
    ) -> None:
        """`recorded` returns what the steps since its last call recorded."""
        self._channel, self._recorded = channel, recorded
        self._steps = self._reported = 0
        self._spent_s = 0.0
        self._shortest_s = math.inf
        self._sent_at = -PROGRESS_INTERVAL_S
        self.last_step: int | None = None
        """A program's own number of its last step."""
        self.rank_steps: tuple[int, ...] = ()
        self.since: float | None = None
        """When a program's unfinished step began, at the latest."""

    @property
    def is_behind(self) -> bool:
        """Whether a step has no report yet."""
        return self._steps > self._reported

    def phase(self, name: str, at: float | None = None) -> None:
        self._sent_at = -PROGRESS_INTERVAL_S  # report the first step of a phase
        self._channel.send(PhaseBegan(name=name, at=monotonic() if at is None else at))

    def ran(self, seconds: float) -> None:
        self._steps += 1
        self._spent_s += seconds
        self._shortest_s = min(self._shortest_s, seconds)
        own = self.last_step is not None and seconds >= NUMBERED_STEP_S
        late = monotonic() - self._sent_at >= PROGRESS_INTERVAL_S
        if own or late or self._steps <= REPORTED_STEPS:
            self.alive()

    def alive(self) -> None:
        self._sent_at, self._reported = monotonic(), self._steps
        self._channel.send(
            StepsDone(
                steps=self._steps,
                spent_s=self._spent_s,
                shortest_s=self._shortest_s if self._steps else 0.0,
                last_step=self.last_step,
                rank_steps=self.rank_steps,
                since=self.since,
                over_steps=self._recorded(),
            )
        )


class MessageReader:
    """The parent's end of the pipe: bytes in, messages out."""

    def __init__(self, fd: int) -> None:
        """`fd` must not block."""
        self._fd = fd
        self._rest = bytearray()
        self.at_end = False
        """Whether the worker and all that inherited its end have closed the pipe."""

    def drain(self, each: Callable[[Message], None]) -> None:
        """Pass on the messages that have arrived, up to MAX_DRAIN_BYTES; Garbled if a line is
        none."""
        left = MAX_DRAIN_BYTES
        while not self.at_end and left > 0:
            try:
                chunk = os.read(self._fd, 2**16)
            except BlockingIOError:
                return
            self.at_end = not chunk
            left -= len(chunk)
            *ends, rest = chunk.split(b"\n")
            for end in ends:
                line = bytes(self._rest + end)
                self._rest.clear()
                try:
                    message = _message.validate_json(line)
                except pydantic.ValidationError as error:
                    raise Garbled(f"{line[:80]!r} ({error.error_count()} errors)") from error
                each(message)
            self._rest += rest
            if len(self._rest) > MAX_LINE_BYTES:
                raise Garbled(f"a line of more than {MAX_LINE_BYTES} bytes")
