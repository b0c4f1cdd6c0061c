"""dK and dV of attention over a band on sm_90: as `key`, see `common.hopper`.

Two warpgroups own 64 keys each and walk the same queries. Within a step, the product with the
values runs under the weights, and that with dO under dS.
"""

from functools import lru_cache

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.hopper import (
    Parts,
    View,
    bring,
    keys_of,
    ring,
    rings,
    store_block,
    tiles_of,
)
from nsa.kernels.banded.interval import UNSPECIALISED, Tile, span
from nsa.kernels.banded.key import KeyGradients
from nsa.kernels.banded.planes import Sizes
from nsa.kernels.common.device import LOG2_E, ceil_div
from nsa.kernels.common.hopper import ROWS, accumulator, barriers, product, scores
from nsa.kernels.common.launch import KINDS, KernelLaunch

HOPPER_KEY_TILE = Tile(64, 128, 8, 3)
"""Its warps are those of both warpgroups, its stages tiles of queries in shared memory."""


@gluon.jit
def _bring_queries(
    i, walk, tiles, rows, to, planes, bars, SIZES: gl.constexpr, STAGES: gl.constexpr
):
    """Those of step i, once both warpgroups have left their slot. `walk`: batch, KV head, first
    query, steps of a head."""
    b, h, begin, count = walk
    _k_full, full, empty = bars
    BYTES: gl.constexpr = (SIZES.D + SIZES.DV) * 2 + (12 if SIZES.GATED else 8)
    head = h * SIZES.G + i // count
    first = begin + (i % count) * ROWS
    slot = i % STAGES
    bar = full.index(slot)
    mbarrier.wait(empty.index(slot), (i // STAGES & 1) ^ 1)
    mbarrier.expect(bar, ROWS * BYTES)
    bring(tiles.q1, tiles.q2, to.q1, to.q2, slot, bar, b, first, head, SIZES)
    for plane in gl.static_range(3 if SIZES.GATED else 2):
        at = [b * (SIZES.HKV * SIZES.G) + head, first]
        tma.async_copy_global_to_shared(rows[plane], at, bar, planes[plane].index(slot))
    tma.async_copy_global_to_shared(tiles.do, [b, first, head, 0], bar, to.do.index(slot))


@gluon.jit
def _gradients(
    tiles, rows, at, planes, bars, given, view,
    HALF: gl.constexpr, SIZES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of 64 keys; the first warpgroup also copies."""
    k_full, full, empty = bars
    dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, first_ptr, stop_ptr, numbers = given
    scale, natural_scale, B, splits = numbers
    HKV: gl.constexpr = SIZES.HKV
    D: gl.constexpr = SIZES.D
    D1: gl.constexpr = SIZES.D1
    D2: gl.constexpr = SIZES.D2
    REST: gl.constexpr = D2 or D1
    DV: gl.constexpr = SIZES.DV
    layout: gl.constexpr = accumulator(ROWS)
    wide: gl.constexpr = accumulator(D1)
    narrow: gl.constexpr = accumulator(REST)
    values: gl.constexpr = accumulator(DV)
    dtype: gl.constexpr = at.q1.dtype
    tile, split = gl.program_id(0) // splits, gl.program_id(0) % splits
    b, h = gl.program_id(1) // HKV, gl.program_id(1) % HKV
    begin, all_begin, all_end, end = span(
        tile * (2 * ROWS), split, splits, first_ptr, stop_ptr, *view[2:],
        SIZES.STRIDE, SIZES.SPAN, SIZES.WINDOW, SIZES.DOCUMENTS, ROWS, 2 * ROWS,
    )  # fmt: skip
    key = tile * (2 * ROWS) + HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dk1 = gl.zeros([ROWS, D1], gl.float32, wide)
    dk2 = gl.zeros([ROWS, REST], gl.float32, narrow)
    dv = gl.zeros([ROWS, DV], gl.float32, values)
    k1, k2, v = at.k1.index(HALF), at.k2.index(HALF), at.v.index(HALF)
    count = (end - begin + ROWS - 1) // ROWS
    steps, walk = count * SIZES.G, (b, h, begin, count)
    if HALF == 0:
        bar = k_full.index(0)
        mbarrier.expect(bar, 2 * ROWS * (D + DV) * 2)
        for half in gl.static_range(2):
            row = tile * (2 * ROWS) + half * ROWS
            bring(tiles.k1, tiles.k2, at.k1, at.k2, half, bar, b, row, h, SIZES)
            tma.async_copy_global_to_shared(tiles.v, [b, row, h, 0], bar, at.v.index(half))
        for i in range(gl.minimum(STAGES - 1, steps)):
            _bring_queries(i, walk, tiles, rows, at, planes, bars, SIZES, STAGES)
    mbarrier.wait(k_full.index(0), 0)
    for i in range(steps):
        first = begin + (i % count) * ROWS
        slot = i % STAGES
        q1, q2, do = at.q1.index(slot), at.q2.index(slot), at.do.index(slot)
        mbarrier.wait(full.index(slot), i // STAGES & 1)
        st = scores(k1, k2, q1, q2, ROWS, SIZES)
        dpt = product(v, do, ROWS, DV)
        if HALF == 0:
            ahead = i + STAGES - 1
            if ahead < steps:
                _bring_queries(ahead, walk, tiles, rows, at, planes, bars, SIZES, STAGES)
        st = warpgroup_mma_wait(1, [st])
        # Past the last query lse is inf, and exp2(x - inf) is 0.
        pt = gl.exp2(st * scale - planes[0].index(slot).load(layout))
        if (first < all_begin) | (first + ROWS > all_end):
            token = first + gl.arange(0, ROWS, gl.SliceLayout(0, layout))
            low, high = keys_of(token, view, SIZES)
            visible = (key[:, None] >= low[None, :]) & (key[:, None] < high[None, :])
            pt = gl.where(visible, pt, 0.0)
        if SIZES.GATED:
            pt = pt * planes[2].index(slot).load(layout)
        weight = gl.convert_layout(pt.to(dtype), gl.DotOperandLayout(0, values, 2))
        dv = warpgroup_mma(weight, do.reshape([ROWS, DV]), dv, is_async=True)
        dpt = warpgroup_mma_wait(1, [dpt])
        dst = (pt * (dpt - planes[1].index(slot).load(layout))).to(dtype)
        slope = gl.convert_layout(dst, gl.DotOperandLayout(0, wide, 2))
        dk1 = warpgroup_mma(slope, q1.reshape([ROWS, D1]), dk1, is_async=True)
        if D2 > 0:
            slope2 = gl.convert_layout(dst, gl.DotOperandLayout(0, narrow, 2))
            dk2 = warpgroup_mma(slope2, q2.reshape([ROWS, D2]), dk2, is_async=True)
            dk1, dk2, dv, _w, _s = warpgroup_mma_wait(0, [dk1, dk2, dv, weight, slope])
        else:
            dk1, dv, _w, _s = warpgroup_mma_wait(0, [dk1, dv, weight, slope])
        mbarrier.arrive(empty.index(slot), count=1)

    # One or the other at run time: see `key._key_kernel`.
    row = ((split.to(gl.int64) * B + b) * view.S + key) * HKV + h
    exists = key < view.S
    dk1 = dk1 * natural_scale
    dk2 = dk2 * natural_scale
    if splits == 1:
        store_block(dv_ptr, dv, row, exists, 0, DV, DV)
        store_block(dk_ptr, dk1, row, exists, 0, D1, D)
        if D2 > 0:
            store_block(dk_ptr, dk2, row, exists, D1, D2, D)
    else:
        store_block(dv_parts_ptr, dv, row, exists, 0, DV, DV)
        store_block(dk_parts_ptr, dk1, row, exists, 0, D1, D)
        if D2 > 0:
            store_block(dk_parts_ptr, dk2, row, exists, D1, D2, D)


@gluon.jit(do_not_specialize=[*UNSPECIALISED, "B", "splits"])
def _key_kernel(
    q1_tiles, q2_tiles, do_tiles, k1_tiles, k2_tiles, v_tiles,  # [1, ROWS, 1, channels]
    lse_rows, delta_rows, gate_rows,  # [1, ROWS]
    dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr,  # as in `key._key_kernel`
    low_ptr, high_ptr, first_ptr, stop_ptr,
    scale, natural_scale, B, splits, T, S, q_start, k_start, window,
    SIZES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles = Parts(q1_tiles, q2_tiles, do_tiles, k1_tiles, k2_tiles, v_tiles)
    rows = (lse_rows, delta_rows, gate_rows)
    at = rings(tiles, SIZES, STAGES, 2, True)
    planes = (ring(lse_rows, STAGES), ring(delta_rows, STAGES), ring(gate_rows, STAGES))
    bars = (barriers(1, 1), barriers(STAGES, 1), barriers(STAGES, 2))
    fence_async_shared()
    view = View(low_ptr, high_ptr, T, S, q_start, k_start, window)
    numbers = (scale, natural_scale, B, splits)
    given = (dk_ptr, dv_ptr, dk_parts_ptr, dv_parts_ptr, first_ptr, stop_ptr, numbers)
    gl.warp_specialize(
        [
            (_gradients, (tiles, rows, at, planes, bars, given, view, 0, SIZES, STAGES)),
            (_gradients, (tiles, rows, at, planes, bars, given, view, 1, SIZES, STAGES)),
        ],
        [4],
        [256],
    )


def hopper_key_gradients(
    to: KeyGradients, do: Tensor, q: Tensor, k: Tensor, v: Tensor, planes: Tensor, band: Band, *,
    scale: float, tile: Tile, sizes: Sizes,
) -> None:  # fmt: skip
    """dK and dV, or their parts; arguments as in `key.write_key_gradients`."""
    B, T, HQ = q.shape[:3]
    S, HKV = k.shape[1:3]
    T_padded = planes.shape[-1]
    rows, D1, D2, DV = tile.queries, sizes.D1, sizes.D2, sizes.DV
    layout = gl.NVMMASharedLayout.get_default_for([1, rows], gl.float32)
    by_head = (
        TensorDescriptor(x, [B * HQ, T_padded], [T_padded, 1], [1, rows], layout) for x in planes
    )
    _launch(sizes, tile.stages)(
        (ceil_div(S, tile.keys) * to.splits, B * HKV),
        (
            *tiles_of(q, rows, D1, D2), *tiles_of(do, rows, DV), *tiles_of(k, rows, D1, D2),
            *tiles_of(v, rows, DV), *by_head, to.dk, to.dv,
            *(to.parts or (planes, planes)),  # planes: then neither read nor written
            *band.tables(planes),
        ),
        (scale * LOG2_E, scale, B, to.splits, T, S, band.q_start, band.k_start, band.window),
    )  # fmt: skip


@lru_cache(maxsize=KINDS)
def _launch(sizes: Sizes, stages: int) -> KernelLaunch:
    return KernelLaunch(_key_kernel, SIZES=sizes, STAGES=stages, num_warps=4)
