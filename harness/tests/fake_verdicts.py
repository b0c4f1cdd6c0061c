"""Verdicts of a gate, fabricated: what renderers and comparisons are tested on."""

from typing import Any

from harness.gate.records import GateCase, GateRecord, GateSide, Mode, Stage, State
from harness.records import Change, CompiledKernel, Decision, Finding
from harness.tests.fake_runs import comparison, ratio

_SIZES: dict[str, Any] = {"registers": 127, "local_bytes": 0, "shared_bytes": 98_304, "warps": 4}
_INSTRUCTIONS: dict[str, Any] = {"mma": 64, "loads": 12, "barriers": 8}
KERNEL = CompiledKernel(name="_forward", code="a", **_SIZES, **_INSTRUCTIONS)


def gate_case(
    case_id: str = "train/nsa",
    decision: Decision = Decision.GO,
    reason: str = "no slower than the tolerance",
    **changes: Any,
) -> GateCase:
    """A case that ran, with this finding of its comparison."""
    ran = Finding(check="ran", decision=Decision.GO, facts={"shows": "all ran"})
    found = Finding(check="against the baseline", decision=decision, facts={"shows": reason})
    return GateCase(
        **{
            "case_id": case_id,
            "suite": "suites/gate.yaml",
            "state": State.COMPARED,
            "findings": (ran, found),
            "baseline_s": 0.010,
            "candidate_s": 0.0101,
            "comparison": comparison(ratio=ratio(1.01, 1.005, 1.015)),
            "gpu_s": 61.5,
            **changes,
        }
    )


SLOWER = gate_case(
    "forward/nsa",
    Decision.NO_GO,
    reason="slower by 5 %",
    comparison=comparison(change=Change.SLOWER, ratio=ratio(1.05, 1.041, 1.059)),
)
OPEN = gate_case(
    "decode/nsa",
    Decision.INCONCLUSIVE,
    reason="the interval lies across the tolerance",
    comparison=comparison(smallest_effect=0.04, pairs_needed=40, minutes_needed=12.0),
)
FASTER = gate_case(
    "attention/nsa", comparison=comparison(change=Change.FASTER, ratio=ratio(0.9, 0.88, 0.92))
)


def gate_verdict(*cases: GateCase, **changes: Any) -> GateRecord:
    return GateRecord(
        **{
            "mode": Mode.RELATIVE,
            "stage": Stage.BLOCK,
            "blocks": any(c.decision is Decision.NO_GO for c in cases),
            "policy": "ci/gate.yaml",
            "candidate": GateSide(ref="HEAD", commit="a" * 40),
            "baseline": GateSide(ref="origin/main", commit="b" * 40),
            "device": "NVIDIA H200",
            "cases": cases,
            "started_at": "2026-11-21T07:30:12+00:00",
            **changes,
        }
    )
