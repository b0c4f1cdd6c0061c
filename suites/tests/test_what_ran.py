"""A profile, as the harness takes it: the branch of each kernel, the parts of a training step."""

import pytest
import torch

from harness.measure import profile
from harness.measure.profile import ProfileRequest
from suites import workloads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_kernels_of_the_fused_operator_belong_to_their_branches() -> None:
    workload = workloads.attention(
        "triton",
        {
            "seq_len": 2048,
            "batch": 1,
            "q_heads": 12,
            "kv_heads": 2,
            "head_dim_qk": 64,
            "head_dim_v": 64,
            "dtype": "bf16",
            "pass": "forward+backward",
        },
    )
    workload.run()

    ran = profile.take(workload.run, ProfileRequest(step_s=3e-3, time_left_s=60))

    branches: dict[str, set[str]] = {}
    for use in ran.profile.kernels:
        branches.setdefault(use.name, set()).add(use.where)
    both = {"nsa.compress", "nsa.window"}
    assert branches["_forward_kernel"] == branches["_query_kernel"] == both
    assert branches["_key_kernel"] == both
    assert branches["_score_kernel"] == branches["_top_kernel"] == {"nsa.scores"}
    assert branches["_partial_kernel"] == branches["_backward_kernel"] == {"nsa.select"}


BRANCHES = "phi compress scores select window gate"


@pytest.mark.parametrize(("provider", "own"), [("nsa", BRANCHES), ("dense", "attention")])
def test_a_training_step_names_its_parts(provider: str, own: str) -> None:
    workload = workloads.train(provider, {"preset": "tiny", "seq_len": 24, "precision": "fp32"})
    workload.run()

    ran = profile.take(workload.run, ProfileRequest(step_s=0.05, time_left_s=60, profile_s=0.0))

    assert ran.profile.breakdown is not None
    named = set(ran.profile.breakdown.host_by_range)
    parts = f"{own} projections feed_forward loss data optimiser"
    assert {f"nsa.{part}" for part in parts.split()} <= named
