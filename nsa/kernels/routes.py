"""Route `triton` of every part, with the signatures that nsa.ops calls."""

from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor

from nsa.config import Positions
from nsa.errors import Unsupported
from nsa.kernels import operator, scores
from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import banded_forward
from nsa.kernels.common.device import require


def _check(q: Tensor, v: Tensor, at: Positions) -> None:
    require(q, v, v.shape[2])
    if not at.scale > 0:
        raise Unsupported(f"triton: scale must be positive, but it is {at.scale}")


def compress_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions) -> Tensor:
    """See nsa.ops.compress_attention."""
    _check(q, v_cmp, at)
    band = Band.compress(at, tokens=q.shape[1], blocks=k_cmp.shape[1])
    return cast(Tensor, operator.BandedAttention.apply(q, k_cmp, v_cmp, band, at.scale))


@torch.no_grad()
def select_blocks(q: Tensor, k_cmp: Tensor, at: Positions) -> Tensor:
    """See nsa.ops.select_blocks. It computes the softmax denominators first."""
    _check(q, k_cmp, at)
    band = Band.compress(at, tokens=q.shape[1], blocks=k_cmp.shape[1])
    _, lse = banded_forward(q, k_cmp, None, band, scale=at.scale)
    return scores.select_blocks(q, k_cmp, lse, at)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions
) -> Tensor:
    """See nsa.ops.selected_attention."""
    _check(q, v, at)
    return cast(Tensor, operator.SelectedAttention.apply(q, k, v, block_indices, at))


def window_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """See nsa.ops.window_attention."""
    _check(q, v, at)
    band = Band.causal(at, tokens=q.shape[1], window=at.config.window_size)
    return cast(Tensor, operator.BandedAttention.apply(q, k, v, band, at.scale))


def dense_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """See nsa.ops.dense_attention: FlashAttention-2 in Triton."""
    _check(q, v, at)
    band = Band.causal(at, tokens=q.shape[1])
    return cast(Tensor, operator.BandedAttention.apply(q, k, v, band, at.scale))


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    at: Positions,
    running: Collection[str],
) -> tuple[Tensor, Tensor]:
    """The whole operator, its branches sharing intermediate results; see nsa.ops.attention.

    Args:
        running: The parts that run, as in Routes.running.

    Returns:
        The output, and the blocks that were selected.
    """
    _check(q, v_sel, at)
    out, blocks = operator.Attention.apply(
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, at, running
    )
    return out, blocks
