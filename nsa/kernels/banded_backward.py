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
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.band import Band
from nsa.kernels.banded import UNSPECIALISED, Tile, interval
from nsa.kernels.common import (
    LOG2_E,
    Architecture,
    aligned,
    architecture,
    descriptor,
    head_blocks,
    head_descriptors,
    padded,
)

PROGRAMS = 1024
"""How many programs dK and dV are split into at least, where there are rows enough."""
PAD_TOKENS = 128
"""To whose multiple lse, delta and gate are padded: no tile of queries is longer."""
MIN_SPLIT_ROWS = 2048
"""Rows of one split at least: below, adding up the splits costs more than they save."""


def query_tile(arch: Architecture, head: int, *, window: bool) -> Tile:
    """Tile of the dQ kernel, which a window gives short walks."""
    if arch == "sm_80":
        if head <= 64:
            return Tile(128, 64, 8, 2)
        return Tile(128, 32, 8, 2) if head <= 128 else Tile(64, 32, 8, 2)
    if head <= 64:
        return Tile(64, 64, 4, 3)
    if head <= 128:
        return Tile(64, 64, 4, 2)
    if head <= 192:
        return Tile(64, 32, 4, 3) if window else Tile(128, 64, 8, 3)
    return Tile(64, 64, 8, 2)


def key_tile(arch: Architecture, head: int, *, window: bool) -> Tile:
    """Tile of the dK, dV kernel, likewise."""
    if arch == "sm_80":
        if head <= 64:
            return Tile(64, 64, 4, 2)
        return Tile(32, 128, 8, 2) if head <= 128 else Tile(32, 64, 8, 2)
    if head <= 64:
        return Tile(64, 64, 4, 3)
    if head <= 128 and window:
        return Tile(64, 64, 4, 2)
    return Tile(64, 128, 8, 3) if head <= 192 else Tile(64, 64, 8, 2)


@triton.jit
def _load_rows(
    ptr,  # start of the first row
    stride,  # of rows
    exists,  # [ROWS]
    COLUMN: tl.constexpr,  # first channel of the block
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,  # channels there are
    ROWS: tl.constexpr,
):
    """A block of channels, [ROWS, BLOCK], by plain loads: what stays for the whole loop then lies
    in shared memory, where a bulk copy would leave it in registers (seen in Triton 3.6)."""
    columns = COLUMN + tl.arange(0, BLOCK)
    pointers = ptr + tl.arange(0, ROWS)[:, None] * stride.to(tl.int32) + columns[None, :]
    return tl.load(pointers, mask=exists[:, None] & (columns < SIZE)[None, :], other=0.0)


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
    k1_tiles,
    k2_tiles,
    v_tiles,
    b,
    h,
    begin,
    end,
    scale,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
):
    for start in tl.range(begin, end, BLOCK_N):
        k1 = tl.reshape(k1_tiles.load([b, start, h, 0]), [BLOCK_N, D1])
        s = tl.dot(q1, tl.trans(k1))
        if D2 > 0:
            k2 = tl.reshape(k2_tiles.load([b, start, h, D1]), [BLOCK_N, D2])
            s = tl.dot(q2, tl.trans(k2), s)
        v = tl.reshape(v_tiles.load([b, start, h, 0]), [BLOCK_N, DV_BLOCK])
        dp = tl.dot(do, tl.trans(v))
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k1.dtype)
        dq1 = tl.dot(ds, k1, dq1)
        if D2 > 0:
            dq2 = tl.dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=[*UNSPECIALISED, "B", "T_padded"])
