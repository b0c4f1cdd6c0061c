"""The suite training-50k-analysis: small, on the CPU, to its verdict; and what it concludes."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from harness.analysis import summary
from harness.analysis.study import Study
from harness.analysis.suspects import Conclusion, diagnose
from harness.records import Case, Decision, Measurement, Outcome, Run, worst_first
from harness.report import conditions
from harness.suite import load as suites
from harness.tests import fake_runs
from harness.tests.answers import answered
from nsa.train.__main__ import main
from suites.tests.small import A100, judged, smaller

NAME = "training-50k-analysis"
SMALL = {
    "device: cuda": "device: any",
    "125m": "tiny",
    "bf16": "fp32",
    "dataset: text": "dataset: synthetic",
    "[128, 256, 512, 1024, 2048]": "[8, 12, 16, 20, 24]",
    "[128, 256, 1024]": "[8, 12, 20]",
    "[256, 1024]": "[12, 20]",
    "[512, 2048]": "[16, 24]",
    "seq_len: 2048": "seq_len: 24",
    "seq_len: 512": "seq_len: 16",
    "seq_len: 128": "seq_len: 8",
    'compile: "on"': 'compile: "off"',
    'graph: "on"': 'graph: "off"',
    "NSA_USE_TRITON: 1": "NSA_USE_TRITON: 0",
    "sample_s: 1": "sample_s: 0.01",
    "warmup_s: 3": "warmup_s: 0.01\n  profile: false\n  accuracy: false",
}


def decisions(run: Run) -> dict[str, Decision]:
    """By the part of the question, the worst of its rules."""
    asked = worst_first(r for r in judged(run).rules if r.asks and r.applies)
    return {r.asks: r.decision for r in reversed(asked)}


def test_a_small_variant_runs_to_its_verdict() -> None:
    suite = suites.loads(smaller(NAME, SMALL), "small.yaml")
    curve = re.compile(".*seq_len=24|train/nsa/.*V2=1|.*compress.window$|.*select.window$")
    cases = tuple(c for c in suite.cases if not c.program and curve.match(c.case_id))
    suite = replace(suite, cases=cases)
    twice = [(c, p) for c in cases for p in range(2 if "fast" in c.case_id else 1)]
    made = tuple(answered(c, process=p) for c, p in twice)

    run = replace(fake_runs.run(cases, lambda _: []), suite=suite, measurements=made)
    run = replace(run, environment=fake_runs.environment(gpu=None))

    assert {m.outcome for m in made} == {Outcome.OK}, [m.detail for m in made]
    found = decisions(run)
    assert found.keys() == {"day", "growth"}
    assert found["day"] is not Decision.NO_GO, "a busy machine may leave it open"
    assert {d.name for d in diagnose(suite, summary.summarise(run)) if d.effect}


def planted(case: Case) -> float:
    """tokens/s as in the report of 2025-08-27, its causes as it suspected them."""
    if case.workload == "gpus":
        return 1000.0 * float(case.axes["gpus"]) * 0.9
    if case.workload in ("fast", "run"):
        return 60_000.0
    if case.workload == "branches":
        return 500.0 if case.axes["NSA_BRANCHES"] == "compress+window" else 33.0
    if case.provider == "dense":
        return 6_000.0
    return 58.0 if case.axes["NSA_SEL_RANGES_V2"] == 0 else 33.0


def learned(m: Measurement, **changes: Any) -> Measurement:
    """With 1,000 steps on record, to a loss of 1.5 nats a byte in flat memory."""
    given = {"loss": lambda n: 5.5 - n / 250, "memory_bytes": lambda _: 2e9, **changes}
    return fake_runs.trained(m, **{"steps": 1000, **given})


def planted_run(
    rate: Callable[[Case], float] = planted,
    stepped: Callable[[Measurement], Measurement] = learned,
    *,
    two: Outcome = Outcome.OK,
) -> Run:
    suite = suites.load(NAME)

    def measure(c: Case) -> list[Measurement]:
        if two is not Outcome.OK and c.axes.get("gpus") == 2:
            return fake_runs.ended(c, two)
        tokens = int(c.axes["seq_len"]) * int(c.axes.get("gpus", 1))
        made = fake_runs.timed(c, tokens / rate(c), tokens=tokens, processes=2)
        return [*map(stepped, made)] if c.workload == "run" else made

    return replace(fake_runs.run(suite.cases, measure, env=A100), suite=suite)


def test_the_causes_that_are_there_are_named_and_the_innocent_is_not() -> None:
    run = planted_run()

    found = {d.name: d.conclusion for d in diagnose(run.suite, summary.summarise(run))}

    assert found["eager kernels (no Triton, no compile, no graph)"] is Conclusion.ENOUGH
    assert found["the selected branch"] is Conclusion.ENOUGH
    assert found["V1 selection (loop over queries)"] is Conclusion.WAS_OFF
    assert found["the model without NSA (dense)"] is Conclusion.RULED_OUT


def test_each_part_of_the_question_has_its_answer() -> None:
    run = planted_run()
    cost = conditions.cost(Study(run))
    slow = planted_run(lambda c: planted(c) / 60)

    assert decisions(run) == {
        "day": Decision.GO,
        "growth": Decision.GO,
        "expected": Decision.CONDITIONAL,
        "two": Decision.GO,
        "stable": Decision.GO,
    }
    assert cost
    assert any(" and " in cell for _, cell, *_ in cost.rows)
    assert decisions(slow)["day"] is not Decision.GO


@pytest.mark.parametrize(
    "changes",
    [
        {"steps": 900},
        {"loss": lambda _: 5.5},
        {"pace": lambda n: 1 + n / 1000},
        {"memory_bytes": lambda n: 2e9 + 2**21 * n},
    ],
    ids=["ends early", "learns nothing", "sinks", "leaks"],
)
def test_a_run_that_is_not_sound_is_no_go(changes: Mapping[str, Any]) -> None:
    run = planted_run(stepped=partial(learned, **changes))

    assert decisions(run)["stable"] is Decision.NO_GO
    assert sum(r.decision is Decision.NO_GO for r in judged(run).rules) == 1


def test_a_machine_with_one_gpu_has_a_verdict() -> None:
    assert [c.program.gpus for c in suites.load(NAME).cases if c.program] == [1, 2]
    run = planted_run(two=Outcome.UNSUPPORTED)

    found = judged(replace(run, environment=fake_runs.environment(gpu=None)))

    assert found.decision is Decision.GO
    assert [r.asks for r in found.rules if r.applies and r.decision is not Decision.GO] == ["two"]


def test_a_crash_on_two_gpus_is_no_go() -> None:
    assert judged(planted_run(two=Outcome.CRASH)).decision is Decision.NO_GO


def test_the_program_takes_the_options_and_prints_the_lines_that_the_suite_reads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one process: torchrun would start another Python."""
    program = next(c.program for c in suites.load(NAME).cases if c.program)
    assert program
    assert program.steps
    options = program.argv[program.argv.index("nsa.train") + 1 :]

    assert main([*options, "--preset=tiny", "--seq-len=16", "--steps=3", "--device=cpu"]) == 0

    lines = capsys.readouterr().out.splitlines()
    steps = [found["step"] for line in lines if (found := re.search(program.steps.step, line))]
    assert steps == ["1", "2", "3"]
