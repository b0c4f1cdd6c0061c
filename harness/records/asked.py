"""What is asked: a suite, its cases, rules and expectations."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.records.environment import gpu_matches
from harness.records.metrics import METRICS, Metric
from harness.records.outcome import Outcome, Scalar
from harness.records.profile import PathRule
from harness.records.program import Program


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
    a silence of many steps is one already; see harness.runner.pace."""
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
