"""What workers import after the fork, each of them again."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from harness.records import Case, Outcome, Scalar
from harness.runner.launcher import Launcher
from harness.tests.workers import QUICK, make_suite, run
from suites.tests.small import OPERATOR, needs_no_gpu

MODEL: Mapping[str, Scalar] = {"preset": "tiny", "precision": "fp32"}
HALF: Mapping[str, Scalar] = {**OPERATOR, "seq_len": 4, "dtype": "fp16", "pass": "forward"}
DECODED = {name: x for name, x in HALF.items() if name not in ("seq_len", "pass")}
CASES: Mapping[str, tuple[tuple[str, ...], Mapping[str, Scalar]]] = {
    "attention": (("triton",), {**HALF, "branch": "window"}),
    "decode_attention": (("triton",), {**DECODED, "context": 4}),
    "train": (("nsa", "dense"), {**MODEL, "seq_len": 16}),
    "training_run": (("nsa",), {**MODEL, "seq_len": 16, "steps": 3}),
    "forward": (("nsa",), {**MODEL, "seq_len": 16}),
    "layer": (("nsa",), {**MODEL, "seq_len": 16}),
    "decode": (("nsa",), {**MODEL, "context": 16}),
}
"""Factory -> the providers that run without a GPU, and small axes."""
LATE = {"torch.profiler._cupti_monitor"}
"""Small, and only some versions of torch have it."""


@needs_no_gpu
def test_a_worker_imports_nothing_that_its_forkserver_could_have(tmp_path: Path) -> None:
    cases = [
        Case(
            case_id=f"{factory} {provider}",
            workload=factory,
            factory=f"suites.workloads:{factory}",
            provider=provider,
            axes=axes,
            settings=replace(QUICK, profile=True, min_samples=1, max_samples=2),
        )
        for factory, (providers, axes) in CASES.items()
        for provider in providers
    ]
    around = {"TRITON_INTERPRET": "1", "PYTHONVERBOSE": "1"}

    with Launcher(around=around) as launcher:
        launcher.preflight(make_suite(*cases))
        assert not launcher.not_preloaded
        measured = run(launcher, tmp_path, *cases)

    assert {m.case_id: m.outcome for m in measured} == {c.case_id: Outcome.OK for c in cases}
    imported = {
        m.case_id: {*re.findall(r"^import '(\S+)' #", (tmp_path / m.log).read_text(), re.M)} - LATE
        for m in measured
    }
    assert imported == {case.case_id: set() for case in cases}
