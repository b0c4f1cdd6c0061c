"""The suite for data-parallel training, on the CPU: two ranks of a tiny model over gloo."""

import statistics
from dataclasses import replace

from harness.records import Decision, Outcome
from harness.suite import load as suites
from harness.tests import fake_runs
from harness.tests.answers import answered
from suites.tests.small import judged, smaller

SMALLER = {
    "device: cuda": "device: cpu",
    "requires: {gpus: 2}": "",
    "--preset=125m": "--preset=tiny",
    "--compile=on": "--compile=off",
    "--cuda-graph": "--no-cuda-graph",
    "NSA_USE_TRITON: 1, ": "",
    "2048": "32",
    "batch: 32": "batch: 2",
    "sample_s: 2": "sample_s: 0.05",
    "warmup_s: 4": "warmup_s: 0.1",
    "profile: true": "profile: false",
}


def test_the_suite_runs_to_its_verdict_on_two_ranks_of_a_tiny_model() -> None:
    """The speed of one rank is planted: here two may share a core."""
    whole = suites.loads(smaller("ddp", SMALLER), "ddp.yaml")
    one, two = (c for c in whole.cases if c.case_id[:6] == "train/")
    assert (one.axes["world_size"], two.axes["world_size"]) == (1, 2)

    m = answered(two, device="cpu")

    assert m.outcome is Outcome.OK, m.detail
    assert (m.tokens, [r.rank for r in m.ranks]) == (2 * 2 * 32, [0, 1])
    assert all(r.steps is None for r in m.ranks), "only rank 0 prints its steps"
    for share, decision in ((0.97, Decision.GO), (0.9, Decision.CONDITIONAL)):
        step_s = share * statistics.median(m.kept_s)
        alone = fake_runs.timed(one, step_s, cv=0.0, tokens=64)
        made = [*alone, *(replace(m, process=p) for p in range(3))]
        run = fake_runs.run([one, two], lambda _: [])
        run = replace(run, measurements=tuple(made))
        run = replace(run, suite=replace(whole, cases=(one, two), rules=whole.rules[:1]))
        assert judged(run).decision is decision
