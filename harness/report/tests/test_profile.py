"""The section "Profile", from records of a GPU and of a machine without one."""

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from harness.analysis import verdict as gate
from harness.analysis.summary import summarise
from harness.integrations import run_verdict
from harness.integrations.junit import junit
from harness.records import (
    Breakdown,
    Case,
    Counters,
    Decision,
    Frame,
    Gpu,
    Measurement,
    Outcome,
    PathRule,
    Profile,
    Rule,
    Run,
    Use,
)
from harness.report.profile import ProfileSection, longest_wait, profile_section
from harness.tests import fake_runs

GPU = Profile(
    kernels=(
        Use(name="gemm", where="nsa.select", calls=24, time_s=9e-3),
        Use(name="_forward_kernel", where="nsa.window", calls=12, time_s=3e-3),
    ),
    operators=(Use(name="aten::mm", calls=24, time_s=1e-3),),
    fingerprint="ab",
    steps=2,
    breakdown=Breakdown(
        step_s=0.071,
        profiled_step_s=0.09,
        device_busy_s=0.012,
        gap_by_range={"nsa.select": 0.64, "": 0.36},
        host_by_range={"nsa.select": 0.5, "": 0.5},
        frames=(
            Frame(function="nsa/trainer.py:9 step", share=0.5),
            Frame(function="nsa/selected.py:120 loop", where="nsa.select", share=0.41),
        ),
        looks=200,
    ),
)
COUNTED = Counters(dispatched_ops=1200, host_syncs=34, kernel_launches=900, steps=2)
NO_GPU = replace(
    GPU,
    kernels=(),
    no_kernels="no GPU",
    breakdown=replace(GPU.breakdown, device_busy_s=None, gap_by_range={}),  # type: ignore[type-var]
)


def recorded(
    *, profile: Profile = GPU, counters: Counters = COUNTED, **case: Any
) -> tuple[Run, list[Case]]:
    cases = [replace(c, **case) for c in fake_runs.sweep(seq_len=[512, 2048])]

    def measure(c: Case) -> list[Measurement]:
        samples = (0.071,) * 5
        return fake_runs.timed(c, 0.071, profile=profile, counters=counters, samples_s=samples)

    return fake_runs.run(cases, measure), cases


def section(run: Run) -> ProfileSection:
    return profile_section(run, summarise(run))


def brief(run: Run) -> list[str]:
    return [*longest_wait(run, summarise(run))]


def test_the_wait_for_the_host_is_shown_with_its_range_and_function() -> None:
    run, _ = recorded()

    (sentence,) = section(run).where
    (summary,) = brief(run)

    text = (
        "the GPU waits for the host in 83.1 % of the step (busy 12.0 ms of 71.0 ms), 64 % of that "
        "before kernels of nsa.select; the host is meanwhile most often in "
        "`nsa/selected.py:120 loop` (41 %)."
    )
    assert sentence.endswith(text)
    assert summary.startswith("In 2 cases the GPU waits for the host")
    assert summary.endswith(text)


def test_the_wait_is_a_share_of_the_sampled_step() -> None:
    """The host of a step of 58 us, captured as a graph, had its result after 74."""
    assert GPU.breakdown is not None
    waited = replace(GPU.breakdown, step_s=0.16, device_busy_s=0.06)

    run, _ = recorded(profile=replace(GPU, breakdown=waited))

    assert "15.5 % of the step (busy 60.0 ms of 71.0 ms)" in section(run).where[0]
    assert not brief(run)


def test_without_a_gpu_the_time_of_the_host_is_shown() -> None:
    run, _ = recorded(profile=NO_GPU)

    built = section(run)

    assert "GPU" not in "".join(built.where)
    assert "50 % of the host's time is in nsa.select" in built.where[0]
    assert built.parts
    assert built.parts.columns[-1] == "operators"
    assert "`aten::mm` ×24" in built.parts.rows[0][-1]
    assert brief(run) == []


def test_cases_with_equal_counts_share_a_row() -> None:
    counts = section(recorded()[0]).counts

    assert counts
    assert counts.columns == ("cases", ">operators", ">host syncs", ">launches")
    assert counts.rows == (("`train/nsa`", "1,200", "34", "900"),)


def test_a_count_that_is_not_exact_is_marked_and_decides_no_rule() -> None:
    run, _ = recorded(counters=replace(COUNTED, differing=("host_syncs",)))
    rule = Rule(name="few syncs", metric="host_syncs", go=100)
    run = replace(run, suite=replace(run.suite, rules=(rule,)))

    counts = section(run).counts
    verdict = gate.judge(run.suite, run.environment, summarise(run), ())

    assert counts
    assert counts.rows[0][2] == "34?"
    assert verdict.decision is Decision.INCONCLUSIVE


@pytest.mark.parametrize(
    ("go", "decision"), [(34, Decision.GO), (33, Decision.NO_GO), (1e6, Decision.GO)]
)
def test_a_rule_on_a_count_is_decided_to_the_digit_by_one_process(
    go: float, decision: Decision
) -> None:
    run, cases = recorded()
    only = tuple(m for m in run.measurements if m.process == 0)
    cases = [replace(c, settings=replace(c.settings, processes=1)) for c in cases]
    suite = replace(
        run.suite,
        cases=tuple(cases),
        rules=(Rule(name="few syncs", metric="host_syncs", go=go),),
    )
    run = replace(run, suite=suite, measurements=only)

    verdict = gate.judge(suite, run.environment, summarise(run), ())

    assert verdict.decision is decision


