"""Addresses of the rows and columns of phi's blocks, shared by its forward and backward kernels."""

from dataclasses import dataclass
from typing import Self

import triton
import triton.language as tl
from torch import Tensor

from nsa.config import NSAConfig

FILL = 264
"""Programs that a product is cut into if its rows alone make fewer: two for each of 132 SMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTile:
    """The tile of a product that one program computes."""

    rows: int
    columns: int = 0
    """0: all channels of a head."""
    depth: int = 0
    """Of one step; 0: steps run along the rows."""
    warps: int
    stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The rows of one call: `count` blocks of `heads` heads in each of `batch` sequences."""

    batch: int
    tokens: int
    count: int
    heads: int
    dim: int
    size: int
    """Tokens of a block (l)."""
    stride: int
    """Tokens between blocks (d)."""

    @classmethod
    def of(cls, x: Tensor, starts: Tensor | None, config: NSAConfig) -> Self:
        B, T, H, D = x.shape
        return cls(
            batch=B,
            tokens=T,
            count=config.compressed_length(T) if starts is None else len(starts),
            heads=H,
            dim=D,
            size=config.compress_block_size,
            stride=config.compress_stride,
        )

    def tiles(self, rows: int) -> int:
        """Tiles of this many rows in one sequence; no tile spans two."""
        return -(-self.count * self.heads // rows)


@triton.jit
def block_rows(
    starts_ptr,  # [N], int32
    tile,
    N,
    H: tl.constexpr,
    STRIDE: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Of each row: its number, block, head, first token, and whether it is used at all."""
    row = tile * ROWS + tl.arange(0, ROWS)
    block = row // H
    used = block < N
    if HAS_STARTS:
        start = tl.load(starts_ptr + block, mask=used, other=-1)
        used = start >= 0
        start = tl.maximum(start, 0)
    else:
        start = block * STRIDE
    return row, block, row % H, start, used


@triton.jit
def column_offsets(column, x_token, D: tl.constexpr):
    """Column (token, channel) of a block's row, counted through, from the row's first element."""
    return (column // D) * x_token + column % D
