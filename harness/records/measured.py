"""What worker processes measured of the cases of one run.

Suite -> Case -> Measurement -> Run -> CaseSummary -> Verdict. All are frozen. Every quantity is in
an SI base unit, named by its suffix (_s, _bytes, _w, _hz); reports alone use other units.

A run of another schema is refused. A new field needs a default and no new schema: it is absent
from records that are stored already. The runs in reports/runs were given the names of schema 4.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from harness.records.asked import Suite
from harness.records.environment import Environment, SelfTest
from harness.records.outcome import Clock, Evidence, Outcome, Scalar, Stop, require_inside
from harness.records.profile import Breakdown, Counters, Profile
from harness.records.program import Rank

SCHEMA_VERSION = 4
MAX_DETAIL_BYTES = 4096
_DETAIL_TAIL_BYTES = 512


def bounded(text: str) -> str:
    """Text from code under test in at most MAX_DETAIL_BYTES of UTF-8, without its middle."""
    data = text.encode("utf-8", "replace")  # a lone surrogate becomes "?"
    if len(data) <= MAX_DETAIL_BYTES:
        return data.decode()
    head, tail = data[: MAX_DETAIL_BYTES - 2 * _DETAIL_TAIL_BYTES], data[-_DETAIL_TAIL_BYTES:]
    left_out = f" [... {len(data) - len(head) - len(tail)} bytes ...] "
    return head.decode(errors="ignore") + left_out + tail.decode(errors="ignore")


MAX_COUNT = 2**63 - 1
"""Of tokens, FLOPs and bytes of one step: what other tools can read."""
MIN_STEP_S, MAX_TIME_S = 1e-12, 1e9
"""Shortest possible step; longest time of anything. Rates of steps between them are finite."""


def require_counts(record: object, *names: str) -> None:
    """Raise ValueError if a count is negative or so large that no statistic can use it."""
    for name in names:
        count = getattr(record, name)
        if count is not None and not 0 <= count <= MAX_COUNT:
            shown = f"{count:,}" if abs(count) < 1e30 else "beyond 1e30"
            raise ValueError(f"{name} is {shown}; it must be between 0 and 2**63 - 1")


def require_times(record: object, *names: str, least: float) -> None:
    """Raise ValueError if a time, or one of several, is not from `least` to MAX_TIME_S."""
    limits = f"between {least:g} and {MAX_TIME_S:g} s"
    for name in names:
        given = getattr(record, name)
        for time_s in given if isinstance(given, tuple) else (given,):
            if time_s is not None and not least <= time_s <= MAX_TIME_S:  # NaN is not
                raise ValueError(f"{name} contains {time_s:g} s; a time must be {limits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    name: str
    error: float
    """Largest absolute difference from the reference, over the reference's largest value."""
    bound: float
    """Largest allowed error: that of the eager definition at the same precision, plus rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """The comparison with the reference, before timing."""

    tensors: tuple[TensorError, ...] = ()
    skipped: str = ""
    """Why nothing was compared; empty if something was."""
    sampled: tuple[int, int] | None = None
    """Rows compared, of rows in all; None if these are the same, and in earlier records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDigest:
    """An output in a few numbers; equal outputs have equal digests."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    """Root of the sum of squares, in float64."""
    projection: float
    """Sum weighted by cos(i), with i from 0: it changes if elements change places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a worker, in seconds since the parent launched it."""

    name: str  # start, setup, accuracy, warmup, sampling, repeat, profile
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Telemetry:
    """Readings of the parent's probes during the lifetime of a worker."""

    t_s: tuple[float, ...] = ()
    """Time of each reading, in seconds since the parent launched the worker."""
    channels: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Readings by channel, aligned with t_s; None for a failed reading. Channels: gpu_utilisation
    (0..1), gpu_memory_bytes, gpu_power_w, gpu_energy_j, gpu_sm_clock_hz, gpu_temperature_c,
    gpu_throttle_reasons (NVML bit mask), gpu_foreign_processes (count), cpu_utilisation (cores),
    rss_bytes. The GPU of rank 1 has gpu1_utilisation and so on."""
    unavailable: Mapping[str, str] = field(default_factory=dict)
    """Channel -> why it could not be read."""


def of_rank(channel: str, rank: int) -> str:
    """A channel's name for the GPU of a rank; those of rank 0 have no number."""
    return channel.replace("gpu_", f"gpu{rank}_", 1) if rank else channel