def _query_kernel(
    do_ptr,  # [B, T, HKV * G, DV]
    q_ptr,  # [B, T, HKV * G, D]
    k1_tiles,  # of [B, S, HKV, D]: BLOCK_N tokens of a head, D1 channels
    k2_tiles,  # D2 channels
    v_tiles,  # of [B, S, HKV, DV]
    planes_ptr,  # [3, B, HKV * G, padded T], float32: lse in log2 units, delta, gate
    dq_ptr,  # [B, T, HKV * G, D], contiguous
    low_ptr,
    high_ptr,
    scale,  # times log2(e)
    natural_scale,
    B,
    T_padded,
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
    b = tl.program_id(1) // HKV
    h = tl.program_id(1) % HKV
    head = h * G + tl.program_id(0) % G

    first = tile * BLOCK_M
    token = first + tl.arange(0, BLOCK_M)
    valid = token < T
    q_base = q_ptr + b * q_batch + head * q_head + first * q_token
    q1 = _load_rows(q_base, q_token, valid, 0, D1, D, BLOCK_M)
    q2 = q1
    if D2 > 0:
        q2 = _load_rows(q_base, q_token, valid, D1, D2, D, BLOCK_M)
    do_base = do_ptr + b * do_batch + head * do_head + first * do_token
    do = _load_rows(do_base, do_token, valid, 0, DV_BLOCK, DV, BLOCK_M)
    plane = B.to(tl.int64) * (HKV * G) * T_padded
    row = planes_ptr + (b.to(tl.int64) * (HKV * G) + head) * T_padded + token
    lse = tl.load(row)
    delta = tl.load(row + plane)

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
    middle = begin
    if WINDOW or DOCUMENTS:
        middle = tl.minimum(begin + tl.cdiv(all_begin - begin, BLOCK_N) * BLOCK_N, end)
        dq1, dq2 = _query_walk(
            dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
            b, h, begin, middle, scale, D1, D2, DV_BLOCK, BLOCK_N, True,
        )  # fmt: skip
    whole_end = middle + tl.maximum(all_end - middle, 0) // BLOCK_N * BLOCK_N
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
        b, h, middle, whole_end, scale, D1, D2, DV_BLOCK, BLOCK_N, False,
    )  # fmt: skip
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
        b, h, whole_end, end, scale, D1, D2, DV_BLOCK, BLOCK_N, True,
    )  # fmt: skip

    factor = tl.full([BLOCK_M], natural_scale, tl.float32)
    if GATED:  # the gate is one number a row, so it can wait until here
        factor *= tl.load(row + 2 * plane)
    out_row = (b.to(tl.int64) * T + token) * (HKV * G) + head
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
    do_tiles,
    q1_tiles,
    q2_tiles,
    lse_rows,
    delta_rows,
    gate_rows,
    low_ptr,
    high_ptr,
    b,
    head,
    row,
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
    G: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
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
    tiles = tl.cdiv(end - begin, BLOCK_M)
    for i in tl.range(tiles * G):
        g = i // tiles
        first = begin + (i % tiles) * BLOCK_M
        q1 = tl.reshape(q1_tiles.load([b, first, head + g, 0]), [BLOCK_M, D1])
        st = tl.dot(k1, tl.trans(q1))  # [BLOCK_N, BLOCK_M]
        if D2 > 0:
            q2 = tl.reshape(q2_tiles.load([b, first, head + g, D1]), [BLOCK_M, D2])
            st = tl.dot(k2, tl.trans(q2), st)
        # Past the last query lse is inf, and exp2(x - inf) is 0.
        lse = tl.reshape(lse_rows.load([row + g, first]), [BLOCK_M])
        pt = tl.exp2(st * scale - lse[None, :])
        if (first < all_begin) | (first + BLOCK_M > all_end):
            token = first + tl.arange(0, BLOCK_M)
            low, high = interval(
                token, low_ptr, high_ptr, T, S, q_start, k_start, window,
                STRIDE, SPAN, WINDOW, DOCUMENTS,
            )  # fmt: skip
            visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
            pt = tl.where(visible, pt, 0.0)
        if GATED:
            pt *= tl.reshape(gate_rows.load([row + g, first]), [BLOCK_M])[None, :]
        do = tl.reshape(do_tiles.load([b, first, head + g, 0]), [BLOCK_M, DV_BLOCK])
        dv = tl.dot(pt.to(do.dtype), do, dv)
        dpt = tl.dot(v, tl.trans(do))
        delta = tl.reshape(delta_rows.load([row + g, first]), [BLOCK_M])
        dst = (pt * (dpt - delta[None, :])).to(q1.dtype)
        dk1 = tl.dot(dst, q1, dk1)
        if D2 > 0:
            dk2 = tl.dot(dst, q2, dk2)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=[*UNSPECIALISED, "B", "splits"])
