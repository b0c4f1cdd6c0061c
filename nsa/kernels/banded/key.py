"""dK and dV of attention over a band: a program owns a tile of keys, and walks the queries of
every head of its group.

With few keys and many queries, as in the compress branch, the queries of a key tile are split among
programs whose sums are added up in a fixed order: gradients are the same in every run.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import UNITS
from nsa.kernels.banded.interval import UNSPECIALISED, Tile, interval, span
from nsa.kernels.banded.planes import Sizes
from nsa.kernels.common.device import LOG2_E, Architecture, ceil_div
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import load_plane, load_rows, load_tile, sources, store_rows, units

PROGRAMS, WINDOW_PROGRAMS = 512, 256
"""Most programs for dK and dV of a tile; the walks of a window are short and equally long."""
MIN_SPLIT_ROWS, MIN_WINDOW_ROWS = 512, 1024
"""Fewest rows of one split: below, adding up the splits costs more than it saves."""
SUM_BLOCK = 512


def key_tile(arch: Architecture, D: int, DV: int, *, window: bool) -> Tile:
    """Tile of the dK, dV kernel, which a window gives short walks."""
    head = max(D, DV)
    if arch == "sm_80":
        if head <= 64:
            return Tile(32, 64, 4, 3)
        # dK and dV of 64 keys are 80 registers of each thread at 192 + 128. Where the first block
        # of dK is 64 wide or less, 32 keys: see the last product of `_row_walk`.
        return Tile(64, 64 if D >= 128 and D + DV <= 320 else 32, 8, 2)
    if head <= 64:
        return Tile(64, 64, 4, 3)
    if head <= 128 and window:
        return Tile(64, 64, 4, 2)
    return Tile(64, 128, 8, 3) if head <= 192 else Tile(64, 64, 8, 2)


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
    do_strides,
    q_strides,
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
    T_padded,
    S,
    q_start,
    k_start,
    window,
    scale,
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
    BULK: tl.constexpr,
):
    """Take in the queries [begin, end) of every head of the group. Those of [all_begin, all_end)
    see every key; a mask is drawn only for tiles that hold others."""
    tiles = tl.cdiv(end - begin, BLOCK_M)
    for i in tl.range(tiles * G):
        g = i // tiles
        first = begin + (i % tiles) * BLOCK_M
        q1 = load_tile(q1_tiles, q_strides, b, first, head + g, T, 0, D1, D, BLOCK_M, True, BULK)
        st = tl.dot(k1, tl.trans(q1))  # [BLOCK_N, BLOCK_M]
        if D2 > 0:
            q2 = load_tile(
                q2_tiles, q_strides, b, first, head + g, T, D1, D2, D, BLOCK_M, True, BULK
            )
            st = tl.dot(k2, tl.trans(q2), st)
        # Past the last query lse is inf, and exp2(x - inf) is 0.
        lse = load_plane(lse_rows, row + g, first, T, T_padded, BLOCK_M, float("inf"), BULK)
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
            pt *= load_plane(gate_rows, row + g, first, T, T_padded, BLOCK_M, 0.0, BULK)[None, :]
        do = load_tile(
            do_tiles, do_strides, b, first, head + g, T, 0, DV_BLOCK, DV, BLOCK_M, True, BULK
        )
        dv = tl.dot(pt.to(do.dtype), do, dv)
        dpt = tl.dot(v, tl.trans(do))
        delta = load_plane(delta_rows, row + g, first, T, T_padded, BLOCK_M, 0.0, BULK)
        dst = (pt * (dpt - delta[None, :])).to(q1.dtype)
        # With mma.sync Triton divides every product among the warps as suits the last one, and for
        # the narrow one by rows, and it has too few of them; so the wide one comes last.
        if D2 > 0 and not BULK:
            dk2 = tl.dot(dst, q2, dk2)
        dk1 = tl.dot(dst, q1, dk1)
        if D2 > 0 and BULK:
            dk2 = tl.dot(dst, q2, dk2)
    return dk1, dk2, dv


@triton.jit(do_not_specialize=[*UNSPECIALISED, "B", "splits", "T_padded", *UNITS[:6]])
def _key_kernel(
    do_tiles,  # of [B, T, HKV * G, DV]: BLOCK_M tokens of a head
    q1_tiles,  # of [B, T, HKV * G, D]: D1 channels
    q2_tiles,  # D2 channels
    k_ptr,  # [B, S, HKV, D]
    v_ptr,  # [B, S, HKV, DV]
    lse_rows,  # of [B * HKV * G, padded T]: BLOCK_M tokens
    delta_rows,
    gate_rows,
    dk_ptr,  # [B, S, HKV, D], written where there is one split
    dv_ptr,  # [B, S, HKV, DV]
    dk_parts_ptr,  # [splits, B, S, HKV, D], float32, where there are several
    dv_parts_ptr,
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
    do_batch,  # see `tiles.units`
    do_token,
    do_head,
    q_batch,
    q_token,
    q_head,
    T_padded,  # where there are no bulk copies
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
    # The first keys are seen by the most rows, and program 0 starts first.
    tile = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    b = tl.program_id(1) // HKV
    h = tl.program_id(1) % HKV
    key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    exists = key < S
    first_key = tile * BLOCK_N
    begin, all_begin, all_end, end = span(
        first_key, split, splits, first_ptr, stop_ptr, T, S, q_start, k_start, window,
        STRIDE, SPAN, WINDOW, DOCUMENTS, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    k_base = k_ptr + b * k_batch + h * k_head + first_key * k_token
    k1 = load_rows(k_base, k_token, exists, 0, D1, D, BLOCK_N)
    k2 = k1
    if D2 > 0:
        k2 = load_rows(k_base, k_token, exists, D1, D2, D, BLOCK_N)
    v_base = v_ptr + b * v_batch + h * v_head + first_key * v_token
    v = load_rows(v_base, v_token, exists, 0, DV_BLOCK, DV, BLOCK_N)
    dk1 = tl.zeros([BLOCK_N, D1], tl.float32)
    dk2 = dk1
    if D2 > 0:
        dk2 = tl.zeros([BLOCK_N, D2], tl.float32)
    dv = tl.zeros([BLOCK_N, DV_BLOCK], tl.float32)

    do_strides = (do_batch, do_token, do_head)
    q_strides = (q_batch, q_token, q_head)
    dk1, dk2, dv = _row_walk(
        dk1, dk2, dv, k1, k2, v, key, do_tiles, q1_tiles, q2_tiles, lse_rows, delta_rows, gate_rows,
        do_strides, q_strides, low_ptr, high_ptr, b, h * G, (b * HKV + h) * G, begin, all_begin,
        all_end, end, T, T_padded, S, q_start, k_start, window, scale,
        G, D, D1, D2, DV, DV_BLOCK, GATED, STRIDE, SPAN, WINDOW, DOCUMENTS, BLOCK_M, BULK,
    )  # fmt: skip

    # One or the other at run time: lengths decide how many splits there are, and must not decide
    # what is compiled.
    out_row = ((split.to(tl.int64) * B + b) * S + key) * HKV + h
    if splits == 1:
        store_rows(dv_ptr, dv, out_row, exists, 0, DV_BLOCK, DV)
        store_rows(dk_ptr, dk1 * natural_scale, out_row, exists, 0, D1, D)
        if D2 > 0:
            store_rows(dk_ptr, dk2 * natural_scale, out_row, exists, D1, D2, D)
    else:
        store_rows(dv_parts_ptr, dv, out_row, exists, 0, DV_BLOCK, DV)
        store_rows(dk_parts_ptr, dk1 * natural_scale, out_row, exists, 0, D1, D)
        if D2 > 0:
            store_rows(dk_parts_ptr, dk2 * natural_scale, out_row, exists, D1, D2, D)


@triton.jit
def _sum_block(
    parts_ptr,  # [splits, size], float32
    sum_ptr,  # [size]
    first,
    splits,
    size,
    BLOCK: tl.constexpr,
):
    at = first + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.range(splits):
        total += tl.load(parts_ptr + split * size + at, mask=at < size, other=0.0)
    tl.store(sum_ptr + at, total.to(sum_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["splits", "k_size", "v_size"])
def _sum_kernel(
    dk_parts_ptr,  # [splits, k_size], float32
    dv_parts_ptr,  # [splits, v_size]
    dk_ptr,  # [k_size]
    dv_ptr,  # [v_size]
    splits,
    k_size: tl.int64,
    v_size: tl.int64,
    BLOCK: tl.constexpr,
):
    """Sums over the splits, in their order."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    k_end = tl.cdiv(k_size, BLOCK) * BLOCK
    if first < k_end:
        _sum_block(dk_parts_ptr, dk_ptr, first, splits, k_size, BLOCK)
    else:
        _sum_block(dv_parts_ptr, dv_ptr, first - k_end, splits, v_size, BLOCK)


