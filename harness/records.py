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
from enum import StrEnum
from fnmatch import fnmatchcase

from harness.program import Program
from harness.what_ran import Breakdown, Counters, PathRule, Profile

SCHEMA_VERSION = 2

Scalar = bool | int | float | str


class Outcome(StrEnum):
    """How a case ended. Only OK carries samples: a wrong kernel has no latency."""

    OK = "ok"
    INCORRECT = "incorrect"  # output differs from the reference beyond its bound
    NON_FINITE = "non_finite"  # NaN or Inf where a number belongs
    OUT_OF_MEMORY = "out_of_memory"
    HANG = "hang"  # no progress for many expected steps
    TIMEOUT = "timeout"  # slow: progress, but not done in timeout_s; a censored observation
    CRASH = "crash"  # exception, signal, or exit without a result
    UNSUPPORTED = "unsupported"  # the provider declined these axes
    PATH_MISMATCH = "path_mismatch"  # something else ran than was asked for
    INVALID_ENVIRONMENT = "invalid_environment"


FAILURES = frozenset(
    {
        Outcome.INCORRECT,
        Outcome.NON_FINITE,
        Outcome.HANG,
        Outcome.CRASH,
        Outcome.PATH_MISMATCH,
    }
)
"""Outcomes that say the code under test is wrong, whatever its speed."""


