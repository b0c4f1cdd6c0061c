"""From findings to verdicts: what is missing or unknown never passes, and exemptions expire."""

import datetime
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.comparison import Change, Comparison
from harness.analysis.summary import summarise
from harness.gate import counters, decide
from harness.gate.decide import CaseEvidence
from harness.gate.policy import Exemption, Policy, load
from harness.gate.records import GateCase, Mode, Stage, State
from harness.records import (
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
def test_a_comparison_decides_by_its_direction(change: Change, decision: Decision) -> None:
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
def test_a_head_that_does_not_end_ok_never_passes(
    outcome: Outcome, base: Outcome, decision: Decision
) -> None:
    before = None if base is Outcome.OK else fake_runs.ended(CASE, base)

    found = judged(fake_runs.ended(CASE, outcome), comparison=None, base=before)

    assert (found.decision, found.state) == (decision, State.FAILED)
    assert found.log.endswith(".log")


@pytest.mark.parametrize(
    ("changes", "decision", "state", "said"),
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
def test_nothing_to_compare_with_is_undecided_unless_the_case_is_new(
    changes: dict[str, Any], decision: Decision, state: State, said: str
) -> None:
    found = judged(comparison=None, **changes)

    assert (found.decision, found.state) == (decision, state)
    assert said in found.reason


def test_the_policy_may_block_new_cases() -> None:
    blocking = replace(POLICY, new_cases_block=True)

    found = judged(comparison=None, base=[], refused="no axis gc", policy=blocking)

    assert (found.decision, found.state) == (NO_GO, State.NEW)


def test_a_case_that_is_gone_is_undecided_unless_exempted() -> None:
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
def test_by_floors_alone_a_case_needs_one_and_must_clear_it(
    policy: Policy, decision: Decision
) -> None:
    found = judged(mode=Mode.ABSOLUTE, comparison=None, base=[], policy=policy)

    assert found.decision is decision


def test_a_broken_floor_is_told_with_its_limit_its_source_and_what_to_do(tmp_path: Path) -> None:
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


def test_a_floor_counts_beside_a_comparison_and_is_not_asked_for_there() -> None:
    assert judged(policy=floor(6_000)).decision is NO_GO
    assert judged(policy=POLICY).decision is GO


def test_operators_that_nobody_saw_leave_a_case_undecided_without_a_gpu_too() -> None:
    """Of a floor that it clears, and of a comparison that finds no change."""
    stated = replace(CASE, operators=PathRule(must=("aten::mm",)))
    unseen = fake_runs.timed(stated, 0.1, census=Profile(skipped="switched off (measure.census)"))
    here = fake_runs.environment(gpu=None)
    (head,) = summarise(fake_runs.run([stated], lambda _: unseen, env=here))

    for mode, policy in ((Mode.ABSOLUTE, floor(1)), (Mode.RELATIVE, POLICY)):
        answer = judged(unseen, gpu=None, summary=head, case=stated, mode=mode, policy=policy)

        assert answer.decision is OPEN
        assert answer.reason.endswith("switched off (measure.census)")


def test_a_known_noisy_case_is_excused_from_comparison_and_from_nothing_else() -> None:
    slower = replace(SAME, change=Change.SLOWER)
    noisy = exempt("noisy")

    assert judged(comparison=slower, policy=noisy).decision is GO
    assert judged(fake_runs.ended(CASE, Outcome.CRASH), policy=noisy).decision is NO_GO
    assert judged(policy=replace(floor(6_000), exemptions=noisy.exemptions)).decision is NO_GO


@pytest.mark.parametrize("mode", [Mode.RELATIVE, Mode.BASELINE])
def test_noise_excuses_no_comparison_that_was_not_made(mode: Mode) -> None:
    crashed = fake_runs.ended(CASE, Outcome.CRASH)

    lost = judged(mode=mode, comparison=None, base=crashed, policy=exempt("noisy"))
    missing = judged(
        mode=mode, comparison=None, base=[], no_comparison="no baseline", policy=exempt("noisy")
    )

    assert (lost.decision, missing.decision) == (OPEN, OPEN)
    assert (missing.reason, missing.exemption) == ("no baseline", "")


@pytest.mark.parametrize(("expect", "decision"), [("noisy", NO_GO), ("failure", GO)])
def test_counters_have_no_noise_to_be_excused_for(expect: str, decision: Decision) -> None:
    more = counters.judge({"host_syncs": 0}, {"host_syncs": 41}, whose="the baseline")

    found = judged(mode=Mode.COUNTERS, comparison=None, counted=more, policy=exempt(expect))

    assert found.decision is decision
    assert (found.exemption == "") is (expect == "noisy"), "named only where it excuses"


def test_noise_lets_no_new_case_in_where_the_policy_blocks_them() -> None:
    noisy = replace(exempt("noisy"), new_cases_block=True)

    found = judged(comparison=None, base=[], refused="no axis gc", policy=noisy)

    assert (found.decision, found.exemption) == (NO_GO, "")


@pytest.mark.parametrize(("metric", "most"), [("step_s", 0.05), ("peak_memory_bytes", 1_000)])
def test_noise_excuses_no_ceiling_of_times_or_of_memory(metric: str, most: float) -> None:
    ceiling = Rule(name="ceiling", metric=metric, go=most)
    noisy = replace(exempt("noisy"), rules=(ceiling,))

    assert judged(policy=noisy).decision is NO_GO


def test_an_expected_failure_is_excused_and_an_unexpected_pass_reported() -> None:
    failing = judged(fake_runs.ended(CASE, Outcome.CRASH), policy=exempt("failure"))
    passing = judged(policy=exempt("failure"))

    assert (failing.decision, failing.unexpected_pass) == (GO, False)
    assert "excused" in failing.reason
    assert (passing.decision, passing.unexpected_pass) == (GO, True)
    assert "ci/gate.yaml:9" in passing.findings[-1].reason


@pytest.mark.parametrize("expect", ["noisy", "failure"])
def test_an_expired_exemption_fails_and_excuses_nothing(expect: str) -> None:
    over = exempt(expect, until="2026-11-20")

    clean = judged(policy=over)
    crashed = judged(fake_runs.ended(CASE, Outcome.CRASH), policy=over)

    assert (clean.decision, crashed.decision) == (NO_GO, NO_GO)
    assert "expired on 2026-11-20" in clean.reason
    assert crashed.exemption == ""


def test_an_exemption_of_other_cases_excuses_nothing() -> None:
    slower = replace(SAME, change=Change.SLOWER)

    assert judged(comparison=slower, policy=exempt("noisy", cases="decode/*")).decision is NO_GO


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


def test_a_speed_up_is_reported() -> None:
    faster = gate_case(GO, comparison=fake_runs.comparison(change=Change.FASTER, ratio=0.9))

    assert "1 faster, train/nsa by -10 %" in decide.overall([faster], [])[1]


@pytest.mark.parametrize(
    ("stage", "inconclusive_blocks", "blocked"),
    [
        (Stage.SHADOW, True, []),
        (Stage.WARN, True, []),
        (Stage.BLOCK, False, [NO_GO]),
        (Stage.BLOCK, True, [NO_GO, OPEN]),
    ],
)
def test_what_blocks_is_policy(
    stage: Stage, inconclusive_blocks: bool, blocked: list[Decision]
) -> None:
    policy = replace(POLICY, stage=stage, inconclusive_blocks=inconclusive_blocks)

    assert [d for d in (GO, NO_GO, OPEN) if decide.blocks(d, policy)] == blocked


@pytest.mark.parametrize("accepted", [True, False])
def test_a_change_of_counters_on_record_is_not_asked_to_be_accepted(accepted: bool) -> None:
    before, after = {"host_syncs": 0}, {"host_syncs": 41}
    changes, finding = counters.judge(
        before, after, whose="the baseline", accepted=after if accepted else None
    )
    case = gate_case(finding.decision, counters=changes, reason=finding.reason)

    asked = decide.remedies([case], POLICY, Mode.COUNTERS)

    assert asked == (
        [] if accepted else [f"if the difference is intended, accept it: {counters.RENEW}"]
    )


def test_what_is_only_compared_needs_no_leave() -> None:
    gone = gate_case(OPEN, state=State.MISSING)
    changes, finding = counters.judge({"host_syncs": 0}, {"host_syncs": 41}, whose="the baseline")
    more = gate_case(finding.decision, counters=changes, reason=finding.reason)
    open_ = compared_case(OPEN, pairs_needed=31)

    assert len(decide.remedies([gone, more], POLICY, Mode.COUNTERS)) == 2
    assert decide.remedies([gone, more], POLICY, Mode.COUNTERS, merging=False) == []
    assert len(decide.remedies([gone, open_], POLICY, Mode.RELATIVE, merging=False)) == 1


def test_what_is_open_names_the_pairs_that_would_decide() -> None:
    open_ = compared_case(OPEN, pairs_needed=31, minutes_needed=4.0)

    (said,) = decide.remedies([open_], POLICY, Mode.RELATIVE)

    assert (
        said
        == "31 pairs would decide, about 4 minutes for 1 open case: confirm_pairs in ci/gate.yaml"
    )


def test_the_most_pairs_are_paid_for_by_every_open_case() -> None:
    """`confirm_pairs` is one number: a case that 10 pairs would decide takes 40 as well."""
    cases = [
        compared_case(OPEN, pairs_needed=40, minutes_needed=4.0),
        compared_case(OPEN, pairs_needed=10, minutes_needed=5.0),
        gate_case(
            GO, comparison=fake_runs.comparison(pairs_needed=900, minutes_needed=90.0)
        ),  # excused, and confirmed as well
        gate_case(GO),
    ]

    (relative,) = decide.remedies(cases, POLICY, Mode.RELATIVE)
    (stored,) = decide.remedies(cases, POLICY, Mode.BASELINE)
    (on_gpu,) = decide.remedies(cases, POLICY, Mode.RELATIVE, on_gpu=True)
    (unknown,) = decide.remedies(
        [*cases, compared_case(OPEN, pairs_needed=3)],
        POLICY,
        Mode.RELATIVE,
    )

    cost = "would decide, about 28 minutes for 3 open cases"
    assert relative == f"40 pairs {cost}: confirm_pairs in ci/gate.yaml"
    assert stored == f"40 pairs measured now {cost}: harness gate --base REF"
    assert on_gpu == relative.replace("minutes", "GPU minutes")
    assert unknown == "40 pairs would decide: confirm_pairs in ci/gate.yaml"
