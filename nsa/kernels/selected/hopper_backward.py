"""The key-major backward pass of selected attention on sm_90: as `backward`, in Gluon.

A program takes one item: it holds a block of keys and values in shared memory and walks over the
queries that selected it, in tiles of 64 rows, for which a ring has STAGES slots. An SM runs one
program, of five parts:

- `_copy`, a warp, asks the bulk copy engine for q and dO. The pairs of a tile are anywhere in the
  sequence, so each is copied on its own, and 64 channels at a time: G rows of a panel of the tile.
- `_rows`, a warp, brings what is one number a row: lse, delta, gate and the last key that is seen.
- `_gradients`, two warpgroups, take turns with the tiles. Each sums dK and dV in registers, and
  while one computes weights the other multiplies. A share of dq replaces its q in the slot.
- `_store`, a warp, has the share written to memory and gives the slot back.

Barriers of a slot: `full`, q, dO and the rows are there; `done`, the share of dq is there; `empty`,
it was read. They count phases: see `nsa.kernels.common.hopper`.
"""

from collections import namedtuple
from functools import lru_cache
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from nsa.kernels.common.device import head_blocks
from nsa.kernels.common.hopper import ROWS, accumulator, barriers, product, scores, takes
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import aligned, descriptor
from nsa.kernels.selected.keymajor import KEYS as MOST_KEYS
from nsa.kernels.selected.keymajor import load_item

KEYS: gl.constexpr = gl.constexpr(MOST_KEYS)
PANEL: gl.constexpr = gl.constexpr(64)
"""Channels of a bulk copy: 128 bytes, the width of a swizzled panel in shared memory."""
GROUPS = {8, 16, 32, 64}
"""Heads of a group: whole swizzle patterns of 8 rows, and whole pairs in a tile."""
STAGES = {128: 5, 192: 4}
"""Tiles of queries in shared memory, by D."""


Sizes = namedtuple("Sizes", "HKV G N D D1 D2 DV GATED ATOMIC STAGES")
Item = namedtuple("Item", "start end tiles b h first_key end_key first_token T")
Tiles = namedtuple("Tiles", "q1 q2 do k1 k2 v weights planes")
"""Shared memory. planes: lse, delta, last key and gate of the rows of each slot."""
Barriers = namedtuple("Barriers", "full done empty keys sums")


@gluon.jit
def _memory(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS_: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS_, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS_, COLUMNS], layout)


