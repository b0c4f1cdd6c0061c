"""The records that travel through the harness.

Suite -> Case -> Measurement -> Run -> CaseSummary -> Verdict. All are frozen: a stage returns
new records and never edits the ones it was given. Every quantity is in an SI base unit named
by its suffix (_s, _bytes, _w, _hz); human units appear only in reports.

Schema history
    1  first schema: environment, cases and one line per worker process.
    2  what ran and why: counters, kernel census, where the step goes, evidence of failures,
       discarded samples, the proof of the instrument. All absent from runs of schema 1.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.records.asked import Suite
from harness.records.environment import Environment
from harness.records.outcome import Clock, Outcome, Scalar
from harness.records.profile import Breakdown, Counters, Profile
from harness.records.self_test import Proof

SCHEMA_VERSION = 2


# --- what is asked -----------------------------------------------------------------------


# --- what was seen -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """How far one output lies from the reference."""

    name: str
    error: float
    """Largest absolute difference from the reference, over the reference's largest value."""
    bound: float
    """What was allowed: the eager error at the same precision, plus rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The check that comes before timing."""

    tensors: tuple[TensorError, ...] = ()
    skipped: str = ""
    """Why nothing was compared; empty when something was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """An output in a few numbers. Equal outputs have equal ones."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    """Root of the sum of squares, in float64."""
    projection: float
    """Sum weighted by cos(i), i counted from 0: it changes where elements change places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a worker's life, in seconds since the parent launched it."""

    name: str  # start, setup, accuracy, warmup, sampling, census
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """What the parent's probes read while a worker lived."""

    t_s: tuple[float, ...] = ()
    """Time of each reading, in seconds since the parent launched the worker."""
    channels: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Readings by channel, aligned with t_s; None where that one reading failed. Channels:
    gpu_utilisation (0..1), gpu_memory_bytes, gpu_power_w, gpu_sm_clock_hz, gpu_temperature_c,
    gpu_throttle_reasons (NVML bit mask), gpu_foreign_processes (count), cpu_utilisation
    (cores), rss_bytes."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Channel -> why it could not be read at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceFile:
    """One thing that was kept of a failure, or could not be."""

    name: str
    """python stacks, native stacks, traceback, telemetry or reproduce."""
    path: str = ""
    """Relative to the run folder; empty where there is no such file."""
    note: str = ""
    """By which means it was had, or why it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFiniteOrigin:
    """Where NaN or Inf first appeared when a computation was run again and watched."""

    computation: str
    """run, check, eager or reference: the last two say whether the definition fails too."""
    precision: str
    """Dtype of the tensor in which it appeared; of the outputs where all stayed finite."""
    value: str = ""
    """NaN or Inf; empty where every value stayed finite."""
    step: int | None = None
    """For `run`: which one, counted from 0."""
    tensor: str = ""
    """As the operator or the module names it: `output 0 of aten.div`, a parameter, `loss`."""
    operator: str = ""
    """The first operator with such a value in its result and none in its arguments."""
    module: str = ""
    """Path of the innermost module that was running, or its class where the path is unknown."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What was seen of a process that did not end OK. None is what could not be known."""

    phase: str = ""
    """Where it was when it was last heard of."""
    runs: int | None = None
    """Steps finished by then, at least: quick ones are not all reported."""
    pace_s: float | None = None
    """Mean time of a finished run."""
    needed_s: float | None = None
    """Time in which the samples asked for would have been taken, at that pace."""
    silent_s: float | None = None
    """Time from its last sign of life to the judgement."""
    stall_limit_s: float | None = None
    """The silence that was allowed."""
    signal: str = ""
    """Name of the signal that ended it."""
    stderr_tail: str = ""
    """The end of what a program wrote to stderr."""
    frame: str = ""
    """The innermost Python frame: `function (file:line)`."""
    last_kernel: str = ""
    """On a GPU: whether a kernel still runs. Some stored runs name the last launch too."""
    peak_host_bytes: int | None = None
    """Largest resident memory of the process."""
    peak_device_bytes: int | None = None
    """Largest sum of live tensors on the device."""
    origins: tuple[NonFiniteOrigin, ...] = ()
    holders: tuple[str, ...] = ()
    """For INVALID_ENVIRONMENT: who else used the GPU."""
    files: tuple[EvidenceFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one worker process measured of one case.

    The samples are kept whole. Every statistic is computed from them afterwards, so an old
    run can be read again with a better method.
    """

    case_id: str
    process: int
    """Which of the case's worker processes this was, from 0."""
    outcome: Outcome
    detail: str = ""
    """Why the outcome is not OK, as the worker said it or as the watchdog saw it."""
    clock: Clock | None = None
    warmup_s: tuple[float, ...] = ()
    """Readings before the steady state, in the order taken."""
    samples_s: tuple[float, ...] = ()
    """Time of each steady run on `clock`, in the order taken."""
    host_samples_s: tuple[float, ...] = ()
    """The same runs on the host's clock, synchronised at both ends."""
    samples_at_s: tuple[float, ...] = ()
    """When each of the samples began, on the host's clock, in seconds since the launch; empty in
    runs of schema 1."""
    discarded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Reason (throttled, shared, clock_dropped) -> indices of the samples that were taken while
    the telemetry was so. They stay among the samples, and enter no estimate."""
    steady: bool | None = None
    """Whether the rule found a steady state; None where nothing was timed, or all of a program."""
    tokens: int | None = None
    """Tokens one run processes; None where the workload has no notion of tokens."""
    flops: int | None = None
    """Floating-point operations the mathematics of one run needs."""
    bytes: int | None = None
    """Bytes a perfect implementation of one run moves."""
    lower_bound_s: float | None = None
    """For TIMEOUT and HANG: one run takes at least this long. A censored observation."""
    peak_memory_bytes: int | None = None
    """Largest allocation on the device during sampling; None without a device."""
    accuracy: Accuracy | None = None
    effective: Mapping[str, Scalar] = field(default_factory=dict)
    """The configuration in force as the workload observed it: shapes, dtypes, routes."""
    flags_read: Mapping[str, bool] = field(default_factory=dict)
    """Variables that were set, by the case or around it, and that the workload knows as flags:
    whether anything asked for them. A variable that is not here may or may not have been read."""
    output_digest: tuple[TensorDigest, ...] = ()
    """Of what the first run returned; empty where it returned no finite numbers."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Package -> file it was loaded from, where the run asked for a certain tree. For a program:
    `program` -> the folder it ran in."""
    counters: Counters | None = None
    census: Profile | None = None
    readings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """What a program told of itself by metric, but for step times, in the order told."""
    telemetry: Telemetry | None = None
    phases: tuple[Phase, ...] = ()
    started_at: str = ""
    """ISO 8601, UTC."""
    wall_s: float = 0.0
    """Life of the process, launch to exit."""
    log: str = ""
    """Path of the process's output, relative to the run folder."""
    evidence: Evidence | None = None
    """What was kept where the outcome is not OK; None in runs of schema 1."""

    def __post_init__(self) -> None:
        if (self.outcome is Outcome.OK) != bool(self.samples_s):
            raise ValueError(
                f"{self.case_id}: outcome {self.outcome} with {len(self.samples_s)} samples; "
                "samples belong to ok and to nothing else"
            )
        if not all(math.isfinite(s) and s > 0 for s in self.samples_s):
            raise ValueError(f"{self.case_id}: a sample is not a positive, finite time")

    @property
    def kept_s(self) -> tuple[float, ...]:
        """The samples that count: all but the discarded."""
        bad = {i for indices in self.discarded.values() for i in indices}
        return tuple(s for i, s in enumerate(self.samples_s) if i not in bad)

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the time of a step goes, by the clock of the samples, as all else that is told of
        it: a host that waits for the result of a short step sees it take longer, and records held
        that time until 2026-11-22."""
        recorded = self.census.breakdown if self.census else None
        if recorded is None or not self.kept_s:
            return recorded
        return replace(recorded, step_s=statistics.median(self.kept_s))

    def is_evidence(self, min_samples: int) -> bool:
        """Whether enough samples are left for a number to rest on."""
        return bool(self.samples_s) and (
            not self.discarded or len(self.kept_s) >= max(1, min_samples)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a suite at one commit on one machine."""

    run_id: str
    folder: str
    suite: Suite
    environment: Environment
    measurements: tuple[Measurement, ...] = ()
    started_at: str = ""
    ended_at: str = ""
    """Empty while the run is unfinished: in progress, interrupted or crashed."""
    elapsed_s: float | None = None
    """From beginning to end by the monotonic clock; None where the run was resumed, or is of
    schema 1: then only the wall clock knows."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the record itself: resumed, last line cut short."""
    proofs: tuple[Proof, ...] = ()
    """The instrument's proof, and one more for each time the run was resumed."""
    wall_s: float | None = None
    """From the command's start to its last measurement; None while unfinished, and for a run
    that was resumed, of whose first part nobody knows."""

    @property
    def proof(self) -> Proof | None:
        """The last one; None in runs of schema 1."""
        return self.proofs[-1] if self.proofs else None

    def of(self, case_id: str) -> tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if m.case_id == case_id)


# --- what follows from it ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one run of a case does; known before it runs, where its workload can tell."""

    tokens: int | None
    flops: int | None
