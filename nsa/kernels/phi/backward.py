"""phi's backward pass; names and formula are those of nsa.kernels.phi.forward.

1. Through the second layer: the gradient of `mixed`, and silu(mixed) once more for dW2.
2. dX: a tile of blocks takes the first d tokens of each, d tokens that l / d blocks share, and
   adds up the gradients from all of them: l / d products into one accumulator. The last block of a
   document also owns its remaining tokens.
3. The weights, in nsa.kernels.phi.weights; dW2 is a plain product.

There are no atomics: gradients are the same bits in every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common.device import Architecture, architecture, ceil_div, head_blocks, padded
from nsa.kernels.phi.rows import Blocks, ProductTile, block_rows, column_offsets
from nsa.kernels.phi.weights import weight_gradients

# For heads of any size: no spills, and two blocks of dX on one multiprocessor of sm_90.
DMIXED: dict[Architecture, ProductTile] = {
    "sm_90": ProductTile(rows=64, depth=64, warps=8, stages=2),
    "sm_80": ProductTile(rows=32, depth=32, warps=8, stages=2),
}
DX: dict[Architecture, ProductTile] = {
    "sm_90": ProductTile(rows=128, columns=128, depth=32, warps=8, stages=4),
    "sm_80": ProductTile(rows=128, columns=128, depth=32, warps=8, stages=4),
}


@triton.jit
def _through_silu(
    acc,  # [ROWS, columns]: the gradient of silu(mixed)
    do_ptr,
    mixed_ptr,
    dmixed_ptr,
    active_ptr,
    sums_ptr,
    rows,
    column,
    used,
    written,
    D: tl.constexpr,
):
    """Store the gradient of mixed, silu(mixed), and the sums of dmixed and do, of some columns."""
    element = mixed_ptr.dtype.element_ty
    offsets = rows + column[None, :]
    inside = column < D
    mask = written & inside[None, :]
    do = tl.load(do_ptr + offsets, mask=used & inside[None, :], other=0.0).to(tl.float32)
    tl.store(sums_ptr + D + column, tl.sum(do, 0), mask=inside)
    mixed = tl.load(mixed_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(mixed)
    slope = sigmoid * (1 + mixed * (1 - sigmoid))
    dmixed = tl.where(used, acc * slope, 0.0)
    active = tl.where(used, mixed * sigmoid, 0.0)
    tl.store(dmixed_ptr + offsets, dmixed.to(element), mask=mask)
    tl.store(active_ptr + offsets, active.to(element), mask=mask)
    tl.store(sums_ptr + column, tl.sum(dmixed, 0), mask=inside)


@triton.jit(do_not_specialize=["N", "tiles"])
def _dmixed_kernel(
    do_ptr,  # [B, N * H, D]
    w2_ptr,  # [D, D]
    mixed_ptr,  # [B, N * H, D]
    starts_ptr,  # [N], int32
    dmixed_ptr,  # [B, N * H, D]
    active_ptr,  # [B, N * H, D]: silu(mixed), zero where a row is unused
    sums_ptr,  # [B * tiles, 2, D], float32: of dmixed and of do, over the rows of a tile
    w2_row: tl.int64,
    N,
    tiles,
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
    row, _, _, _, used = block_rows(
        starts_ptr, tl.program_id(0) % tiles, N, H, STRIDE, HAS_STARTS, ROWS
    )
    used, written = used[:, None], (row < N * H)[:, None]
    rows = ((batch * N * H + row) * D)[:, None]
    sums_ptr += tl.program_id(0) * 2 * D
    out1 = tl.arange(0, D1)
    acc1 = tl.zeros([ROWS, D1], tl.float32)
    if D2 > 0:
        out2 = D1 + tl.arange(0, D2)
        acc2 = tl.zeros([ROWS, D2], tl.float32)

    for begin in range(0, D, BLOCK_K):
        channel = begin + tl.arange(0, BLOCK_K)
        inside = channel < D
        # For the products alone: were its sums taken here, Triton would keep it in one slot of
        # shared memory, and the next step's load would overwrite what wgmma still reads.
        do = tl.load(do_ptr + rows + channel[None, :], mask=used & inside[None, :], other=0.0)
        w = tl.load(
            w2_ptr + channel[:, None] * w2_row + out1[None, :],
            mask=inside[:, None] & (out1 < D)[None, :],
            other=0.0,
        )  # [BLOCK_K, D1]
        acc1 = tl.dot(do, w, acc1)
        if D2 > 0:
            w = tl.load(
                w2_ptr + channel[:, None] * w2_row + out2[None, :],
                mask=inside[:, None] & (out2 < D)[None, :],
                other=0.0,
            )  # [BLOCK_K, D2]
            acc2 = tl.dot(do, w, acc2)

    _through_silu(
        acc1,
        do_ptr,
        mixed_ptr,
        dmixed_ptr,
        active_ptr,
        sums_ptr,
        rows,
        out1,
        used,
        written,
        D,
    )
    if D2 > 0:
        _through_silu(
            acc2,
            do_ptr,
            mixed_ptr,
            dmixed_ptr,
            active_ptr,
            sums_ptr,
            rows,
            out2,
            used,
            written,
            D,
        )


@triton.jit(do_not_specialize=["N", "T", "tiles"])
def _dx_kernel(
    dmixed_ptr,  # [B, N * H, D]
    w1_ptr,  # [D, SIZE * D]
    starts_ptr,  # [N], int32
    dx_ptr,  # [B, T, H, D]
    w1_row: tl.int64,
    N,
    T,
    tiles,
    H: tl.constexpr,
    D: tl.constexpr,
    SIZE: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    OVERLAP: tl.constexpr = SIZE // STRIDE
    WIDTH: tl.constexpr = STRIDE * D  # columns of d tokens
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    later = tl.program_id(2)  # which d tokens of the block: its first, or later ones
    row, block, head, start, used = block_rows(
        starts_ptr, tl.program_id(0) % tiles, N, H, STRIDE, HAS_STARTS, ROWS
    )
    if HAS_STARTS:
        following = tl.load(starts_ptr + block + 1, mask=block + 1 < N, other=-1)
        last = following != start + STRIDE
    else:
        last = block + 1 == N
    owner = used & (last | (later == 0))
    if tl.max(owner.to(tl.int32), 0) == 0:
        return

    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    DEPTH: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    for step in range(OVERLAP * DEPTH):
        back = step // DEPTH  # how many blocks before this one
        channel = step % DEPTH * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = channel < D
        covers = owner & (block >= back) & (back + later < OVERLAP)
        if HAS_STARTS:  # or it belongs to another document
            before = tl.load(starts_ptr + block - back, mask=covers, other=-1)
            covers = covers & (before == start - back * STRIDE)
        dmixed = tl.load(
            dmixed_ptr + ((batch * N * H + row - back * H) * D)[:, None] + channel[None, :],
            mask=covers[:, None] & inside[None, :],
            other=0.0,
        )  # [ROWS, BLOCK_K]
        w = tl.load(
            w1_ptr + channel[:, None] * w1_row + ((back + later) * WIDTH + column)[None, :],
            mask=(inside & (back + later < OVERLAP))[:, None] & (column < WIDTH)[None, :],
            other=0.0,
        )  # [BLOCK_K, COLUMNS]
        acc = tl.dot(dmixed, w, acc)

    token = batch * T + start + later * STRIDE
    dx = dx_ptr + ((token * H + head) * D)[:, None] + column_offsets(column, H * D, D)[None, :]
    mask = owner[:, None] & (column < WIDTH)[None, :]
    tl.store(dx, acc.to(dx_ptr.dtype.element_ty), mask=mask)


def phi_backward(
    blocks: Blocks,
    do: Tensor,
    x: Tensor,
    position: Tensor,
    w1: Tensor,
    w2: Tensor,
    mixed: Tensor,
    starts: Tensor | None,
    *,
    dtypes: tuple[torch.dtype, ...],
    needs_x: bool,
    needs_weights: bool,
) -> tuple[Tensor | None, ...]:
    """Gradients of x, position, w1, b1, w2 and b2; None for those not needed.

    Args:
        do: Gradient of the output, [B, N, H, D], contiguous.
        w1, w2: The weights in the dtype of x, as the forward pass used them.
        mixed: [B, N, H, D], from the forward pass.
        dtypes: Of the gradients of w1, b1, w2 and b2.
    """
    N, H, D = blocks.count, blocks.heads, blocks.dim
    if not mixed.numel():
        shapes = [x.shape, position.shape, w1.shape, w1.shape[:1], w2.shape, w2.shape[:1]]
        wanted = [needs_x] + 5 * [needs_weights]
        return tuple(
            torch.zeros(shape, dtype=dtype, device=x.device) if want else None
            for shape, dtype, want in zip(
                shapes, (x.dtype, position.dtype, *dtypes), wanted, strict=True
            )
        )
    d1, d2 = head_blocks(D)
    tile = DMIXED[architecture(x.device)]
    tiles = blocks.tiles(tile.rows)
    total = blocks.batch * tiles
    dmixed = torch.empty(mixed.shape, dtype=x.dtype, device=x.device)
    active = torch.empty(mixed.shape, dtype=x.dtype, device=x.device)
    sums = torch.empty(total, 2, D, dtype=torch.float32, device=x.device)
    _dmixed_kernel[(total,)](
        do,
        w2,
        mixed,
        starts,
        dmixed,
        active,
        sums,
        w2.stride(0),
        N,
        tiles,
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
    dx = _dx(blocks, dmixed, x, w1, starts) if needs_x else None
    if not needs_weights:
        return dx, None, None, None, None, None
    dw1_dtype, db1_dtype, dw2_dtype, db2_dtype = dtypes
    dposition, dw1, db1, db2 = weight_gradients(
        blocks,
        dmixed,
        sums,
        x,
        position,
        w1,
        starts,
        dtypes=(dw1_dtype, db1_dtype, db2_dtype),
    )
    dw2 = (do.view(-1, D).T @ active.view(-1, D)).to(dw2_dtype)
    return dx, dposition, dw1, db1, dw2, db2


def _dx(blocks: Blocks, dmixed: Tensor, x: Tensor, w1: Tensor, starts: Tensor | None) -> Tensor:
    """The gradient of x; zero where no block covers a token."""
    B, T, H, D = x.shape
    dx = torch.empty(B, T, H, D, dtype=x.dtype, device=x.device)
    covered = 0
    if starts is None:
        covered = (blocks.count - 1) * blocks.stride + blocks.size
    if covered < T:
        dx[:, covered:].zero_()
    tile = DX[architecture(x.device)]
    tiles = blocks.tiles(tile.rows)
    columns = ceil_div(blocks.stride * D, tile.columns)
    _dx_kernel[(B * tiles, columns, blocks.size // blocks.stride)](
        dmixed,
        w1,
        starts,
        dx,
        w1.stride(0),
        blocks.count,
        T,
        tiles,
        H=H,
        D=D,
        SIZE=blocks.size,
        STRIDE=blocks.stride,
        HAS_STARTS=starts is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=min(tile.depth, padded(D)),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return dx
