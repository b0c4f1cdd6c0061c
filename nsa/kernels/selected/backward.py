"""Selected attention, key-major: backward.

As in the forward pass, a program holds one block of keys and values and walks over the queries that
selected it. Meanwhile the gradients of the keys and values stay in registers, transposed ([D,
KEYS]): every product then has a gathered tile on its left and 64 keys on its right, for any head
size. At the end they are added to float32 buffers. Each row's share of dq goes to a scratch buffer;
a second kernel adds up the shares of a query and the gradients from the other branches.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089, eq. 12.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import Positions
from nsa.kernels.common.device import LOG2_E, Architecture, architecture, ceil_div, last_contiguous
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.streams import SideStream
from nsa.kernels.selected.hopper_backward import hopper_launch, hopper_serves, tiles_of
from nsa.kernels.selected.inverse import Selected
from nsa.kernels.selected.keymajor import (
    Config,
    Configs,
    constants,
    load_item,
    load_pairs,
    load_rows,
    needs_wide_offsets,
    row_offsets,
    store_rows,
    strides,
)
from nsa.kernels.selected.reduce import ELEMENTS, reduce_launch

BACKWARD: Configs = {
    "sm_90": (
        (128, Config(rows=64, warps=4, stages=1)),
        (320, Config(rows=128, warps=8, stages=1)),
        (512, Config(rows=64, warps=8, stages=1)),
    ),
    "sm_80": (
        (128, Config(rows=32, warps=4, stages=1)),
        (320, Config(rows=32, warps=8, stages=1)),
        (512, Config(rows=16, warps=8, stages=1)),
    ),
}


@triton.jit
def _add(
    ptr,
    offsets,
    inside,
    x,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    ATOMIC: tl.constexpr,
):
    """Add x [ROWS, BLOCK] to columns FIRST ... of some rows."""
    column = FIRST + tl.arange(0, BLOCK)
    at = ptr + offsets[:, None] + column[None, :]
    mask = inside[:, None] & (column[None, :] < SIZE)
    if ATOMIC:
        tl.atomic_add(at, x, mask=mask, sem="relaxed")
    else:
        tl.store(at, tl.load(at, mask=mask, other=0.0) + x, mask=mask)


@triton.jit
def _row_values(
    lse_ptr,
    delta_ptr,
    gate_ptr,
    lse_t,
    lse_h,
    delta_t,
    delta_h,
    gate_t,
    gate_h,
    local,
    g,
    inside,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
):
    """(lse, delta, gate) of the rows of a tile, [ROWS]; one past the end has p = exp2(-inf) = 0."""
    at = row_offsets(local, g, lse_t, lse_h, WIDE)
    lse = tl.load(lse_ptr + at, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + row_offsets(local, g, delta_t, delta_h, WIDE))
    if GATED:
        gate = tl.load(gate_ptr + row_offsets(local, g, gate_t, gate_h, WIDE)).to(tl.float32)
    else:
        gate = tl.full(delta.shape, 1.0, tl.float32)
    return lse, delta, gate


# Strides of one number a row are multiples of 16 at some lengths only.
@triton.jit(
    do_not_specialize=[
        *("first_token", "first_bin", "end_bin", "T", "S", "q_start"),
        *("lse_b", "lse_t", "lse_h"),
        *("delta_b", "delta_t", "delta_h"),
        *("gate_b", "gate_t", "gate_h"),
    ]
)
def _backward_kernel(
    do_ptr,  # [B, T, HKV * G, DV]
    q_ptr,  # [B, T, HKV * G, D]
    partial_ptr,  # [tokens of the chunk, HKV, N, G, D]: shares of dq
    k_ptr,  # [B, S, HKV, D]
    v_ptr,  # [B, S, HKV, DV]
    lse_ptr,  # [B, T, HKV * G] float32, log2 units
    delta_ptr,  # [B, T, HKV * G] float32
    gate_ptr,  # [B, T, HKV * G], or None
    pairs_ptr,
    items_ptr,
    first_item_ptr,
    dk_ptr,  # [B, S, HKV, D] float32
    dv_ptr,  # [B, S, HKV, DV] float32
    do_b: tl.int64,
    do_t: tl.int64,
    do_h: tl.int64,
    q_b: tl.int64,
    q_t: tl.int64,
    q_h: tl.int64,
    k_b: tl.int64,
    k_s: tl.int64,
    k_h: tl.int64,
    v_b: tl.int64,
    v_s: tl.int64,
    v_h: tl.int64,
    lse_b: tl.int64,
    lse_t: tl.int64,
    lse_h: tl.int64,
    delta_b: tl.int64,
    delta_t: tl.int64,
    delta_h: tl.int64,
    gate_b: tl.int64,
    gate_t: tl.int64,
    gate_h: tl.int64,
    scale,
    scale_log2,
    first_token,
    first_bin,
    end_bin,
    T,
    S,
    q_start,
    HKV: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    GATED: tl.constexpr,
    ATOMIC: tl.constexpr,  # others may add to the same keys; else this program alone does
    WIDE: tl.constexpr,  # see `row_offsets`
    HALVES: tl.constexpr,  # compute shares of dq in halves of D1: fewer registers, more copies of k
    ROWS: tl.constexpr,
):
    exists, start, end, b_h, first_key, end_key = load_item(
        items_ptr, first_item_ptr, first_bin, end_bin
    )
    if not exists:
        return
    b = b_h // HKV
    h = b_h - b * HKV

    key = first_key + tl.arange(0, KEYS)
    is_key = key < end_key
    k_rows = b * k_b + h * k_h + key * k_s
    k1 = load_rows(k_ptr, k_rows, is_key, 0, D1, D)  # [KEYS, D1]
    dk1 = tl.zeros([D1, KEYS], tl.float32)
    if D2 > 0:
        k2 = load_rows(k_ptr, k_rows, is_key, D1, D2, D)
        dk2 = tl.zeros([D2, KEYS], tl.float32)
    if HALVES:
        ka = load_rows(k_ptr, k_rows, is_key, 0, D1 // 2, D)
        kb = load_rows(k_ptr, k_rows, is_key, D1 // 2, D1 // 2, D)
    v = load_rows(v_ptr, b * v_b + h * v_h + key * v_s, is_key, 0, DV_BLOCK, DV)
    dv = tl.zeros([DV_BLOCK, KEYS], tl.float32)

    # Rows are addressed from the chunk's first query in this sequence: 32 bits are enough for
    # that, and half the registers.
    t0 = tl.maximum(first_token - b * T, 0)
    origin = b * T + t0
    q_ptr += b * q_b + t0 * q_t + h * G * q_h
    do_ptr += b * do_b + t0 * do_t + h * G * do_h
    lse_ptr += b * lse_b + t0 * lse_t + h * G * lse_h
    delta_ptr += b * delta_b + t0 * delta_t + h * G * delta_h
    if GATED:
        gate_ptr += b * gate_b + t0 * gate_t + h * G * gate_h
    partial_ptr += ((origin - first_token).to(tl.int64) * HKV + h) * (N * G * D)

    rows = (end - start) * G
    row = tl.arange(0, ROWS)
    # Pairs and what is small are read a tile ahead; so the loads of a tile can be issued early.
    next_pair = load_pairs(pairs_ptr, start, end, 0, ROWS, G)
    next_lse, next_delta, next_gate = _row_values(
        lse_ptr,
        delta_ptr,
        gate_ptr,
        lse_t,
        lse_h,
        delta_t,
        delta_h,
        gate_t,
        gate_h,
        next_pair // N - origin,
        row % G,
        row < rows,
        GATED,
        WIDE,
    )
    q_rows = row_offsets(next_pair // N - origin, row % G, q_t, q_h, WIDE)
    next_q1 = load_rows(q_ptr, q_rows, None, 0, D1, D)
    if D2 > 0:
        next_q2 = load_rows(q_ptr, q_rows, None, D1, D2, D)
    for tile in range(0, rows, ROWS):
        pair = next_pair
        next_pair = load_pairs(pairs_ptr, start, end, tile + ROWS, ROWS, G)
        row = tile + tl.arange(0, ROWS)
        local = pair // N - origin

        do_rows = row_offsets(local, row % G, do_t, do_h, WIDE)
        do = load_rows(do_ptr, do_rows, None, 0, DV_BLOCK, DV)  # [ROWS, DV]
        q1 = next_q1
        s = tl.dot(q1, tl.trans(k1))  # [ROWS, KEYS]
        if D2 > 0:
            q2 = next_q2
            s = tl.dot(q2, tl.trans(k2), s)
        lse, delta, gate = next_lse, next_delta, next_gate
        next_local = next_pair // N - origin
        next_g = (row + ROWS) % G
        next_lse, next_delta, next_gate = _row_values(
            lse_ptr,
            delta_ptr,
            gate_ptr,
            lse_t,
            lse_h,
            delta_t,
            delta_h,
            gate_t,
            gate_h,
            next_local,
            next_g,
            row + ROWS < rows,
            GATED,
            WIDE,
        )
        visible = is_key[None, :] & (key[None, :] <= q_start + t0 + local[:, None])
        p = tl.where(visible, tl.exp2(s * scale_log2 - lse[:, None]), 0.0)
        if GATED:
            p = p * gate[:, None]
        dp = tl.dot(do, tl.trans(v))  # [ROWS, KEYS]
        ds = (p * (dp - delta[:, None])).to(q1.dtype)

        # Scores are done: there are registers for the next tile, which arrives meanwhile.
        q_rows = row_offsets(next_local, next_g, q_t, q_h, WIDE)
        next_q1 = load_rows(q_ptr, q_rows, None, 0, D1, D)
        if D2 > 0:
            next_q2 = load_rows(q_ptr, q_rows, None, D1, D2, D)

        dv = tl.dot(tl.trans(do), p.to(do.dtype), dv)  # [DV, KEYS]
        dk1 = tl.dot(tl.trans(q1), ds, dk1)  # [D1, KEYS]
        if D2 > 0:
            dk2 = tl.dot(tl.trans(q2), ds, dk2)
        # Read again rather than kept: registers are short here.
        pair = load_pairs(pairs_ptr, start, end, tile, ROWS, G)
        token = pair // N
        out = (((token - origin) * (HKV * N) + pair - token * N) * G + row % G) * D
        if WIDE:
            out = out.to(tl.int64)
        if HALVES:
            store_rows(partial_ptr, out, row < rows, tl.dot(ds, ka) * scale, 0, D1 // 2, D)
            store_rows(partial_ptr, out, row < rows, tl.dot(ds, kb) * scale, D1 // 2, D1 // 2, D)
        else:
            store_rows(partial_ptr, out, row < rows, tl.dot(ds, k1) * scale, 0, D1, D)
        if D2 > 0:
            store_rows(partial_ptr, out, row < rows, tl.dot(ds, k2) * scale, D1, D2, D)

    # Read again rather than kept, for the same reason.
    _, _, _, b_h, first_key, end_key = load_item(items_ptr, first_item_ptr, first_bin, end_bin)
    b = b_h // HKV
    h = b_h - b * HKV
    key = first_key + tl.arange(0, KEYS)
    is_key = key < end_key
    to = (b.to(tl.int64) * S + key) * HKV + h
    _add(dv_ptr, to * DV, is_key, tl.trans(dv), 0, DV_BLOCK, DV, ATOMIC)
    _add(dk_ptr, to * D, is_key, tl.trans(dk1) * scale, 0, D1, D, ATOMIC)
    if D2 > 0:
        _add(dk_ptr, to * D, is_key, tl.trans(dk2) * scale, D1, D2, D, ATOMIC)


def selected_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    index: Selected,
    at: Positions,
    *,
    deterministic: bool = False,
    gate: Tensor | None = None,
    add_dq: Sequence[Tensor] = (),
    added_by: Sequence[SideStream] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `selected_forward`.

    Args:
        do: [B, T, HQ, Dv], the gradient of gate * o, or of o without a gate.
        lse: [B, T, HQ] float32, from the forward pass.
        delta: [B, T, HQ] float32, rowsum(do * o).
        index: From the forward pass, with the same `deterministic`.
        gate: [B, T, HQ].
        add_dq: At most two gradients of q, [B, T, HQ, Dk], of other branches: the dq returned is
            the sum.
        added_by: The streams that write them, contiguous; joined before they are read.

    Returns:
        dq, dk and dv, shaped as q, k and v and in their dtypes, contiguous.
    """
    do, q, k, v = (last_contiguous(x) for x in (do, q, k, v))
    B, T, HQ, Dk = q.shape
    S, HKV, Dv = v.shape[1:]
    G, N = HQ // HKV, index.slots
    most = max(chunk.tokens for chunk in index.chunks)
    partial = torch.empty(most, HKV, N, G, Dk, dtype=q.dtype, device=q.device)
    dq = torch.empty(B, T, HQ, Dk, dtype=q.dtype, device=q.device)
    # One buffer, zeroed and rounded at once.
    sums = torch.zeros(k.numel() + v.numel(), dtype=torch.float32, device=q.device)
    dk_sum, dv_sum = sums[: k.numel()], sums[k.numel() :]
    added = [last_contiguous(x) for x in add_dq]
    add1, add2, *_ = *added, None, None

    kind = (HKV, G, N, Dk, Dv, gate is not None, not deterministic)
    row_strides: tuple[int, ...] = ()
    if hopper_serves(q, v, G):
        launch, rows = hopper_launch(*kind), tiles_of(do, q, partial)
    else:
        wide = needs_wide_offsets(index, q, do, lse, delta, *([] if gate is None else [gate]))
        launch, rows = _launch(architecture(q.device), *kind, wide), [do, q, partial]
        row_strides = (*do.stride()[:3], *q.stride()[:3])
    block_size, documents = at.config.select_block_size, at.cu_seqlens is not None
    launch_reduce = reduce_launch(HKV, G, N, Dk, block_size, index.parts, documents, len(added))
    for chunk in index.chunks:
        launch(
            (chunk.max_items,),
            (
                *(*rows, k, v, lse, delta, gate),
                *(index.pairs, index.items, index.first_item),
                *(dk_sum, dv_sum),
            ),
            (
                *row_strides,
                *k.stride()[:3],
                *v.stride()[:3],
                *lse.stride(),
                *delta.stride(),
                *strides(gate, 3),
                at.scale,
                at.scale * LOG2_E,
                chunk.first_token,
                chunk.first_bin,
                chunk.end_bin,
                T,
                S,
                at.q_start,
            ),
        )
        for side in added_by:
            side.join()
        launch_reduce(
            (chunk.tokens * HKV, ceil_div(G * Dk, ELEMENTS)),
            (partial, index.blocks, index.document_start, dq, add1, add2),
            (*strides(add1, 3), *strides(add2, 3), chunk.first_token, T, at.q_start),
        )
    rounded = sums.to(k.dtype)
    return dq, rounded[: k.numel()].view(k.shape), rounded[k.numel() :].view(v.shape)


@lru_cache(maxsize=KINDS)
def _launch(
    arch: Architecture,
    HKV: int,
    G: int,
    N: int,
    Dk: int,
    Dv: int,
    gated: bool,
    atomic: bool,
    wide: bool,
) -> KernelLaunch:
    shared = constants(BACKWARD, arch, HKV, G, N, Dk, Dv, wide)
    return KernelLaunch(
        _backward_kernel, **shared, GATED=gated, ATOMIC=atomic, HALVES=shared["D1"] > 64
    )
