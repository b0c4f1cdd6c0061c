"""The definition itself, against a second oracle: PyTorch's own attention, and NSA.md's traps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import ops, reference
from nsa.config import NSAConfig, Positions
from nsa.tests.operator_inputs import SMALL, draw, normal, run


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """PyTorch's attention on [B, T, H, D]: causal, or with a boolean mask [T, S]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return out.transpose(1, 2)


def assert_same(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def window(q: Tensor, size: int, scale: float | None = None) -> Positions:
    return Positions.of(q, config=NSAConfig(window_size=size), scale=scale)


def test_window_as_long_as_the_sequence_is_causal_attention() -> None:
    x = draw("window", 37)

    assert_same(reference.window_attention(x.q, x.k, x.v, window(x.q, 37)), sdpa(x.q, x.k, x.v))


def test_window_holds_the_query_and_those_just_before_it() -> None:
    x = draw("window", 37)
    mask = torch.tensor([[t - 5 < s <= t for s in range(37)] for t in range(37)])

    out = reference.window_attention(x.q, x.k, x.v, window(x.q, 5))

    assert_same(out, sdpa(x.q, x.k, x.v, mask))


def test_dense_is_causal_attention() -> None:
    x = draw("dense", 37)

    assert_same(reference.dense_attention(x.q, x.k, x.v, Positions.of(x.q)), sdpa(x.q, x.k, x.v))


def test_selecting_all_blocks_is_causal_attention() -> None:
    x = draw("select", 37)
    assert SMALL.num_blocks * SMALL.select_block_size >= 37

    out = reference.selected_attention(x.q, x.k, x.v, x.blocks, Positions.of(x.q, config=SMALL))

    assert_same(out, sdpa(x.q, x.k, x.v))


def test_selecting_the_own_block_is_causal_attention_in_each_block() -> None:
    x = draw("select", 48)
    own = torch.full((2, 48, 2, 4), -1, dtype=torch.int32)
    own[..., 0] = (torch.arange(48, dtype=torch.int32) // 16)[:, None]

    out = reference.selected_attention(x.q, x.k, x.v, own, Positions.of(x.q, config=SMALL))

    blocks = zip(*(t.split(16, 1) for t in (x.q, x.k, x.v)), strict=True)
    assert_same(out, torch.cat([sdpa(*block) for block in blocks], 1))


def test_compressing_single_tokens_is_causal_attention() -> None:
    config = NSAConfig(compress_block_size=1, compress_stride=1, select_block_size=16)
    x = draw("window", 37)
    k_cmp, v_cmp = (
        ops.compress_blocks(t, lambda blocks: blocks.squeeze(2), config=config) for t in (x.k, x.v)
    )

    out = reference.compress_attention(x.q, k_cmp, v_cmp, Positions.of(x.q, config=config))

    assert_same(out, sdpa(x.q, x.k, x.v))


def test_a_compressed_block_is_seen_from_its_last_token_on() -> None:
    x = draw("compress", 37)
    visible = torch.tensor([[4 * i + 8 - 1 <= t for i in range(8)] for t in range(37)])
    seeing = slice(7, None)

    out = reference.compress_attention(x.q, x.k, x.v, Positions.of(x.q, config=SMALL))

    assert x.k.shape[1] == 8
    assert_same(out[:, seeing], sdpa(x.q[:, seeing], x.k, x.v, visible[seeing]))
    assert torch.equal(out[:, :7], torch.zeros_like(out[:, :7]))


def test_compressed_blocks_are_cut_at_every_stride() -> None:
    x = torch.arange(21.0).view(1, 21, 1, 1)

    blocks = ops.compress_blocks(x, lambda b: b[:, :, 0] * 100 + b[:, :, -1], config=SMALL)

    assert blocks.flatten().tolist() == [7, 411, 815, 1219]


def test_compressed_blocks_do_not_cross_documents() -> None:
    x = torch.arange(21.0).view(1, 21, 1, 1)
    cu_seqlens = torch.tensor([0, 9, 12, 21], dtype=torch.int32)

    blocks = ops.compress_blocks(
        x, lambda b: b[:, :, 0] * 100 + b[:, :, -1], config=SMALL, cu_seqlens=cu_seqlens
    )

    assert blocks.flatten().tolist() == [7, 1219]


def test_a_sequence_shorter_than_a_block_keeps_its_gradient() -> None:
    """Zeros, not None: a parameter without a gradient stalls distributed training."""
    x = torch.ones(1, 7, 2, 4, requires_grad=True)

    blocks = ops.compress_blocks(x, lambda b: b.mean(2), config=SMALL)
    blocks.sum().backward()

    assert blocks.shape == (1, 0, 2, 4)
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros_like(x))


def test_scale_multiplies_the_scores() -> None:
    x = draw("window", 21)

    assert_same(
        reference.window_attention(x.q, x.k, x.v, window(x.q, 9, scale=0.5)),
        reference.window_attention(2 * x.q, x.k, x.v, window(x.q, 9, scale=0.25)),
    )


@pytest.mark.parametrize("route", ["reference", "sdpa", "math"])
def test_a_single_query_sees_every_key(route: str) -> None:
    """PyTorch aligns is_causal at the first key, so one query would see that key alone. An
    earlier implementation fell for it, and its reference with it; hence the literal oracle."""
    q, k, v = (normal(1, T, 1, 4, seed=T) for T in (1, 7, 8))
    v = v[:, :7]
    weights = ((k @ q[0, 0, 0]).flatten() / 2).softmax(0)

    out = ops.dense_attention(q, k, v, route=route, q_start=6)

    assert_same(out.flatten(), weights @ v[0, :, 0])
    trap = sdpa(q, k, v)
    assert_same(trap.flatten(), v[0, 0, 0])  # the trap is still there


def test_float64_stays_float64() -> None:
    for part in ("compress", "select", "window", "dense"):
        assert run(part, "reference", draw(part, 21)).dtype == torch.float64


def test_attention_is_the_gated_sum_of_the_branches_on_the_selected_blocks() -> None:
    """Gates that are 1 for one branch pick it out; the blocks are those of the scores."""
    T = 90  # 6 select blocks; 4 are selected
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (
        normal(2, length, H, D, seed=seed)
        for seed, (length, H, D) in enumerate(
            [(T, 6, 16), *[(SMALL.compressed_length(T), 2, D) for D in (16, 8)]]
            + [(T, 2, D) for D in (16, 8, 16, 8)]
        )
    )
    at = Positions.of(q, config=SMALL)
    blocks = reference.top_blocks(
        reference.block_importance(q, k_cmp, at), torch.arange(T), config=SMALL
    )
    branches = (
        reference.compress_attention(q, k_cmp, v_cmp, at),
        reference.selected_attention(q, k_sel, v_sel, blocks, at),
        reference.window_attention(q, k_win, v_win, at),
    )

    for number, branch in enumerate(branches):
        gates = torch.eye(3, dtype=torch.float64)[number].expand(2, T, 6, 3)
        out = reference.attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, at)
        assert_same(out, branch)