@gluon.jit
def _panel(tile, i: gl.constexpr):
    """64 channels of a tile."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([tile.shape[0], PANEL], tile.dtype)
    shape: gl.constexpr = [tile.shape[1] // PANEL, tile.shape[0], PANEL]
    return tile._reinterpret(tile.dtype, shape, layout).index(i)


@gluon.jit
def _part(tile, panel: gl.constexpr, pair: gl.constexpr, G: gl.constexpr):
    """A pair's rows of 64 channels, as they are copied."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, G, 1, PANEL], tile.dtype)
    count: gl.constexpr = tile.shape[0] * tile.shape[1] // (G * PANEL)
    parts = tile._reinterpret(tile.dtype, [count, 1, G, 1, PANEL], layout)
    return parts.index(panel * (ROWS // G) + pair)


@gluon.jit
def _q_part(at, slot, panel: gl.constexpr, pair: gl.constexpr, SIZES: gl.constexpr):
    if panel * PANEL < SIZES.D1:
        part = _part(at.q1.index(slot), panel, pair, SIZES.G)
    else:
        part = _part(at.q2.index(slot), panel - SIZES.D1 // PANEL, pair, SIZES.G)
    return part


@gluon.jit
def _pairs(pairs_ptr, i, item, SIZES: gl.constexpr):
    """The pairs of tile i; past the end the last one repeats."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    pair = item.start + i * (ROWS // SIZES.G) + lane
    return gl.load(pairs_ptr + gl.minimum(pair, item.end - 1))


@gluon.jit
def _one(pairs, j: gl.constexpr):
    """The j-th of them, in every lane."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    return gl.sum(gl.where(lane == j, pairs, 0), 0)


@gluon.jit
def _copy(q_tiles, do_tiles, pairs_ptr, at, bars, item, SIZES: gl.constexpr):
    G: gl.constexpr = SIZES.G
    BYTES: gl.constexpr = ROWS * (SIZES.D + SIZES.DV) * 2
    next_pairs = _pairs(pairs_ptr, 0, item, SIZES)
    for i in range(item.tiles):
        slot = i % SIZES.STAGES
        pairs = next_pairs
        next_pairs = _pairs(pairs_ptr, i + 1, item, SIZES)
        mbarrier.wait(bars.empty.index(slot), (i // SIZES.STAGES & 1) ^ 1)
        full = bars.full.index(slot)
        mbarrier.expect(full, BYTES)
        for j in gl.static_range(ROWS // G):
            token = _one(pairs, j) // SIZES.N - item.b * item.T
            for panel in gl.static_range(SIZES.D // PANEL):
                source = [item.b, item.h * G, token, panel * PANEL]
                to = _q_part(at, slot, panel, j, SIZES)
                tma.async_copy_global_to_shared(q_tiles, source, full, to)
            for panel in gl.static_range(SIZES.DV // PANEL):
                source = [item.b, item.h * G, token, panel * PANEL]
                to = _part(at.do.index(slot), panel, j, G)
                tma.async_copy_global_to_shared(do_tiles, source, full, to)


@gluon.jit
def _store(share_tiles, pairs_ptr, at, bars, item, SIZES: gl.constexpr):
    G: gl.constexpr = SIZES.G
    N: gl.constexpr = SIZES.N
    next_pairs = _pairs(pairs_ptr, 0, item, SIZES)
    for i in range(item.tiles):
        slot = i % SIZES.STAGES
        pairs = next_pairs
        next_pairs = _pairs(pairs_ptr, i + 1, item, SIZES)
        mbarrier.wait(bars.done.index(slot), i // SIZES.STAGES & 1)
        for j in gl.static_range(ROWS // G):
            if item.start + i * (ROWS // G) + j < item.end:
                pair = _one(pairs, j)
                token = pair // N
                row = (((token - item.first_token) * SIZES.HKV + item.h) * N + pair % N) * G
                for panel in gl.static_range(SIZES.D // PANEL):
                    source = _q_part(at, slot, panel, j, SIZES)
                    to = [0, row, 0, panel * PANEL]
                    tma.async_copy_shared_to_global(share_tiles, to, source)
        tma.store_wait(0)
        mbarrier.arrive(bars.empty.index(slot), count=1)


@gluon.jit
def _row_value(x, t, head, item):
    ptr, stride_b, stride_t, stride_h = x
    return gl.load(ptr + item.b * stride_b + t * stride_t + head * stride_h)


@gluon.jit
def _rows(lse, delta, gate, pairs_ptr, q_start, at, bars, item, SIZES: gl.constexpr):
    PLANES: gl.constexpr = 4 if SIZES.GATED else 3
    row = gl.arange(0, ROWS, gl.BlockedLayout([2], [32], [1], [0]))
    head = item.h * SIZES.G + row % SIZES.G
    pair = item.start + row // SIZES.G
    next_pair = gl.load(pairs_ptr + gl.minimum(pair, item.end - 1))
    for i in range(item.tiles):
        slot = i % SIZES.STAGES
        t = next_pair // SIZES.N - item.b * item.T
        exists = pair < item.end
        pair += ROWS // SIZES.G
        next_pair = gl.load(pairs_ptr + gl.minimum(pair, item.end - 1))
        last = gl.minimum(q_start + t, item.end_key - 1) - item.first_key
        lse_value, delta_value = _row_value(lse, t, head, item), _row_value(delta, t, head, item)
        if SIZES.GATED:
            gate_value = _row_value(gate, t, head, item)
        mbarrier.wait(bars.empty.index(slot), (i // SIZES.STAGES & 1) ^ 1)
        at.planes.index(slot * PLANES).store(lse_value)
        at.planes.index(slot * PLANES + 1).store(delta_value)
        at.planes.index(slot * PLANES + 2).store(gl.where(exists, last, -1).to(gl.float32))
        if SIZES.GATED:
            at.planes.index(slot * PLANES + 3).store(gate_value.to(gl.float32))
        mbarrier.arrive(bars.full.index(slot), count=1)


@gluon.jit
def _fill(to, rows, stride, item, FIRST: gl.constexpr, COLUMNS: gl.constexpr):
    """Some channels of the block's keys or values; zeros past its end."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = item.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pointers = rows + (key * stride)[:, None] + column[None, :]
    to.index(0).store(gl.load(pointers, mask=(key < item.end_key)[:, None], other=0.0))


@gluon.jit
def _floats(tiles, i: gl.constexpr, COLUMNS: gl.constexpr):
    """The i-th [KEYS, COLUMNS] float32 in the memory of a ring."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLUMNS], gl.float32)
    return tiles._reinterpret(gl.float32, [i + 1, KEYS, COLUMNS], layout).index(i)


@gluon.jit
def _add(ptr, x, item, S, FIRST: gl.constexpr, COLUMNS: gl.constexpr, SIZE: gl.constexpr,
         SIZES: gl.constexpr):  # fmt: skip
    """Add x [KEYS, COLUMNS] to columns of the block's rows of [B, S, HKV, SIZE]."""
    layout: gl.constexpr = accumulator(COLUMNS)
    key = item.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, layout))
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    row = (item.b.to(gl.int64) * S + key) * SIZES.HKV + item.h
    pointers = ptr + (row * SIZE)[:, None] + column[None, :]
    mask = (key < item.end_key)[:, None]
    if SIZES.ATOMIC:
        gl.atomic_add(pointers, x, mask=mask, sem="relaxed")
    else:
        gl.store(pointers, gl.load(pointers, mask=mask, other=0.0) + x, mask=mask)


@gluon.jit
def _share(ds, k, q, scale):
    """dS K, in the place of q: 64 channels at a time, which take few registers."""
    for panel in gl.static_range(q.shape[1] // PANEL):
        dq = warpgroup_mma_init(gl.zeros([ROWS, PANEL], gl.float32, accumulator(PANEL)))
        dq = warpgroup_mma(ds, _panel(k, panel), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, [dq])
        _panel(q, panel).store((dq * scale).to(q.dtype))


@gluon.jit
def _gradients(keys, sums, scale, scale_log2, S, at, bars, item,
               HALF: gl.constexpr, SIZES: gl.constexpr):  # fmt: skip
    """Every other tile: dV += p^T dO and dK += dS^T q, and the share dS K of dq."""
    k_ptr, k_s, v_ptr, v_s = keys
    dk_ptr, dv_ptr = sums
    D1: gl.constexpr = SIZES.D1
    D2: gl.constexpr = SIZES.D2
    REST: gl.constexpr = D2 or D1
    DV: gl.constexpr = SIZES.DV
    PLANES: gl.constexpr = 4 if SIZES.GATED else 3
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    dtype: gl.constexpr = at.v.dtype
    if HALF == 0:
        _fill(at.k1, k_ptr, k_s, item, 0, D1)
        if D2 > 0:
            _fill(at.k2, k_ptr, k_s, item, D1, D2)
    else:
        _fill(at.v, v_ptr, v_s, item, 0, DV)
    fence_async_shared()
    mbarrier.arrive(bars.keys.index(0), count=1)
    mbarrier.wait(bars.keys.index(0), 0)
    key = gl.arange(0, KEYS, gl.SliceLayout(0, accumulator(KEYS))).to(gl.float32)
    dk1 = gl.zeros([KEYS, D1], gl.float32, accumulator(D1))
    dk2 = gl.zeros([KEYS, REST], gl.float32, accumulator(REST))
    dv = gl.zeros([KEYS, DV], gl.float32, accumulator(DV))
    for i in range(HALF, item.tiles, 2):
        slot = i % SIZES.STAGES
        q1, q2, do = at.q1.index(slot), at.q2.index(slot), at.do.index(slot)
        # A zero that ptxas does not see: else it keeps addresses of what stays, in many registers.
        zero = gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)
        k1, k2, v = at.k1.index(zero), at.k2.index(zero), at.v.index(zero)
        weights = at.weights.index(HALF + zero)
        mbarrier.wait(bars.full.index(slot), i // SIZES.STAGES & 1)
        s = scores(q1, q2, k1, k2, KEYS, SIZES)
        lse = at.planes.index(slot * PLANES).load(by_row)
        last = at.planes.index(slot * PLANES + 2).load(by_row)
        s = warpgroup_mma_wait(0, [s])
        p = gl.where(key[None, :] <= last[:, None], gl.exp2(s * scale_log2 - lse[:, None]), 0.0)
        if SIZES.GATED:
            p *= at.planes.index(slot * PLANES + 3).load(by_row)[:, None]
        weights.store(p.to(dtype))
        fence_async_shared()
        dp = product(do, v, KEYS, DV)
        dv = warpgroup_mma(weights.permute([1, 0]), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        delta = at.planes.index(slot * PLANES + 1).load(by_row)
        ds = weights.load(accumulator(KEYS)).to(gl.float32) * (dp - delta[:, None])
        dv = warpgroup_mma_wait(0, [dv])
        weights.store(ds.to(dtype))
        fence_async_shared()
        dk1 = warpgroup_mma(weights.permute([1, 0]), q1, dk1, is_async=True)
        if D2 > 0:
            dk2 = warpgroup_mma(weights.permute([1, 0]), q2, dk2, is_async=True)
        _share(weights, k1, q1, scale)  # which waits for all products
        if D2 > 0:
            _share(weights, k2, q2, scale)
            dk1, dk2 = warpgroup_mma_wait(0, [dk1, dk2])
        else:
            dk1 = warpgroup_mma_wait(0, [dk1])
        fence_async_shared()
        mbarrier.arrive(bars.done.index(slot), count=1)

    # Each gives the other a part of its sums, where dO and the weights were, and adds up the rest.
    mbarrier.arrive(bars.sums.index(0), count=1)
    mbarrier.wait(bars.sums.index(0), 0)
    if HALF == 0:
        _floats(at.do, 0, DV).store(dv)
    else:
        _floats(at.do, 1, D1).store(dk1)
        if D2 > 0:
            _floats(at.weights, 0, D2).store(dk2)
    mbarrier.arrive(bars.sums.index(0), count=1)
    mbarrier.wait(bars.sums.index(0), 1)
    if HALF == 1:
        dv += _floats(at.do, 0, DV).load(accumulator(DV))
        _add(dv_ptr, dv, item, S, 0, DV, DV, SIZES)
    else:
        dk1 += _floats(at.do, 1, D1).load(accumulator(D1))
        _add(dk_ptr, dk1 * scale, item, S, 0, D1, SIZES.D, SIZES)
        if D2 > 0:
            dk2 += _floats(at.weights, 0, D2).load(accumulator(D2))
            _add(dk_ptr, dk2 * scale, item, S, D1, D2, SIZES.D, SIZES)


# Strides of one number a row are multiples of 16 at some lengths only.
@gluon.jit(
    do_not_specialize=[
        *("first_token", "first_bin", "end_bin", "T", "S", "q_start"),
        *("lse_b", "lse_t", "lse_h"),
        *("delta_b", "delta_t", "delta_h"),
        *("gate_b", "gate_t", "gate_h"),
    ]
)
def _backward_kernel(
    do_tiles, q_tiles, share_tiles,  # [1, G, 1, PANEL] of [B, HQ, T, channels] and of partial
    k_ptr, v_ptr, lse_ptr, delta_ptr, gate_ptr, pairs_ptr, items_ptr, first_item_ptr,
    dk_ptr, dv_ptr,  # all as in `backward._backward_kernel`
    k_b: gl.int64, k_s: gl.int64, k_h: gl.int64,
    v_b: gl.int64, v_s: gl.int64, v_h: gl.int64,
    lse_b: gl.int64, lse_t: gl.int64, lse_h: gl.int64,
    delta_b: gl.int64, delta_t: gl.int64, delta_h: gl.int64,
    gate_b: gl.int64, gate_t: gl.int64, gate_h: gl.int64,
    scale, scale_log2, first_token, first_bin, end_bin, T, S, q_start,
    SIZES: gl.constexpr,
):  # fmt: skip
    exists, start, end, b_h, first_key, end_key = load_item(
        items_ptr, first_item_ptr, first_bin, end_bin
    )
    PAIRS: gl.constexpr = ROWS // SIZES.G
    STAGES: gl.constexpr = SIZES.STAGES
    b = b_h // SIZES.HKV
    h = b_h - b * SIZES.HKV
    tiles = (end - start + PAIRS - 1) // PAIRS
    item = Item(start, end, tiles, b, h, first_key, end_key, first_token, T)
    dtype: gl.constexpr = q_tiles.dtype
    q1 = _memory(dtype, STAGES, ROWS, SIZES.D1)
    k1 = _memory(dtype, 1, KEYS, SIZES.D1)
    q2, k2 = q1, k1
    if SIZES.D2 > 0:
        q2 = _memory(dtype, STAGES, ROWS, SIZES.D2)
        k2 = _memory(dtype, 1, KEYS, SIZES.D2)
    do = _memory(dtype, STAGES, ROWS, SIZES.DV)
    v = _memory(dtype, 1, KEYS, SIZES.DV)
    weights = _memory(dtype, 2, ROWS, KEYS)
    planes = gl.allocate_shared_memory(
        gl.float32, [4 * STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    at = Tiles(q1, q2, do, k1, k2, v, weights, planes)
    bars = Barriers(
        barriers(STAGES, 2), barriers(STAGES, 1), barriers(STAGES, 1), barriers(1, 2),
        barriers(1, 2),
    )  # fmt: skip
    fence_async_shared()
    keys = (k_ptr + b * k_b + h * k_h, k_s, v_ptr + b * v_b + h * v_h, v_s)
    sums = (dk_ptr, dv_ptr)
    lse = (lse_ptr, lse_b, lse_t, lse_h)
    delta = (delta_ptr, delta_b, delta_t, delta_h)
    gate = (gate_ptr, gate_b, gate_t, gate_h)
    if exists:
        gl.warp_specialize(
            [
                (_gradients, (keys, sums, scale, scale_log2, S, at, bars, item, 0, SIZES)),
                (_gradients, (keys, sums, scale, scale_log2, S, at, bars, item, 1, SIZES)),
                (_copy, (q_tiles, do_tiles, pairs_ptr, at, bars, item, SIZES)),
                (_rows, (lse, delta, gate, pairs_ptr, q_start, at, bars, item, SIZES)),
                (_store, (share_tiles, pairs_ptr, at, bars, item, SIZES)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )


def hopper_serves(q: Tensor, v: Tensor, G: int) -> bool:
    """Whether this kernel is made for the device, the heads and so many of them in a group."""
    return G in GROUPS and takes(q, v)


def tiles_of(do: Tensor, q: Tensor, partial: Tensor) -> list[Any]:
    """What the kernel gets for dO, q and the shares of dq."""
    G = partial.shape[3]
    shares = partial.view(1, -1, 1, q.shape[3])
    heads = (aligned(x).transpose(1, 2) for x in (do, q))
    return [descriptor(x, G, PANEL.value, gluon=True) for x in (*heads, shares)]


@lru_cache(maxsize=KINDS)
def hopper_launch(
    HKV: int, G: int, N: int, D: int, DV: int, gated: bool, atomic: bool
) -> KernelLaunch:
    sizes = Sizes(HKV, G, N, D, *head_blocks(D), DV, gated, atomic, STAGES[D])
    return KernelLaunch(_backward_kernel, SIZES=sizes, num_warps=4)
