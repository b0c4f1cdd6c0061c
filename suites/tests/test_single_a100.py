"""The smoke test before 50,000 steps: its ladder, its gap, and a small run on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis import summary
from harness.analysis.study import Study
from harness.analysis.suspects import Conclusion, diagnose
from harness.records import Case, Decision, Measurement, Outcome, Run
from harness.report import answer, conditions, steadiness
from harness.runner.launcher import Launcher
from harness.runner.run import Agenda, run_suite
from harness.suite import load as suites
from harness.tests import fake_runs
from harness.tests.workers import Memory, rig_of
from suites.tests.small import A100, judged

NAME = "single-a100-production"
FAST, SLOW, CHECKPOINTED = 60_000.0, 27.0, 16.0
"""tokens/s of the fast routes, and of the users' run, without and with checkpointing."""
TINY = (
    *("preset=tiny", "seq_len=48", "accum=1", "precision=fp32", "compile=off", "graph=off"),
    *(
        "steps=6",
        "NSA_USE_TRITON=0",
        "dataset=synthetic",
        "measure.processes=1",
        "measure.min_samples=2",
    ),
    *("measure.max_samples=2", "measure.warmup_s=0", "measure.accuracy=false"),
    "measure.profile=false",
)


def measured(case: Case, rate: float) -> list[Measurement]:
    tokens = int(case.axes["seq_len"]) * int(case.axes["accum"])
    count = case.settings.processes
    found = fake_runs.timed(case, tokens / rate, tokens=tokens, processes=count)
    return [run_over(m) for m in found] if case.workload == "smoke" else found


def run_over(m: Measurement, pace: Callable[[int], float] = lambda n: 1.0) -> Measurement:
    """With its 500 steps: a loss that falls, and memory that stays."""
    return fake_runs.trained(
        m, steps=500, pace=pace, loss=lambda n: 2 + 3 / n, memory_bytes=lambda n: 1e9
    )


def as_planned(case: Case) -> float:
    if case.axes["gc"] == "on":
        return CHECKPOINTED
    return SLOW if case.workload == "report" or "TRITON=0" in case.case_id else FAST


def run_of(rate: Callable[[Case], float] = as_planned) -> Run:
    suite = suites.load(NAME)
    run = fake_runs.run(suite.cases, lambda c: measured(c, rate(c)), env=A100)
    return replace(run, suite=suite)


def decisions(run: Run) -> dict[str, Decision]:
    return {r.rule: r.decision for r in judged(run).rules if r.applies and r.stated}


def test_fast_steps_may_start_the_training_and_the_cost_has_an_interval() -> None:
    run = run_of()

    assert {*decisions(run).values()} == {Decision.GO}
    cost = conditions.cost(Study(run))
    assert cost
    assert [name.split(",")[0] for name, *_ in cost.rows] == [
        "NSA Triton + graph",
        *["as on 2025-08-28"] * 4,
    ]
    assert " h" in cost.rows[0][1]
    assert "at $" in cost.columns[1]


def test_a_speed_that_sinks_over_500_steps_is_no_go() -> None:
    run = run_of()
    sinking = [
        run_over(m, lambda n: 1 + n / 500) if m.case_id.startswith("smoke") else m
        for m in run.measurements
    ]

    found = decisions(replace(run, measurements=tuple(sinking)))

    assert found["tokens/s stay steady"] is Decision.NO_GO
    assert found["memory stays flat"] is Decision.GO


@pytest.mark.parametrize(
    ("rate", "decision", "stops"),
    [
        (27.0, Decision.NO_GO, True),
        (300.0, Decision.CONDITIONAL, False),
        (FAST, Decision.GO, False),
    ],
)
def test_the_ladder_ends_a_run_below_100_and_asks_for_500(
    rate: float, decision: Decision, stops: bool
) -> None:
    run = run_of(lambda case: rate)
    rung = [m for m in run.measurements if m.case_id.startswith("first/")]
    partial = replace(run, measurements=tuple(rung))
    agenda = Agenda(run.suite, recorded=rung, device="NVIDIA A100", read=lambda: partial)

    step = agenda.next()

    assert decisions(run)["500 steps on an A100"] is decision
    assert (step is None) is stops
    assert step is None or step[0].workload == "smoke"


def test_the_settings_that_slow_a_run_down_are_named_and_the_innocent_are_not() -> None:
    run = run_of()

    diagnoses = {d.name: d for d in diagnose(run.suite, summary.summarise(run))}
    found = {name: d.conclusion for name, d in diagnoses.items()}

    assert found["the eager packed route (no Triton, no compile, no graph)"] is Conclusion.ENOUGH
    assert found["the model without NSA (dense)"] is Conclusion.RULED_OUT
    off = [name for name, conclusion in found.items() if conclusion is Conclusion.WAS_OFF]
    assert set(off) == {"gradient checkpointing", "gather instead of Triton"}
    assert (cost := diagnoses["gradient checkpointing"].effect)
    assert cost.value == pytest.approx(SLOW / CHECKPOINTED, rel=0.05)


def test_the_page_names_the_gap_and_what_the_node_lacks() -> None:
    run = run_of(lambda case: 39.0)
    shown = answer.brief(answer.named(judged(run), Study(run)))

    first = next(iter(answer.parts(shown, run.suite, "")))

    assert (first.word, first.limit, "missed by 13x" in first.said) == ("no", "≥ 500", True)
    trusted = [*steadiness.trust(Study(run))]
    assert "not as the suite requires: deterministic, gpu_free_bytes and 5 more" in trusted


def test_a_small_variant_runs_to_its_verdict_on_the_cpu(tmp_path: Path) -> None:
    filters = ["smoke/*", "report/nsa/gc=off/*", "dense/*"]
    suite = replace(suites.load(NAME, overrides=TINY, filters=filters), device="cpu")
    writer = Memory(tmp_path)

    with Launcher.of(suite) as launcher:
        launcher.preflight(suite)
        run_suite(Agenda(suite), rig_of(launcher), writer)

    ended = {m.case_id: m.outcome for m in writer.measurements}
    refused = [name for name, outcome in ended.items() if outcome is Outcome.UNSUPPORTED]
    assert {*ended.values()} == {Outcome.OK, Outcome.UNSUPPORTED}
    assert all("flash-attn" in name for name in refused)
    here = replace(fake_runs.run(suite.cases, lambda c: []), suite=suite)
    found = judged(
        replace(
            here,
            measurements=tuple(writer.measurements),
            environment=fake_runs.environment(gpu=None),
        )
    )
    assert found.not_measured == "A100"
    assert next(r for r in found.rules if r.rule == "every case ran").decision is Decision.GO
