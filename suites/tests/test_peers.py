"""Peers' kernels as providers: declined where they cannot run, and judged by the definition.

The package is not a dependency, so its functions are replaced by the definitions of what they
compute; that they compute it is checked where a suite runs them, before anything is timed.
"""

import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from harness.measure import accuracy
from harness.records import Scalar
from harness.workload import Unsupported
from nsa import reference
from nsa.config import NSAConfig, Positions
from nsa.flags import Flags
from nsa.routes import fa2
from suites import peers, workloads
from suites.attention_plan import AttentionPlan
from suites.axes import AxisError
from suites.tests import small
from suites.tests.small import needs_no_gpu

OPERATOR: Mapping[str, Scalar] = {**small.OPERATOR, "batch": 2, "select_block_size": 16}


def sizes(block_size: int, num_blocks: int) -> NSAConfig:
    return NSAConfig(
        compress_block_size=block_size,
        compress_stride=block_size,
        select_block_size=block_size,
        num_blocks=num_blocks,
    )


def mean(x: Tensor, size: int) -> Tensor:
    return reference.compress_blocks(x, lambda blocks: blocks.mean(2), config=sizes(size, 4))


def nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    block_indices: Tensor | None = None,
    *,
    block_counts: int,
    block_size: int,
) -> Tensor:
    """What parallel_nsa says it computes; it takes groups of 16 and more."""
    assert q.shape[2] // k.shape[2] >= 16
    at = Positions.of(q, config=sizes(block_size, block_counts))
    k_cmp, v_cmp = mean(k, block_size), mean(v, block_size)
    if block_indices is None:
        block_indices = reference.select_blocks(q.detach(), k_cmp.detach(), at)
    out = reference.selected_attention(q, k, v, block_indices, at)
    if g_slc is not None:
        out = out * g_slc.unsqueeze(-1)
    if g_cmp is not None:
        compressed = reference.compress_attention(q, k_cmp, v_cmp, at)
        out = out + compressed * g_cmp.unsqueeze(-1)
    return out


def window(q: Tensor, size: int) -> Positions:
    return Positions.of(q, config=NSAConfig(window_size=size))


def topk(
    q: Tensor, k: Tensor, *, lse: None, TK: int, block_counts: int, block_size: int, scale: float
) -> Tensor:
    """Like parallel_nsa_topk, the best first."""
    assert lse is None
    assert scale == q.shape[-1] ** -0.5
    assert q.shape[1] == TK
    at = Positions.of(q, config=sizes(block_size, block_counts))
    return reference.select_blocks(q, k, at).flip(-1)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers' functions as their definitions, on any device."""
    module = SimpleNamespace(
        parallel_nsa=nsa,
        parallel_nsa_topk=topk,
        parallel_nsa_compression=lambda **_: (None, None),
        mean_pooling=mean,
    )

    def flash(q: Tensor, k: Tensor, v: Tensor, *, window_size: int, **_: Any) -> Tensor:
        return reference.window_attention(q, k, v, window(q, window_size))

    monkeypatch.setattr(peers, "_fla", lambda _: module)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__version__="0.6.0"))
    monkeypatch.setattr(peers, "_refusal", lambda *_: "")
    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention)
    monkeypatch.setattr(fa2, "flash_attention", flash)


@pytest.mark.usefixtures("played")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("provider", "branch", "gradients"),
    [
        ("fla-nsa", "whole", {"dq", "dk_sel", "dv_sel", "dgates"}),
        ("fla-nsa", "select", {"dq", "dk_sel", "dv_sel"}),
        ("flex", "window", set()),
    ],
)
def test_a_peer_is_compared_with_what_it_computes(
    provider: str, branch: str, gradients: set[str]
) -> None:
    backward = "forward+backward" if gradients else "forward"
    axes = {**OPERATOR, "branch": branch, "pass": backward}
    workload = workloads.attention(provider, axes)

    compared = accuracy.compare(workload)

    names = {t.name for t in compared.tensors}
    assert {"o", *gradients} <= names
    assert ("selected" in names) == ((provider, branch) == ("fla-nsa", "whole"))
    assert workload.effective
    seen = workload.effective()
    assert seen["routes"] == f"{branch}:{provider}"
    fla = {"padded_q_heads": 32, "fla-core": "0.6.0"}
    assert (fla if provider == "fla-nsa" else {"q_heads": 6}).items() <= seen.items()


