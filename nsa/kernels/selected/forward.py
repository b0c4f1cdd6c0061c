"""Selected attention, key-major: forward. The backward pass is in `backward`.

A query-major kernel reads n blocks of keys for each query, and multiplies them with only as many
rows as the group has heads: it is bound by those reads, and leaves the tensor cores idle. Here a
program (an *item* of nsa.kernels.selected.inverse) loads one block of keys and values once, and
walks over the queries that selected it, in tiles of full rows: row r is head r % G of the item's
pair r // G. A row's softmax over one block is a partial result; `combine` weighs the partial
results of a query by their log-sum-exp and adds them up, and can apply the gate.

Partial results go through a scratch buffer of bounded size, so queries are taken in chunks.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089, eq. 12. In the paper
block_size is l' and the number of blocks is n.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import Positions
from nsa.kernels.common.device import LOG2_E, Architecture, architecture, last_contiguous
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.selected import inverse
from nsa.kernels.selected.combine import combine
from nsa.kernels.selected.inverse import Selected, invert
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
)

SCRATCH_BYTES = 1 << 30
"""Most memory for the partial results of a chunk, forward and backward."""
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 16, 10240
"""Queries of a chunk. More do not fill the GPU better, and with this limit small heads need far
less memory than SCRATCH_BYTES."""

FORWARD: Configs = {
    "sm_90": (
        (128, Config(rows=64, warps=4, stages=1)),
        (512, Config(rows=64, warps=4, stages=2)),
    ),
    "sm_80": (
        (320, Config(rows=64, warps=4, stages=2)),
        (512, Config(rows=32, warps=4, stages=2)),
    ),
}


@triton.jit(do_not_specialize=["first_token", "first_bin", "end_bin", "T", "q_start"])
def _partial_kernel(
    q_ptr,  # [B, T, HKV * G, D]
    k_ptr,  # [B, S, HKV, D]
    v_ptr,  # [B, S, HKV, DV]
    pairs_ptr,
    items_ptr,
    first_item_ptr,
    partial_ptr,  # [tokens of the chunk, HKV, N, G, DV]
    partial_lse_ptr,  # [tokens of the chunk, HKV, N, G] float32, log2 units
    q_b: tl.int64,
    q_t: tl.int64,
    q_h: tl.int64,
    k_b: tl.int64,
    k_s: tl.int64,
    k_h: tl.int64,
    v_b: tl.int64,
    v_s: tl.int64,
    v_h: tl.int64,
    scale_log2,
    first_token,
    first_bin,
    end_bin,
    T,
    q_start,
    HKV: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,  # of a block, padded
    WIDE: tl.constexpr,  # see `row_offsets`
    AHEAD: tl.constexpr,  # keep the next tile's queries in registers; else pipeline their copies
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
    if D2 > 0:
        k2 = load_rows(k_ptr, k_rows, is_key, D1, D2, D)
    v = load_rows(v_ptr, b * v_b + h * v_h + key * v_s, is_key, 0, DV_BLOCK, DV)

    # Rows are addressed from the chunk's first query in this sequence: 32 bits are enough for
    # that, and half the registers.
    t0 = tl.maximum(first_token - b * T, 0)
    origin = b * T + t0
    q_ptr += b * q_b + t0 * q_t + h * G * q_h
    first_row = ((origin - first_token).to(tl.int64) * HKV + h) * (N * G)
    partial_ptr += first_row * DV
    partial_lse_ptr += first_row

    rows = (end - start) * G
    # Pairs are read a tile ahead: then the load of a tile's queries can be issued early.
    next_pair = load_pairs(pairs_ptr, start, end, 0, ROWS, G)
    if AHEAD:
        q_rows = row_offsets(next_pair // N - origin, tl.arange(0, ROWS) % G, q_t, q_h, WIDE)
        next_q1 = load_rows(q_ptr, q_rows, None, 0, D1, D)
        if D2 > 0:
            next_q2 = load_rows(q_ptr, q_rows, None, D1, D2, D)
    for tile in range(0, rows, ROWS):
        pair = next_pair
        next_pair = load_pairs(pairs_ptr, start, end, tile + ROWS, ROWS, G)
        row = tile + tl.arange(0, ROWS)
        g = row % G
        token = pair // N
        local = token - origin
        if AHEAD:
            q1 = next_q1
            if D2 > 0:
                q2 = next_q2
        else:
            q_rows = row_offsets(local, g, q_t, q_h, WIDE)
            q1 = load_rows(q_ptr, q_rows, None, 0, D1, D)
            if D2 > 0:
                q2 = load_rows(q_ptr, q_rows, None, D1, D2, D)
        s = tl.dot(q1, tl.trans(k1))  # [ROWS, KEYS]
        if D2 > 0:
            s = tl.dot(q2, tl.trans(k2), s)
        if AHEAD:
            q_rows = row_offsets(next_pair // N - origin, (row + ROWS) % G, q_t, q_h, WIDE)
            next_q1 = load_rows(q_ptr, q_rows, None, 0, D1, D)
            if D2 > 0:
                next_q2 = load_rows(q_ptr, q_rows, None, D1, D2, D)
        # A pair is listed only where its query sees the block's first key: row_max is finite.
        visible = is_key[None, :] & (key[None, :] <= q_start + t0 + local[:, None])
        s = tl.where(visible, s * scale_log2, float("-inf"))
        row_max = tl.max(s, 1)
        p = tl.exp2(s - row_max[:, None])
        row_sum = tl.sum(p, 1)
        o = tl.dot(p.to(v.dtype), v) * (1.0 / row_sum)[:, None]  # [ROWS, DV]

        out = (local * (HKV * N) + pair - token * N) * G + g
        if WIDE:
            out = out.to(tl.int64)
        store_rows(partial_ptr, out * DV, row < rows, o, 0, DV_BLOCK, DV)
        tl.store(partial_lse_ptr + out, row_max + tl.log2(row_sum), mask=row < rows)


def selected_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    at: Positions,
    *,
    deterministic: bool = False,
    gated: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Selected, Tensor | None]:
    """Attend to the keys of the selected blocks, causally.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], S = q_start + T.
        v: [B, S, HKV, Dv].
        block_indices: [B, T, HKV, n]; see `invert`.
        deterministic: Whether the backward pass must give the same gradients, bit for bit, in every
            run. The forward pass always does.
        gated: The gates [B, T, HQ, 3], in the order of nsa.config.BRANCHES, and the outputs of
            compress and window, [B, T, HQ, Dv]: then the gated sum is computed too.

    Returns:
        o: [B, T, HQ, Dv], dtype of q.
        lse: [B, T, HQ] float32, in log2 units.
        index: For `selected_backward`.
        out: The gated sum, [B, T, HQ, Dv], or None.
    """
    q, k, v = (last_contiguous(x) for x in (q, k, v))
    B, T, HQ, Dk = q.shape
    S, HKV, Dv = v.shape[1:]
    G = HQ // HKV
    block_size = at.config.select_block_size
    parts = -(-block_size // inverse.MAX_PART)
    N = block_indices.shape[3] * parts
    index = invert(
        block_indices,
        keys=S,
        group=G,
        channels=Dk + Dv,
        block_size=block_size,
        chunk_tokens=_chunk_tokens(HQ * N, max(Dk, Dv), q.element_size()),
        q_start=at.q_start,
        cu_seqlens=at.cu_seqlens,
        deterministic=deterministic,
    )
    most = max(chunk.tokens for chunk in index.chunks)

    def empty(*size: int, dtype: torch.dtype = q.dtype) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=q.device)

    partial = empty(most, HKV, N, G, Dv)
    partial_lse = empty(most, HKV, N, G, dtype=torch.float32)
    o = empty(B, T, HQ, Dv)
    lse = empty(B, T, HQ, dtype=torch.float32)
    out = None
    if gated is not None:
        gated = (gated[0], last_contiguous(gated[1]), last_contiguous(gated[2]))
        out = empty(B, T, HQ, Dv)

    wide = needs_wide_offsets(index, q)
    launch = _launch(architecture(q.device), HKV, G, N, Dk, Dv, wide)
    pointers = (q, k, v, index.pairs, index.items, index.first_item, partial, partial_lse)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    for chunk in index.chunks:
        launch(
            (chunk.max_items,),
            pointers,
            (
                *strides,
                at.scale * LOG2_E,
                chunk.first_token,
                chunk.first_bin,
                chunk.end_bin,
                T,
                at.q_start,
            ),
        )
        combine(partial, partial_lse, index, chunk, o, lse, gated, out, q_start=at.q_start)
    return o, lse, index, out


@lru_cache(maxsize=KINDS)
def _launch(
    arch: Architecture, HKV: int, G: int, N: int, Dk: int, Dv: int, wide: bool
) -> KernelLaunch:
    shared = constants(FORWARD, arch, HKV, G, N, Dk, Dv, wide)
    return KernelLaunch(_partial_kernel, **shared, AHEAD=shared["num_stages"] == 1)


def _chunk_tokens(rows: int, size: int, element_size: int) -> int:
    """Queries whose partial results, `rows` of `size` elements each, fit the scratch buffer."""
    fit = SCRATCH_BYTES // (rows * (size * element_size + 4))
    return min(max(MIN_CHUNK_TOKENS, fit), MAX_CHUNK_TOKENS)
