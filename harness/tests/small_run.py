"""A small run, the file it is written to, and a disk with no room for it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.records import (
    Case,
    Clock,
    CostPlan,
    Environment,
    Expectation,
    Git,
    Gpu,
    Match,
    Measurement,
    Outcome,
    Rule,
    Suite,
)
from harness.store import reader
from harness.store.writer import RunWriter

GPU = Gpu(
    name="NVIDIA H200",
    uuid="GPU-6f0c",
    index=0,
    memory_bytes=150 * 10**9,
    driver="570.86",
    cuda_driver="12.8",
    compute_capability="9.0",
    power_limit_w=700.0,
)
ENVIRONMENT = Environment(
    captured_at="2026-11-21T07:30:12+00:00",
    hostname="node",
    os="Linux",
    cpu="a CPU",
    cpu_count=2,
    memory_bytes=2**33,
    gpu=GPU,
    versions={"torch": "2.11.0", "flash-attn": None},
    torch_settings={"allow_tf32_matmul": True, "num_threads": 2, "allocator": "native"},
    git=Git(commit="3f2a" * 10, branch="main"),
    command=("harness", "run", "smoke"),
)
CASES = tuple(
    Case(
        case_id=f"train/nsa/seq_len={T}",
        workload="train",
        factory="suites.workloads:train",
        provider="nsa",
        axes={"seq_len": T, "gc": False, "lr": 1.0},
        swept=("seq_len",),
        allow={Outcome.TIMEOUT: "slow by design"},
    )
    for T in (128, 256)
)
SUITE = Suite(
    name="smoke",
    title="Smoke",
    subject="Smoke",
    question="Does it run?",
    path="suites/smoke.yaml",
    text="# Does it run?\ntitle: Smoke\n",
    sha256="0" * 64,
    cases=CASES,
    expectations=(Expectation(metric="mfu", low=0.2, match=Match(criteria={"gc": (False,)})),),
    rules=(Rule(name="floor", metric="tokens_per_s", go=500.0, abort=100.0),),
    cost=CostPlan(steps=1000),
)


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
