"""Tiles of [B, T, H, D] tensors: how they are read from memory and written back.

On sm_90 the bulk copy engine reads them through a descriptor. sm_80 has none, and Triton would
compute a 64-bit address and its bounds for each element; there a kernel gets the tensor and its
strides, and copies 16 bytes at a time (cp.async). The constant BULK says which of the two.
"""

from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common.device import Architecture

UNIT: tl.constexpr = tl.constexpr(8)
"""Elements in 16 bytes of half precision: the unit of strides without a descriptor. It tells the
compiler how rows are aligned, and lets 32 bits hold any stride."""


def has_bulk_copies(arch: Architecture) -> bool:
    """Whether tiles are read through descriptors and not through pointers."""
    return arch != "sm_80"


def aligned(x: Tensor) -> Tensor:
    """x as the bulk copy engine can read it: contiguous rows, and all other strides multiples of 16
    bytes. If x is not so, a copy padded with zeros."""
    unit = 16 // x.element_size()
    if x.shape[-1] % unit == 0 and x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x  # the usual case; the host launches 20 kernels in a millisecond
    strides_fit = all(
        size == 1 or (stride > 0 and stride % unit == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
    if x.stride(-1) == 1 and strides_fit and x.data_ptr() % 16 == 0 and x.shape[-1] % unit == 0:
        return x
    return F.pad(x, (0, -x.shape[-1] % unit)).contiguous().clone()


def descriptor(x: Tensor, rows: int, columns: int, *, gluon: bool = False) -> Any:
    """A tile of `rows` tokens and `columns` channels of one head of x [B, T, H, D].

    The same as TensorDescriptor(x, ...), but of its checks only the address's runs each time.

    Raises:
        AssertionError: TensorDescriptor does not take such a tensor.
    """
    assert x.data_ptr() % 16 == 0, "base must be 16-byte aligned"
    known = object.__new__(GluonDescriptor if gluon else TensorDescriptor)
    known.__dict__.update(_layout(x.shape, x.stride(), x.dtype, rows, columns, gluon), base=x)
    return known


@lru_cache(maxsize=1024)
def _layout(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int, columns: int,
    gluon: bool,
) -> Mapping[str, object]:  # fmt: skip
    """The fields of a descriptor except its base; nothing changes them."""
    base = SimpleNamespace(dtype=dtype, data_ptr=lambda: 0)  # checked for each tensor
    unit = 16 // dtype.itemsize
    known = [
        unit if size == 1 else stride for size, stride in zip(shape[:-1], strides[:-1], strict=True)
    ]
    tile = [1, rows, 1, columns]
    taken = TensorDescriptor(base, list(shape), [*known, 1], tile)
    if gluon:  # with its layout in shared memory
        kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(tile, kind)
        taken = GluonDescriptor(base, taken.shape, taken.strides, tile, layout)
    return {name: held for name, held in vars(taken).items() if name != "base"}


def sources(x: Tensor, rows: int, *columns: int, bulk: bool, gluon: bool = False) -> list[Any]:
    """What a kernel reads tiles of x's head blocks from; the first also serves a block of 0."""
    if not bulk:
        return [x for _ in columns]
    first = descriptor(x, rows, columns[0], gluon=gluon)
    rest = (descriptor(x, rows, size, gluon=gluon) if size else first for size in columns[1:])
    return [first, *rest]


def units(x: Tensor, *, bulk: bool) -> tuple[int | None, ...]:
    """Strides of batch, token and head in units of 16 bytes; None if a descriptor has them."""
    if bulk:
        return None, None, None
    return tuple(
        0 if size == 1 else stride // UNIT.value
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


@triton.jit
def load_tile(
    source,  # see `sources`
    strides,  # see `units`
    b,
    token,  # the first
    head,
    count,  # tokens there are
    COLUMN: tl.constexpr,  # first channel of the block
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,  # channels there are
    ROWS: tl.constexpr,
    CHECK: tl.constexpr,  # whether rows may be missing
    BULK: tl.constexpr,
):
    """A block of channels of some tokens of a head, [ROWS, BLOCK]; 0 outside."""
    if BULK:
        x = tl.reshape(source.load([b, token, head, COLUMN]), [ROWS, BLOCK])
    else:
        rows = tl.arange(0, ROWS)
        columns = COLUMN + tl.arange(0, BLOCK)
        start = strides[0].to(tl.int64) * b + strides[1].to(tl.int64) * token
        start += strides[2].to(tl.int64) * head
        base = tl.multiple_of(source + start * UNIT, 16)
        pointers = base + (rows[:, None] * (strides[1] * UNIT) + columns[None, :])
        if COLUMN + BLOCK > SIZE:
            mask = ((token + rows) < count)[:, None] & (columns < SIZE)[None, :]
            x = tl.load(pointers, mask=mask, other=0.0)
        elif CHECK:
            x = tl.load(pointers, mask=((token + rows) < count)[:, None], other=0.0)
        else:
            x = tl.load(pointers)
    return x


@triton.jit
def load_plane(
    source,  # a descriptor, or a pointer to [*, length]
    row,
    token,  # the first, a multiple of 4
    count,
    length,
    ROWS: tl.constexpr,
    OTHER: tl.constexpr,
    BULK: tl.constexpr,
):
    """One number each of some tokens, [ROWS]; without bulk copies OTHER outside."""
    if BULK:
        x = tl.reshape(source.load([row, token]), [ROWS])
    else:
        offsets = tl.arange(0, ROWS)
        start = tl.multiple_of(length.to(tl.int64) * row + token, 4)
        x = tl.load(source + start + offsets, mask=token + offsets < count, other=OTHER)
    return x


@triton.jit
def load_rows(
    ptr,  # start of the first row
    stride,  # of rows
    exists,  # [ROWS]
    COLUMN: tl.constexpr,  # first channel of the block
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,  # channels there are
    ROWS: tl.constexpr,
):
    """A block of channels, [ROWS, BLOCK], by plain loads: what stays for the whole loop is then
    in shared memory, where a bulk copy would leave it in registers (seen in Triton 3.6)."""
    columns = COLUMN + tl.arange(0, BLOCK)
    pointers = ptr + tl.arange(0, ROWS)[:, None] * stride.to(tl.int32) + columns[None, :]
    return tl.load(pointers, mask=exists[:, None] & (columns < SIZE)[None, :], other=0.0)


@triton.jit
def store_rows(ptr, x, row, valid, COLUMN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """Write a block of columns of the rows of a contiguous [*, SIZE]."""
    columns = COLUMN + tl.arange(0, BLOCK)
    pointers = ptr + row[:, None] * SIZE + columns[None, :]
    mask = valid[:, None] & (columns < SIZE)[None, :]
    tl.store(pointers, x.to(ptr.dtype.element_ty), mask=mask)
