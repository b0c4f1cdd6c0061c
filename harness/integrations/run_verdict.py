"""The verdict on a run in the form of a gate's verdict, so that CI can show it."""

from collections.abc import Sequence
from dataclasses import replace

from harness import units
from harness.gate.decide import settled
from harness.gate.records import (
    GateCase,
    GateVerdict,
    LeftOut,
    Stage,
    State,
    VerdictSubject,
    side_of,
)
from harness.records import FAILURES, CaseSummary, Decision, Finding, Outcome, Run, Verdict
from harness.report.verdict_text import rule_sentence, verdict_sentence


def of_run(run: Run, cases: Sequence[CaseSummary], verdict: Verdict) -> GateVerdict:
    """The verdict on a run. Each case is judged by the rules that it decides."""
    git = run.environment.git
    return GateVerdict(
        decision=verdict.decision,
        reason=verdict_sentence(verdict),
        stage=Stage.BLOCK,
        blocks=False,
        policy=run.suite.path,
        subject=VerdictSubject.RUN,
        candidate=side_of(run, git.branch if git else ""),
        device=run.environment.device_name,
        cases=tuple(_case(run, seen, verdict) for seen in cases if not seen.stop),
        left_out=tuple(
            LeftOut(case_id=seen.case.case_id, suite=run.suite.path, reason=seen.detail)
            for seen in cases
            if seen.stop
        ),
        findings=tuple(
            Finding(check=r.rule, decision=r.decision, reason=rule_sentence(r), counts=r.applies)
            for r in verdict.rules
        ),
        started_at=run.started_at,
        ended_at=run.ended_at,
        gpu_s=sum(m.wall_s for m in run.measurements),
    )


def _case(run: Run, seen: CaseSummary, verdict: Verdict) -> GateCase:
    """A case, by how it ended and by the rules that it decides."""
    case_id, outcome = seen.case.case_id, seen.outcome
    slow = any(case_id in f.cases for r in verdict.rules for f in r.slow)
    decision = Decision.NO_GO if outcome in FAILURES else Decision.INCONCLUSIVE
    if outcome is Outcome.OK or slow or (outcome is not None and outcome in seen.case.allow):
        decision = Decision.GO
    found = [
        Finding(check=r.rule, decision=r.decision, reason=f"{r.rule}: {rule_sentence(r)}")
        for r in verdict.rules
        if r.applies and case_id in r.evidence and r.decision is not Decision.GO
    ]
    ran = Finding(check="ran", decision=decision, reason=units.ending_text(outcome, seen.detail))
    measured = run.of(case_id)
    bad = next((m for m in measured if m.outcome is not Outcome.OK), None)
    step = seen.metrics.get("step_s")
    state = State.UNCOMPARED if outcome is Outcome.OK else State.FAILED
    return replace(
        settled(run.suite.path, case_id, state, [ran, *found]),
        candidate_s=step.value if step else None,
        gpu_s=sum(m.wall_s for m in measured),
        log=f"{run.folder}/{bad.log}" if bad and bad.log else "",
    )
