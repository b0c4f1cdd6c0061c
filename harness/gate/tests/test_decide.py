"""From findings to verdicts, and the file of a verdict."""

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.summary import summarise
from harness.gate import counters, decide
from harness.gate.decide import CaseEvidence
from harness.gate.policy import Policy, parse
from harness.gate.records import CounterChange, GateCase, GateSubject, Mode, State, decode
from harness.records import (
    Change,
    Comparison,
    Decision,
    Finding,
    Gpu,
    Measurement,
    Outcome,
    PathRule,
    Profile,
)
from harness.report.series.gate_text import encode, next_steps, reason, verdict_reason
from harness.tests import fake_runs
from harness.tests.fake_verdicts import gate_case, gate_verdict

CASE = fake_runs.case({"seq_len": 512})
SAME = fake_runs.comparison(case_id=CASE.case_id)
GO, NO_GO, OPEN = Decision.GO, Decision.NO_GO, Decision.INCONCLUSIVE


def policy_of(*lines: str, stage: str = "block") -> Policy:
    text = "\n".join(["schema: 1", f"stage: {stage}", "suites: [{suite: s.yaml}]", *lines])
    return parse(text, Path("ci/gate.yaml"))


def exempt(until: str = "2999-12-31") -> Policy:
    return policy_of(f"exempt: [{{cases: ['train/*'], because: known, expires: {until}}}]")


POLICY = policy_of()


def ended(outcome: Outcome) -> list[Measurement]:
    return fake_runs.timed(CASE, 0.1) if outcome is Outcome.OK else fake_runs.ended(CASE, outcome)


def judged(
    measured: list[Measurement] | None = None,
    *,
    policy: Policy = POLICY,
    mode: Mode = Mode.RELATIVE,
    comparison: Comparison | None = SAME,
    base: list[Measurement] | Outcome = Outcome.OK,
    gpu: Gpu | None = fake_runs.H200,
    **changes: Any,
) -> GateCase:
    measured = fake_runs.timed(CASE, 0.1) if measured is None else measured
    if isinstance(base, Outcome):
        base = ended(base)
    run = fake_runs.run([CASE], lambda _: measured, env=fake_runs.environment(gpu=gpu))
    return decide.judge_case(
        CaseEvidence(
            **{
                "suite": "suites/gate.yaml",
                "case": CASE,
                "summary": summarise(run)[0],
                "candidate": measured,
                "baseline": base,
                "comparison": comparison,
                "mode": mode,
                "policy": policy,
                **changes,
            }
        )
    )


@pytest.mark.parametrize(
    ("outcome", "base", "decision"),
    [
        (Outcome.CRASH, Outcome.OK, NO_GO),
        (Outcome.CRASH, Outcome.CRASH, NO_GO),
        (Outcome.TIMEOUT, Outcome.OK, NO_GO),  # the base runs it
        (Outcome.UNSUPPORTED, Outcome.OK, NO_GO),
        (Outcome.TIMEOUT, Outcome.TIMEOUT, OPEN),
        (Outcome.UNSUPPORTED, Outcome.UNSUPPORTED, OPEN),
        (Outcome.INVALID_ENVIRONMENT, Outcome.OK, OPEN),
    ],
)
def test_no_failed_candidate_passes(outcome: Outcome, base: Outcome, decision: Decision) -> None:
    found = judged(ended(outcome), comparison=None, base=base)

    assert (found.decision, found.state) == (decision, State.FAILED)
    assert found.log.endswith(".log")


@pytest.mark.parametrize(
    ("changes", "decision", "state", "message"),
    [
        ({"summary": None, "no_comparison": {"unfit": True}}, OPEN, State.UNCOMPARED, "not fit"),
        ({"base": []}, OPEN, State.UNCOMPARED, "no process of the baseline ran"),
        ({"base": Outcome.CRASH}, OPEN, State.UNCOMPARED, "the baseline failed"),
        ({"base": Outcome.PATH_MISMATCH}, OPEN, State.UNCOMPARED, "path mismatch"),
        ({"base": Outcome.INCORRECT}, GO, State.NEW, "new: the baseline"),
        ({"base": [], "refused": "no axis gc"}, GO, State.NEW, "no axis gc"),
        ({"measured": fake_runs.timed(CASE, 1, processes=1), "same": True}, GO, State.SAME, "one"),
        ({"no_comparison": {"unsteady": 3, "pairs": 6}}, OPEN, State.UNCOMPARED, "6 pairs were"),
    ],
)
def test_a_case_without_comparison_is_undecided_unless_it_is_new(
    changes: dict[str, Any], decision: Decision, state: State, message: str
) -> None:
    found = judged(comparison=None, **changes)

    assert (found.decision, found.state) == (decision, state)
    assert message in reason(found)


def test_a_missing_case_is_undecided_unless_exempted() -> None:
    gone = decide.judge_gone("s", CASE.case_id, {"only": "baseline"}, POLICY)
    meant = decide.judge_gone("s", CASE.case_id, {"only": "baseline"}, exempt())

    assert (gone.decision, gone.state) == (OPEN, State.MISSING)
    assert (meant.decision, meant.state) == (GO, State.MISSING)
    assert (meant.exemption["exempt_until"], reason(meant)[:8]) == ("2999-12-31", "excused:")