class KeyGradients(NamedTuple):
    """Destination of dK and dV; in parts if the queries of a tile of keys are split."""

    dk: Tensor
    """[B, S, HKV, D], in the dtype of k."""
    dv: Tensor
    """[B, S, HKV, DV]"""
    parts: tuple[Tensor, ...] = ()
    """Of dK, [splits, B, S, HKV, D], and of dV, float32."""
    splits: int = 1

    @classmethod
    def empty(cls, q: Tensor, k: Tensor, v: Tensor, band: Band, tile: Tile) -> Self:
        """For gradients of k [B, S, HKV, D] and v [B, S, HKV, DV], of queries [B, T, HQ, D]."""
        B, S, HKV = k.shape[:3]
        T, group = q.shape[1], q.shape[2] // HKV
        programs = ceil_div(S, tile.keys) * B * HKV
        if band.window:
            rows = group * min(T, band.window + tile.keys)
            splits = min(WINDOW_PROGRAMS // programs, rows // MIN_WINDOW_ROWS)
        else:
            splits = min(PROGRAMS // programs, group * T // MIN_SPLIT_ROWS)
        splits = max(1, splits)
        dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
        if splits == 1:
            return cls(dk, dv)
        parts = (x.new_empty(splits, *x.shape, dtype=torch.float32) for x in (dk, dv))
        return cls(dk, dv, tuple(parts), splits)


def write_key_gradients(
    to: KeyGradients,
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
    """dK and dV, or their parts; arguments as in `write_query_gradient`."""
    B, T, HQ = q.shape[:3]
    S, HKV = k.shape[1:3]
    bulk = sizes.BULK
    T_padded = planes.shape[-1]
    by_head: Sequence[Tensor | TensorDescriptor] = planes.unbind()
    if bulk:
        by_head = [
            TensorDescriptor(plane, [B * HQ, T_padded], [T_padded, 1], [1, tile.queries])
            for plane in planes
        ]
    dk_parts, dv_parts = to.parts or (planes, planes)  # then neither read nor written
    _launch(sizes, tile)(
        (ceil_div(S, tile.keys) * to.splits, B * HKV),
        (
            *sources(do, tile.queries, sizes.DV_BLOCK, bulk=bulk),
            *sources(q, tile.queries, sizes.D1, sizes.D2, bulk=bulk), k, v, *by_head, to.dk, to.dv,
            dk_parts, dv_parts, *band.tables(planes),
        ),
        (
            scale * LOG2_E, scale, B, to.splits, T, S, band.q_start, band.k_start, band.window,
            *k.stride()[:3], *v.stride()[:3], *units(do, bulk=bulk), *units(q, bulk=bulk),
            None if bulk else T_padded,
        ),
    )  # fmt: skip


def add_parts(to: KeyGradients) -> None:
    """Form dK and dV where there are parts of them."""
    if to.splits > 1:
        k_size, v_size = to.dk.numel(), to.dv.numel()
        _launch_sum()(
            (ceil_div(k_size, SUM_BLOCK) + ceil_div(v_size, SUM_BLOCK),),
            (*to.parts, to.dk, to.dv),
            (to.splits, k_size, v_size),
        )


@lru_cache(maxsize=KINDS)
def _launch(sizes: Sizes, tile: Tile) -> KernelLaunch:
    return KernelLaunch(
        _key_kernel, **sizes._asdict(), BLOCK_M=tile.queries, BLOCK_N=tile.keys,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


@lru_cache(maxsize=KINDS)
def _launch_sum() -> KernelLaunch:
    return KernelLaunch(_sum_kernel, BLOCK=SUM_BLOCK)
