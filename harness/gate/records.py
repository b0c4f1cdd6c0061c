"""What a merge gate says: frozen, plain and complete, so that it can be drawn without running.

GateVerdict is the only thing a renderer (JUnit, step summary, annotations, comment) needs. It
goes to a file as JSON with `encode`, and comes back with `decode`. Times are SI, ratios are
candidate over baseline: above one is slower.

Schema history
    1  first schema.
    2  a case holds its comparison, whose numbers were fields of the case; the sides are `baseline`
       and `candidate`, which were `base` and `head`.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from harness.errors import HarnessError
from harness.gate import files
from harness.machine.drift import Difference
from harness.records import Change, Comparison, Decision, Finding

SCHEMA_VERSION = 2
UNCOMMITTED = " with uncommitted changes"
"""Follows a commit that is not the whole of what was measured."""


class Mode(StrEnum):
    """What the candidate is compared with."""

    ABSOLUTE = "absolute"  # the policy's floors and ceilings alone
    RELATIVE = "relative"  # the baseline commit, in fresh processes between those of the candidate
    BASELINE = "baseline"  # a stored baseline of the same GPU
    COUNTERS = "counters"  # counters per step, exactly; needs no GPU


class Stage(StrEnum):
    """How far a policy trusts its gate."""

    SHADOW = "shadow"  # measured and recorded, shown to those who look
    WARN = "warn"  # shown to everybody, blocks nobody
    BLOCK = "block"  # a NO-GO blocks the change


class VerdictSubject(StrEnum):
    """What a verdict is on."""

    GATE = "gate"  # a change or a tree, by a policy
    RUN = "run"  # a stored run, by its suite; mode, stage and blocks mean nothing
    COMPARISON = "comparison"  # two runs or commits, without a policy; blocks nothing


class State(StrEnum):
    """What became of a case between the two sides."""

    COMPARED = "compared"
    NEW = "new"  # nothing to compare with; absolute rules only
    MISSING = "missing"  # the baseline has it, the candidate does not
    FAILED = "failed"  # the candidate did not end ok
    UNCOMPARED = "uncompared"  # the other side has no answer, or none was asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterChange:
    """One counter per step, on both sides. None where a side does not have it."""

    name: str
    before: int | None
    after: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GateCase:
    """The gate's answer for one case."""

    case_id: str
    suite: str
    """Path of the suite's file, from the root of the repository."""
    decision: Decision
    """GO, NO_GO or INCONCLUSIVE; a gate says CONDITIONAL of nothing."""
    reason: str
    """The finding that decided, as one sentence."""
    state: State
    findings: tuple[Finding, ...] = ()
    """Every check that was made, in the order in which they were made."""
    comparison: Comparison | None = None
    """Of times; None where they were not compared."""
    baseline_s: float | None = None
    candidate_s: float | None = None
    """Step time of either side, the median over processes of their medians."""
    counters: tuple[CounterChange, ...] = ()
    """Those that differ, where counters were compared."""
    exemption: str = ""
    """Reason and expiry date, where the policy exempts the case."""
    unexpected_pass: bool = False
    """The policy expects it to fail, and it did not."""
    gpu_s: float = 0.0
    """How long both sides' processes of this case lived."""
    log: str = ""
    """The log of the process that failed, from the folder the gate ran in."""

    @property
    def change(self) -> Change | None:
        return self.comparison.change if self.comparison else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A case that was not measured because no changed file concerns its suite."""

    case_id: str
    suite: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSide:
    """The baseline or the candidate: a commit, the working tree or a stored baseline."""

    ref: str
    """As it was asked for: `origin/main`, `HEAD`, `.` for the working tree, a path."""
    commit: str = ""
    run_id: str = ""
    run_folder: str = ""
    """Where its measurements are stored; empty where none were made."""
    uncommitted: bool = False
    """What was measured is the commit and changes that are in none."""

    @property
    def beyond(self) -> str:
        """What the commit is to be followed by, so that it names what was measured."""
        return UNCOMMITTED if self.uncommitted else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """The answer of a gate, with all that it rests on."""

    schema: int = SCHEMA_VERSION
    decision: Decision
    reason: str
    """One sentence: what decided, or what was found to hold."""
    mode: Mode
    stage: Stage
    blocks: bool
    """Whether, by its policy, this keeps the change from being merged."""
    policy: str
    """Path of the policy file; of the suite's where a run is judged by that."""
    candidate: GateSide
    baseline: GateSide | None = None
    device: str = ""
    """Name of the GPU, or `cpu`."""
    device_id: str = ""
    """UUID of the GPU, or a name for the CPU that is as particular."""
    cases: tuple[GateCase, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    findings: tuple[Finding, ...] = ()
    """Of the whole: preflight, expired exemptions, a change of the policy."""
    calibration: str = ""
    """Noise class and date of the calibration in use; empty without one."""
    started_at: str = ""
    ended_at: str = ""
    """ISO 8601, UTC."""
    gpu_s: float = 0.0
    """How long all processes of the gate lived: what it cost."""
    remedies: tuple[str, ...] = ()
    """Commands that would settle what is open, or accept what changed."""
    subject: VerdictSubject = VerdictSubject.GATE
    differences: tuple[Difference, ...] = ()
    """Of the environments, then of the suites, in a comparison; the most suspect first."""

    @property
    def exit_status(self) -> int:
        """0 go, 1 no-go, 3 undecided: of the decision, whatever the policy makes of it."""
        return self.decision.exit_status

    def count(self, decision: Decision) -> int:
        return sum(case.decision is decision for case in self.cases)


WORST_FIRST: Mapping[Decision, int] = {
    Decision.NO_GO: 0,
    Decision.INCONCLUSIVE: 1,
    Decision.CONDITIONAL: 2,
    Decision.GO: 3,
}
"""Order in which findings decide, and in which cases are shown."""


def document(verdict: GateVerdict) -> dict[str, object]:
    """The verdict as plain values, with its exit status beside it."""
    return {**asdict(verdict), "exit_status": verdict.exit_status}


def encode(verdict: GateVerdict) -> str:
    """The verdict as JSON."""
    return json.dumps(document(verdict), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def decode(text: str | bytes, place: str) -> GateVerdict:
    """The verdict that `encode` wrote. It may come from someone else: it is only data.

    Args:
        place: Where it came from, for the error.

    Raises:
        HarnessError: It is not such a document.
    """
    try:
        return files.parse(text, GateVerdict, SCHEMA_VERSION, {1: _of_schema_1})
    except ValueError as error:
        raise HarnessError(
            f"{place} is no verdict of a gate: {error}",
            "`harness gate --verdict FILE` writes one.",
        ) from None


def _of_schema_1(fields: dict[str, Any]) -> dict[str, Any]:
    """The document with each case's numbers in its comparison, and the sides by today's names."""
    renamed = {"head": "candidate", "base": "baseline"}
    fields = {renamed.get(name, name): value for name, value in fields.items()}
    shared = ("case_id", "reason")
    numbers = {f.name for f in dataclasses.fields(Comparison)}
    cases = []
    for case in fields.get("cases", []):
        if not isinstance(case, dict):
            raise ValueError("a case is not a JSON object")
        kept = {n: value for n, value in case.items() if n in shared or n not in numbers}
        if case.get("ratio") is not None:
            known = {n: case.get(n) for n in numbers}
            kept["comparison"] = known | {"clock_explained": False}
        cases.append(kept)
    return fields | {"cases": cases}