def test_unattested_operators_leave_a_case_undecided() -> None:
    stated = replace(CASE, operators=PathRule(must=("aten::mm",)))
    unseen = fake_runs.timed(stated, 0.1, profile=Profile(skipped="switched off (measure.profile)"))
    here = fake_runs.environment(gpu=None)
    (head,) = summarise(fake_runs.run([stated], lambda _: unseen, env=here))

    answer = judged(unseen, gpu=None, summary=head, case=stated)

    assert answer.decision is OPEN
    assert reason(answer).endswith("switched off (measure.profile)")


SLOWER = replace(SAME, change=Change.SLOWER)
COUNTED = counters.judge({"host_syncs": 0}, {"host_syncs": 41}, source="the baseline")


@pytest.mark.parametrize(
    ("changes", "decision", "named"),
    [
        ({}, GO, False),
        ({"comparison": SLOWER}, GO, True),
        ({"comparison": replace(SAME, change=Change.UNDECIDED)}, GO, True),
        ({"mode": Mode.COUNTERS, "comparison": None, "counted": COUNTED}, GO, True),
        ({"measured": ended(Outcome.CRASH)}, NO_GO, False),
        ({"comparison": None, "base": Outcome.CRASH}, OPEN, False),
        ({"comparison": None, "base": [], "no_comparison": {"untested": True}}, OPEN, False),
    ],
)
def test_an_exemption_excuses_only_what_the_comparison_says(
    changes: dict[str, Any], decision: Decision, named: bool
) -> None:
    found = judged(policy=exempt(), **changes)

    assert found.decision is decision
    known = {"exempt_until": "2999-12-31", "exempt_because": "known"}
    assert found.exemption == (known if named else {})


def test_an_expired_exemption_excuses_nothing() -> None:
    today = datetime.date.today()
    over, last_day = (exempt(until=str(day)) for day in (today - datetime.timedelta(1), today))

    assert judged(comparison=SLOWER, policy=over).decision is NO_GO
    assert judged(comparison=SLOWER, policy=last_day).decision is GO


@pytest.mark.parametrize(
    ("decisions", "whole", "expected", "said"),
    [
        ([GO, GO], GO, GO, "2 cases passed"),
        ([GO, OPEN], GO, OPEN, "1 of 2 cases: train/nsa: no slower than the tolerance"),
        ([OPEN, NO_GO], GO, NO_GO, "1 of 2 cases: train/nsa: no slower than the tolerance"),
        ([GO], OPEN, OPEN, "preflight: it"),
        ([GO], NO_GO, NO_GO, "preflight: it"),
        ([], GO, GO, "0 cases passed"),
    ],
)
def test_the_worst_decides_the_whole(
    decisions: list[Decision], whole: Decision, expected: Decision, said: str
) -> None:
    finding = Finding(check="preflight", decision=whole, facts={"shows": "it"})

    verdict = gate_verdict(*(gate_case(decision=d) for d in decisions), findings=(finding,))

    assert verdict.decision is expected
    assert verdict_reason(verdict) == said


@pytest.mark.parametrize(
    ("stage", "inconclusive", "blocked"),
    [
        ("shadow", "block", []),
        ("warn", "block", []),
        ("block", "neutral", [NO_GO]),
        ("block", "block", [NO_GO, OPEN]),
    ],
)
def test_a_policy_says_what_blocks(stage: str, inconclusive: str, blocked: list[Decision]) -> None:
    policy = policy_of(f"inconclusive: {inconclusive}", stage=stage)

    assert [d for d in (GO, NO_GO, OPEN) if decide.blocks(d, policy)] == blocked


def test_next_steps_suit_the_mode_and_the_request() -> None:
    counting, only = {"mode": Mode.COUNTERS}, {"subject": GateSubject.COMPARISON}
    more = gate_case(decision=NO_GO, counters=COUNTED[0], findings=(COUNTED[1],))
    gone = gate_case(decision=OPEN, state=State.MISSING)
    uncompared = gate_case(decision=OPEN, state=State.UNCOMPARED)
    open_ = gate_case(decision=OPEN, comparison=fake_runs.comparison(pairs_needed=31))

    accept = f"if the difference is intended, accept it: {counters.RENEW}"
    assert [*next_steps(gate_verdict(more, **counting))] == [accept]
    (remedy,) = next_steps(gate_verdict(uncompared, **counting))
    assert remedy.endswith(": harness gate --counters --base REF")
    assert [*next_steps(gate_verdict(uncompared))] == []
    assert len([*next_steps(gate_verdict(gone, more, **counting))]) == 2
    assert [*next_steps(gate_verdict(gone, more, **counting, **only))] == []
    (relative,) = next_steps(gate_verdict(gone, open_, **only))
    assert relative == "31 pairs would decide: confirm_pairs in ci/gate.yaml"


COUNTS = (CounterChange(name="host_syncs", before=0, after=None),)
VERDICT = gate_verdict(gate_case(decision=NO_GO, counters=COUNTS))


def test_a_verdict_round_trips_also_without_a_newer_field() -> None:
    stored = json.loads(encode(VERDICT))
    del stored["candidate"]["uncommitted"]

    assert stored["exit_status"] == 1
    case = stored["cases"][0]
    assert case["findings"][-1]["reason"] == case["reason"] in stored["reason"]
    assert decode(encode(VERDICT), "it") == decode(json.dumps(stored), "it") == VERDICT