def _key_kernel(
    do_tiles,  # of [B, T, HKV * G, DV]: BLOCK_M tokens of a head
    q1_tiles,  # of [B, T, HKV * G, D]: D1 channels
    q2_tiles,  # D2 channels
    k_ptr,  # [B, S, HKV, D]
    v_ptr,  # [B, S, HKV, DV]
    lse_rows,  # of [B * HKV * G, padded T]: BLOCK_M tokens
    delta_rows,
    gate_rows,
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
    b = tl.program_id(1) // HKV
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

    # This split's share, in whole tiles. A bulk copy of floats begins at a multiple of 16 bytes.
    begin = begin // 4 * 4
    share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_M) * BLOCK_M
    begin = tl.minimum(begin + split * share, end)
    end = tl.minimum(begin + share, end)

    k_base = k_ptr + b * k_batch + h * k_head + first_key * k_token
    k1 = _load_rows(k_base, k_token, exists, 0, D1, D, BLOCK_N)
    k2 = k1
    if D2 > 0:
        k2 = _load_rows(k_base, k_token, exists, D1, D2, D, BLOCK_N)
    v_base = v_ptr + b * v_batch + h * v_head + first_key * v_token
    v = _load_rows(v_base, v_token, exists, 0, DV_BLOCK, DV, BLOCK_N)
    dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    dk2 = dk1
    if D2 > 0:
        dk2 = tl.zeros([BLOCK_N, D2], tl.float32)
    dv = tl.zeros([BLOCK_N, DV_BLOCK], tl.float32)

    dk1, dk2, dv = _row_walk(
        dk1, dk2, dv, k1, k2, v, key, do_tiles, q1_tiles, q2_tiles, lse_rows, delta_rows, gate_rows,
        low_ptr, high_ptr, b, h * G, (b * HKV + h) * G, begin, all_begin, tl.minimum(all_end, end),
        end, T, S, q_start, k_start, window, scale, G, D1, D2, DV_BLOCK, GATED, STRIDE, SPAN,
        WINDOW, DOCUMENTS, BLOCK_M,
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
    if S == 0:
        return torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    arch, head = architecture(q.device), max(D, DV)
    window = band.window > 0
    query = query_tile(arch, head, window=window) if query is None else query
    key = key_tile(arch, head, window=window) if key is None else key
    D1, D2 = head_blocks(D)
    DV_BLOCK = padded(DV)
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    planes = _by_head(lse, delta, gate)
    T_padded = planes.shape[-1]
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
        "DV_BLOCK": DV_BLOCK,
        "GATED": gate is not None,
        "STRIDE": band.stride,
        "SPAN": band.span,
        "WINDOW": window,
        "DOCUMENTS": documents is not None,
    }
    where = (T, S, band.q_start, band.k_start, band.window)

    dq = torch.empty(B, T, HQ, D, dtype=q.dtype, device=q.device)
    _query_kernel[(triton.cdiv(T, query.queries) * G, B * HKV)](
        do, q, *head_descriptors(k, query.keys, D1, D2), descriptor(v, query.keys, DV_BLOCK),
        planes, dq, low, high, scale * LOG2_E, scale, B, T_padded, *where, *do.stride()[:3],
        *q.stride()[:3], **sizes,
        BLOCK_M=query.queries, BLOCK_N=query.keys, num_warps=query.warps, num_stages=query.stages,
    )  # fmt: skip

    key_tiles = triton.cdiv(S, key.keys)
    rows = G * (T if band.window == 0 else min(T, band.window + key.keys))
    splits = max(1, min(PROGRAMS // (key_tiles * B * HKV), rows // MIN_SPLIT_ROWS))
    partial = torch.float32 if splits > 1 else q.dtype
    dk = torch.empty(splits, B, S, HKV, D, dtype=partial, device=q.device)
    dv = torch.empty(splits, B, S, HKV, DV, dtype=partial, device=q.device)
    by_head = [
        TensorDescriptor(plane, [B * HQ, T_padded], [T_padded, 1], [1, key.queries])
        for plane in planes
    ]
    _key_kernel[(key_tiles * splits, B * HKV)](
        descriptor(do, key.queries, DV_BLOCK), *head_descriptors(q, key.queries, D1, D2), k, v,
        *by_head, dk, dv, low, high, first, stop, scale * LOG2_E, scale, B, splits, *where,
        *k.stride()[:3], *v.stride()[:3], **sizes,
        BLOCK_M=key.queries, BLOCK_N=key.keys, num_warps=key.warps, num_stages=key.stages,
    )  # fmt: skip
    if splits == 1:
        return dq, dk[0], dv[0]
    return dq, dk.sum(0).to(q.dtype), dv.sum(0).to(q.dtype)


def _by_head(lse: Tensor, delta: Tensor, gate: Tensor | None) -> Tensor:
    """lse, delta and gate as [3, B, HQ, padded T] float32: a tile's queries lie side by side.

    Past the last query lse is inf and the others 0. Without a gate the third is not written.
    """
    B, T, HQ = lse.shape
    planes = torch.empty(
        3, B, HQ, -(-T // PAD_TOKENS) * PAD_TOKENS, dtype=torch.float32, device=lse.device
    )
    third = delta if gate is None else gate
    BLOCK_T = 64
    _transpose_kernel[(planes.shape[-1] // BLOCK_T, B)](
        lse, delta, third, planes, B, T, planes.shape[-1], *lse.stride(), *delta.stride(),
        *third.stride(), HQ=HQ, GATED=gate is not None, BLOCK_T=BLOCK_T,
        BLOCK_H=min(64, padded(HQ)), num_warps=4,
    )  # fmt: skip
    return planes


@triton.jit(do_not_specialize=["B", "T", "T_padded"])
def _transpose_kernel(
    lse_ptr,
    delta_ptr,
    gate_ptr,
    planes_ptr,  # [3, B, HQ, T_padded], float32
    B,
    T,
    T_padded,
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
        exists = (head < HQ)[None, :] & (token < T_padded)[:, None]
        mask = exists & (token < T)[:, None]
        out = planes_ptr + (b * HQ + head)[None, :] * T_padded + token[:, None]
        plane = B.to(tl.int64) * HQ * T_padded
        lse = lse_ptr + b * lse_batch + token[:, None] * lse_token + head[None, :] * lse_head
        tl.store(out, tl.load(lse, mask=mask, other=float("inf")), mask=exists)
        delta = delta_ptr + b * delta_batch
        delta += token[:, None] * delta_token + head[None, :] * delta_head
        tl.store(out + plane, tl.load(delta, mask=mask, other=0.0), mask=exists)
        if GATED:
            gate = gate_ptr + b * gate_batch
            gate += token[:, None] * gate_token + head[None, :] * gate_head
            factor = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
            tl.store(out + 2 * plane, factor, mask=exists)
