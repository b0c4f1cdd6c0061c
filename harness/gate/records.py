"""The record of a gate: what was compared, the findings that decide, all that a renderer needs.

`encode` of harness.report.series.gate_text writes it as JSON, `decode` reads it. Times are SI;
ratios are candidate over baseline, so above one is slower.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.errors import HarnessError
from harness.machine.drift import Difference
from harness.records import Change, Comparison, Decision, Facts, Finding, KernelChange, Run, worst

Record = TypeVar("Record")


class Mode(StrEnum):
    """What the candidate is compared with."""

    RELATIVE = "relative"  # the baseline commit, in interleaved fresh processes
    BASELINE = "baseline"  # one stored run, with another
    COUNTERS = "counters"  # counters per step, exactly; needs no GPU


class Stage(StrEnum):
    """How far a policy trusts its gate."""

    SHADOW = "shadow"  # recorded
    WARN = "warn"  # shown, blocks nothing
    BLOCK = "block"  # a NO-GO blocks the change


class GateSubject(StrEnum):
    GATE = "gate"  # a change or a tree, by a policy
    COMPARISON = "comparison"  # two runs or commits, without a policy; blocks nothing


class State(StrEnum):
    """Whether a case could be compared."""

    COMPARED = "compared"
    NEW = "new"  # the baseline lacks it or cannot run it
    MISSING = "missing"  # the candidate lacks it
    FAILED = "failed"  # the candidate did not end ok
    SAME = "same code"  # as the baseline's, so not measured, or in no more than one pair
    UNCOMPARED = "uncompared"  # no comparison was possible


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterChange:
    """One counter per step on both sides, the median if steps differ; None if a side lacks it."""

    name: str
    before: int | None
    after: int | None

    def __str__(self) -> str:
        """`host_syncs 0 → 41`."""
        sides = ("unknown" if n is None else f"{n:,}" for n in (self.before, self.after))
        return f"{self.name} {' → '.join(sides)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    case_id: str
    suite: str
    """Path of the suite's file from the root of the repository."""
    state: State
    findings: tuple[Finding, ...] = ()
    """All checks, in their order."""
    overruled: bool = False
    """Whether the last of them decides, whatever the others say."""
    comparison: Comparison | None = None
    """Of times; None if they were not compared."""
    baseline_s: float | None = None
    candidate_s: float | None = None
    """Step time of each side, as that of a case in a report."""
    counters: tuple[CounterChange, ...] = ()
    """Counters that differ, if they were compared."""
    kernels: tuple[KernelChange, ...] = ()
    """Whose machine code differs in the first pair."""
    exemption: Facts = field(default_factory=dict)
    """Until when the comparison does not decide the case, and why."""
    gpu_s: float = 0.0
    """Total duration of the processes of both sides."""
    log: str = ""
    """Log of the failed process, relative to the folder of the gate."""

    @property
    def decisive(self) -> Finding | None:
        """The worst finding that counts: the first, or the last that is GO; None if all are
        excused. The last of all, if it overrules the others."""
        if self.overruled:
            return self.findings[-1]
        found = worst(f for f in self.findings if f.counts)
        return found[-1 if found[0].decision is Decision.GO else 0] if found else None

    @property
    def decision(self) -> Decision:
        """GO, NO_GO or INCONCLUSIVE."""
        return self.decisive.decision if self.decisive else Decision.GO

    @property
    def change(self) -> Change | None:
        return self.comparison.change if self.comparison else None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSide:
    ref: str
    """As given: `origin/main`, `HEAD`, `.` for the working tree, a run."""
    commit: str = ""
    folders: tuple[str, ...] = ()
    """Of the runs, one for each suite; empty if nothing was measured."""
    uncommitted: bool = False
    """The commit plus uncommitted changes was measured."""

    @property
    def beyond(self) -> str:
        """Text to print after the commit."""
        return " with uncommitted changes" if self.uncommitted else ""


def side_of(run: Run) -> GateSide:
    """A stored run as a side."""
    return GateSide(
        ref=run.run_id,
        commit=run.environment.commit,
        folders=(run.folder,),
        uncommitted=run.environment.uncommitted,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateRecord:
    schema: Literal[6] = 6
    mode: Mode
    stage: Stage = Stage.SHADOW
    blocks: bool = False
    """Whether the policy prevents the merge."""
    policy: str = ""
    """Path of the policy."""
    candidate: GateSide
    baseline: GateSide | None = None
    device: str = ""
    """Name of the GPU, or `cpu`."""
    cases: tuple[GateCase, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Of the whole: preflight, self-test, a change of the policy."""
    started_at: str = ""
    ended_at: str = ""
    """ISO 8601, UTC."""
    gpu_s: float = 0.0
    """Total duration of all processes."""
    subject: GateSubject = GateSubject.GATE
    differences: tuple[Difference, ...] = ()
    """Of the environments, in a comparison; the most suspect first."""

    @property
    def decision(self) -> Decision:
        """That of the worst case, or finding of the whole."""
        judged: list[Finding | GateCase] = [*self.findings, *self.cases]
        return next((one.decision for one in worst(judged)), Decision.GO)

    @property
    def undecided_blocks(self) -> bool:
        """Whether what is undecided keeps the change from being merged."""
        return self.blocks and self.decision is not Decision.NO_GO


def decode(text: str | bytes, place: str) -> GateRecord:
    """The verdict that `encode` wrote; a HarnessError that names the `place` if it is not one."""
    try:
        return parse(text, GateRecord)
    except ValueError as error:
        raise HarnessError(
            f"{place} is not a verdict of a gate: {error}", "Write one: harness gate --verdict FILE"
        ) from None


def parse(data: bytes | str, kind: type[Record]) -> Record:
    """A record from JSON, validated: a ValueError if it is not such a record."""
    try:
        return TypeAdapter(kind).validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
