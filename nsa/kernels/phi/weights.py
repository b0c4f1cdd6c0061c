"""Gradients of phi's first layer, its position encoding and both biases.

dW1 is dmixed^T times the blocks, which are read in place, plus an outer product: the position
encoding passed through W1 is part of the bias, so it multiplies the sum of dmixed. The product is
cut along its rows, the long side; a second kernel adds up the float32 parts and does the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common.device import Architecture, architecture, ceil_div, head_blocks
from nsa.kernels.phi.rows import FILL, Blocks, ProductTile, block_rows, column_offsets

DW1: dict[Architecture, ProductTile] = {
    "sm_90": ProductTile(rows=64, columns=128, warps=8, stages=3),
    "sm_80": ProductTile(rows=64, columns=64, warps=8, stages=2),
}
SUM = ProductTile(rows=64, columns=32, warps=4, stages=2)


@triton.jit(do_not_specialize=["N", "tiles", "total", "splits"])
def _dw1_kernel(
    x_ptr,  # [B, T, H, D]
    dmixed_ptr,  # [B, N * H, D]
    starts_ptr,  # [N], int32
    parts_ptr,  # [splits, D, SIZE * D], float32
    x_batch: tl.int64,
    x_token: tl.int64,
    x_head: tl.int64,
    N,
    tiles,
    total,  # B * tiles
    splits,
    H: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE * D
    x_columns = x_ptr + column_offsets(column, x_token, D)[None, :]
    sequence = N.to(tl.int64) * H  # rows of one
    out1 = tl.arange(0, D1)
    acc1 = tl.zeros([COLUMNS, D1], tl.float32)
    if D2 > 0:
        out2 = D1 + tl.arange(0, D2)
        acc2 = tl.zeros([COLUMNS, D2], tl.float32)

    for tile in range(split * total // splits, (split + 1) * total // splits):
        batch = tile // tiles
        row, _, head, start, used = block_rows(
            starts_ptr, tile % tiles, N, H, STRIDE, HAS_STARTS, ROWS
        )
        x = tl.load(
            x_columns + (batch * x_batch + start * x_token + head * x_head)[:, None],
            mask=used[:, None] & inside[None, :],
            other=0.0,
        )  # [ROWS, COLUMNS]
        rows = dmixed_ptr + ((batch * sequence + row) * D)[:, None]
        mask = used[:, None] & (out1 < D)[None, :]
        dmixed = tl.load(rows + out1[None, :], mask=mask, other=0.0)  # [ROWS, D1]
        acc1 = tl.dot(tl.trans(x), dmixed, acc1)
        if D2 > 0:
            mask = used[:, None] & (out2 < D)[None, :]
            dmixed = tl.load(rows + out2[None, :], mask=mask, other=0.0)  # [ROWS, D2]
            acc2 = tl.dot(tl.trans(x), dmixed, acc2)

    parts = parts_ptr + split.to(tl.int64) * D * SIZE * D + column[:, None]
    mask = inside[:, None] & (out1 < D)[None, :]
    tl.store(parts + out1[None, :] * (SIZE * D), acc1, mask=mask)
    if D2 > 0:
        mask = inside[:, None] & (out2 < D)[None, :]
        tl.store(parts + out2[None, :] * (SIZE * D), acc2, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _sum_kernel(
    parts_ptr,  # [splits, D, SIZE * D], float32
    sums_ptr,  # [2, D], float32: of dmixed and of do, over all rows
    w1_ptr,  # [D, SIZE * D]
    position_ptr,  # [SIZE * D]
    dw1_ptr,  # [D, SIZE * D]
    dposition_ptr,  # [SIZE * D]
    db1_ptr,  # [D]
    db2_ptr,  # [D]
    w1_row: tl.int64,
    splits,
    D: tl.constexpr,
    WIDTH: tl.constexpr,  # SIZE * D
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    position = tl.load(position_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dposition = tl.zeros([COLUMNS], tl.float32)
    for begin in range(0, D, ROWS):
        row = begin + tl.arange(0, ROWS)
        mask = (row < D)[:, None] & inside[None, :]
        dbias = tl.load(sums_ptr + row, mask=row < D, other=0.0)
        w = tl.load(w1_ptr + row[:, None] * w1_row + column[None, :], mask=mask, other=0.0)
        dposition += tl.sum(dbias[:, None] * w.to(tl.float32), 0)
        dw1 = dbias[:, None] * position[None, :]
        offsets = row[:, None] * WIDTH + column[None, :]
        part = parts_ptr + offsets
        for _ in range(splits):
            dw1 += tl.load(part, mask, other=0.0)
            part += D * WIDTH
        tl.store(dw1_ptr + offsets, dw1.to(dw1_ptr.dtype.element_ty), mask=mask)
        if tl.program_id(0) == 0:
            do = tl.load(sums_ptr + D + row, mask=row < D, other=0.0)
            tl.store(db1_ptr + row, dbias.to(db1_ptr.dtype.element_ty), mask=row < D)
            tl.store(db2_ptr + row, do.to(db2_ptr.dtype.element_ty), mask=row < D)
    dposition = dposition.to(dposition_ptr.dtype.element_ty)
    tl.store(dposition_ptr + column, dposition, mask=inside)


def weight_gradients(
    blocks: Blocks,
    dmixed: Tensor,
    sums: Tensor,
    x: Tensor,
    position: Tensor,
    w1: Tensor,
    starts: Tensor | None,
    *,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the position encoding, W1, b1 and b2.

    Args:
        dmixed: [B, N, H, D].
        sums: [tiles, 2, D], float32: of dmixed and of the output's gradient over some rows.
        w1: In the dtype of x.
        dtypes: Of the gradients of W1, b1 and b2.
    """
    D, width = blocks.dim, blocks.size * blocks.dim
    parts = _dw1_parts(blocks, dmixed, x, starts)
    dposition = torch.empty(position.shape, dtype=position.dtype, device=x.device)
    dw1 = torch.empty(w1.shape, dtype=dtypes[0], device=x.device)
    db1 = torch.empty(D, dtype=dtypes[1], device=x.device)
    db2 = torch.empty(D, dtype=dtypes[2], device=x.device)
    _sum_kernel[(ceil_div(width, SUM.columns),)](
        parts,
        sums.sum(0),
        w1,
        position.contiguous(),
        dw1,
        dposition,
        db1,
        db2,
        w1.stride(0),
        len(parts),
        D=D,
        WIDTH=width,
        ROWS=SUM.rows,
        COLUMNS=SUM.columns,
        num_warps=SUM.warps,
        num_stages=SUM.stages,
    )
    return dposition, dw1, db1, db2


def _dw1_parts(blocks: Blocks, dmixed: Tensor, x: Tensor, starts: Tensor | None) -> Tensor:
    """Parts [splits, D, l * D], float32, whose sum is the gradient of W1 without the position."""
    H, D = blocks.heads, blocks.dim
    tile = DW1[architecture(x.device)]
    tiles = blocks.tiles(tile.rows)
    total = blocks.batch * tiles
    columns = ceil_div(blocks.size * D, tile.columns)
    splits = min(total, max(1, FILL // columns))
    parts = torch.empty(splits, D, blocks.size * D, dtype=torch.float32, device=x.device)
    d1, d2 = head_blocks(D)
    _dw1_kernel[(columns, splits)](
        x,
        dmixed,
        starts,
        parts,
        *x.stride()[:3],
        blocks.count,
        tiles,
        total,
        splits,
        H=H,
        D=D,
        D1=d1,
        D2=d2,
        SIZE=blocks.size,
        STRIDE=blocks.stride,
        HAS_STARTS=starts is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return parts
