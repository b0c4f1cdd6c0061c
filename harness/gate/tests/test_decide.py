"""From findings to verdicts."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.summary import summarise
from harness.gate import counters, decide
from harness.gate.decide import CaseEvidence
from harness.gate.policy import Exemption, Policy, load
from harness.gate.records import GateCase, Mode, Stage, State
from harness.records import (
    Change,
    Comparison,
    Decision,
    Finding,
    Gpu,
    Match,
    Measurement,
    Outcome,
    PathRule,
    Profile,
    Rule,
)
from harness.tests import fake_runs

TODAY = datetime.date(2026, 11, 21)
CASE = fake_runs.case({"seq_len": 512})
POLICY = Policy(path="ci/gate.yaml", stage=Stage.BLOCK)
SAME = fake_runs.comparison(case_id=CASE.case_id)
GO, NO_GO, OPEN = Decision.GO, Decision.NO_GO, Decision.INCONCLUSIVE


def judged(
    measured: list[Measurement] | None = None,
    *,
    policy: Policy = POLICY,
    mode: Mode = Mode.RELATIVE,
    comparison: Comparison | None = SAME,
    base: list[Measurement] | None = None,
    gpu: Gpu | None = fake_runs.H200,
    **changes: Any,
) -> GateCase:
    measured = fake_runs.timed(CASE, 0.1) if measured is None else measured
    run = fake_runs.run([CASE], lambda _: measured, env=fake_runs.environment(gpu=gpu))
    return decide.judge_case(
        CaseEvidence(
            **{
                "suite": "suites/gate.yaml",
                "case": CASE,
                "summary": summarise(run)[0],
                "candidate": measured,
                "baseline": fake_runs.timed(CASE, 0.1) if base is None else base,
                "comparison": comparison,
                **changes,
            }
        ),
        mode=mode,
        policy=policy,
        environment=run.environment,
        today=TODAY,
    )


def exempt(expect: str, *, until: str = "2026-12-31", cases: str = "train/*") -> Policy:
    exemption = Exemption(
        cases=(cases,),
        expect=expect,
        reason="known",
        expires=datetime.date.fromisoformat(until),
        place="ci/gate.yaml:9",
    )
    return replace(POLICY, exemptions=(exemption,))


@pytest.mark.parametrize(
    ("change", "decision"),
    [
        (Change.SAME, GO),
        (Change.FASTER, GO),
        (Change.SLOWER, NO_GO),
        (Change.UNDECIDED, OPEN),
    ],
)
def test_the_comparison_decides(change: Change, decision: Decision) -> None:
    found = judged(comparison=replace(SAME, change=change))

    assert (found.decision, found.change, found.state) == (decision, change, State.COMPARED)
    assert found.comparison is not None
    assert found.comparison.ratio == SAME.ratio


@pytest.mark.parametrize(
    ("outcome", "base", "decision"),
    [
        (Outcome.CRASH, Outcome.OK, NO_GO),
        (Outcome.CRASH, Outcome.CRASH, NO_GO),
        (Outcome.NON_FINITE, Outcome.OK, NO_GO),
        (Outcome.INCORRECT, Outcome.OK, NO_GO),
        (Outcome.PATH_MISMATCH, Outcome.OK, NO_GO),
        (Outcome.HANG, Outcome.OK, NO_GO),
        (Outcome.TIMEOUT, Outcome.OK, NO_GO),  # the base runs it
        (Outcome.OUT_OF_MEMORY, Outcome.OK, NO_GO),
        (Outcome.UNSUPPORTED, Outcome.OK, NO_GO),
        (Outcome.TIMEOUT, Outcome.TIMEOUT, OPEN),
        (Outcome.UNSUPPORTED, Outcome.UNSUPPORTED, OPEN),
        (Outcome.INVALID_ENVIRONMENT, Outcome.OK, OPEN),
    ],
)
def test_a_failed_candidate_never_passes(
    outcome: Outcome, base: Outcome, decision: Decision
) -> None:
    before = None if base is Outcome.OK else fake_runs.ended(CASE, base)

    found = judged(fake_runs.ended(CASE, outcome), comparison=None, base=before)

    assert (found.decision, found.state) == (decision, State.FAILED)
    assert found.log.endswith(".log")


@pytest.mark.parametrize(
    ("changes", "decision", "state", "message"),
    [
        (
            {"summary": None, "no_comparison": "not measured"},
            OPEN,
            State.UNCOMPARED,
            "not measured",
        ),
        ({"baseline": []}, OPEN, State.UNCOMPARED, "no process of the baseline ran"),
        (
            {"baseline": fake_runs.ended(CASE, Outcome.CRASH)},
            OPEN,
            State.UNCOMPARED,
            "the baseline failed",
        ),
        (
            {"baseline": fake_runs.ended(CASE, Outcome.PATH_MISMATCH)},
            OPEN,
            State.UNCOMPARED,
            "path mismatch",
        ),
        (
            {"baseline": fake_runs.ended(CASE, Outcome.INCORRECT)},
            GO,
            State.NEW,
            "new: the baseline",
        ),
        ({"baseline": [], "refused": "no axis gc"}, GO, State.NEW, "no axis gc"),
        ({"no_comparison": "3 of 6 pairs not steady"}, OPEN, State.UNCOMPARED, "not steady"),
        ({"mode": Mode.BASELINE, "no_comparison": "no baseline"}, OPEN, State.UNCOMPARED, "no b"),
    ],
)
def test_a_case_without_comparison_is_undecided_unless_it_is_new(
    changes: dict[str, Any], decision: Decision, state: State, message: str
) -> None:
    found = judged(comparison=None, **changes)

    assert (found.decision, found.state) == (decision, state)
    assert message in found.reason


def test_the_policy_may_block_new_cases() -> None:
    blocking = replace(POLICY, new_cases_block=True)

    found = judged(comparison=None, base=[], refused="no axis gc", policy=blocking)

    assert (found.decision, found.state) == (NO_GO, State.NEW)


def test_a_missing_case_is_undecided_unless_exempted() -> None:
    gone = decide.judge_gone("s", CASE.case_id, "it is gone", policy=POLICY, today=TODAY)
    meant = decide.judge_gone(
        "s", CASE.case_id, "it is gone", policy=exempt("missing"), today=TODAY
    )

    assert (gone.decision, gone.state) == (OPEN, State.MISSING)
    assert (meant.decision, meant.state) == (GO, State.MISSING)
    assert meant.exemption == "missing until 2026-12-31: known"


def floor(value: float, *, gpu: str = "*", provider: str = "nsa") -> Policy:
    rule = Rule(
        name="floor",
        metric="tokens_per_s",
        go=value,
        gpu=gpu,
        match=Match(criteria={"provider": (provider,)}),
    )
    return replace(POLICY, rules=(rule,))


@pytest.mark.parametrize(
    ("policy", "decision"),
    [
        (floor(4_000), GO),  # 5,120 tokens/s
        (floor(6_000), NO_GO),
        (floor(5_120), OPEN),  # the interval lies across it
        (floor(6_000, gpu="A100"), OPEN),  # stated for another GPU: nothing is known
        (floor(6_000, provider="dense"), OPEN),
        (POLICY, OPEN),
    ],
)
def test_absolute_mode_needs_a_limit_that_is_met(policy: Policy, decision: Decision) -> None:
    found = judged(mode=Mode.ABSOLUTE, comparison=None, base=[], policy=policy)

    assert found.decision is decision


def test_a_violated_limit_is_named_with_its_source(tmp_path: Path) -> None:
    file = tmp_path / "gate.yaml"
    file.write_text(
        "schema: 1\nstage: block\nsuites: [{suite: s.yaml}]\nabsolute:\n"
        "  - {metric: tokens_per_s, low: 6000, gpu: H200, source: run 7}\n"
    )
    policy, _ = load(file)

    found = judged(policy=policy)

    assert found.decision is NO_GO
    limit = f"lower limit of tokens/s on H200: 6,000 tokens/s (run 7, {file}:5)"
    assert found.reason.endswith(f"; {limit}")
    said = decide.remedies([found], policy, Mode.RELATIVE)
    assert said == [f"if a limit is meant to change, change it in {file}"]


def test_a_limit_counts_beside_a_comparison_but_is_not_required_there() -> None:
    assert judged(policy=floor(6_000)).decision is NO_GO
    assert judged(policy=POLICY).decision is GO


def test_unattested_operators_leave_a_case_undecided() -> None:
    """Of a floor that it clears, and of a comparison that finds no change."""
    stated = replace(CASE, operators=PathRule(must=("aten::mm",)))
    unseen = fake_runs.timed(stated, 0.1, profile=Profile(skipped="switched off (measure.profile)"))
    here = fake_runs.environment(gpu=None)
    (head,) = summarise(fake_runs.run([stated], lambda _: unseen, env=here))

    for mode, policy in ((Mode.ABSOLUTE, floor(1)), (Mode.RELATIVE, POLICY)):
        answer = judged(unseen, gpu=None, summary=head, case=stated, mode=mode, policy=policy)

        assert answer.decision is OPEN
        assert answer.reason.endswith("switched off (measure.profile)")


def test_an_exemption_for_noise_excuses_only_the_comparison() -> None:
    slower = replace(SAME, change=Change.SLOWER)
    noisy = exempt("noisy")

    assert judged(comparison=slower, policy=noisy).decision is GO
    assert judged(comparison=slower, policy=exempt("noisy", cases="decode/*")).decision is NO_GO
    assert judged(fake_runs.ended(CASE, Outcome.CRASH), policy=noisy).decision is NO_GO
    assert judged(policy=replace(floor(6_000), exemptions=noisy.exemptions)).decision is NO_GO


@pytest.mark.parametrize("mode", [Mode.RELATIVE, Mode.BASELINE])
def test_an_exemption_for_noise_does_not_excuse_a_missing_comparison(mode: Mode) -> None:
    crashed = fake_runs.ended(CASE, Outcome.CRASH)

    lost = judged(mode=mode, comparison=None, base=crashed, policy=exempt("noisy"))
    missing = judged(
        mode=mode, comparison=None, base=[], no_comparison="no baseline", policy=exempt("noisy")
    )

    assert (lost.decision, missing.decision) == (OPEN, OPEN)
    assert (missing.reason, missing.exemption) == ("no baseline", "")


@pytest.mark.parametrize(("expect", "decision"), [("noisy", NO_GO), ("failure", GO)])
def test_an_exemption_for_noise_does_not_excuse_counters(expect: str, decision: Decision) -> None:
    more = counters.judge({"host_syncs": 0}, {"host_syncs": 41}, source="the baseline")

    found = judged(mode=Mode.COUNTERS, comparison=None, counted=more, policy=exempt(expect))

    assert found.decision is decision
    assert (found.exemption == "") is (expect == "noisy"), "named only where it excuses"


@pytest.mark.parametrize(("metric", "most"), [("step_s", 0.05), ("peak_memory_bytes", 1_000)])
def test_an_exemption_for_noise_does_not_excuse_a_limit(metric: str, most: float) -> None:
    ceiling = Rule(name="ceiling", metric=metric, go=most)
    noisy = replace(exempt("noisy"), rules=(ceiling,))

    assert judged(policy=noisy).decision is NO_GO


def test_an_expected_failure_is_excused_and_an_unexpected_pass_is_reported() -> None:
    failing = judged(fake_runs.ended(CASE, Outcome.CRASH), policy=exempt("failure"))
    passing = judged(policy=exempt("failure"))

    assert (failing.decision, failing.unexpected_pass) == (GO, False)
    assert "excused" in failing.reason
    assert (passing.decision, passing.unexpected_pass) == (GO, True)
    assert "ci/gate.yaml:9" in passing.findings[-1].reason


@pytest.mark.parametrize("expect", ["noisy", "failure"])
def test_an_expired_exemption_fails_the_case(expect: str) -> None:
    over = exempt(expect, until="2026-11-20")

    clean = judged(policy=over)
    crashed = judged(fake_runs.ended(CASE, Outcome.CRASH), policy=over)

    assert (clean.decision, crashed.decision) == (NO_GO, NO_GO)
    assert "expired on 2026-11-20" in clean.reason
    assert crashed.exemption == ""


def gate_case(decision: Decision, **changes: Any) -> GateCase:
    return GateCase(
        **{
            "case_id": "train/nsa",
            "suite": "s",
            "decision": decision,
            "reason": "because",
            "state": State.COMPARED,
            **changes,
        }
    )


def compared_case(decision: Decision, **numbers: Any) -> GateCase:
    return gate_case(decision, comparison=fake_runs.comparison(**numbers))


@pytest.mark.parametrize(
    ("decisions", "whole", "expected"),
    [
        ([GO, GO], GO, GO),
        ([GO, OPEN], GO, OPEN),
        ([OPEN, NO_GO], GO, NO_GO),
        ([GO], OPEN, OPEN),
        ([GO], NO_GO, NO_GO),
        ([], GO, GO),
    ],
)
def test_the_worst_decides_the_whole(
    decisions: list[Decision], whole: Decision, expected: Decision
) -> None:
    finding = Finding(check="preflight", decision=whole, reason="it")

    decision, reason = decide.overall([gate_case(d) for d in decisions], [finding])

    assert decision is expected
    assert reason


def test_the_reason_of_a_go_counts_passed_faster_and_new_cases() -> None:
    faster = gate_case(GO, comparison=fake_runs.comparison(change=Change.FASTER, ratio=0.9))
    cases = [gate_case(GO), faster, gate_case(GO, state=State.NEW)]

    assert decide.overall([], [])[1] == decide.NO_CASE
    assert decide.overall([gate_case(GO)], [])[1] == "1 case passed"
    assert decide.overall(cases, [])[1] == "3 cases passed; 1 faster, train/nsa by -10 %; 1 new"


def test_an_uncompared_case_suggests_a_baseline_commit_in_counters_mode_only() -> None:
    case = gate_case(OPEN, state=State.UNCOMPARED)

    (remedy,) = decide.remedies([case], POLICY, Mode.COUNTERS)

    assert remedy.endswith(": harness gate --counters --base REF")
    assert decide.remedies([case], POLICY, Mode.RELATIVE) == []


@pytest.mark.parametrize(
    ("stage", "inconclusive_blocks", "blocked"),
    [
        (Stage.SHADOW, True, []),
        (Stage.WARN, True, []),
        (Stage.BLOCK, False, [NO_GO]),
        (Stage.BLOCK, True, [NO_GO, OPEN]),
    ],
)
def test_the_policy_decides_what_blocks(
    stage: Stage, inconclusive_blocks: bool, blocked: list[Decision]
) -> None:
    policy = replace(POLICY, stage=stage, inconclusive_blocks=inconclusive_blocks)

    assert [d for d in (GO, NO_GO, OPEN) if decide.blocks(d, policy)] == blocked


@pytest.mark.parametrize("accepted", [True, False])
def test_recorded_counters_need_no_acceptance(accepted: bool) -> None:
    before, after = {"host_syncs": 0}, {"host_syncs": 41}
    changes, finding = counters.judge(
        before, after, source="the baseline", accepted=after if accepted else None
    )
    case = gate_case(finding.decision, counters=changes, reason=finding.reason)

    asked = decide.remedies([case], POLICY, Mode.COUNTERS)

    assert asked == (
        [] if accepted else [f"if the difference is intended, accept it: {counters.RENEW}"]
    )


def test_a_comparison_suggests_no_acceptance() -> None:
    gone = gate_case(OPEN, state=State.MISSING)
    changes, finding = counters.judge({"host_syncs": 0}, {"host_syncs": 41}, source="the baseline")
    more = gate_case(finding.decision, counters=changes, reason=finding.reason)
    open_ = compared_case(OPEN, pairs_needed=31)

    assert len(decide.remedies([gone, more], POLICY, Mode.COUNTERS)) == 2
    assert decide.remedies([gone, more], POLICY, Mode.COUNTERS, merging=False) == []
    assert len(decide.remedies([gone, open_], POLICY, Mode.RELATIVE, merging=False)) == 1


def test_the_cost_covers_every_open_case() -> None:
    """`confirm_pairs` is one number: a case that 10 pairs would decide takes 40 as well."""
    cases = [
        compared_case(OPEN, pairs_needed=40, minutes_needed=4.0),
        compared_case(OPEN, pairs_needed=10, minutes_needed=5.0),
        gate_case(
            GO, comparison=fake_runs.comparison(pairs_needed=900, minutes_needed=90.0)
        ),  # excused, and confirmed as well
        gate_case(GO),
    ]

    unknown = compared_case(OPEN, pairs_needed=3)

    (relative,) = decide.remedies(cases, POLICY, Mode.RELATIVE)
    (stored,) = decide.remedies(cases, POLICY, Mode.BASELINE)
    (without_cost,) = decide.remedies([*cases, unknown], POLICY, Mode.RELATIVE)

    assert all("40 pairs" in text and "28 minutes" in text for text in (relative, stored))
    assert stored.endswith(": harness gate --base REF")
    assert ("40 pairs" in without_cost, "minutes" in without_cost) == (True, False)
