"""The section "Profile", from records of a GPU and of a machine without one."""

from dataclasses import replace
from typing import Any

import pytest

from harness.analysis import verdict as gate
from harness.analysis.study import Study
from harness.analysis.summary import summarise
from harness.records import (
    Breakdown,
    Case,
    Counters,
    Decision,
    Measurement,
    PathRule,
    Profile,
    Rule,
    Run,
    Use,
    Verdict,
)
from harness.report import profile as page
from harness.report.tables import Table
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
        device_busy_s=0.012,
        gap_by_range={"nsa.select": 0.64, "": 0.36},
        host_by_range={"nsa.select": 0.5, "": 0.5},
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
    *, profile: Profile | None = GPU, counters: Counters = COUNTED, **case: Any
) -> tuple[Run, list[Case]]:
    cases = [replace(c, **case) for c in fake_runs.sweep(seq_len=[512, 2048])]

    def measure(c: Case) -> list[Measurement]:
        return fake_runs.taking(c, *[0.071] * 3, profile=profile, counters=counters)

    return fake_runs.run(cases, measure), cases


def counts(run: Run) -> Table:
    table = page.counts(Study(run))
    assert table is not None
    return table


def test_the_wait_is_a_share_of_the_sampled_step() -> None:
    """The host of a step of 58 us, captured as a graph, had its result after 74."""
    assert GPU.breakdown is not None
    waited = replace(GPU.breakdown, step_s=0.16, device_busy_s=0.06)

    table = page.limits(Study(recorded(profile=replace(GPU, breakdown=waited))[0]))

    assert table is not None
    assert table.rows[0][0] == "host and GPU"


def test_a_provider_whose_gpu_waits_is_named_with_its_cases() -> None:
    of = Study(recorded()[0])
    assert page.host_bound(of, of.summaries) == "Host-bound: nsa (2 of 2 cases)."


def judged(run: Run) -> Verdict:
    return gate.judge(run.suite, run.environment, summarise(run), ())


@pytest.mark.parametrize(
    ("go", "steps", "decision"),
    [
        (34, 2, Decision.GO),
        (33, 2, Decision.NO_GO),
        (1e6, 2, Decision.GO),
        (100, 1, Decision.INCONCLUSIVE),
    ],
)
def test_a_rule_on_a_count_is_decided_by_one_process_if_the_count_is_exact(
    go: float, steps: int, decision: Decision
) -> None:
    run, cases = recorded(counters=replace(COUNTED, steps=steps))
    only = tuple(m for m in run.measurements if m.process == 0)
    cases = [replace(c, settings=replace(c.settings, processes=1)) for c in cases]
    rule = Rule(name="few syncs", metric="host_syncs", go=go)
    suite = replace(run.suite, cases=tuple(cases), rules=(rule,))
    run = replace(run, suite=suite, measurements=only)

    assert judged(run).decision is decision
    assert counts(run).rows[0][2] == ("34?" if steps == 1 else "34")


KERNELS, OPERATORS = PathRule(must=("gemm",)), PathRule(must=("aten::mm",))
SKIPPED = Profile(skipped="one step takes 31 s, over 30 s")
MET, OPEN, LEFT = (Decision.GO, True), (Decision.INCONCLUSIVE, True), (Decision.INCONCLUSIVE, False)
MET_BUT_LEFT = {gate.WHAT_RAN: MET, gate.KERNELS_THAT_RAN: LEFT}


@pytest.mark.parametrize(
    ("requires", "profile", "gpu", "rules", "why"),
    [
        ({}, None, True, {}, ""),
        ({"kernels": KERNELS}, GPU, True, {gate.WHAT_RAN: MET}, ""),
        ({"kernels": KERNELS}, SKIPPED, True, {gate.WHAT_RAN: OPEN}, SKIPPED.skipped),
        ({"kernels": KERNELS}, NO_GPU, True, {gate.WHAT_RAN: OPEN}, "no GPU"),
        ({"kernels": KERNELS}, NO_GPU, False, {gate.KERNELS_THAT_RAN: LEFT}, ""),
        ({"kernels": KERNELS, "operators": OPERATORS}, NO_GPU, False, MET_BUT_LEFT, ""),
        ({"operators": OPERATORS}, NO_GPU, True, {gate.WHAT_RAN: MET}, ""),
        ({"operators": OPERATORS}, SKIPPED, True, {gate.WHAT_RAN: OPEN}, SKIPPED.skipped),
        ({"operators": OPERATORS}, SKIPPED, False, {gate.WHAT_RAN: OPEN}, SKIPPED.skipped),
        ({"operators": OPERATORS}, None, False, {gate.WHAT_RAN: OPEN}, "no profile was taken"),
    ],
)
def test_unchecked_requirements_leave_the_verdict_open_but_invisible_kernels_do_not(
    requires: dict[str, Any],
    profile: Profile | None,
    gpu: bool,
    rules: dict[str, tuple[Decision, bool]],
    why: str,
) -> None:
    run, _ = recorded(profile=profile, **requires)
    run = replace(run, environment=fake_runs.environment(**({} if gpu else {"gpu": None})))

    verdict = judged(run)

    found = {r.rule: (r.decision, r.applies) for r in verdict.rules}
    assert found == {gate.EVERY_CASE_RAN: MET, **rules}
    assert verdict.decision is (Decision.INCONCLUSIVE if why else Decision.GO)
    assert {s.unattested for s in summarise(run)} == {why}
