"""A training run as a workload, and the suite of step 5, small and on the CPU, to its verdict."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from harness.analysis.over_steps import course
from harness.analysis.summary import summarise
from harness.analysis.verdict import judge
from harness.records import Case, Decision, Measurement, Outcome, Run, Scalar
from harness.suite import load as suites
from harness.tests import answers
from harness.tests.small_run import ENVIRONMENT
from harness.tests.workers import make_case
from suites import workloads

FILE = Path(__file__).parents[1] / "step5-breakthrough.yaml"
STEPS = 16
SMALL = {
    "device: cuda": "device: any",
    r"steps: (200|20|10)\b": f"steps: {STEPS}",
    r"go: (200|10)\b": f"go: {STEPS}",
    r"preset: (125m|small)": "preset: tiny",
    r"seq_len: \d+": "seq_len: 4",
    "NSA_USE_TRITON: 1": "NSA_USE_TRITON: 0",
    r"processes: \{.*\n": "processes: 1\n  accuracy: false\n  profile: false\n",
    r"timeout_s: \d+": "timeout_s: 240",
}
AXES: Mapping[str, Scalar] = {
    "preset": "tiny", "seq_len": 24, "batch": 2, "precision": "fp32", "steps": 4,
}  # fmt: skip


def seldom(c: Case) -> bool:
    """fp16 is slow on a CPU; the statistics run in one configuration."""
    precision, statistics = c.axes["precision"], c.get("NSA_DISABLE_AUX_STATS") == 0
    one = c.get("NSA_PREFILL_BATCHED") == 1 and precision == "fp32"
    return precision == "fp16" or (statistics and not one)


def answered(case: Case) -> Measurement:
    """What a worker answers for a case, in this process; a planted hang ends as the parent says.
    Steps in which nothing is planted take the least time: a loaded machine has slow ones itself."""
    fault = case.axes.get("fault")
    if fault == "hang":
        return Measurement(case_id=case.case_id, process=0, outcome=Outcome.HANG)
    m = answers.answered(case)
    if fault in ("none", "slow") and (s := m.over_steps):
        planted, least_s = 5 if fault == "slow" else 0, min(s.step_s)
        times_s = (x if n == planted else least_s for n, x in zip(s.step, s.step_s, strict=True))
        return replace(m, over_steps=replace(s, step_s=tuple(times_s)))
    return m


def test_the_suite_of_step_5_runs_to_its_verdict() -> None:
    text = FILE.read_text()
    for old, new in SMALL.items():
        text = re.sub(old, new, text)
    suite = suites.loads(text, "step5.yaml")
    suite = replace(suite, cases=tuple(c for c in suite.cases if not seldom(c)))
    run = Run(
        run_id="r",
        folder="",
        suite=suite,
        environment=ENVIRONMENT,
        measurements=tuple(map(answered, suite.cases)),
    )

    verdict = judge(suite, ENVIRONMENT, summarise(run), ())

    found = {r.rule: r.decision for r in verdict.rules}
    assert found["every case ran"] is Decision.GO, verdict.rules[0].findings
    passed = "all 12 combinations of prefill, precision and statistics pass step 5 (tiny model)"
    assert found[passed] is Decision.GO
    assert found["batched prefill completes 200 steps, also at 125M"] is Decision.GO
    assert found["expectations are met"] is Decision.GO
    (failed,) = [m for m in run.measurements if m.outcome is Outcome.NON_FINITE]
    assert (went := course([failed]))
    assert went.not_finite["loss"] == 5
    (slow,) = [m for m in run.measurements if "fault=slow" in m.case_id]
    assert (went := course([slow]))
    assert 5 in went.slow
    courses = [course([m]) for m in run.measurements if m.case_id.startswith(("early", "steps"))]
    losses = {c.last["loss"] for c in courses if c}
    assert max(losses) < 1.01 * min(losses), "prefill, precision and statistics train alike"


def test_a_training_run_learns_and_says_so_step_by_step() -> None:
    workload = workloads.training_run("nsa", AXES)
    assert workload.recorded is not None

    seen = []
    for _ in range(4):
        (loss,) = workload.run().values()
        seen.append(workload.recorded())
        assert seen[-1]["loss"] == pytest.approx(loss.item())

    assert workload.steps == 4
    assert seen[0]["loss"] == pytest.approx(math.log(256), rel=0.1)
    assert all(s["bits_per_byte"] == pytest.approx(s["loss"] / math.log(2)) for s in seen)
    assert all(float(s["grad_norm"]) > 0 for s in seen)
    assert len({s["loss"] for s in seen}) == 4


def test_a_planted_hang_waits_in_its_step_and_those_before_it_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        raise TimeoutError

    monkeypatch.setattr("suites.training.time.sleep", sleep)
    case = make_case("", axes={**AXES, "steps": 9, "fault": "hang"})

    m = answers.answered(replace(case, factory="suites.workloads:training_run", provider="nsa"))

    assert (m.outcome, waited[0] > 60) == (Outcome.CRASH, True), m.detail
    assert m.over_steps
    assert m.over_steps.step == (1, 2, 3, 4)
    assert all(5 < (loss or 0) < 6 for loss in m.over_steps.values["loss"])
