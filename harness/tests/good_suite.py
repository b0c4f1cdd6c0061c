"""A good suite, which tests of suite files read, sweep and break."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from harness.errors import SuiteError
from harness.records import Suite
from harness.suite import load as suites

GOOD = """\
schema: 1
title: Retest
subject: A100 Retest
question: Is it fast enough?
measure: {processes: 4, timeout_s: 90}
workloads:
  - name: train
    factory: suites.workloads:train
    providers: [nsa, dense]
    axes:
      preset: small
      seq_len: [128, 256, 512]
      gc: ["off", "on"]
      NSA_USE_FA2: [0, 1]
    exclude:
      - {provider: dense, NSA_USE_FA2: 1}
      - {gc: "on", seq_len: [256, 512]}
    env: {OMP_NUM_THREADS: 1}
    measure: {timeout_s: 60}
    allow: {timeout: slow card}
expectations:
  - match: {seq_len: 128, gc: "off"}
    gpu: A100
    tokens_per_s: {low: 500, high: 1500}
    source: runbook
verdict:
  - name: throughput
    match: {provider: nsa}
    metric: tokens_per_s
    go: 500
    abort: 100
  - name: scaling
    match: {gc: off}
    metric: scaling_exponent
    axis: seq_len
    go: 1.3
    abort: 1.8
cost: {steps: 50000, match: {seq_len: 512}, usd_per_gpu_hour: 2.0}
"""


def error_of(text: str, overrides: Sequence[str] = (), filters: Sequence[str] = ()) -> str:
    with pytest.raises(SuiteError) as caught:
        suites.loads(text, "x.yaml", overrides, filters)
    return str(caught.value)


def ids(loaded: Suite) -> list[str]:
    return [case.case_id for case in loaded.cases]


def write_suite(folder: Path, text: str = GOOD) -> Path:
    path = folder / "mine.yaml"
    path.write_text(text)
    return path
