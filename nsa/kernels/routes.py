"""Route `triton` of every part, in the form in which nsa.ops calls a route."""

from typing import cast

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.errors import Unsupported
from nsa.kernels import operator, scores
from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import banded_forward
from nsa.kernels.common.device import require
from nsa.kernels.operator import Place


def _check(q: Tensor, v: Tensor, scale: float) -> None:
    require(q, v, v.shape[2])
    if not scale > 0:
        raise Unsupported(f"triton: scale must be positive, and it is {scale}")


def compress_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    config: NSAConfig,
    q_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """See nsa.ops.compress_attention."""
    _check(q, v_cmp, scale)
    band = Band.compress(
        config,
        q_start=q_start,
        blocks=k_cmp.shape[1],
        tokens=q.shape[1],
        cu_seqlens=cu_seqlens,
    )
    return cast(Tensor, operator.BandedAttention.apply(q, k_cmp, v_cmp, band, scale))


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    q_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """See nsa.ops.select_blocks. By itself it computes the softmax denominators first."""
    _check(q, k_cmp, scale)
    band = Band.compress(
        config,
        q_start=q_start,
        blocks=k_cmp.shape[1],
        tokens=q.shape[1],
        cu_seqlens=cu_seqlens,
    )
    _, lse = banded_forward(q, k_cmp, None, band, scale=scale)
    return scores.select_blocks(
        q, k_cmp, lse, config=config, q_start=q_start, cu_seqlens=cu_seqlens, scale=scale
    )


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    q_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """See nsa.ops.selected_attention."""
    _check(q, v, scale)
    place = Place.here(config=config, scale=scale, q_start=q_start, cu_seqlens=cu_seqlens)
    return cast(Tensor, operator.SelectedAttention.apply(q, k, v, block_indices, place))


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int,
    q_start: int,
    k_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """See nsa.ops.window_attention."""
    _check(q, v, scale)
    band = Band.causal(
        tokens=q.shape[1],
        window=window_size,
        q_start=q_start,
        k_start=k_start,
        cu_seqlens=cu_seqlens,
    )
    return cast(Tensor, operator.BandedAttention.apply(q, k, v, band, scale))


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> Tensor:
    """See nsa.ops.dense_attention: FlashAttention-2 in Triton."""
    _check(q, v, scale)
    band = Band.causal(tokens=q.shape[1], q_start=q_start, cu_seqlens=cu_seqlens)
    return cast(Tensor, operator.BandedAttention.apply(q, k, v, band, scale))


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    q_start: int,
    k_win_start: int,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The whole operator, its branches sharing what they can; see nsa.ops.attention.

    Returns:
        The output, and the blocks that were selected.
    """
    _check(q, v_sel, scale)
    place = Place.here(
        config=config,
        scale=scale,
        q_start=q_start,
        k_win_start=k_win_start,
        cu_seqlens=cu_seqlens,
    )
    out, blocks = operator.Attention.apply(
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, place
    )
    return out, blocks