def test_the_reason_of_unknown_counts_is_given_once() -> None:
    unknown = {"kernel_launches": "no GPU", "device_waits": "no GPU"}
    counters = replace(COUNTED, kernel_launches=None, unknown=unknown, hidden=("torch.compile",))

    assert section(recorded(counters=counters)[0]).missing == (
        "Not available: launches and waits (no GPU).",
        "Not available: operators inside torch.compile (not counted).",
    )


STATED = PathRule(must=("gemm",))


def judged(run: Run) -> dict[str, tuple[Decision, bool]]:
    verdict = gate.judge(run.suite, run.environment, summarise(run), ())
    return {r.rule: (r.decision, r.applies) for r in verdict.rules}


def test_required_kernels_that_ran_meet_the_rule() -> None:
    run, _ = recorded(kernels=STATED)

    assert section(run).required.endswith(" in 2 cases: confirmed in 2.")
    assert judged(run)[gate.WHAT_RAN] == (Decision.GO, True)


def test_without_a_gpu_required_kernels_are_not_judged() -> None:
    run, _ = recorded(kernels=STATED, profile=NO_GPU)
    run = replace(run, environment=fake_runs.environment(gpu=None))

    assert section(run).required.endswith("kernels not checked in 2: no GPU.")
    assert judged(run)[gate.KERNELS_THAT_RAN] == (Decision.INCONCLUSIVE, False)
    assert gate.WHAT_RAN not in judged(run)


@pytest.mark.parametrize("gpu", [fake_runs.H200, None], ids=["gpu", "cpu"])
@pytest.mark.parametrize(
    "profile",
    [
        None,
        Profile(skipped="switched off (measure.profile)"),
        Profile(skipped="one step takes 31 s"),
    ],
    ids=["none", "off", "too-long"],
)
def test_unchecked_operators_leave_the_verdict_open_on_any_machine(
    profile: Profile | None, gpu: Gpu | None
) -> None:
    run, _ = recorded(operators=STATED)
    run = replace(
        run,
        environment=fake_runs.environment(gpu=gpu),
        measurements=tuple(replace(m, profile=profile) for m in run.measurements),
    )
    summaries = summarise(run)

    verdict = gate.judge(run.suite, run.environment, summaries, ())

    assert (verdict.decision, verdict.decided_by) == (Decision.INCONCLUSIVE, gate.WHAT_RAN)
    assert "not checked in 2: " in section(run).required
    in_ci = run_verdict.of_run(run, summaries, verdict)
    assert [c.decision for c in in_ci.cases] == [Decision.INCONCLUSIVE] * 2
    states = _states(junit(in_ci))
    assert {name for name, state in states.items() if state == "passing"} == {gate.EVERY_CASE_RAN}


def test_without_a_gpu_operators_are_judged_and_kernels_are_not() -> None:
    run, _ = recorded(kernels=STATED, operators=PathRule(must=("aten::mm",)), profile=NO_GPU)
    run = replace(run, environment=fake_runs.environment(gpu=None))

    assert section(run).required.endswith(
        ": operators confirmed in 2; kernels not checked in 2: no GPU."
    )
    assert judged(run)[gate.WHAT_RAN] == (Decision.GO, True)
    assert judged(run)[gate.KERNELS_THAT_RAN] == (Decision.INCONCLUSIVE, False)
    verdict = gate.judge(run.suite, run.environment, summarise(run), ())
    assert verdict.decision is Decision.GO
    assert [r.said for r in verdict.rules] == ["GO", "GO", "not applicable"]
    states = _states(junit(run_verdict.of_run(run, summarise(run), verdict)))
    assert states[gate.KERNELS_THAT_RAN] == "skipped"


def _states(document: str) -> dict[str, str]:
    """Test -> its state, as JUnit has it."""
    tests = ElementTree.fromstring(document).iter("testcase")
    return {
        t.get("name", ""): next((c.tag for c in t if c.tag != "system-out"), "passing")
        for t in tests
    }


def test_unchecked_kernels_on_a_gpu_leave_the_verdict_open() -> None:
    run, _ = recorded(kernels=STATED, profile=Profile(skipped="one step takes 31 s, over 30 s"))

    assert judged(run)[gate.WHAT_RAN] == (Decision.INCONCLUSIVE, True)
    assert gate.judge(run.suite, run.environment, summarise(run), ()).decision is (
        Decision.INCONCLUSIVE
    )


def test_a_missing_kernel_is_a_no_go() -> None:
    run, cases = recorded(kernels=STATED)
    broken = fake_runs.ended(cases[0], Outcome.PATH_MISMATCH, profile=GPU, counters=COUNTED)
    others = [m for m in run.measurements if m.case_id != cases[0].case_id]
    run = replace(run, measurements=(*broken, *others))

    assert "**not** met in 1" in section(run).required
    assert gate.judge(run.suite, run.environment, summarise(run), ()).decision is Decision.NO_GO


def test_a_suite_without_requirements_has_no_such_rule() -> None:
    run, _ = recorded()

    assert section(run).required == ""
    assert gate.WHAT_RAN not in judged(run)
