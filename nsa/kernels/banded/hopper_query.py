"""The forward pass and dQ over a band on sm_90: as `forward` and `query`; see `common.hopper`.

A program takes every P-th item, an item being 128 queries of a head, and walks the keys that any of
them sees: copies for the next item start while the last one is finished. Products of step i + 1
(scores, dP) are asked for before the weights of step i meet their values, or dS its keys.

o = sum p v / sum p, p = exp2(scale q k - m), m the running maximum;  with p = exp2(scale q k - lse)
and g the gate,  dS = p (dO V^T - delta),  dQ = g scale dS K.
"""

from collections import namedtuple
from collections.abc import Sequence
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
    warpgroup_mma_wait,
)

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.hopper import Parts, View, bring, keys_of, rings, store_block, tiles_of
from nsa.kernels.banded.interval import UNSPECIALISED
from nsa.kernels.banded.planes import Sizes
from nsa.kernels.common.device import LOG2_E, ceil_div
from nsa.kernels.common.hopper import ROWS, accumulator, barriers, multiprocessors, product, scores
from nsa.kernels.common.launch import KINDS, KernelLaunch

Barriers = namedtuple("Barriers", "q_full q_empty k_full k_empty v_full v_empty")


@gluon.jit
def _item_of(i, items, view, SIZES: gl.constexpr, KEYS: gl.constexpr):
    """Of item i: batch, KV head, head, first query, first key and steps."""
    count = items // (SIZES.HKV * SIZES.G)
    h = i // (count * SIZES.G)
    rest = i % (count * SIZES.G)
    tile = count - 1 - rest // SIZES.G  # the longest come first
    tiles = (view.T + 2 * ROWS - 1) // (2 * ROWS)
    first = tile % tiles * (2 * ROWS)
    begin, _end = keys_of(first, view, SIZES)
    _begin, end = keys_of(first + 2 * ROWS - 1, view, SIZES)
    # Queries that see nothing take one step, in which every key is masked.
    steps = gl.maximum((end - begin + KEYS - 1) // KEYS, 1)
    return tile // tiles, h, h * SIZES.G + rest % SIZES.G, first, begin, steps


@gluon.jit
def _rows_of(i, items, view, HALF: gl.constexpr, SIZES: gl.constexpr, KEYS: gl.constexpr):
    """Of a warpgroup's part of item i: batch, head, queries, first key, steps; the keys [low, high)
    that each query sees and those [all_begin, all_end) that all see."""
    b, _h, head, first, begin, steps = _item_of(i, items, view, SIZES, KEYS)
    first += HALF * ROWS
    token = first + gl.arange(0, ROWS, gl.SliceLayout(1, accumulator(KEYS)))
    low, high = keys_of(token, view, SIZES)
    _low, all_end = keys_of(first, view, SIZES)
    all_begin, _high = keys_of(first + ROWS - 1, view, SIZES)
    return b, head, token, begin, steps, (low, high, all_begin, all_end)


@gluon.jit
def _masked(x, other, start, edges, KEYS: gl.constexpr):
    """x of the keys from `start` on, `other` where a query does not see the key; see `_rows_of`."""
    low, high, all_begin, all_end = edges
    if (start < all_begin) | (start + KEYS > all_end):
        key = start + gl.arange(0, KEYS, gl.SliceLayout(0, accumulator(KEYS)))
        visible = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        x = gl.where(visible, x, other)
    return x


@gluon.jit
def _barriers(STAGES: gl.constexpr):
    """Those of `_copy`."""
    return Barriers(
        barriers(1, 1), barriers(1, 2), barriers(STAGES, 1), barriers(STAGES, 2),
        barriers(STAGES, 1), barriers(STAGES, 2),
    )  # fmt: skip


@gluon.jit
def _copy(
    tiles, to, bars, items, view, SIZES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    DO: gl.constexpr,
):  # fmt: skip
    """Fill the rings, in the order in which the warpgroups empty them."""
    D: gl.constexpr = SIZES.D
    DV: gl.constexpr = SIZES.DV
    step = 0  # of all items
    turn = 0  # of the queries' barriers
    for i in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, head, first, begin, steps = _item_of(i, items, view, SIZES, KEYS)
        mbarrier.wait(bars.q_empty.index(0), turn ^ 1)
        full = bars.q_full.index(0)
        mbarrier.expect(full, 2 * ROWS * (D + DV if DO else D) * 2)
        for half in gl.static_range(2):
            row = first + half * ROWS
            bring(tiles.q1, tiles.q2, to.q1, to.q2, half, full, b, row, head, SIZES)
            if DO:
                at = [b, row, head, 0]
                tma.async_copy_global_to_shared(tiles.do, at, full, to.do.index(half))
        turn ^= 1
        for j in range(steps):
            slot = step % STAGES
            free = (step // STAGES & 1) ^ 1
            start = begin + j * KEYS
            full = bars.k_full.index(slot)
            mbarrier.wait(bars.k_empty.index(slot), free)
            mbarrier.expect(full, KEYS * D * 2)
            bring(tiles.k1, tiles.k2, to.k1, to.k2, slot, full, b, start, h, SIZES)
            full = bars.v_full.index(slot)
            mbarrier.wait(bars.v_empty.index(slot), free)
            mbarrier.expect(full, KEYS * DV * 2)
            tma.async_copy_global_to_shared(tiles.v, [b, start, h, 0], full, to.v.index(slot))
            step += 1


@gluon.jit
def _weights(s, row_max, row_sum, scale):
    """p = exp2(scale s - max) of a step, and the maximum, sum and rescaling of what came before."""
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    # A row that has seen no key yet keeps -inf, and nothing is subtracted from -inf.
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    p = gl.exp2(s * scale - base[:, None])
    rescale = gl.exp2(row_max - base)
    return p, new_max, row_sum * rescale + gl.sum(p, 1), rescale


@gluon.jit
def _attend(
    at, bars, o_ptr, lse_ptr, scale, items, view, HALF: gl.constexpr, SIZES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries of each item: `forward._forward_kernel`, one step ahead with the scores."""
    HQ: gl.constexpr = SIZES.HKV * SIZES.G
    DV: gl.constexpr = SIZES.DV
    outputs: gl.constexpr = accumulator(DV)
    weights: gl.constexpr = gl.DotOperandLayout(0, outputs, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    by_output: gl.constexpr = gl.SliceLayout(1, outputs)
    dtype: gl.constexpr = at.v.dtype
    q1, q2 = at.q1.index(HALF), at.q2.index(HALF)
    step = 0
    turn = 0
    for i in range(gl.program_id(0), items, gl.num_programs(0)):
        b, head, token, begin, steps, edges = _rows_of(i, items, view, HALF, SIZES, KEYS)
        acc = gl.zeros([ROWS, DV], gl.float32, outputs)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, by_row)
        row_sum = gl.zeros([ROWS], gl.float32, by_row)
        mbarrier.wait(bars.q_full.index(0), turn)
        turn ^= 1
        slot = step % STAGES
        mbarrier.wait(bars.k_full.index(slot), step // STAGES & 1)
        s = scores(q1, q2, at.k1.index(slot), at.k2.index(slot), KEYS, SIZES)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(bars.k_empty.index(slot), count=1)
        s = _masked(s, float("-inf"), begin, edges, KEYS)
        p, row_max, row_sum, rescale = _weights(s, row_max, row_sum, scale)
        weight = gl.convert_layout(p.to(dtype), weights)
        for j in range(1, steps):
            last, last_phase = slot, step // STAGES & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(bars.k_full.index(slot), step // STAGES & 1)
            s = scores(q1, q2, at.k1.index(slot), at.k2.index(slot), KEYS, SIZES)
            mbarrier.wait(bars.v_full.index(last), last_phase)
            acc = warpgroup_mma(weight, at.v.index(last).reshape([KEYS, DV]), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(bars.k_empty.index(slot), count=1)
            # While the product with the values runs, p holds the weights of this step.
            s = _masked(s, float("-inf"), begin + j * KEYS, edges, KEYS)
            p, row_max, row_sum, rescale = _weights(s, row_max, row_sum, scale)
            # Over long ago; but ptxas waits for the product first unless something loops before it.
            mbarrier.wait(bars.v_full.index(last), last_phase)
            acc, _weight = warpgroup_mma_wait(0, [acc, weight])
            mbarrier.arrive(bars.v_empty.index(last), count=1)
            acc = acc * gl.convert_layout(rescale, by_output)[:, None]
            weight = gl.convert_layout(p.to(dtype), weights)
        mbarrier.arrive(bars.q_empty.index(0), count=1)
        mbarrier.wait(bars.v_full.index(slot), step // STAGES & 1)
        acc = warpgroup_mma(weight, at.v.index(slot).reshape([KEYS, DV]), acc, is_async=True)
        acc, _weight = warpgroup_mma_wait(0, [acc, weight])
        mbarrier.arrive(bars.v_empty.index(slot), count=1)
        step += 1

        # A row that saw no key keeps row_sum == 0 and row_max == -inf: output 0, lse -inf.
        denominator = gl.where(row_sum > 0, row_sum, 1.0)
        lse_row = (b.to(gl.int64) * HQ + head) * view.T
        valid = token < view.T
        gl.store(lse_ptr + lse_row + token, row_max + gl.log2(denominator), mask=valid)
        o = acc / gl.convert_layout(denominator, by_output)[:, None]
        row = (b.to(gl.int64) * view.T + token) * HQ + head
        store_block(o_ptr, o, row, valid, 0, DV, DV)


@gluon.jit(do_not_specialize=[*UNSPECIALISED, "items"])
def _forward_kernel(
    q1_tiles, q2_tiles, k1_tiles, k2_tiles, v_tiles,  # [1, ROWS or KEYS, 1, channels]
    o_ptr, lse_ptr, low_ptr, high_ptr,  # as in `forward._forward_kernel`
    scale, items, T, S, q_start, k_start, window,
    SIZES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles = Parts(q1_tiles, q2_tiles, q1_tiles, k1_tiles, k2_tiles, v_tiles)
    at = rings(tiles, SIZES, 2, STAGES, False)
    bars = _barriers(STAGES)
    fence_async_shared()
    view = View(low_ptr, high_ptr, T, S, q_start, k_start, window)
    gl.warp_specialize(
        [
            (_attend, (at, bars, o_ptr, lse_ptr, scale, items, view, 0, SIZES, KEYS, STAGES)),
            (_attend, (at, bars, o_ptr, lse_ptr, scale, items, view, 1, SIZES, KEYS, STAGES)),
            (_copy, (tiles, at, bars, items, view, SIZES, KEYS, STAGES, False)),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def _add(dq1, dq2, ds, k1, k2, SIZES: gl.constexpr, KEYS: gl.constexpr):
    """Ask for dS K."""
    dq1 = warpgroup_mma(ds, k1.reshape([KEYS, SIZES.D1]), dq1, is_async=True)
    if SIZES.D2 > 0:
        ds2 = gl.convert_layout(ds, gl.DotOperandLayout(0, accumulator(SIZES.D2), 2))
        dq2 = warpgroup_mma(ds2, k2.reshape([KEYS, SIZES.D2]), dq2, is_async=True)
    return dq1, dq2


@gluon.jit
def _added(dq1, dq2, ds, SIZES: gl.constexpr):
    """Wait for all products."""
    if SIZES.D2 > 0:
        dq1, dq2, _ds = warpgroup_mma_wait(0, [dq1, dq2, ds])
    else:
        dq1, _ds = warpgroup_mma_wait(0, [dq1, ds])
    return dq1, dq2


@gluon.jit
def _gradient(
    at, bars, given, items, view,
    HALF: gl.constexpr, SIZES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dQ of 64 queries of each item."""
    planes_ptr, dq_ptr, scale, natural_scale, B, T_padded = given
    HQ: gl.constexpr = SIZES.HKV * SIZES.G
    D: gl.constexpr = SIZES.D
    D1: gl.constexpr = SIZES.D1
    D2: gl.constexpr = SIZES.D2
    REST: gl.constexpr = D2 or D1
    by_row: gl.constexpr = gl.SliceLayout(1, accumulator(KEYS))
    wide: gl.constexpr = accumulator(D1)
    narrow: gl.constexpr = accumulator(REST)
    slopes: gl.constexpr = gl.DotOperandLayout(0, wide, 2)
    dtype: gl.constexpr = at.v.dtype
    q1, q2, do = at.q1.index(HALF), at.q2.index(HALF), at.do.index(HALF)
    plane = B.to(gl.int64) * HQ * T_padded
    step = 0
    turn = 0
    for i in range(gl.program_id(0), items, gl.num_programs(0)):
        b, head, token, begin, steps, edges = _rows_of(i, items, view, HALF, SIZES, KEYS)
        row = planes_ptr + (b.to(gl.int64) * HQ + head) * T_padded + token
        lse = gl.load(row)
        delta = gl.load(row + plane)
        dq1 = gl.zeros([ROWS, D1], gl.float32, wide)
        dq2 = gl.zeros([ROWS, REST], gl.float32, narrow)
        mbarrier.wait(bars.q_full.index(0), turn)
        turn ^= 1
        slot = step % STAGES
        mbarrier.wait(bars.k_full.index(slot), step // STAGES & 1)
        s = scores(q1, q2, at.k1.index(slot), at.k2.index(slot), KEYS, SIZES)
        mbarrier.wait(bars.v_full.index(slot), step // STAGES & 1)
        dp = product(do, at.v.index(slot), KEYS, SIZES.DV)
        s, dp = warpgroup_mma_wait(0, [s, dp])
        mbarrier.arrive(bars.v_empty.index(slot), count=1)
        p = _masked(gl.exp2(s * scale - lse[:, None]), 0.0, begin, edges, KEYS)
        ds = gl.convert_layout((p * (dp - delta[:, None])).to(dtype), slopes)
        for j in range(1, steps):
            last, last_phase = slot, step // STAGES & 1
            step += 1
            slot = step % STAGES
            mbarrier.wait(bars.k_full.index(slot), step // STAGES & 1)
            s = scores(q1, q2, at.k1.index(slot), at.k2.index(slot), KEYS, SIZES)
            mbarrier.wait(bars.v_full.index(slot), step // STAGES & 1)
            dp = product(do, at.v.index(slot), KEYS, SIZES.DV)
            dq1, dq2 = _add(dq1, dq2, ds, at.k1.index(last), at.k2.index(last), SIZES, KEYS)
            s, dp = warpgroup_mma_wait(2 if D2 > 0 else 1, [s, dp])
            mbarrier.arrive(bars.v_empty.index(slot), count=1)
            p = _masked(gl.exp2(s * scale - lse[:, None]), 0.0, begin + j * KEYS, edges, KEYS)
            slope = p * (dp - delta[:, None])
            mbarrier.wait(bars.k_full.index(last), last_phase)  # see `_attend`
            dq1, dq2 = _added(dq1, dq2, ds, SIZES)
            mbarrier.arrive(bars.k_empty.index(last), count=1)
            ds = gl.convert_layout(slope.to(dtype), slopes)
        mbarrier.arrive(bars.q_empty.index(0), count=1)
        dq1, dq2 = _add(dq1, dq2, ds, at.k1.index(slot), at.k2.index(slot), SIZES, KEYS)
        dq1, dq2 = _added(dq1, dq2, ds, SIZES)
        mbarrier.arrive(bars.k_empty.index(slot), count=1)
        step += 1

        factor = gl.full([ROWS], 1.0, gl.float32, by_row) * natural_scale
        if SIZES.GATED:  # the gate is one number a row, so it can wait until here
            factor *= gl.load(row + 2 * plane)
        row = (b.to(gl.int64) * view.T + token) * HQ + head
        valid = token < view.T
        dq1 *= gl.convert_layout(factor, gl.SliceLayout(1, wide))[:, None]
        store_block(dq_ptr, dq1, row, valid, 0, D1, D)
        if D2 > 0:
            dq2 *= gl.convert_layout(factor, gl.SliceLayout(1, narrow))[:, None]
            store_block(dq_ptr, dq2, row, valid, D1, D2, D)


@gluon.jit(do_not_specialize=[*UNSPECIALISED, "items", "B", "T_padded"])
def _query_kernel(
    q1_tiles, q2_tiles, do_tiles, k1_tiles, k2_tiles, v_tiles,  # [1, ROWS or KEYS, 1, channels]
    planes_ptr, dq_ptr, low_ptr, high_ptr,  # as in `query._query_kernel`
    scale, natural_scale, B, T_padded, items, T, S, q_start, k_start, window,
    SIZES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    tiles = Parts(q1_tiles, q2_tiles, do_tiles, k1_tiles, k2_tiles, v_tiles)
    at = rings(tiles, SIZES, 2, STAGES, True)
    bars = _barriers(STAGES)
    fence_async_shared()
    view = View(low_ptr, high_ptr, T, S, q_start, k_start, window)
    given = (planes_ptr, dq_ptr, scale, natural_scale, B, T_padded)
    gl.warp_specialize(
        [
            (_gradient, (at, bars, given, items, view, 0, SIZES, KEYS, STAGES)),
            (_gradient, (at, bars, given, items, view, 1, SIZES, KEYS, STAGES)),
            (_copy, (tiles, at, bars, items, view, SIZES, KEYS, STAGES, True)),
        ],
        [4, 1],
        [240, 24],
    )


def hopper_forward(
    o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, band: Band, *, scale: float,
    sizes: Sizes,
) -> None:  # fmt: skip
    """Write o and lse [B, HQ, T]: see `forward.banded_forward`. q, k and v are aligned."""
    _run(_forward(sizes), q, (), k, v, (o, lse), band, (scale * LOG2_E,), sizes)


def hopper_query_gradient(
    dq: Tensor, do: Tensor, q: Tensor, k: Tensor, v: Tensor, planes: Tensor, band: Band, *,
    scale: float, sizes: Sizes,
) -> None:  # fmt: skip
    """dQ; arguments as in `query.write_query_gradient`."""
    numbers = (scale * LOG2_E, scale, q.shape[0], planes.shape[-1])
    do_tiles = tiles_of(do, ROWS.value, sizes.DV)
    _run(_query(sizes), q, do_tiles, k, v, (planes, dq), band, numbers, sizes)


def _run(
    launch: KernelLaunch, q: Tensor, do_tiles: Sequence[Any], k: Tensor, v: Tensor,
    pointers: tuple[Tensor, ...], band: Band, numbers: tuple[float, ...], sizes: Sizes,
) -> None:  # fmt: skip
    B, T, HQ = q.shape[:3]
    keys, D1, D2 = launch.named["KEYS"], sizes.D1, sizes.D2
    items = B * ceil_div(T, 2 * ROWS.value) * HQ
    launch(
        (min(items, multiprocessors(q.device)),),
        (
            *tiles_of(q, ROWS.value, D1, D2), *do_tiles, *tiles_of(k, keys, D1, D2),
            *tiles_of(v, keys, sizes.DV), *pointers, *band.tables(pointers[0])[:2],
        ),
        (*numbers, items, T, k.shape[1], band.q_start, band.k_start, band.window),
    )  # fmt: skip


@lru_cache(maxsize=KINDS)
def _forward(sizes: Sizes) -> KernelLaunch:
    stages = 2 if sizes.D > 128 else 3
    return KernelLaunch(_forward_kernel, SIZES=sizes, KEYS=128, STAGES=stages, num_warps=4)


@lru_cache(maxsize=KINDS)
def _query(sizes: Sizes) -> KernelLaunch:
    stages = 3 if sizes.D > 128 else 4
    return KernelLaunch(_query_kernel, SIZES=sizes, KEYS=64, STAGES=stages, num_warps=4)
