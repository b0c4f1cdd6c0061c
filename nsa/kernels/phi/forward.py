"""The compress branch's phi: every block of l tokens, one each d tokens, becomes one.

    mixed = W1 @ (the block's tokens of one head, flattened) + bias,    out = W2 @ silu(mixed) + b2

where the bias holds b1 and the position encoding passed through W1. A copy of the blocks would be
l / d times the input, so the kernels read each token in place. Rows are (block, head), head
fastest; the columns of a block's row, (token, channel), are apart in memory by the token's stride,
which a tile's column offsets absorb. The first product is cut along its columns, so that a short
sequence also fills the GPU; a second kernel adds up its float32 parts and does the rest.

The backward kernels are in nsa.kernels.phi.backward.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 7. In the paper block_size is l and stride is d.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from nsa.config import NSAConfig
from nsa.kernels.common.device import (
    Architecture,
    architecture,
    ceil_div,
    head_blocks,
    last_contiguous,
    padded,
)
from nsa.kernels.phi.backward import phi_backward
from nsa.kernels.phi.rows import FILL, Blocks, ProductTile, block_rows, column_offsets

# For heads of any size: at most 48 KiB of shared memory a stage on sm_90, 32 on sm_80.
MIX: dict[Architecture, ProductTile] = {
    "sm_90": ProductTile(rows=128, depth=64, warps=8, stages=3),
    "sm_80": ProductTile(rows=128, depth=64, warps=8, stages=3),
}
"""The first product."""
OUT: dict[Architecture, ProductTile] = {
    "sm_90": ProductTile(rows=64, depth=64, warps=8, stages=2),
    "sm_80": ProductTile(rows=32, depth=32, warps=8, stages=2),
}
"""The second, which is bound by registers: deeper steps spill on sm_80."""


@triton.jit(do_not_specialize=["N", "tiles", "splits"])
def _mix_kernel(
    x_ptr,  # [B, T, H, D]
    w1_ptr,  # [D, SIZE * D]
    starts_ptr,  # [N], int32: first token of each block, -1 where a row is unused
    parts_ptr,  # [splits, B, N * H, D], float32
    x_batch: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    w1_row: tl.int64,
    N,
    tiles,  # of one sequence
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    split = tl.program_id(1)
    row, _, head, start, used = block_rows(
        starts_ptr, tl.program_id(0) % tiles, N, H, STRIDE, HAS_STARTS, ROWS
    )
    x_rows = x_ptr + batch * x_batch + (start * x_token + head * x_head)[:, None]
    out1 = tl.arange(0, D1)
    acc1 = tl.zeros([ROWS, D1], tl.float32)
    if D2 > 0:
        out2 = D1 + tl.arange(0, D2)
        acc2 = tl.zeros([ROWS, D2], tl.float32)

    STEPS: tl.constexpr = (SIZE * D + BLOCK_K - 1) // BLOCK_K
    for step in range(split * STEPS // splits, (split + 1) * STEPS // splits):
        column = step * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = column < SIZE * D
        x = tl.load(
            x_rows + column_offsets(column, x_token, D)[None, :],
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )  # [ROWS, BLOCK_K]
        w = tl.load(
            w1_ptr + out1[:, None] * w1_row + column[None, :],
            mask=(out1 < D)[:, None] & inside[None, :],
            other=0.0,
        )  # [D1, BLOCK_K]
        acc1 = tl.dot(x, tl.trans(w), acc1)
        if D2 > 0:
            w = tl.load(
                w1_ptr + out2[:, None] * w1_row + column[None, :],
                mask=(out2 < D)[:, None] & inside[None, :],
                other=0.0,
            )  # [D2, BLOCK_K]
            acc2 = tl.dot(x, tl.trans(w), acc2)

    B = tl.num_programs(0) // tiles
    written = (row < N * H)[:, None]
    parts = parts_ptr + (((split * B + batch) * N * H + row) * D)[:, None]
    tl.store(parts + out1[None, :], acc1, mask=written & (out1 < D)[None, :])
    if D2 > 0:
        tl.store(parts + out2[None, :], acc2, mask=written & (out2 < D)[None, :])


@triton.jit(do_not_specialize=["N", "tiles", "splits"])
def _out_kernel(
    parts_ptr,  # [splits, B, N * H, D], float32
    bias_ptr,  # [D]
    w2_ptr,  # [D, D]
    b2_ptr,  # [D]
    starts_ptr,  # [N], int32
    mixed_ptr,  # [B, N * H, D], for the backward pass
    out_ptr,  # [B, N * H, D]
    w2_row: tl.int64,
    N,
    tiles,
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    B = tl.num_programs(0) // tiles
    row, _, _, _, used = block_rows(
        starts_ptr, tl.program_id(0) % tiles, N, H, STRIDE, HAS_STARTS, ROWS
    )
    written = (row < N * H)[:, None]
    rows = ((batch * N * H + row) * D)[:, None]
    part = B.to(tl.int64) * N * H * D
    out1 = tl.arange(0, D1)
    acc1 = tl.zeros([ROWS, D1], tl.float32)
    if D2 > 0:
        out2 = D1 + tl.arange(0, D2)
        acc2 = tl.zeros([ROWS, D2], tl.float32)

    for begin in range(0, D, BLOCK_K):
        channel = begin + tl.arange(0, BLOCK_K)
        inside = channel < D
        mask = written & inside[None, :]
        bias = tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        mixed = tl.zeros([ROWS, BLOCK_K], tl.float32) + bias[None, :]
        for split in range(splits):
            mixed += tl.load(parts_ptr + split * part + rows + channel[None, :], mask, other=0.0)
        tl.store(mixed_ptr + rows + channel[None, :], mixed.to(mixed_ptr.dtype.element_ty), mask)
        active = (mixed * tl.sigmoid(mixed)).to(w2_ptr.dtype.element_ty)
        w = tl.load(
            w2_ptr + out1[:, None] * w2_row + channel[None, :],
            mask=(out1 < D)[:, None] & inside[None, :],
            other=0.0,
        )  # [D1, BLOCK_K]
        acc1 = tl.dot(active, tl.trans(w), acc1)
        if D2 > 0:
            w = tl.load(
                w2_ptr + out2[:, None] * w2_row + channel[None, :],
                mask=(out2 < D)[:, None] & inside[None, :],
                other=0.0,
            )  # [D2, BLOCK_K]
            acc2 = tl.dot(active, tl.trans(w), acc2)

    element = out_ptr.dtype.element_ty
    b2 = tl.load(b2_ptr + out1, mask=out1 < D, other=0.0).to(tl.float32)
    out = tl.where(used[:, None], acc1 + b2[None, :], 0.0)
    tl.store(out_ptr + rows + out1[None, :], out.to(element), mask=written & (out1 < D)[None, :])
    if D2 > 0:
        b2 = tl.load(b2_ptr + out2, mask=out2 < D, other=0.0).to(tl.float32)
        out = tl.where(used[:, None], acc2 + b2[None, :], 0.0)
        mask = written & (out2 < D)[None, :]
        tl.store(out_ptr + rows + out2[None, :], out.to(element), mask=mask)


def phi_blocks(
    x: Tensor,
    position: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    *,
    config: NSAConfig,
    starts: Tensor | None = None,
) -> Tensor:
    """Turn blocks of tokens into compressed tokens by the MLP of nsa.model.attention.Phi.

    Args:
        x: Keys or values, [B, T, HKV, D], float16 or bfloat16, any strides.
        position: [l, D]: added to the tokens of a block by their place in it.
        w1, b1: [D, l * D] and [D], the first layer.
        w2, b2: [D, D] and [D], the second.
            Parameters have the dtype of x, or are float32: then they are rounded for the
            products, and their gradients are float32.
        starts: First token of each block, [N], int32, from `block_starts`: packed documents,
            B == 1. A row with -1 is zeros and has no gradient.

    Returns:
        [B, N, HKV, D], dtype of x; N = config.compressed_length(T) without starts.
    """
    out: Tensor = _Phi.apply(x, position, w1, b1, w2, b2, starts, config)
    return out


def block_starts(cu_seqlens: Tensor, tokens: int, config: NSAConfig) -> Tensor:
    """First token of each compressed block of packed documents, without waiting for the device.

    Returns:
        [config.compressed_length(tokens)], int32, ascending; -1 fills the end, because documents
        have at most as many blocks as one sequence of all their tokens.
    """
    first, last = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    size, stride = config.compress_block_size, config.compress_stride
    blocks = ((last - first - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    ends = blocks.cumsum(0)
    row = torch.arange(config.compressed_length(tokens), device=cu_seqlens.device)
    document = torch.searchsorted(ends, row, right=True)
    here = document.clamp(max=len(first) - 1)
    start = first[here] + (row - ends[here] + blocks[here]) * stride
    return start.where(document < len(first), -1).int()


class _Phi(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        position: Tensor,
        w1: Tensor,
        b1: Tensor,
        w2: Tensor,
        b2: Tensor,
        starts: Tensor | None,
        config: NSAConfig,
    ) -> Tensor:
        ctx.dtypes = w1.dtype, b1.dtype, w2.dtype, b2.dtype
        x = last_contiguous(x)
        w1, w2 = (last_contiguous(w.to(x.dtype)) for w in (w1, w2))
        ctx.blocks = Blocks.of(x, starts, config)
        out, mixed = _forward(ctx.blocks, x, position, w1, b1, w2, b2, starts)
        ctx.save_for_backward(x, position, w1, w2, mixed, starts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        x, position, w1, w2, mixed, starts = ctx.saved_tensors
        gradients = phi_backward(
            ctx.blocks,
            do.contiguous(),
            x,
            position,
            w1,
            w2,
            mixed,
            starts,
            dtypes=ctx.dtypes,
            needs_x=ctx.needs_input_grad[0],
            needs_weights=any(ctx.needs_input_grad[1:6]),
        )
        return *gradients, None, None


def _forward(
    blocks: Blocks,
    x: Tensor,
    position: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output [B, N, H, D], and `mixed`, before the activation, in the dtype of x."""
    B, N, H, D = blocks.batch, blocks.count, blocks.heads, blocks.dim
    out = torch.empty(B, N, H, D, dtype=x.dtype, device=x.device)
    mixed = torch.empty(B, N, H, D, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out, mixed
    tile = MIX[architecture(x.device)]
    tiles = blocks.tiles(tile.rows)
    steps = ceil_div(blocks.size * D, tile.depth)
    splits = min(steps, max(1, FILL // (B * tiles)))
    parts = torch.empty(splits, B, N * H, D, dtype=torch.float32, device=x.device)
    d1, d2 = head_blocks(D)
    _mix_kernel[(B * tiles, splits)](
        x,
        w1,
        starts,
        parts,
        *x.stride()[:3],
        w1.stride(0),
        N,
        tiles,
        splits,
        H=H,
        D=D,
        D1=d1,
        D2=d2,
        SIZE=blocks.size,
        STRIDE=blocks.stride,
        HAS_STARTS=starts is not None,
        ROWS=tile.rows,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    bias = torch.addmv(b1.to(x.dtype), w1, position.to(x.dtype).flatten())
    tile = OUT[architecture(x.device)]
    tiles = blocks.tiles(tile.rows)
    _out_kernel[(B * tiles,)](
        parts,
        bias,
        w2,
        b2,
        starts,
        mixed,
        out,
        w2.stride(0),
        N,
        tiles,
        splits,
        H=H,
        D=D,
        D1=d1,
        D2=d2,
        STRIDE=blocks.stride,
        HAS_STARTS=starts is not None,
        ROWS=tile.rows,
        BLOCK_K=min(tile.depth, padded(D)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out, mixed