@pytest.mark.usefixtures("played")
def test_a_peer_that_computes_something_else_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module = peers._fla("")
    monkeypatch.setattr(module, "parallel_nsa", lambda *a, **k: nsa(*a, **k) * 1.001)

    with pytest.raises(accuracy.Incorrect, match=r"error .* bound"):
        accuracy.compare(workloads.attention("fla-nsa", OPERATOR))


@pytest.mark.usefixtures("played")
def test_a_peer_that_selects_other_blocks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers._fla(""), "parallel_nsa_topk", lambda q, k, **kw: topk(-q, k, **kw))

    with pytest.raises(accuracy.Incorrect, match="selected"):
        accuracy.compare(workloads.attention("fla-nsa", OPERATOR))


@needs_no_gpu
@pytest.mark.parametrize(
    ("provider", "branch", "message"),
    [
        ("flex", "window", "flex: needs tensors on CUDA"),
        ("fa2-torch", "window", "fa2-torch: needs an NVIDIA GPU"),
        ("fa2-torch", "compress", "fa2-torch: needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_run_here_declines(provider: str, branch: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        workloads.attention(provider, {**OPERATOR, "branch": branch}).run()


def test_an_absent_package_declines_and_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(Unsupported, match="pip install fla-core"):
        workloads.attention("fla-nsa", OPERATOR)


@pytest.mark.parametrize(
    ("provider", "axes", "message"),
    [
        ("flex", {}, "flex has no branch 'whole'; only window"),
        ("fla-nsa", {"branch": "window"}, "fla-nsa has no branch 'window'; only whole, select"),
        ("fa2-torch", {"branch": "select"}, "no branch 'select'; only compress, window"),
        ("fla-nas", {}, "did you mean 'fla-nsa'"),
        ("gather", {"selection": "random"}, "needs branch=select"),
        ("gather", {"branch": "select", "selection": "rnadom"}, "did you mean 'random'"),
    ],
)
def test_a_peer_without_the_branch_is_refused(
    provider: str, axes: Mapping[str, Scalar], message: str
) -> None:
    with pytest.raises(AxisError, match=message):
        workloads.preflight("attention", provider, {**OPERATOR, **axes}, {})


def test_a_route_of_the_branch_under_test_is_a_provider_of_it() -> None:
    axes = {**OPERATOR, "branch": "window"}

    plan = AttentionPlan.read("eager", axes, Flags())

    assert plan.routes.window == "eager"
    accuracy.compare(workloads.attention("eager", axes))


@pytest.mark.parametrize("group", [1, 3, 16, 17, 32])
def test_padding_a_group_keeps_its_heads(group: int) -> None:
    x = torch.randn(2, 5, 2 * group, 3)

    padded = peers.pad_group(x, 2)

    assert padded.shape[2] == 2 * (32 if group > 16 else 16)
    assert torch.equal(peers.unpad_group(padded, 2, 2 * group), x)


@pytest.mark.parametrize(
    ("T", "window_size"), [(130, 16), (1024, 512), (1000, 512), (700, 129), (300, 1), (300, 999)]
)
def test_the_window_mask_is_that_of_its_definition(T: int, window_size: int) -> None:
    mask = peers.window_mask(T, window_size, torch.device("cpu"))

    expected = create_block_mask(mask.mask_mod, None, None, T, T, device="cpu")

    assert torch.equal(mask.kv_num_blocks, expected.kv_num_blocks)
    assert mask.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(mask.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(mask.to_dense(), expected.to_dense())
