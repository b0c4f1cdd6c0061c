"""Gradients of attention over a band.

Two kernels, and no atomics: one owns a tile of queries of a head and walks keys (dQ), the other
owns a tile of keys and walks the queries of every head of its group (dK, dV). The weights are
computed again in both from `lse`. Where keys are few and queries many, as in the compress branch,
those of a key tile are split among programs whose sums are added up in a fixed order: gradients are
the same in every run.

With p the weights and g the gate of the branch:  dV = (p g)^T dO,  dS = p g (dO V^T - delta),
dQ = scale dS K,  dK = scale dS^T Q,  where delta = rowsum(dO o) of the branch's own output o.

Source: Dao 2023, arXiv:2307.08691, algorithm 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.band import Band
from nsa.kernels.banded import UNSPECIALISED, Tile, interval, load_tile
from nsa.kernels.common import (
    LOG2_E,
    Architecture,
    architecture,
    head_blocks,
    last_contiguous,
    padded,
)

PROGRAMS = 1024
"""How many programs dK and dV are split into at least, where there are rows enough."""
MIN_SPLIT_ROWS = 2048
"""Rows of one split at least: below, adding up the splits costs more than they save."""


def query_tile(arch: Architecture, head: int) -> Tile:
    """Tile of the dQ kernel."""
    if arch == "sm_80":
        if head <= 64:
            return Tile(128, 64, 8, 2)
        return Tile(128, 32, 8, 2) if head <= 128 else Tile(64, 32, 8, 2)
    if head <= 64:
        return Tile(128, 64, 4, 2)
    return Tile(128, 64, 8, 2)


def key_tile(arch: Architecture, head: int) -> Tile:
    """Tile of the dK, dV kernel."""
    if arch == "sm_80":
        if head <= 64:
            return Tile(64, 64, 4, 2)
        return Tile(32, 128, 8, 2) if head <= 128 else Tile(32, 64, 8, 2)
    if head <= 64:
        return Tile(64, 128, 8, 2)
    return Tile(64, 128, 8, 2)


@triton.jit
def _query_walk(
    dq1,  # [BLOCK_M, D1]
    dq2,  # [BLOCK_M, D2], or dq1 where D2 is 0
    q1,
    q2,
    do,  # [BLOCK_M, DV_BLOCK]
    lse,  # [BLOCK_M]
    delta,
    low,
    high,
    k_ptr,
    v_ptr,
    k_stride,
    v_stride,
    begin,
    end,
    S,
    scale,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    offs_n = tl.arange(0, BLOCK_N)
    k_offsets = offs_n * k_stride.to(tl.int32)
    v_offsets = offs_n * v_stride.to(tl.int32)
    for start in tl.range(begin, end, BLOCK_N):
        key = start + offs_n
        exists = key < S
        k_tile = k_ptr + start * k_stride
        k1 = load_tile(k_tile, k_offsets, exists, 0, D1, D, MASKED)
        s = tl.dot(q1, tl.trans(k1))
        if D2 > 0:
            k2 = load_tile(k_tile, k_offsets, exists, D1, D2, D, MASKED)
            s = tl.dot(q2, tl.trans(k2), s)
        v = load_tile(v_ptr + start * v_stride, v_offsets, exists, 0, DV_BLOCK, DV, MASKED)
        dp = tl.dot(do, tl.trans(v))
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k1.dtype)
        dq1 = tl.dot(ds, k1, dq1)
        if D2 > 0:
            dq2 = tl.dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=UNSPECIALISED)
def _query_kernel(
    do_ptr,  # [B, T, HKV * G, DV]
    q_ptr,  # [B, T, HKV * G, D]
    k_ptr,  # [B, S, HKV, D]
    v_ptr,  # [B, S, HKV, DV]
    lse_ptr,  # [B, HKV * G, T], float32, log2 units
    delta_ptr,  # [B, HKV * G, T], float32
    gate_ptr,  # [B, HKV * G, T], float32
    dq_ptr,  # [B, T, HKV * G, D], contiguous
    low_ptr,
    high_ptr,
    scale,  # times log2(e)
    natural_scale,
    T,
    S,
    q_start,
    k_start,
    window,
    do_batch: tl.int64,
    do_token: tl.int64,
    do_head: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    b = (tl.program_id(1) // HKV).to(tl.int64)
    h = tl.program_id(1) % HKV
    head = h * G + tl.program_id(0) % G

    first = tile * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    token = first + offs_m
    valid = token < T
    q_base = q_ptr + b * q_batch + head * q_head + first * q_token
    q_rows = offs_m * q_token.to(tl.int32)
    q1 = load_tile(q_base, q_rows, valid, 0, D1, D, True)
    q2 = q1
    if D2 > 0:
        q2 = load_tile(q_base, q_rows, valid, D1, D2, D, True)
    do_base = do_ptr + b * do_batch + head * do_head + first * do_token
    do = load_tile(do_base, offs_m * do_token.to(tl.int32), valid, 0, DV_BLOCK, DV, True)
    row = (b * (HKV * G) + head) * T + token
    lse = tl.load(lse_ptr + row, mask=valid, other=0.0)
    delta = tl.load(delta_ptr + row, mask=valid, other=0.0)

    low, high = interval(
        token, low_ptr, high_ptr, T, S, q_start, k_start, window, STRIDE, SPAN, WINDOW, DOCUMENTS
    )
    begin, all_end = interval(
        first, low_ptr, high_ptr, T, S, q_start, k_start, window, STRIDE, SPAN, WINDOW, DOCUMENTS
    )
    all_begin, end = interval(
        first + BLOCK_M - 1, low_ptr, high_ptr, T, S, q_start, k_start, window,
        STRIDE, SPAN, WINDOW, DOCUMENTS,
    )  # fmt: skip

    dq1 = tl.zeros([BLOCK_M, D1], tl.float32)
    dq2 = dq1
    if D2 > 0:
        dq2 = tl.zeros([BLOCK_M, D2], tl.float32)
    k_base = k_ptr + b * k_batch + h * k_head
    v_base = v_ptr + b * v_batch + h * v_head
    middle = begin
    if WINDOW or DOCUMENTS:
        middle = tl.minimum(begin + tl.cdiv(all_begin - begin, BLOCK_N) * BLOCK_N, end)
        dq1, dq2 = _query_walk(
            dq1, dq2, q1, q2, do, lse, delta, low, high, k_base, v_base, k_token, v_token,
            begin, middle, S, scale, D, D1, D2, DV, DV_BLOCK, BLOCK_N, True,
        )  # fmt: skip
    whole_end = middle + tl.maximum(all_end - middle, 0) // BLOCK_N * BLOCK_N
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k_base, v_base, k_token, v_token,
        middle, whole_end, S, scale, D, D1, D2, DV, DV_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k_base, v_base, k_token, v_token,
        whole_end, end, S, scale, D, D1, D2, DV, DV_BLOCK, BLOCK_N, True,
    )  # fmt: skip

    factor = tl.full([BLOCK_M], natural_scale, tl.float32)
    if GATED:  # the gate is one number a row, so it can wait until here
        factor *= tl.load(gate_ptr + row, mask=valid, other=0.0)
    out_row = (b * T + token) * (HKV * G) + head
    _store(dq_ptr, dq1 * factor[:, None], out_row, valid, 0, D1, D)
    if D2 > 0:
        _store(dq_ptr, dq2 * factor[:, None], out_row, valid, D1, D2, D)


@triton.jit
def _store(ptr, x, row, valid, COLUMN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Write a block of columns of the rows of a contiguous [*, SIZE]."""
    columns = COLUMN + tl.arange(0, BLOCK)
    pointers = ptr + row[:, None] * SIZE + columns[None, :]
    mask = valid[:, None] & (columns < SIZE)[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _row_walk(
    dk1,  # [BLOCK_N, D1]
    dk2,  # [BLOCK_N, D2], or dk1 where D2 is 0
    dv,  # [BLOCK_N, DV_BLOCK]
    k1,
    k2,
    v,  # [BLOCK_N, DV_BLOCK]
    key,  # [BLOCK_N]
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    low_ptr,
    high_ptr,
    begin,
    all_begin,
    all_end,
    end,
    T,
    S,
    q_start,
    k_start,
    window,
    scale,
    q_token,
    q_head,
    do_token,
    do_head,
    G: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Take in the queries [begin, end) of every head of the group. Those of [all_begin, all_end)
    see every key; a mask is drawn only for tiles that hold others."""
    offs_m = tl.arange(0, BLOCK_M)
    q_rows = offs_m * q_token.to(tl.int32)
    do_rows = offs_m * do_token.to(tl.int32)
    tiles = tl.cdiv(end - begin, BLOCK_M)
    for i in tl.range(tiles * G):
        g = i // tiles
        first = begin + (i % tiles) * BLOCK_M
        token = first + offs_m
        valid = token < end
        q_tile = q_ptr + first * q_token + g * q_head
        q1 = load_tile(q_tile, q_rows, valid, 0, D1, D, True)
        st = tl.dot(k1, tl.trans(q1))  # [BLOCK_N, BLOCK_M]
        if D2 > 0:
            q2 = load_tile(q_tile, q_rows, valid, D1, D2, D, True)
            st = tl.dot(k2, tl.trans(q2), st)
        row = g.to(tl.int64) * T + token
        # Rows past the end weigh nothing: exp2(x - inf) is 0.
        lse = tl.load(lse_ptr + row, mask=valid, other=float("inf"))
        delta = tl.load(delta_ptr + row, mask=valid, other=0.0)
        pt = tl.exp2(st * scale - lse[None, :])
        if (first < all_begin) | (first + BLOCK_M > all_end):
            low, high = interval(
                token, low_ptr, high_ptr, T, S, q_start, k_start, window,
                STRIDE, SPAN, WINDOW, DOCUMENTS,
            )  # fmt: skip
            visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
            pt = tl.where(visible, pt, 0.0)
        if GATED:
            pt *= tl.load(gate_ptr + row, mask=valid, other=0.0)[None, :]
        do_tile = do_ptr + first * do_token + g * do_head
        do = load_tile(do_tile, do_rows, valid, 0, DV_BLOCK, DV, True)
        dv = tl.dot(pt.to(do.dtype), do, dv)
        dpt = tl.dot(v, tl.trans(do))
        dst = (pt * (dpt - delta[None, :])).to(q1.dtype)
        dk1 = tl.dot(dst, q1, dk1)
        if D2 > 0:
            dk2 = tl.dot(dst, q2, dk2)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=[*UNSPECIALISED, "B", "splits"])
def _key_kernel(
    do_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    lse_ptr,
    delta_ptr,
    gate_ptr,
    dk_ptr,  # [splits, B, S, HKV, D]
    dv_ptr,  # [splits, B, S, HKV, DV]
    low_ptr,
    high_ptr,
    first_ptr,  # [S] int32, with documents
    stop_ptr,  # [S] int32, with documents
    scale,
    natural_scale,
    B,
    splits,
    T,
    S,
    q_start,
    k_start,
    window,
    do_batch: tl.int64,
    do_token: tl.int64,
    do_head: tl.int64,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    STRIDE: tl.constexpr,
    SPAN: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    # The first keys are seen by the most rows, and program 0 starts first.
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    b = (tl.program_id(1) // HKV).to(tl.int64)
    h = tl.program_id(1) % HKV
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = key < S
    first_key = tile * BLOCK_N
    last_key = tl.minimum(first_key + BLOCK_N, S) - 1

    # Queries [begin, end) see some key of the tile, [all_begin, all_end) see every one.
    if DOCUMENTS:
        begin = tl.load(first_ptr + first_key)
        all_begin = tl.load(first_ptr + last_key)
        all_end = tl.load(stop_ptr + first_key)
        end = tl.load(stop_ptr + last_key)
    else:
        begin = tl.maximum((first_key + k_start) * STRIDE + SPAN - 1 - q_start, 0)
        all_begin = tl.maximum((last_key + k_start) * STRIDE + SPAN - 1 - q_start, 0)
        all_end = T
        end = T
        if WINDOW:
            all_end = tl.minimum(T, first_key + k_start + window - q_start)
            end = tl.minimum(T, last_key + k_start + window - q_start)
    end = tl.maximum(end, begin)
    all_begin = tl.minimum(all_begin, end)

    # This split's share, in whole tiles.
    share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_M) * BLOCK_M
    begin = tl.minimum(begin + split * share, end)
    end = tl.minimum(begin + share, end)

    k_base = k_ptr + b * k_batch + h * k_head
    k_rows = key.to(tl.int64) * k_token
    k1 = load_tile(k_base, k_rows, exists, 0, D1, D, True)
    k2 = k1
    if D2 > 0:
        k2 = load_tile(k_base, k_rows, exists, D1, D2, D, True)
    v_rows = key.to(tl.int64) * v_token
    v = load_tile(v_ptr + b * v_batch + h * v_head, v_rows, exists, 0, DV_BLOCK, DV, True)
    dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    dk2 = dk1
    if D2 > 0:
        dk2 = tl.zeros([BLOCK_N, D2], tl.float32)
    dv = tl.zeros([BLOCK_N, DV_BLOCK], tl.float32)

    q_base = q_ptr + b * q_batch + h * G * q_head
    do_base = do_ptr + b * do_batch + h * G * do_head
    rows = (b * HKV + h) * G * T
    lse_base = lse_ptr + rows
    delta_base = delta_ptr + rows
    gate_base = gate_ptr + rows
    dk1, dk2, dv = _row_walk(
        dk1, dk2, dv, k1, k2, v, key, q_base, do_base, lse_base, delta_base, gate_base, low_ptr,
        high_ptr, begin, all_begin, all_end, end, T, S, q_start, k_start, window, scale, q_token,
        q_head, do_token, do_head, G, D, D1, D2, DV, DV_BLOCK, GATED,
        STRIDE, SPAN, WINDOW, DOCUMENTS, BLOCK_M,
    )  # fmt: skip

    out_row = ((split.to(tl.int64) * B + b) * S + key) * HKV + h
    _store(dv_ptr, dv, out_row, exists, 0, DV_BLOCK, DV)
    _store(dk_ptr, dk1 * natural_scale, out_row, exists, 0, D1, D)
    if D2 > 0:
        _store(dk_ptr, dk2 * natural_scale, out_row, exists, D1, D2, D)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    band: Band,
    *,
    scale: float,
    gate: Tensor | None = None,
    query: Tile | None = None,
    key: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `banded.forward`.

    Args:
        do: Gradient of the output, [B, T, HQ, Dv]; with `gate` that of the gated sum.
        lse: From the forward pass.
        delta: [B, T, HQ], float32, any strides: rowsum(do * o), the branch's own o.
        gate: [B, T, HQ], any strides: what the branch's output is multiplied by.

    Returns:
        dq, dk, dv, contiguous, in the dtype of q.
    """
    B, T, HQ, D = q.shape
    S, HKV = k.shape[1:3]
    DV, G = v.shape[-1], HQ // HKV
    do, q, k, v = (last_contiguous(x) for x in (do, q, k, v))
    arch, head = architecture(q.device), max(D, DV)
    query = query_tile(arch, head) if query is None else query
    key = key_tile(arch, head) if key is None else key
    D1, D2 = head_blocks(D)
    documents = band.documents
    low, high, first, stop = (
        (lse, lse, lse, lse)
        if documents is None
        else (documents.low, documents.high, documents.first, documents.stop)
    )
    sizes = {
        "HKV": HKV,
        "G": G,
        "D": D,
        "D1": D1,
        "D2": D2,
        "DV": DV,
        "DV_BLOCK": padded(DV),
        "GATED": gate is not None,
        "STRIDE": band.stride,
        "SPAN": band.span,
        "WINDOW": band.window > 0,
        "DOCUMENTS": documents is not None,
    }
    strides = (*do.stride()[:3], *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    where = (T, S, band.q_start, band.k_start, band.window)
    saved = _by_head(lse, delta, gate)

    dq = q.new_empty(B, T, HQ, D)
    _query_kernel[(triton.cdiv(T, query.queries) * G, B * HKV)](
        do, q, k, v, *saved, dq, low, high, scale * LOG2_E, scale, *where, *strides, **sizes,
        BLOCK_M=query.queries, BLOCK_N=query.keys, num_warps=query.warps, num_stages=query.stages,
    )  # fmt: skip
    if S == 0:
        return dq, torch.empty_like(k), torch.empty_like(v)

    key_tiles = triton.cdiv(S, key.keys)
    rows = G * (T if band.window == 0 else min(T, band.window + key.keys))
    splits = max(1, min(PROGRAMS // (key_tiles * B * HKV), rows // MIN_SPLIT_ROWS))
    partial = torch.float32 if splits > 1 else q.dtype
    dk = torch.empty(splits, B, S, HKV, D, dtype=partial, device=q.device)
    dv = torch.empty(splits, B, S, HKV, DV, dtype=partial, device=q.device)
    _key_kernel[(key_tiles * splits, B * HKV)](
        do, q, k, v, *saved, dk, dv, low, high, first, stop, scale * LOG2_E, scale, B, splits,
        *where, *strides, **sizes,
        BLOCK_M=key.queries, BLOCK_N=key.keys, num_warps=key.warps, num_stages=key.stages,
    )  # fmt: skip
    if splits == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0).to(q.dtype), dv.sum(0).to(q.dtype)


def _by_head(lse: Tensor, delta: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The three as [B, HQ, T] float32, so that the queries of a tile lie side by side.

    Without a gate the third stands for nothing, and is not read.
    """
    B, T, HQ = lse.shape
    planes = torch.empty(3, B, HQ, T, dtype=torch.float32, device=lse.device)
    BLOCK_T = 64
    _transpose_kernel[(triton.cdiv(T, BLOCK_T), B)](
        lse, delta, delta if gate is None else gate, planes, B, T, *lse.stride(), *delta.stride(),
        *(delta if gate is None else gate).stride(), HQ=HQ, GATED=gate is not None,
        BLOCK_T=BLOCK_T, BLOCK_H=min(64, padded(HQ)), num_warps=4,
    )  # fmt: skip
    return planes[0], planes[1], planes[2]


@triton.jit(do_not_specialize=["B", "T"])
def _transpose_kernel(
    lse_ptr,
    delta_ptr,
    gate_ptr,
    planes_ptr,  # [3, B, HQ, T], float32
    B,
    T,
    lse_batch: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    delta_batch: tl.int64,
    delta_token: tl.int64,
    delta_head: tl.int64,
    gate_batch: tl.int64,
    gate_token: tl.int64,
    gate_head: tl.int64,
    HQ: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    for first in tl.static_range(0, HQ, BLOCK_H):
        head = first + tl.arange(0, BLOCK_H)
        mask = (token < T)[:, None] & (head < HQ)[None, :]
        out = planes_ptr + (b * HQ + head)[None, :] * T + token[:, None]
        plane = B.to(tl.int64) * HQ * T
        lse = lse_ptr + b * lse_batch + token[:, None] * lse_token + head[None, :] * lse_head
        tl.store(out, tl.load(lse, mask=mask), mask=mask)
        delta = delta_ptr + b * delta_batch
        delta += token[:, None] * delta_token + head[None, :] * delta_head
        tl.store(out + plane, tl.load(delta, mask=mask), mask=mask)
        if GATED:
            gate = gate_ptr + b * gate_batch
            gate += token[:, None] * gate_token + head[None, :] * gate_head
            tl.store(out + 2 * plane, tl.load(gate, mask=mask).to(tl.float32), mask=mask)
