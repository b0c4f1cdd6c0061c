"""What follows from measurements: estimates, summaries, findings and verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from harness.records.asked import Case, Rule
from harness.records.outcome import Outcome, Scalar


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
    """What a finding states; harness.report.phrases has one sentence for each."""

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
