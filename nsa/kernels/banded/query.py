"""dQ of attention over a band: a program owns a tile of queries of a head, and walks keys."""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import UNITS
from nsa.kernels.banded.interval import UNSPECIALISED, Tile, interval
from nsa.kernels.banded.planes import Sizes
from nsa.kernels.common.device import LOG2_E, Architecture, ceil_div
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import load_rows, load_tile, sources, store_rows, units


def query_tile(arch: Architecture, D: int, DV: int, *, window: bool) -> Tile:
    """Tile of the dQ kernel, which a window gives short walks."""
    head = max(D, DV)
    if arch == "sm_80":
        if head <= 64:
            return Tile(128, 64, 8, 3)
        return Tile(128, 32, 8, 2) if head <= 128 else Tile(64, 64, 8, 2)
    if head <= 64:
        return Tile(64, 64, 4, 3)
    if head <= 128:
        return Tile(64, 64, 4, 2)
    if head <= 192:
        return Tile(64, 32, 4, 3) if window else Tile(128, 64, 8, 3)
    return Tile(64, 64, 8, 2)


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
    k_strides,
    v_strides,
    b,
    h,
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
    BULK: tl.constexpr,
):
    for start in tl.range(begin, end, BLOCK_N):
        k1 = load_tile(k1_tiles, k_strides, b, start, h, S, 0, D1, D, BLOCK_N, MASKED, BULK)
        s = tl.dot(q1, tl.trans(k1))
        if D2 > 0:
            k2 = load_tile(k2_tiles, k_strides, b, start, h, S, D1, D2, D, BLOCK_N, MASKED, BULK)
            s = tl.dot(q2, tl.trans(k2), s)
        v = load_tile(v_tiles, v_strides, b, start, h, S, 0, DV_BLOCK, DV, BLOCK_N, MASKED, BULK)
        dp = tl.dot(do, tl.trans(v))
        p = tl.exp2(s * scale - lse[:, None])
        if MASKED:
            key = start + tl.arange(0, BLOCK_N)
            visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k1.dtype)
        # The wide product last where it is mma.sync: see `banded_key`.
        if D2 > 0 and not BULK:
            dq2 = tl.dot(ds, k2, dq2)
        dq1 = tl.dot(ds, k1, dq1)
        if D2 > 0 and BULK:
            dq2 = tl.dot(ds, k2, dq2)
    return dq1, dq2


@triton.jit(do_not_specialize=[*UNSPECIALISED, "B", "T_padded", *UNITS[6:]])
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
    k_batch,  # see `tiles.units`
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
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
    BULK: tl.constexpr,
):
    tile = tl.num_programs(0) // G - 1 - tl.program_id(0) // G
    b = tl.program_id(1) // HKV
    h = tl.program_id(1) % HKV
    head = h * G + tl.program_id(0) % G

    first = tile * BLOCK_M
    token = first + tl.arange(0, BLOCK_M)
    valid = token < T
    q_base = q_ptr + b * q_batch + head * q_head + first * q_token
    q1 = load_rows(q_base, q_token, valid, 0, D1, D, BLOCK_M)
    q2 = q1
    if D2 > 0:
        q2 = load_rows(q_base, q_token, valid, D1, D2, D, BLOCK_M)
    do_base = do_ptr + b * do_batch + head * do_head + first * do_token
    do = load_rows(do_base, do_token, valid, 0, DV_BLOCK, DV, BLOCK_M)
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
    k_strides = (k_batch, k_token, k_head)
    v_strides = (v_batch, v_token, v_head)
    middle = begin
    if WINDOW or DOCUMENTS:
        middle = tl.minimum(begin + tl.cdiv(all_begin - begin, BLOCK_N) * BLOCK_N, end)
        dq1, dq2 = _query_walk(
            dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
            k_strides, v_strides, b, h, begin, middle, S, scale,
            D, D1, D2, DV, DV_BLOCK, BLOCK_N, True, BULK,
        )  # fmt: skip
    whole_end = middle + tl.maximum(all_end - middle, 0) // BLOCK_N * BLOCK_N
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
        k_strides, v_strides, b, h, middle, whole_end, S, scale,
        D, D1, D2, DV, DV_BLOCK, BLOCK_N, False, BULK,
    )  # fmt: skip
    dq1, dq2 = _query_walk(
        dq1, dq2, q1, q2, do, lse, delta, low, high, k1_tiles, k2_tiles, v_tiles,
        k_strides, v_strides, b, h, whole_end, end, S, scale,
        D, D1, D2, DV, DV_BLOCK, BLOCK_N, True, BULK,
    )  # fmt: skip

    factor = tl.full([BLOCK_M], natural_scale, tl.float32)
    if GATED:  # the gate is one number a row, so it can wait until here
        factor *= tl.load(row + 2 * plane)
    out_row = (b.to(tl.int64) * T + token) * (HKV * G) + head
    store_rows(dq_ptr, dq1 * factor[:, None], out_row, valid, 0, D1, D)
    if D2 > 0:
        store_rows(dq_ptr, dq2 * factor[:, None], out_row, valid, D1, D2, D)


def write_query_gradient(
    dq: Tensor,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    planes: Tensor,
    band: Band,
    *,
    scale: float,
    tile: Tile,
    sizes: Sizes,
) -> None:
    """dQ.

    Args:
        dq: Written, [B, T, HQ, D], contiguous.
        do, q, k, v: Aligned, see `tiles.aligned`.
        planes: See `write_planes`.
        sizes: Constants of both kernels, see `banded_backward`.
    """
    B, T = q.shape[:2]
    S, HKV = k.shape[1:3]
    bulk = sizes.BULK
    _launch(sizes, tile)(
        (ceil_div(T, tile.queries) * sizes.G, B * HKV),
        (
            do, q, *sources(k, tile.keys, sizes.D1, sizes.D2, bulk=bulk),
            *sources(v, tile.keys, sizes.DV_BLOCK, bulk=bulk), planes, dq,
            *band.tables(planes)[:2],
        ),
        (
            scale * LOG2_E, scale, B, planes.shape[-1], T, S, band.q_start, band.k_start,
            band.window, *do.stride()[:3], *q.stride()[:3], *units(k, bulk=bulk),
            *units(v, bulk=bulk),
        ),
    )  # fmt: skip


@lru_cache(maxsize=KINDS)
def _launch(sizes: Sizes, tile: Tile) -> KernelLaunch:
    return KernelLaunch(
        _query_kernel, **sizes._asdict(), BLOCK_M=tile.queries, BLOCK_N=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
