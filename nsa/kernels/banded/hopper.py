"""The banded kernels on sm_90, in Gluon: products of one tile run under the softmax of another.

The equations and the order of keys are those of `forward`, `query` and `key`, their Triton twins;
Gluon says when a product starts and when it is waited for. One program runs on an SM, with two
warpgroups that compute and keep nearly all registers.

- **Copies.** The bulk copy engine brings tiles into rings of shared memory. In `hopper_query` (the
  forward pass and dQ) one more warp asks for them, as far ahead as there are slots; in `hopper_key`
  (dK and dV), where sums need its registers, the first warpgroup does, STAGES - 1 steps ahead.
- **Barriers.** A slot of a ring has two: `full` is over once the bytes of the tile are there,
  `empty` once both warpgroups are done with it. They count phases, and a wait names a phase by its
  parity: a slot's n-th tile is in phase n, and so is the wait for it.
- **Two warpgroups.** Each owns 64 rows and walks the same tiles, so that a tile is read from L2
  once for 128 rows, and while one warpgroup computes weights the other multiplies. Within a
  warpgroup, too, a product runs while something else is computed; each kernel says which.

Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, algorithms 1 and 2.
"""

from collections import namedtuple
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
)

from nsa.kernels.banded.interval import interval
from nsa.kernels.common.device import architecture
from nsa.kernels.common.tiles import sources

ROWS: gl.constexpr = gl.constexpr(64)
"""Of a warpgroup: those of one wgmma."""
HEADS = {(128, 128), (192, 128)}
"""D and DV. Heads of 64 are slower than in Triton, larger ones do not fit."""
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
"""Its version; 3.5 takes partitions in another form."""

View = namedtuple("View", "low_ptr high_ptr T S q_start k_start window")
"""What decides which keys a query sees: see `interval`."""
Parts = namedtuple("Parts", "q1 q2 do k1 k2 v")
"""Descriptors of tiles, or rings of shared memory; heads are cut as by `head_blocks`."""


@gluon.constexpr_function
def accumulator(columns: int) -> Any:
    """The layout of a warpgroup's product, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def keys_of(token, view, SIZES: gl.constexpr):
    """Keys [low, high) that queries see."""
    return interval(token, *view, SIZES.STRIDE, SIZES.SPAN, SIZES.WINDOW, SIZES.DOCUMENTS)


@gluon.jit
def ring(tiles, COUNT: gl.constexpr):
    """Shared memory for so many tiles."""
    return gl.allocate_shared_memory(tiles.dtype, [COUNT] + tiles.block_shape, tiles.layout)  # noqa: RUF005 - no stars here


@gluon.jit
def rings(tiles, SIZES: gl.constexpr, QUERIES: gl.constexpr, KEYS: gl.constexpr, DO: gl.constexpr):
    """Rings of so many tiles of queries and of keys."""
    q1, k1, v = ring(tiles.q1, QUERIES), ring(tiles.k1, KEYS), ring(tiles.v, KEYS)
    q2, k2, do = q1, k1, q1
    if SIZES.D2 > 0:
        q2, k2 = ring(tiles.q2, QUERIES), ring(tiles.k2, KEYS)
    if DO:
        do = ring(tiles.do, QUERIES)
    return Parts(q1, q2, do, k1, k2, v)


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def bring(
    tiles1, tiles2, ring1, ring2, slot, barrier, b, token, head, SIZES: gl.constexpr
):  # fmt: skip
    """Copy a tile of q or k."""
    tma.async_copy_global_to_shared(tiles1, [b, token, head, 0], barrier, ring1.index(slot))
    if SIZES.D2 > 0:
        D1: gl.constexpr = SIZES.D1
        tma.async_copy_global_to_shared(tiles2, [b, token, head, D1], barrier, ring2.index(slot))


@gluon.jit
def product(a, b, N: gl.constexpr, K: gl.constexpr):
    """Ask for a b^T, [ROWS, N]; it is there once it has been waited for."""
    x = warpgroup_mma_init(gl.zeros([ROWS, N], gl.float32, accumulator(N)))
    return warpgroup_mma(
        a.reshape([ROWS, K]), b.reshape([N, K]).permute([1, 0]), x, use_acc=False, is_async=True
    )


@gluon.jit
def scores(a1, a2, b1, b2, N: gl.constexpr, SIZES: gl.constexpr):
    """Ask for q k^T or k q^T."""
    s = product(a1, b1, N, SIZES.D1)
    if SIZES.D2 > 0:
        s = warpgroup_mma(
            a2.reshape([ROWS, SIZES.D2]),
            b2.reshape([N, SIZES.D2]).permute([1, 0]),
            s,
            is_async=True,
        )
    return s


@gluon.jit
def store_block(to, x, row, valid, COLUMN: gl.constexpr, BLOCK: gl.constexpr, SIZE: gl.constexpr):
    """Write a block of columns of the rows of a contiguous [*, SIZE]."""
    layout: gl.constexpr = accumulator(BLOCK)
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    at = to + row[:, None] * SIZE + columns[None, :]
    gl.store(at, x.to(to.dtype.element_ty), mask=valid[:, None])


@cache
def multiprocessors(device: torch.device) -> int:
    """0 if the device has no wgmma: 9.0 has, not what comes after. `meta` is as an H200."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 0
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count if (found.major, found.minor) == (9, 0) else 0


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether these kernels serve such heads, on their device."""
    serves = (q.shape[-1], v.shape[-1]) in HEADS and architecture(q.device) == "sm_90"
    return serves and TRITON >= (3, 6) and multiprocessors(q.device) > 0


def tiles_of(x: Tensor, rows: int, *columns: int) -> list[Any]:
    """Descriptors of blocks of a head, each [1, rows, 1, columns]; see `tiles.sources`."""
    return sources(x, rows, *columns, bulk=True, gluon=True)
