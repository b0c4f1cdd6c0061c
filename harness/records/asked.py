"""What a suite asks: its cases, rules and expectations."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, TypeVar

from harness.records.metrics import METRICS, Metric
from harness.records.outcome import Outcome, Scalar, as_text
from harness.records.profile import PathRule
from harness.records.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How one case is measured: set by the suite, or by one of its workloads."""

    processes: int = 3
    """Fresh processes per case. `{from: 2, to: 6}`: two, and up to six of an open case."""
    most_processes: int = 0
    """That `to`; 0: no more than `processes`."""
    min_samples: int = 5
    """Steady samples that a process takes at least."""
    max_samples: int = 200
    """Steady samples after which a process stops."""
    sample_s: float = 2.0
    """Seconds after which a process stops sampling, once it has min_samples."""
    warmup_s: float = 20.0
    """Longest search for the steady state, in seconds."""
    timeout_s: float = 300.0
    """Longest duration of one process in seconds; then the outcome is timeout."""
    stall_s: float = 30.0
    """Least time without progress in seconds, after which an idle process is a hang."""
    flush_l2: bool = False
    """Empty the GPU's L2 cache before every sample."""
    accuracy: bool = True
    """Compare with the reference before timing."""
    graph: bool = False
    """Time the replay of a CUDA graph of one step."""
    profile: bool = True
    """Profile a few steps after the last sample; a program needs one more process for it."""

    @property
    def most(self) -> int:
        """Processes per case at most."""
        return max(self.processes, self.most_processes)

    @property
    def processes_text(self) -> str:
        """`3`, or `2 to 6`."""
        several = self.most > self.processes
        return f"{self.processes} to {self.most}" if several else str(self.processes)

    def untimed(self, steps: int) -> "MeasureSettings":
        """For one process that takes so many steps: nothing is timed."""
        short = replace(self, processes=1, sample_s=1e-3, warmup_s=0.0)
        return replace(short, min_samples=steps, max_samples=steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One bound point of a suite's sweep."""

    case_id: str
    """Joins runs: `train/nsa/seq_len=512/gc=off`."""
    workload: str
    """Name of the suite's workload entry."""
    factory: str
    """`package.module:function`, imported by the worker only; empty for a program."""
    provider: str
    axes: Mapping[str, Scalar]
    """Every axis, swept or fixed."""
    swept: tuple[str, ...] = ()
    """The axes of the sweep, in declared order."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the worker, including the axes with upper-case names."""
    settings: MeasureSettings = field(default_factory=MeasureSettings)
    allow: Mapping[Outcome, str] = field(default_factory=dict)
    """Outcomes other than OK that do not fail the verdict, each with its reason."""
    nondeterministic: str | None = None
    """Why processes may compute different outputs; empty if they must agree; None in old runs."""
    kernels: PathRule = field(default_factory=PathRule)
    """Required and forbidden kernels; a violation is PATH_MISMATCH."""
    operators: PathRule = field(default_factory=PathRule)
    """The same for PyTorch's operators, on any device."""
    program: Program | None = None
    """Run in place of a factory's workload."""

    def get(self, name: str) -> Scalar | None:
        """An axis, or the pseudo-axes `workload` and `provider`."""
        if name == "workload":
            return self.workload
        if name == "provider":
            return self.provider
        return self.axes.get(name)


class Weight(StrEnum):
    """What a rule, expectation or missing partner may do to the verdict."""

    FAIL = "fail"
    CONDITION = "condition"  # at worst CONDITIONAL
    NOTE = "note"  # stated, but decides nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Selects the cases that meet every criterion."""

    criteria: Mapping[str, tuple[Scalar, ...]] = field(default_factory=dict)
    """Axis (or `workload`, `provider`) -> accepted values."""

    def accepts(self, case: Case) -> bool:
        return all(case.get(name) in values for name, values in self.criteria.items())


def range_of(low: float | None, high: float | None) -> tuple[float, float]:
    """The ends of a range, infinite where it is open."""
    return -math.inf if low is None else low, math.inf if high is None else high


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of the verdict: GO at `go` or better, NO-GO beyond `abort`, else CONDITIONAL. Or an
    expectation: GO from `low` to `high`, else NO-GO."""

    name: str
    metric: str
    """A metric of the harness, or one that a program of the suite reports."""
    go: float | None = None
    """For a ratio rule: how many times better the matched case must be than its partner."""
    low: float | None = None
    high: float | None = None
    abort: float | None = None
    """If absent, everything worse than `go` is NO-GO."""
    abort_early: bool = False
    """Run its cases first; if it is then NO-GO, run no others."""
    match: Match = field(default_factory=Match)
    """The cases to judge; all if absent."""
    quantifier: str = "all"
    """`all`: every case must pass. `any`: the best case decides."""
    axis: str | None = None
    """For scaling_exponent: the axis of the fit."""
    gpu: str = "*"
    """Pattern of the GPUs that the rule applies to; `!A100` is any other GPU."""
    source: str = ""
    """Where an expectation comes from: a report, a data sheet or a runbook, with its date."""
    free: Metric | None = None
    """The definition of `metric`, if only a program of the suite knows it."""
    asks: str = ""
    """The part of the question that the rule answers."""
    against: Match | None = None
    """Makes a ratio rule: the case to compare with, equal in other axes: `{provider: dense}`."""
    missing: Weight = Weight.CONDITION
    """What a pair does to the verdict if the other case has no value."""
    counts: Weight = Weight.FAIL
    """What the rule does to the verdict: `condition` makes it CONDITIONAL at worst."""
    condition: str = ""
    """What a person must keep to if the verdict is CONDITIONAL by this rule: `train in bf16`."""
    over: str = "all"
    """For scaling_exponent: the whole curve, or its last two lengths, as of one that steepens."""
    asked: int = 0
    """Cases, or pairs, of the whole suite, with those that a filter left out; 0 if unknown."""

    @property
    def quantity(self) -> Metric:
        return self.free or METRICS[self.metric]

    @property
    def higher_is_better(self) -> bool:
        return self.against is not None or self.quantity.higher_is_better

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the greatest value that is GO."""
        return range_of(self.low, self.high) if self.go is None else self._to(self.go)

    @property
    def bearable(self) -> tuple[float, float]:
        """The least and the greatest value that is not NO-GO."""
        return self.limits if self.abort is None else self._to(self.abort)

    def _to(self, worst: float) -> tuple[float, float]:
        return range_of(worst, None) if self.higher_is_better else range_of(None, worst)

    def needs(self, cases: Iterable[Case]) -> list[Case]:
        """The cases that decide the rule: the matched ones, or both sides of its pairs."""
        known = list(cases)
        if self.against is None:
            return [case for case in known if self.match.accepts(case)]
        return [*{c.case_id: c for pair in self.pairs(known) for c in pair}.values()]

    def pairs(self, cases: Iterable[Case]) -> list[tuple[Case, Case]]:
        """The matched cases with their partners: equal in all axes that `against` does not name."""
        if self.against is None:
            return []
        return partners(cases, self.match, self.against, *self.against.criteria)


class OfCase(Protocol):
    """What was measured of a case, such as its summary."""

    @property
    def case(self) -> Case: ...

    @property
    def card(self) -> str: ...


_Paired = TypeVar("_Paired", bound=Case | OfCase)


def pairs(cases: Iterable[_Paired], *free: str, one_gpu: bool = False) -> list[list[_Paired]]:
    """Groups of cases that are equal but for what is free: axes, `provider`, or `workload`. Cases
    of several workloads are equal in the axes that all of them have. `one_gpu`: that were also
    measured on one, since a group is compared."""
    known = [(of, of if isinstance(of, Case) else of.case) for of in cases]
    have = Counter(name for _, case in known for name in case.axes)
    lacking = {name for name, n in have.items() if n < len(known)} if "workload" in free else set()
    groups: dict[object, list[_Paired]] = {}
    for of, case in known:
        bound = {"workload": case.workload, "provider": case.provider, **case.axes}
        equal = frozenset((n, x) for n, x in bound.items() if n not in free and n not in lacking)
        card = of.card if one_gpu and not isinstance(of, Case) else ""
        groups.setdefault((card, equal), []).append(of)
    return [*groups.values()]


def partners(
    cases: Iterable[Case], ours: Match, theirs: Match, *free: str
) -> list[tuple[Case, Case]]:
    """Every two cases that are equal but for what is free, the first of our side and the second of
    theirs. They are equal in all axes that both have, also in those that a third workload lacks."""
    both = [c for c in cases if ours.accepts(c) or theirs.accepts(c)]
    group = {c.case_id: members for members in pairs(both, *free) for c in members}
    return [
        (a, b)
        for a in filter(ours.accepts, both)
        for b in filter(theirs.accepts, group[a.case_id])
        if a is not b and len(pairs((a, b), *free)) == 1
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPlan:
    """The training run for which the report extrapolates time and cost."""

    steps: int
    match: Match = field(default_factory=Match)
    """The cases to extrapolate from; all if absent."""
    usd_per_gpu_hour: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A number that somebody saw, and what was expected of it."""

    metric: str
    expected: float
    seen: float
    where: Match = field(default_factory=Match)
    """The configuration in which it was seen; effects are taken there."""
    then: Match | None = None
    """Cases with the settings of that day: whether they reproduce what was seen."""
    gpu: str = "*"
    """The GPU on which it was seen."""
    source: str

    @property
    def factor(self) -> float:
        """How many times worse than expected: above one."""
        ratio = self.expected / self.seen
        return ratio if METRICS[self.metric].higher_is_better else 1 / ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """Something that may explain the gap: pairs of cases without and with it, or a control."""

    name: str
    within: Match = field(default_factory=Match)
    """Both sides of each pair."""
    without: Match = field(default_factory=Match)
    with_: Match = field(default_factory=Match)
    """Pairs are equal in every axis that neither side names."""
    then: str = "unknown"
    """Whether it was on in the run of the gap; what was `off` cannot be the cause."""
    control: Match | None = None
    """Cases without the subject: if they do as well as was expected, the rest is ruled out."""
    remedy: str = ""
    """What removes it, such as NSA_PREFILL_BATCHED=1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What else was seen in the run of the gap, to compare with each suspect's case."""

    metric: str
    """A metric of a case, or gpu_memory_bytes, as nvidia-smi prints it."""
    seen: float
    at: Match = field(default_factory=Match)
    """Values of axes that the suspect's case takes on for it."""
    over: Match = field(default_factory=Match)
    """If a ratio was seen: that with the values of `at` over that with these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspects:
    """The diagnosis of a gap."""

    gap: Gap
    tested: tuple[Suspect, ...]
    observed: tuple[Observation, ...] = ()
    """In the run of the gap, from its source."""
    not_tested: tuple[str, ...] = ()
    """What the suite does not vary, so that the report says so."""
    asks: str = ""
    """The part of the question that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """A suite file, validated and expanded."""

    name: str
    """File name without `.yaml`."""
    title: str
    subject: str
    """Goes into the report's file name."""
    question: str
    """What the suite answers."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """The parts of the question, by the name that rules ask; empty if it has none."""
    decides_for: str = ""
    """Pattern of the GPU that the question is about; a run on another one is never GO."""
    deciding: tuple[str, ...] = ()
    """The parts of the question that decide; all if empty."""
    peers: tuple[str, ...] = ()
    """Providers that are not the subject: their failure leaves a gap in a comparison."""
    left_out: int = 0
    """Cases of the suite that the run lacks, because a filter left them out."""
    labels: tuple[tuple[str, Match], ...] = ()
    """Short names for the cases that each selects."""
    axis_names: Mapping[str, str] = field(default_factory=dict)
    """Short names of axes for people."""
    provider_names: Mapping[str, str] = field(default_factory=dict)
    """Provider, or `workload/provider` -> its name for people."""
    path: str
    text: str
    """The file as read, so that a stored run can be repeated exactly."""
    sha256: str
    device: str = "any"
    """`cuda` if the suite needs a GPU; a run without one is refused."""
    requires: Mapping[str, Scalar] = field(default_factory=dict)
    """`gpu` or `packages.flash-attn` -> what the machine must have before the first case."""
    wants: Mapping[str, Scalar] = field(default_factory=dict)
    """Likewise, but without it the suite goes on, and the report says so."""
    cases: tuple[Case, ...]
    expectations: tuple[Rule, ...] = ()
    rules: tuple[Rule, ...] = ()
    cost: CostPlan | None = None
    suspects: Suspects | None = None

    def __post_init__(self) -> None:
        if len({case.case_id for case in self.cases}) < len(self.cases):
            raise ValueError("two cases have the same id")

    def axis(self, name: str) -> str:
        """An axis as people read it."""
        return self.axis_names.get(name, name)

    def provider(self, workload: str, name: str) -> str:
        """A provider as people read it."""
        names = self.provider_names
        return names.get(f"{workload}/{name}", names.get(name, name))

    def label(self, case: Case) -> tuple[str, ...]:
        """Parts of a case's name: labels that fit, the first of each axis, and other swept axes.
        A label may name several parts, `NSA eager, batched`."""
        said: list[str] = []
        named: set[str] = set()
        for name, match in self.labels:
            axes = match.criteria.keys() & case.axes.keys()
            if match.accepts(case) and not named & axes:
                said += name.split(", ")
                named |= axes
        if not said:
            return ()
        others = (a for a in case.swept if a not in named)
        return (*said, *(f"{self.axis(a)}={as_text(case.axes[a])}" for a in others))