@dataclass(frozen=True, slots=True, kw_only=True)
class OverSteps:
    """What a process reported step by step: an entry a step, or a line of several steps."""

    step: tuple[int, ...]
    """The program's own number of each step; a workload's are counted from 1."""
    step_s: tuple[float, ...]
    """Time of the step, or the mean of those of the line."""
    end_s: tuple[float, ...]
    """Its end, in seconds since the launch, as the times of the telemetry."""
    values: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """Name (loss, grad_norm, memory_bytes) -> value of each step; None without a finite one."""
    not_finite: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> numbers of the steps at which it was NaN or infinite."""

    def __post_init__(self) -> None:
        if {len(v) for v in (self.step_s, self.end_s, *self.values.values())} - {len(self.step)}:
            raise ValueError("a series over steps needs one value a step")

    @classmethod
    def joined(cls, parts: Sequence["OverSteps"]) -> "OverSteps | None":
        """Parts that follow each other, as one; None if no step reported a value."""
        names = dict.fromkeys(name for part in parts for name in part.values)
        bad = dict.fromkeys(name for part in parts for name in part.not_finite)
        if not names and not bad:
            return None

        def row(name: str, part: "OverSteps") -> Sequence[float | None]:
            return part.values.get(name, (None,) * len(part.step))

        return cls(
            step=tuple(n for part in parts for n in part.step),
            step_s=tuple(s for part in parts for s in part.step_s),
            end_s=tuple(s for part in parts for s in part.end_s),
            values={n: tuple(v for part in parts for v in row(n, part)) for n in names},
            not_finite={n: tuple(s for p in parts for s in p.not_finite.get(n, ())) for n in bad},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one worker process measured of one case, with all samples."""

    case_id: str
    process: int
    """Number of the process within its case, from 0."""
    outcome: Outcome
    detail: str = ""
    """Why the outcome is not OK, by the worker or the watchdog; see `bounded`."""
    clock: Clock | None = None
    warmup_s: tuple[float, ...] = ()
    """Times of the steps before the steady state, in order."""
    samples_s: tuple[float, ...] = ()
    """Time of each steady step on `clock`, in order."""
    host_samples_s: tuple[float, ...] = ()
    """The same steps on the host's clock, synchronised at both ends."""
    samples_at_s: tuple[float, ...] = ()
    """Start of each sample on the host's clock, in seconds since the launch; may be absent."""
    discarded: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Reason (throttled, shared, clock_dropped) -> indices of samples that enter no estimate."""
    steady: bool | None = None
    """Whether a steady state was found; None if none was looked for."""
    until_sampled: bool | None = None
    """Whether a workload stepped until it had enough samples; None of a program, or unknown."""
    tokens: int | None = None
    """Tokens that one step processes; None if the workload has no tokens."""
    flops: int | None = None
    """Floating-point operations that one step needs mathematically."""
    bytes: int | None = None
    """Bytes that a perfect implementation of one step moves."""
    lower_bound_s: float | None = None
    """For TIMEOUT and HANG: one step takes at least this long."""
    peak_memory_bytes: int | None = None
    """Largest allocation on the device during sampling; None without a device."""
    accuracy: Accuracy | None = None
    effective: Mapping[str, Scalar] = field(default_factory=dict)
    """The configuration that the workload observed: shapes, dtypes, routes."""
    flags_read: Mapping[str, bool] = field(default_factory=dict)
    """Variable that is a flag, or option that carries an axis -> whether it was read, if known."""
    output_digest: tuple[TensorDigest, ...] = ()
    """Of the result of the first step; empty if that has no finite numbers."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Package -> the file it was loaded from; of a program: `program` -> its folder."""
    counters: Counters | None = None
    profile: Profile | None = None
    readings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Values that a program reported by metric, without step times, in order."""
    over_steps: OverSteps | None = None
    """Of a training run, also of one that hung or crashed; None if no step reported a value."""
    telemetry: Telemetry | None = None
    ranks: tuple[Rank, ...] = ()
    """Of a program with several ranks; its samples are those of rank 0."""
    phases: tuple[Phase, ...] = ()
    started_at: str = ""
    """ISO 8601, UTC."""
    wall_s: float = 0.0
    """Lifetime of the process, launch to exit."""
    log: str = ""
    """Path of the process's output, relative to the run folder."""
    evidence: Evidence | None = None
    """If the outcome is not OK and something was kept."""
    card: str = ""
    """Environment.card of the one it was taken in; empty if none was recorded."""
    asked_by: str = ""
    """The rule or suspect that was open without it; empty in the first pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", bounded(self.detail))
        if (self.outcome is Outcome.OK) != bool(self.samples_s):
            raise ValueError(
                f"{self.case_id}: outcome {self.outcome} with {len(self.samples_s)} samples; "
                "only ok has samples"
            )
        require_counts(self, "tokens", "flops", "bytes", "peak_memory_bytes")
        require_times(self, "samples_s", "lower_bound_s", least=MIN_STEP_S)
        require_times(self, "warmup_s", "host_samples_s", "wall_s", least=0.0)
        require_times(self, "samples_at_s", least=-MAX_TIME_S)
        require_inside(self.log)

    @property
    def kept_s(self) -> tuple[float, ...]:
        """The samples that were not discarded."""
        if not self.discarded:
            return self.samples_s
        bad = {i for indices in self.discarded.values() for i in indices}
        return tuple(s for i, s in enumerate(self.samples_s) if i not in bad)

    @property
    def step_s(self) -> float:
        """The time of a step: the median of the samples that were not discarded."""
        return statistics.median(self.kept_s)

    @property
    def breakdown(self) -> Breakdown | None:
        """Where the time of a step goes; the step time is by the clock of the samples."""
        recorded = self.profile.breakdown if self.profile else None
        if recorded is None or not self.kept_s:
            return recorded
        return replace(recorded, step_s=self.step_s)

    def is_evidence(self, min_samples: int) -> bool:
        """Whether the process counts: it kept min_samples, or more than half of its samples."""
        kept = len(self.kept_s)
        return kept > 0 and (kept >= min_samples or 2 * kept > len(self.samples_s))

    def without_samples(self, outcome: Outcome, detail: str) -> "Measurement":
        """The process with another outcome than OK, for its samples are not of the case."""
        bare = replace(self, outcome=outcome, samples_s=(), host_samples_s=(), samples_at_s=())
        return replace(bare, detail=detail)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a suite at one commit, on one GPU or on several alike ones."""

    run_id: str
    folder: str
    suite: Suite
    environment: Environment
    measurements: tuple[Measurement, ...] = ()
    started_at: str = ""
    ended_at: str = ""
    """Empty if the run is unfinished: in progress, interrupted or crashed."""
    elapsed_s: float | None = None
    """From start to end by the monotonic clock; None if the run was resumed."""
    notes: tuple[str, ...] = ()
    """What a reader must know about the record: resumed, last line cut short."""
    self_tests: tuple[SelfTest, ...] = ()
    """The self-test, and one more for each time the run was resumed."""
    wall_s: float | None = None
    """From the start of the command to its last measurement; None if unfinished or resumed."""
    stopped: Stop | None = None
    """Why it ended before all of its processes."""
    judged_by: str = ""
    """The suite file whose rules judge it here; empty for its own. It is not stored."""
    environments: tuple[Environment, ...] = ()
    """Of each GPU, if `--executor` measured the run; `environment` is then all of them in one."""

    @property
    def self_test(self) -> SelfTest | None:
        """The last self-test; None without one."""
        return self.self_tests[-1] if self.self_tests else None

    def self_test_of(self, card: str) -> SelfTest | None:
        """That of the GPU, or without one the last of all."""
        return next((t for t in self.self_tests[::-1] if card and t.device == card), self.self_test)

    def of(self, case_id: str) -> tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if m.case_id == case_id)
