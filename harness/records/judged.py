"""What is derived from measurements: estimates, summaries, findings and verdicts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from harness.records.asked import Case, Rule
from harness.records.metrics import SPEEDS
from harness.records.outcome import Outcome, Scalar, Stop

Facts = Mapping[str, Any]
"""Numbers and names that fill the clauses of harness/report/templates."""
WORKS = 0.8
"""Share of a step from which the GPU works for most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number and between what it lies."""

    value: float
    low: float | None = None
    high: float | None = None
    """None with one process, or with too few pairs."""
    n: int
    """Fresh processes behind it; of a ratio, those of each side."""
    each: tuple[float, ...] = ()
    """The value of each process, in order, or the least and the greatest; empty if unknown."""
    usual: float | None = None
    """Standard deviation of a process of a case of its kind, as a share of the value (of a drift,
    of the speed); None if the run has too few such cases."""

    @property
    def ends(self) -> tuple[float, float] | None:
        """The least and the greatest value of the processes."""
        return (min(self.each), max(self.each)) if self.each else None

    @property
    def both(self) -> tuple[float, ...]:
        """The values of two processes that differ: people read these, not an interval."""
        two = self.n == len(self.each) == 2 and self.each[0] != self.each[1]
        return self.each if two else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Interval):
    """A metric of one case, with its 95 % interval of the typical process."""

    samples: int
    freedom: float | None = None
    """Degrees of freedom of the interval if they are not `n` - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio(Interval):
    """One side over the other; of several pairs of cases, their geometric mean."""

    p: float | None = None
    """That it is above one by chance; None if that was not tested."""

    @property
    def differs(self) -> bool:
        """Whether the whole interval is on one side of one."""
        low, high = self.low, self.high
        return low is not None and high is not None and not low <= 1 <= high

    @property
    def inverse(self) -> "Ratio":
        """The other side over this one, without `p`."""
        low, high = (end and 1 / end for end in (self.high, self.low))
        each = tuple(1 / value for value in self.each)
        return replace(self, value=1 / self.value, low=low, high=high, each=each, p=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseSummary:
    """All processes of one case, together."""

    case: Case
    outcome: Outcome | None
    """OK if every process was; otherwise the first other outcome; None if no process ran."""
    detail: str = ""
    """What the process with that outcome said."""
    facts: Facts = field(default_factory=dict)
    """Why the outcome is not that of a process: too few samples, an impossible speed."""
    metrics: Mapping[str, Estimate] = field(default_factory=dict)
    """By metric name; unknown metrics are absent."""
    lower_bound_s: float | None = None
    """From TIMEOUT or HANG: the step time is at least this."""
    working: bool = False
    """Whether it was seen to work at its TIMEOUT: it is slow or busy, not stuck."""
    untimed_s: float | None = None
    """From a TIMEOUT before a step was timed: the process's time over its steps, with start-up."""
    tokens: int | None = None
    """Tokens of one step, also if no step finished: they bound tokens/s from above."""
    flops: int | None = None
    """Floating-point operations of one step."""
    effective: Mapping[str, Scalar] = field(default_factory=dict)
    roofline_by: str = ""
    """The term that sets the roofline bound: compute, bandwidth or launches."""
    withdrawn: str = ""
    """An axis without effect that its work follows: tokens and FLOPs are left out."""
    notes: tuple[Facts, ...] = ()
    """What weakens the numbers: not steady, throttled, GPU shared, processes disagree."""
    apart: Mapping[str, Estimate] = field(default_factory=dict)
    """Rates of which the processes differ by more than 2x, so that no process is typical."""
    attested: bool | None = None
    """Whether the kernels and operators of every process follow the rules; None without rules."""
    unattested: str = ""
    """Why `attested` is False."""
    differing: tuple[int, ...] = ()
    """Processes whose first output is not the one of the first process."""
    stop: Stop | None = None
    """Why the run ended before the case; None if it ran, or if a resumed run will run it."""
    kernels_invisible: bool = False
    """Whether the suite has rules for kernels but there is no GPU."""
    card: str = ""
    """Of its measurements, see Measurement: cases of two cards are not compared."""

    def known(self, metric: str) -> Estimate | None:
        """A metric, also a rate of which the processes are apart."""
        return self.metrics.get(metric) or self.apart.get(metric)

    @property
    def busy(self) -> float:
        """Share of a step in which the GPU works, by the profile; 0 if that is not known."""
        step, kernels = self.known("step_s"), self.known("kernel_s")
        return min(1.0, kernels.value / step.value) if step and kernels else 0.0

    @property
    def waits(self) -> bool:
        """Whether the GPU is known to work for less than WORKS of a step."""
        return 0 < self.busy < WORKS

    def behind(self, metric: str) -> float:
        """The share of the step that the GPU works, if the host sets this speed; else 0."""
        return self.busy if metric in SPEEDS and self.waits else 0.0

    @property
    def spread(self) -> float:
        """The slowest process over the fastest; 1 if that is unknown."""
        step = self.known("step_s")
        return step.ends[1] / step.ends[0] if step and step.ends else 1.0


class Decision(StrEnum):
    GO = "GO"
    CONDITIONAL = "CONDITIONAL"
    NO_GO = "NO-GO"
    INCONCLUSIVE = "INCONCLUSIVE"

    @property
    def exit_status(self) -> int:
        """0 GO, 1 NO-GO, 3 otherwise: a person must decide."""
        return {Decision.GO: 0, Decision.NO_GO: 1}.get(self, 3)


WORST_FIRST = (Decision.NO_GO, Decision.INCONCLUSIVE, Decision.CONDITIONAL, Decision.GO)
"""The order in which findings decide and cases are shown."""


class Judged(Protocol):
    """A finding, a rule or a case."""

    @property
    def decision(self) -> Decision: ...


AnyJudged = TypeVar("AnyJudged", bound=Judged)


def worst_first(judged: Iterable[AnyJudged]) -> list[AnyJudged]:
    """By their decisions; equal ones stay in their order."""
    return sorted(judged, key=lambda one: WORST_FIRST.index(one.decision))


def worst(judged: Iterable[AnyJudged], *, best: bool = False) -> list[AnyJudged]:
    """All that have the worst decision among them, or the best, in their order."""
    ranked = worst_first(judged)
    end = -1 if best else 0
    return [one for one in ranked if one.decision is ranked[end].decision]


class Fact(StrEnum):
    """What a finding states; harness.report.verdict_text makes a sentence of each."""

    STATED = "stated"  # `facts`
    NOT_RUN = "not_run"  # `detail` is why, if the run ended early
    RAN = "ran"
    TOO_FEW_PROCESSES = "too_few_processes"  # `count` of `asked`
    NOT_DETERMINISTIC = "not_deterministic"  # the outputs of `count` of `asked` processes differ
    ALLOWED = "allowed"  # `outcome` is allowed by the suite; `detail` is why
    ENDED = "ended"  # `outcome` and its detail
    SLOW = "slow"  # slow or busy until its time limit; a step takes over `bound` seconds, if known
    FASTEST = "fastest"  # the estimate of the fastest case; those in `cases` are not told apart
    ATTESTED = "attested"  # the required kernels and operators ran
    NOT_ATTESTED = "not_attested"
    KERNELS_INVISIBLE = "kernels_invisible"
    OTHER_DEVICE = "other_device"  # the run's device is in `detail`
    NO_GROUP = "no_group"  # with three values of the axis in `detail`
    NO_FIT = "no_fit"
    NO_METRIC = "no_metric"  # `detail` is why, if known
    AT_MOST = "at_most"  # a timeout bounds the metric by `bound`
    AT_LEAST = "at_least"
    DECIDED = "decided"  # all that the value can be is on one side of the thresholds
    OPEN = "open"  # processes on both sides of a threshold, or a value that is not finite
    NO_PARTNER = "no_partner"  # the case in `partner` has no value; `detail` is why
    LEFT_OUT = "left_out"  # the run lacks all of its cases; `detail` is why, if it ended early


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact that a rule or check found about one case, several cases or the whole run."""

    check: str = ""
    """Short name of the rule or check: `ran`, `against the baseline`."""
    decision: Decision
    fact: Fact = Fact.STATED
    subject: str = ""
    """The case or group of cases; empty for the whole run."""
    cases: tuple[str, ...] = ()
    """Ids of the cases behind it."""
    counts: bool = True
    """False if the policy excuses it: it is reported but decides nothing."""
    metric: str = ""
    partner: str = ""
    """The case of the other side, if `estimate` is how many times better the subject is."""
    estimate: Interval | None = None
    busy: float = 0.0
    """Of a speed that the host sets: the share of the step that the GPU works."""
    beside: Ratio | None = None
    """Of a pair of such speeds: the ratio by the kernels' time; by time, if the kernels decide."""
    low: float | None = None
    high: float | None = None
    """Of the expected range."""
    bound: float | None = None
    outcome: Outcome | None = None
    detail: str = ""
    """The detail of the outcome, or why something is unknown."""
    facts: Facts = field(default_factory=dict, hash=False)
    """What else it states, for the words of harness.report.text."""
    count: int = 0
    asked: int = 0
    likely: Decision | None = None
    """If it is not decided: what one process says, or several that are near the limit."""
    may_be_go: bool = True
    """If undecided: whether it may turn out to be GO."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """The decision of one rule, with the findings behind it."""

    rule: str
    stated: Rule | None = None
    """None for built-in rules."""
    decision: Decision
    findings: tuple[Finding, ...] = ()
    """The findings that decided."""
    perhaps: tuple[Finding, ...] = ()
    """Undecided findings that may turn out to be GO, if one GO is enough."""
    judged: int = 0
    """Number of cases, or fits over cases, that were judged."""
    matched: int = 0
    """Number of matched cases, including those with an allowed outcome."""
    applies: bool = True
    """False if the rule is for another GPU, for cases left out, or for kernels without a GPU."""
    counts: bool = True
    """False if the suite only notes the answer."""
    asks: str = ""
    """The part of the suite's question that it answers."""
    beside: bool = False
    """Whether its part of the question does not decide."""

    @property
    def decides(self) -> bool:
        return self.applies and self.counts and not self.beside

    @property
    def slow(self) -> tuple[Finding, ...]:
        """Cases that count as measured, although they did not end within their time limit."""
        return tuple(f for f in self.findings if f.fact is Fact.SLOW)

    @property
    def evidence(self) -> tuple[str, ...]:
        """Ids of the cases that decided."""
        return tuple(case_id for f in self.findings for case_id in f.cases)

    @property
    def said(self) -> str:
        """The decision, or that the rule was not asked."""
        if self.slow:
            return "measured"
        if self.applies:
            return str(self.decision) if self.counts else f"{self.decision} (note)"
        fact = self.findings[0].fact if self.findings else None
        return "not asked on this GPU" if fact is Fact.OTHER_DEVICE else "not asked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer to a suite's question."""

    decision: Decision
    rule: RuleResult | None
    """The worst rule, which decided; None if no stated rule applies."""
    rules: tuple[RuleResult, ...] = ()
    device: str = ""
    not_measured: str = ""
    """The GPU that the question is about, if the run used another one."""
    here: Decision | None = None
    """What the rules that were asked say about the GPU of the run."""
    partial: str = ""
    """`18 of 33 cases`, if the run lacks the others."""

    @property
    def asked(self) -> bool:
        """Whether a rule of the suite that counts, not only one that all have, was asked."""
        stated = (r for r in self.rules if r.applies and not r.beside and (r.stated or r.asks))
        return any(r.counts for r in stated)

    @property
    def decided_by(self) -> str:
        if self.rule is None:
            return "no applicable rule"
        decided = sum(r.decides for r in self.rules)
        if self.rule.decision is Decision.GO and decided > 1:
            return f"all {decided} rules"
        return self.rule.rule

    @property
    def said(self) -> str:
        """`CONDITIONAL`, `measured`, or `A100 not measured; NVIDIA H200: CONDITIONAL`."""
        text = str(self.decision if self.here is None else self.here)
        if not self.asked and (self.rule is None or text == Decision.GO):
            text = "measured"
            if self.rule and (late := len(self.rule.slow)):
                ended = self.rule.judged - late
                text = f"measured: {ended} of {self.rule.judged} cases end in time"
        if self.not_measured:
            text = f"{self.not_measured} not measured; {self.device}: {text}"
        return f"{text} (partial: {self.partial})" if self.partial else text