class Clock(StrEnum):
    """Which clock a sample was read from."""

    CUDA_EVENT = "cuda_event"
    HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A named quantity with its unit and the direction in which it is good."""

    name: str
    title: str
    unit: str
    """Of METRICS, also how a value is printed: see harness.units."""
    higher_is_better: bool
    counted: bool = False
    """An exact count of one step, without noise: of harness.what_ran.COUNTERS."""
    of_case: bool = True
    """Whether one case has a value, so that an expectation may name it."""
    about: str = ""
    """What the name cannot say, for editors of a suite."""


METRICS: Mapping[str, Metric] = {
    m.name: m
    for m in (
        Metric(name="tokens_per_s", title="tokens/s", unit="tokens/s", higher_is_better=True),
        Metric(name="step_s", title="step time", unit="s", higher_is_better=False),
        Metric(
            name="step_cycles",
            title="step cycles",
            unit="cycles",
            higher_is_better=False,
            about="Step time in cycles of the SM clock as measured.",
        ),
        Metric(
            name="mfu",
            title="MFU",
            unit="ratio",
            higher_is_better=True,
            about="Model FLOPs utilisation, 0 to 1.",
        ),
        Metric(
            name="floor_share",
            title="share of floor",
            unit="ratio",
            higher_is_better=True,
            about="Least time by the machine's measured peaks over the time taken, 0 to 1.",
        ),
        Metric(name="peak_memory_bytes", title="peak memory", unit="B", higher_is_better=False),
        Metric(
            name="gpu_utilisation",
            title="GPU",
            unit="ratio",
            higher_is_better=True,
            about="0 to 1.",
        ),
        Metric(
            name="cpu_utilisation",
            title="CPU",
            unit="cores",
            higher_is_better=False,
            about="In cores: 1.0 is one core kept busy.",
        ),
        Metric(
            name="scaling_exponent",
            title="scaling exponent",
            unit="1",
            higher_is_better=False,
            of_case=False,
        ),
        *(
            Metric(
                name=name,
                title=title,
                unit="1",
                higher_is_better=False,
                counted=True,
                about="A count of one step.",
            )
            for name, title in (
                ("dispatched_ops", "operators a step"),
                ("host_syncs", "host syncs a step"),
                ("allocations", "allocations a step"),
                ("kernel_launches", "kernel launches a step"),
                ("device_waits", "waits for the device a step"),
                ("host_device_copies", "host-device copies a step"),
            )
        ),
    )
}
"""Every metric of the harness. The keys of a suite's expectations and the way that values are
printed follow from this table."""


# --- what is asked -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How one case is measured; a suite sets them, a workload of the suite may override."""

    processes: int = 3
    """Fresh processes per case. One process never decides a comparison."""
    min_samples: int = 5
    """Steady samples every process must take before it may stop."""
    max_samples: int = 200
    """Steady samples after which a process stops."""
    sample_s: float = 2.0
    """Time after which a process stops sampling, once it has min_samples."""
    warmup_s: float = 20.0
    """Longest time spent looking for the steady state; past it, `steady` is False."""
    timeout_s: float = 300.0
    """Longest life of one process. Past it: TIMEOUT, a lower bound on the step time."""
    stall_s: float = 120.0
    """Longest silence between two signs of progress. Past it: HANG. Once step times are known,
    a silence of many steps is one already; see harness.execution.pace."""
    flush_l2: bool = False
    """Empty the GPU's L2 cache before every sample; for operators, not for whole steps."""
    accuracy: bool = True
    """Compare with the reference before timing."""
    rotate_inputs: int = 1
    """So many sets of inputs take turns, one a run; 1 is always the same. Where a set does not
    fit the cache beside the others, no run finds its inputs there."""
    graph: bool = False
    """Capture a run as a CUDA graph and time its replay; unsupported where that cannot be."""
    telemetry: bool = True
    """Read the probes while the worker works. Off only to learn what reading them costs."""
    census: bool = True
    """Profile a few steps after the last sample: what ran, and where the time goes. Of a program:
    also whether to count, which takes one more process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bound point of a suite's sweep."""

    case_id: str
    """Stable name, the key that joins runs: `train/nsa/seq_len=512/gc=off`. Workload, provider
    and the swept axes in the order the suite declares them."""
    workload: str
    """Name of the suite's workload entry."""
    factory: str
    """`package.module:function`, imported by the worker and by nothing else. A program has none."""
    provider: str
    axes: Mapping[str, Scalar]
    """Every axis, swept or fixed."""
    swept: tuple[str, ...] = ()
    """The axes of the sweep, in declared order."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the worker. An axis with an upper-case name is in here too."""
    settings: MeasureSettings = field(default_factory=MeasureSettings)
    allow: Mapping[Outcome, str] = field(default_factory=dict)
    """Outcomes other than OK that the suite expects here, each with its reason. They are
    reported, but do not by themselves turn the verdict."""
    kernels: PathRule = field(default_factory=PathRule)
    """What must and must not run on the device; a breach is PATH_MISMATCH."""
    operators: PathRule = field(default_factory=PathRule)
    """The same of PyTorch's operators, on any device."""
    program: Program | None = None
    """Run instead of a factory's workload."""

    def get(self, name: str) -> Scalar | None:
        """An axis, or the pseudo-axes `workload` and `provider`."""
        if name == "workload":
            return self.workload
        if name == "provider":
            return self.provider
        return self.axes.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Chooses cases: every criterion must hold. No criteria choose every case."""

    criteria: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Axis (or `workload`, `provider`) -> accepted values."""

    def accepts(self, case: Case) -> bool:
        return all(case.get(name) in values for name, values in self.criteria.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What somebody expects of a case, and on whose word."""

    metric: str
    match: Match = field(default_factory=Match)
    gpu: str = "*"
    """Pattern (fnmatch) of the GPU name the expectation was stated for; `cpu` for no GPU."""
    low: float | None = None
    high: float | None = None
    source: str = ""

    def applies_to(self, gpu_name: str) -> bool:
        return gpu_matches(self.gpu, gpu_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One line of a suite's verdict: cases, a metric and two thresholds.

    With a metric that is better when higher: GO at or above `go`, NO-GO below `abort`,
    CONDITIONAL between. With one that is better when lower, mirrored.
    """

    name: str
    metric: str
    go: float
    abort: float | None = None
    """Without it, missing `go` is already NO-GO."""
    match: Match = field(default_factory=Match)
    quantifier: str = "all"
    """`all`: every matched case must hold. `any`: the best matched case decides."""
    axis: str | None = None
    """For `scaling_exponent`: the axis the exponent is fitted over."""
    gpu: str = "*"
    free: Metric | None = None
    """What `metric` is, where a program of the suite names it and the harness does not know it."""

    @property
    def quantity(self) -> Metric:
        """The metric it speaks of."""
        return self.free or METRICS[self.metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """A training run the report extrapolates to."""

    steps: int
    match: Match = field(default_factory=Match)
    usd_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite file, validated and expanded."""

    name: str
    """File name without `.yaml`."""
    title: str
    subject: str
    """Goes into the report's file name."""
    question: str
    """What the suite is there to answer."""
    path: str
    text: str
    """The file as read, so that a stored run can be repeated exactly."""
    sha256: str
    device: str = "any"
    """`cuda` where the question only makes sense on a GPU; a run without one is refused."""
    requires: Mapping[str, str] = field(default_factory=dict)
    """`gpu` and `driver`: patterns (fnmatch) that the machine must fit. Where it does not, every
    case is INVALID_ENVIRONMENT."""
    cases: tuple[Case, ...]
    expectations: tuple[Expectation, ...] = ()
    rules: tuple[Rule, ...] = ()
    cost: CostPlan | None = None


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
class ProofCheck:
    """One question put to the instrument before a run."""

    name: str
    """host_clock, cuda_events, spin_kernel, gpu_sampler, cpu_sampler, l2_flush."""
    holds: bool | None
    """None where it could not be asked; that neither proves nor refutes."""
    fact: str
    """What was seen, with the number that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What the machine was measured to reach, moments before the run: no data sheet's numbers."""

    flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Precision (bf16, fp16, tf32, fp32) -> FLOP/s of a large matrix product."""
    bytes_per_s: float | None = None
    """Bytes read and written by a large copy."""
    launch_s: float | None = None
    """The cheapest kernel launch from PyTorch, many in a row; None without a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What the instrument showed of itself before the first measurement."""

    at: str
    """ISO 8601, UTC."""
    device: str
    """The GPU's UUID, or `cpu`."""
    checks: tuple[ProofCheck, ...] = ()
    peaks: Peaks = field(default_factory=Peaks)
    wall_s: float = 0.0
    skipped: str = ""
    """Why nothing was asked: the option that said so."""

    @property
    def refuted(self) -> tuple[ProofCheck, ...]:
        """The checks that failed. With one of them nothing may be measured."""
        return tuple(check for check in self.checks if check.holds is False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as NVML describes it."""

    name: str
    uuid: str
    index: int
    memory_bytes: int
    driver: str
    cuda_driver: str
    compute_capability: str
    power_limit_w: float | None = None
    max_sm_clock_hz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Git:
    """Where the code under test stood."""

    commit: str
    branch: str
    dirty_sha256: str = ""
    """Hash of the diff against the commit and of untracked files; empty when clean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where, on what and with what a run was made."""

    captured_at: str
    hostname: str
    os: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    gpu: Gpu | None
    gpu_unavailable: str = ""
    """Why `gpu` is None."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """python, torch, triton, flash-attn, numpy, harness, cuda, cudnn: None where absent."""
    torch_settings: Mapping[str, Scalar] = field(default_factory=dict)
    """As a worker saw them: allow_tf32_matmul, allow_tf32_cudnn, allocator, anomaly_mode,
    deterministic, num_threads, device."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """NSA_*, CUDA_*, TORCH_*, PYTORCH_*, NCCL_*, OMP_* and TRITON_* of the parent."""
    git: Git | None = None
    command: tuple[str, ...] = ()
    data: Mapping[str, str] = field(default_factory=dict)
    """Path of data that a case names -> its size and a hash."""

    @property
    def device_name(self) -> str:
        """The GPU's name, or `cpu`."""
        return self.gpu.name if self.gpu else "cpu"

    @property
    def uncommitted(self) -> bool:
        """Whether the code under test was not all in its commit."""
        return bool(self.git and self.git.dirty_sha256)


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
class Estimate:
    """A number with its 95 % interval over processes."""

    value: float
    low: float | None
    high: float | None
    """None with fewer than two processes: one process cannot say how sure it is."""
    processes: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """All processes of one case, together."""

    case: Case
    outcome: Outcome | None
    """OK if every process was; else the first other outcome; None if no process ran."""
    detail: str = ""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    """By metric name; a metric that cannot be known is absent."""
    lower_bound_s: float | None = None
    """From TIMEOUT or HANG: the step time is at least this."""
    tokens: int | None = None
    """Tokens of one run, also where no process finished one: bounds tokens/s from above."""
    flops: int | None = None
    """Floating-point operations of one run."""
    effective: Mapping[str, Scalar] = field(default_factory=dict)
    floor_s: float | None = None
    """Least time of one run by the machine's measured peaks; None where it is unknown."""
    floor_by: str = ""
    """What that is: compute, bandwidth or launches."""
    notes: tuple[str, ...] = ()
    """What weakens the numbers: not steady, throttled, GPU shared, processes disagree."""
    attested: bool | None = None
    """Whether what the suite states of kernels and operators, and a machine like this one can see,
    was seen to hold in every process; None where it states nothing of the kind. A breach is an
    outcome, PATH_MISMATCH."""
    unattested: str = ""
    """Why it was not seen, where `attested` is False."""
    kernels_invisible: bool = False
    """Whether the suite states kernels and there is no GPU to see them on."""


class Decision(StrEnum):
    GO = "GO"
    CONDITIONAL = "CONDITIONAL"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_status(self) -> int:
        """0 go, 1 no-go, 3 anything a person must still decide."""
        return {Decision.GO: 0, Decision.NO_GO: 1}.get(self, 3)


class Fact(StrEnum):
    """What a finding states; harness.phrases has one sentence for each."""

    STATED = "stated"  # `reason` is the sentence
    NOT_RUN = "not_run"
    RAN = "ran"
    TOO_FEW_PROCESSES = "too_few_processes"  # `count` of `asked`
    ALLOWED = "allowed"  # `outcome`, which the suite allows, and why
    ENDED = "ended"  # `outcome` and its detail
    ATTESTED = "attested"  # the kernels and operators that the suite states were seen
    NOT_ATTESTED = "not_attested"
    KERNELS_INVISIBLE = "kernels_invisible"
    OTHER_DEVICE = "other_device"  # stated for the GPU in `detail`
    NO_GROUP = "no_group"  # of three values of the axis in `detail`
    NO_FIT = "no_fit"
    SINGLE_PROCESSES = "single_processes"  # behind the points of a fit
    NO_METRIC = "no_metric"
    AT_MOST = "at_most"  # a timeout bounds the metric by `bound`
    AT_LEAST = "at_least"
    NO_INTERVAL = "no_interval"
    NOT_FINITE = "not_finite"
    INTERVAL = "interval"  # it decides: it lies on one side
    ACROSS = "across"  # the interval contains a threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact that a rule or a check found, of one case, of several or of the whole."""

    check: str = ""
    """The rule or check, in few words: `ran`, `against the baseline`, `exemption`."""
    decision: Decision
    fact: Fact = Fact.STATED
    subject: str = ""
    """The case, or the group of cases; empty for the whole."""
    cases: tuple[str, ...] = ()
    """Ids of the cases behind it."""
    reason: str = ""
    """As a sentence."""
    counts: bool = True
    """False where the policy excuses it: it is reported, and decides nothing."""
    metric: str = ""
    estimate: Estimate | None = None
    bound: float | None = None
    outcome: Outcome | None = None
    detail: str = ""
    """What the record says beside the outcome, or why something is unknown."""
    count: int = 0
    asked: int = 0
    may_be_go: bool = True
    """Of what is undecided: whether it may turn out to be GO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The answer of one rule, with the findings that it rests on."""

    rule: str
    stated: Rule | None = None
    """None for the rules that every suite has without writing them."""
    decision: Decision
    findings: tuple[Finding, ...] = ()
    """Those that decided."""
    perhaps: tuple[Finding, ...] = ()
    """Undecided ones that may turn out GO, where one GO is enough."""
    judged: int = 0
    """How many cases, or fits over cases, the rule is about."""
    matched: int = 0
    """How many cases the rule matches, with those whose outcome the suite allows."""
    applies: bool = True
    """False where the rule was stated for another GPU, or of kernels where there is no GPU; it then
    turns no verdict."""

    @property
    def evidence(self) -> tuple[str, ...]:
        """Ids of the cases that decided."""
        return tuple(case_id for f in self.findings for case_id in f.cases)

    @property
    def said(self) -> str:
        """The decision, if it is one."""
        return str(self.decision) if self.applies else "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to a suite's question."""

    decision: Decision
    rule: RuleResult | None
    """The one that decided: the worst; None where no stated rule applies."""
    rules: tuple[RuleResult, ...] = ()
    device: str = ""

    @property
    def decided_by(self) -> str:
        applied = [r for r in self.rules if r.applies]
        if self.rule is None:
            return "no applicable rule"
        if self.decision is Decision.GO and len(applied) > 1:
            return f"all {len(applied)} rules"
        return self.rule.rule


def gpu_matches(pattern: str, gpu_name: str) -> bool:
    """Whether a GPU name fits a pattern, ignoring case; `A100` means `*A100*`."""
    pattern, name = pattern.lower(), gpu_name.lower()
    return fnmatchcase(name, pattern) or (not any(c in pattern for c in "*?[") and pattern in name)
