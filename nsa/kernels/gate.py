"""The gate: the weighed sum of three branches, and the row products of their backward passes.

Both kernels read every branch once and are bound by memory. A program takes a tile of rows, one
row a head of a token, and all of each row's channels. Sums run in float32.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common.device import ceil_div, last_contiguous, power_of_2
from nsa.kernels.common.launch import KINDS, KernelLaunch

TILE = 4096
"""Elements of one branch that a program reads: with 128 threads, four loads of 16 bytes each."""
WARPS = 4


@triton.jit
def _offsets(row, stride_token, stride_head, HQ: tl.constexpr):
    """Where row r, head r % HQ of token r // HQ, begins; int64, for T * HQ * D passes 2**31."""
    return (row // HQ).to(tl.int64) * stride_token + (row % HQ) * stride_head


@triton.jit
def _tile(ptr, stride_token, stride_head, row, mask, HQ: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of a [tokens, HQ, D] tensor in float32, zero outside the mask: [ROWS, BLOCK_D]."""
    start = _offsets(row, stride_token, stride_head, HQ)
    tile = tl.load(ptr + start[:, None] + tl.arange(0, BLOCK_D)[None, :], mask=mask, other=0.0)
    return tile.to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def _gate_fwd_kernel(
    gates_ptr,  # [tokens, HQ, 3]
    compress_ptr,  # [tokens, HQ, D], as the next two
    select_ptr,
    window_ptr,
    out_ptr,  # [tokens, HQ, D], contiguous
    gates_token: tl.int64,
    gates_head: tl.int64,
    gates_branch: tl.int64,
    compress_token: tl.int64,
    compress_head: tl.int64,
    select_token: tl.int64,
    select_head: tl.int64,
    window_token: tl.int64,
    window_head: tl.int64,
    rows,  # tokens * HQ
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK_D)
    valid = row < rows
    mask = valid[:, None] & (channel < D)[None, :]

    compress = _tile(compress_ptr, compress_token, compress_head, row, mask, HQ, BLOCK_D)
    select = _tile(select_ptr, select_token, select_head, row, mask, HQ, BLOCK_D)
    window = _tile(window_ptr, window_token, window_head, row, mask, HQ, BLOCK_D)
    gate = gates_ptr + _offsets(row, gates_token, gates_head, HQ)
    g_compress = tl.load(gate, mask=valid, other=0.0).to(tl.float32)
    g_select = tl.load(gate + gates_branch, mask=valid, other=0.0).to(tl.float32)
    g_window = tl.load(gate + 2 * gates_branch, mask=valid, other=0.0).to(tl.float32)

    out = g_compress[:, None] * compress + g_select[:, None] * select + g_window[:, None] * window
    out_offsets = row.to(tl.int64)[:, None] * D + channel[None, :]
    tl.store(out_ptr + out_offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gate_bwd_kernel(
    do_ptr,  # [tokens, HQ, D]: gradient of the weighed sum
    compress_ptr,  # [tokens, HQ, D], as the next two; only the first is read when BRANCHES == 1
    select_ptr,
    window_ptr,
    delta_ptr,  # [tokens, HQ, BRANCHES], float32, contiguous
    do_token: tl.int64,
    do_head: tl.int64,
    compress_token: tl.int64,
    compress_head: tl.int64,
    select_token: tl.int64,
    select_head: tl.int64,
    window_token: tl.int64,
    window_head: tl.int64,
    rows,  # tokens * HQ
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    BRANCHES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    mask = valid[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]
    delta = delta_ptr + row.to(tl.int64) * BRANCHES

    do = _tile(do_ptr, do_token, do_head, row, mask, HQ, BLOCK_D)
    compress = _tile(compress_ptr, compress_token, compress_head, row, mask, HQ, BLOCK_D)
    if BRANCHES == 3:  # loaded before the first sum, so that all loads are under way together
        select = _tile(select_ptr, select_token, select_head, row, mask, HQ, BLOCK_D)
        window = _tile(window_ptr, window_token, window_head, row, mask, HQ, BLOCK_D)
        tl.store(delta + 1, tl.sum(do * select, 1), mask=valid)
        tl.store(delta + 2, tl.sum(do * window, 1), mask=valid)
    tl.store(delta, tl.sum(do * compress, 1), mask=valid)


def gate_forward(gates: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor) -> Tensor:
    """Add up the outputs of the branches, weighed by their gates.

    Args:
        gates: [B, T, HQ, 3], in the order of nsa.config.BRANCHES; any dtype, any strides.
        o_cmp, o_sel, o_win: [B, T, HQ, Dv].

    Returns:
        [B, T, HQ, Dv], contiguous, dtype of o_cmp.
    """
    B, T, HQ, D = o_cmp.shape
    out = torch.empty(B, T, HQ, D, dtype=o_cmp.dtype, device=o_cmp.device)
    gates = gates.flatten(0, 1)  # a view unless B and T cannot be joined
    branches = [_rows(o) for o in (o_cmp, o_sel, o_win)]
    rows = B * T * HQ
    block_d, tile_rows = _blocks(D)
    if rows:
        _gate_fwd_kernel[(ceil_div(rows, tile_rows),)](
            gates,
            *branches,
            out,
            *gates.stride(),
            *(stride for o in branches for stride in o.stride()[:2]),
            rows,
            HQ=HQ,
            D=D,
            BLOCK_D=block_d,
            ROWS=tile_rows,
            num_warps=WARPS,
        )
    return out


def gate_backward(do: Tensor, o_cmp: Tensor, o_sel: Tensor, o_win: Tensor) -> Tensor:
    """Multiply the gradient of the weighed sum with each branch, channel by channel, and sum.

    Args:
        do, o_cmp, o_sel, o_win: [B, T, HQ, Dv].

    Returns:
        delta: [B, T, HQ, 3], float32, contiguous; delta[..., b] = sum(do * o_b). It is the
            gradient of the gates and, times the gate, what softmax subtracts in the branches'
            backward passes.
    """
    return _row_dots(do, (o_cmp, o_sel, o_win))


def row_dot(do: Tensor, o: Tensor) -> Tensor:
    """The same for one branch: [B, T, HQ], float32, contiguous."""
    return _row_dots(do, (o,)).squeeze(-1)


def _row_dots(do: Tensor, outputs: tuple[Tensor, ...]) -> Tensor:
    B, T, HQ, D = do.shape
    delta = torch.empty(B, T, HQ, len(outputs), dtype=torch.float32, device=do.device)
    branches = [_rows(o) for o in outputs]
    unread = [branches[0]] * (3 - len(branches))
    tiles = [_rows(do), *branches, *unread]
    if rows := B * T * HQ:
        launch, tile_rows = _launch_row_dots(HQ, D, len(outputs))
        launch(
            (ceil_div(rows, tile_rows),),
            (*tiles, delta),
            (*(stride for tile in tiles for stride in tile.stride()[:2]), rows),
        )
    return delta


@lru_cache(maxsize=KINDS)
def _launch_row_dots(HQ: int, D: int, branches: int) -> tuple[KernelLaunch, int]:
    """The kernel, and rows of its tile."""
    block_d, rows = _blocks(D)
    launch = KernelLaunch(
        _gate_bwd_kernel, HQ=HQ, D=D, BLOCK_D=block_d, ROWS=rows, BRANCHES=branches,
        num_warps=WARPS,
    )  # fmt: skip
    return launch, rows


def _rows(x: Tensor) -> Tensor:
    """[B, T, HQ, D] -> [B * T, HQ, D] with the channels contiguous: a view where one exists."""
    return last_contiguous(x).flatten(0, 1)


def _blocks(D: int) -> tuple[int, int]:
    """Channels, padded to a power of two, and rows of a tile."""
    block_d = power_of_2(D)
    return block_d, max(1, TILE // block_d)
