"""What the banded kernels in Gluon share: the keys of queries, and rings of tiles.

`hopper_query` has the forward pass and dQ, `hopper_key` dK and dV; see `nsa.kernels.common.hopper`.
"""

from collections import namedtuple
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from nsa.kernels.banded.interval import interval
from nsa.kernels.common.hopper import accumulator
from nsa.kernels.common.tiles import sources

View = namedtuple("View", "low_ptr high_ptr T S q_start k_start window")
"""What decides which keys a query sees: see `interval`."""
Parts = namedtuple("Parts", "q1 q2 do k1 k2 v")
"""Descriptors of tiles, or rings of shared memory; heads are cut as by `head_blocks`."""


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
def bring(
    tiles1, tiles2, ring1, ring2, slot, barrier, b, token, head, SIZES: gl.constexpr
):  # fmt: skip
    """Copy a tile of q or k."""
    tma.async_copy_global_to_shared(tiles1, [b, token, head, 0], barrier, ring1.index(slot))
    if SIZES.D2 > 0:
        D1: gl.constexpr = SIZES.D1
        tma.async_copy_global_to_shared(tiles2, [b, token, head, D1], barrier, ring2.index(slot))


@gluon.jit
def store_block(to, x, row, valid, COLUMN: gl.constexpr, BLOCK: gl.constexpr, SIZE: gl.constexpr):
    """Write a block of columns of the rows of a contiguous [*, SIZE]."""
    layout: gl.constexpr = accumulator(BLOCK)
    row = gl.convert_layout(row, gl.SliceLayout(1, layout))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, layout))
    columns = COLUMN + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    at = to + row[:, None] * SIZE + columns[None, :]
    gl.store(at, x.to(to.dtype.element_ty), mask=valid[:, None])


def tiles_of(x: Tensor, rows: int, *columns: int) -> list[Any]:
    """Descriptors of blocks of a head, each [1, rows, 1, columns]; see `tiles.sources`."""
    return sources(x, rows, *columns, bulk=True, gluon=True)
