"""Tiles of [B, T, H, D] tensors: how they come from memory, and go back."""

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


def aligned(x: Tensor) -> Tensor:
    """x as the bulk copy engine can read it: rows of contiguous elements, everything else 16 bytes
    apart or a multiple of it. A copy, padded with zeros, where x is not so."""
    unit = 16 // x.element_size()
    strides_fit = all(
        size == 1 or (stride > 0 and stride % unit == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )
    if x.stride(-1) == 1 and strides_fit and x.data_ptr() % 16 == 0 and x.shape[-1] % unit == 0:
        return x
    return F.pad(x, (0, -x.shape[-1] % unit)).contiguous().clone()


def descriptor(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A tile of `rows` tokens and `columns` channels of one head of x [B, T, H, D]."""
    unit = 16 // x.element_size()
    strides = [
        unit if size == 1 else stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, rows, 1, columns])


def head_descriptors(x: Tensor, rows: int, first: int, second: int) -> list[TensorDescriptor]:
    """Descriptors of both blocks of a head; the first stands in where there is no second."""
    one = descriptor(x, rows, first)
    return [one, descriptor(x, rows, second) if second else one]


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
    """A block of channels, [ROWS, BLOCK], by plain loads: what stays for the whole loop then lies
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
