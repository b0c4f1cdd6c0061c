"""What tests of suites share: an operator of small sizes, and shipped suites made smaller."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from harness.analysis.study import Study
from harness.records import Run, Scalar, Verdict
from harness.suite import load as suites
from harness.tests import fake_runs

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
A100 = fake_runs.environment(gpu=replace(fake_runs.H200, name="NVIDIA A100 80GB PCIe"))
OPERATOR: Mapping[str, Scalar] = {
    "seq_len": 70,
    "batch": 1,
    "q_heads": 6,
    "kv_heads": 2,
    "head_dim_qk": 16,
    "head_dim_v": 8,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 8,
    "num_blocks": 4,
    "window_size": 16,
    "dtype": "fp32",
    "pass": "forward+backward",
}


def smaller(name: str, changes: Mapping[str, str]) -> str:
    """The text of a shipped suite with these texts replaced, each of which it must have."""
    text = suites.load(name).text
    for shipped, small in changes.items():
        assert shipped in text, shipped
        text = text.replace(shipped, small)
    return text


def judged(run: Run) -> Verdict:
    return Study(run).verdict
