"""A small run, the file it is written to, and a disk with no room for it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.records import Case, Clock, CostPlan, Measurement, Outcome, Rule, Weight
from harness.store import reader
from harness.store.writer import RunWriter
from harness.tests.fake_runs import H200, environment, run, sweep, to

GPU = replace(H200, uuid="GPU-6f0c", driver="570.86")
ENVIRONMENT = environment(gpu=GPU)
CASES = tuple(
    replace(c, axes={**c.axes, "gc": False, "lr": 1.0}, allow={Outcome.TIMEOUT: "slow by design"})
    for c in sweep(seq_len=[128, 256])
)
SUITE = run(
    CASES,
    lambda _: [],
    name="smoke",
    path="suites/smoke.yaml",
    expectations=[Rule(name="half", metric="mfu", low=0.2, match=to(gc=False), counts=Weight.NOTE)],
    rules=[Rule(name="floor", metric="tokens_per_s", go=500.0, abort=100.0)],
    cost=CostPlan(steps=1000),
).suite


def measured(process: int, case: Case = CASES[0]) -> Measurement:
    return Measurement(
        case_id=case.case_id,
        process=process,
        outcome=Outcome.OK,
        clock=Clock.HOST,
        samples_s=(0.1, 0.1 + 1e-17, 1 / 3),
        effective={"routes": "gather", "layers": 12, "scale": 1.0},
    )


def run_file(writer: RunWriter) -> Path:
    return writer.folder / reader.RUN_FILE


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow past `size`: the kernel writes up to it, then fails, as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
