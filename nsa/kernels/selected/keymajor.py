"""What the key-major kernels of selected attention share: items, tiles of rows, configurations."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common.device import Architecture, head_blocks, padded
from nsa.kernels.selected.inverse import ITEM_FIELDS, MAX_PART, Selected


class Config(NamedTuple):
    """How a key-major kernel is built."""

    rows: int
    """Of a tile: queries times heads."""
    warps: int
    stages: int


KEYS = MAX_PART
"""Keys of a tile; blocks of fewer are padded."""
MIN_VALUES = 64
"""Channels of a tile of values; smaller heads are padded. Both are the right side of products; 16
wide, Triton 3.6 builds a kernel for sm_90 that faults."""

Configs = Mapping[Architecture, tuple[tuple[int, Config], ...]]
"""Channels of a key and a value together, padded, at most -> configuration; ascending."""


def constants(
    table: Configs, arch: Architecture, HKV: int, G: int, N: int, Dk: int, Dv: int, wide: bool
) -> dict[str, Any]:
    """Constants of all key-major kernels, and Triton's options: from the smallest entry of the
    table that holds this many channels."""
    D1, D2 = head_blocks(Dk)
    DV_BLOCK = max(MIN_VALUES, padded(Dv))
    config = next(config for limit, config in table[arch] if limit >= D1 + D2 + DV_BLOCK)
    return {
        "HKV": HKV,
        "G": G,
        "N": N,
        "D": Dk,
        "D1": D1,
        "D2": D2,
        "DV": Dv,
        "DV_BLOCK": DV_BLOCK,
        "KEYS": KEYS,
        "WIDE": wide,
        "ROWS": config.rows,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def strides(x: Tensor | None, axes: int) -> Sequence[int]:
    """The first strides of a tensor, or zeros without one."""
    return [0] * axes if x is None else x.stride()[:axes]


def needs_wide_offsets(index: Selected, *tensors: Tensor) -> bool:
    """Whether a row of a chunk is 2**31 elements or more after the chunk's first row.

    Args:
        tensors: [B, T, HQ, ...]: what programs read by rows, except the partial results.
    """
    reach = max(
        min(index.piece_tokens, x.shape[1]) * x.stride(1) + x.shape[2] * x.stride(2)
        for x in tensors
    )
    return reach >= 1 << 31


@triton.jit
def row_offsets(local, g, stride_t, stride_h, WIDE: tl.constexpr):
    """Where rows lie behind a chunk's first query: `local` queries and `g` heads on."""
    if WIDE:
        offsets = local.to(tl.int64) * stride_t + g * stride_h
    else:
        offsets = local * stride_t.to(tl.int32) + g * stride_h.to(tl.int32)
    return offsets


@triton.jit
def load_rows(
    ptr,
    offsets,  # [ROWS], where a row starts
    inside,  # [ROWS], or None if every row may be read
    FIRST: tl.constexpr,  # column
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,  # of a whole row
):
    """[ROWS, BLOCK]: columns FIRST ... of some rows; zeros outside."""
    column = FIRST + tl.arange(0, BLOCK)
    at = ptr + offsets[:, None] + column[None, :]
    if inside is None:
        if FIRST + BLOCK <= SIZE:
            x = tl.load(at)
        else:
            x = tl.load(at, mask=column[None, :] < SIZE, other=0.0)
    else:
        if FIRST + BLOCK <= SIZE:
            x = tl.load(at, mask=inside[:, None], other=0.0)
        else:
            x = tl.load(at, mask=inside[:, None] & (column[None, :] < SIZE), other=0.0)
    return x


@triton.jit
def store_rows(
    ptr,
    offsets,  # [ROWS]
    inside,  # [ROWS]
    x,  # [ROWS, BLOCK]
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Write what `load_rows` reads."""
    column = FIRST + tl.arange(0, BLOCK)
    mask = inside[:, None]
    if FIRST + BLOCK > SIZE:
        mask = mask & (column[None, :] < SIZE)
    tl.store(ptr + offsets[:, None] + column[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_item(items_ptr, first_item_ptr, first_bin, end_bin):
    """This program's item: (exists, first pair, end of pairs, b * HKV + h, first key, end)."""
    first = tl.load(first_item_ptr + first_bin)
    item = first + tl.program_id(0)
    exists = item < tl.load(first_item_ptr + end_bin)
    field = items_ptr + item.to(tl.int64) * ITEM_FIELDS
    return (
        exists,
        tl.load(field, mask=exists, other=0),
        tl.load(field + 1, mask=exists, other=0),
        tl.load(field + 2, mask=exists, other=0),
        tl.load(field + 3, mask=exists, other=0),
        tl.load(field + 4, mask=exists, other=0),
    )


@triton.jit
def load_pairs(pairs_ptr, start, end, tile, ROWS: tl.constexpr, G: tl.constexpr):
    """The pair of each row of a tile, [ROWS].

    Rows past the end repeat the last pair, so that what they load needs no mask.
    """
    pair = start + (tile + tl.arange(0, ROWS)) // G
    return tl.load(pairs_ptr + tl.minimum(pair, end - 1))


@triton.jit
def seen_slots(
    blocks_ptr,  # [B * T, HKV, N / PARTS]
    document_start_ptr,
    token,  # in the flattened [B, T]
    h,
    slot,  # broadcastable to token
    T,
    q_start,
    HKV: tl.constexpr,
    N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Whether a slot holds keys that the query sees: the pairs that `invert` lists."""
    PART: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    at = (token.to(tl.int64) * HKV + h) * (N // PARTS) + slot // PARTS
    block = tl.load(blocks_ptr + at, mask=slot < N, other=-1).to(tl.int32)
    position = q_start + token % T
    if VARLEN:
        position -= tl.load(document_start_ptr + token)
    return (block >= 0) & (block * BLOCK_SIZE + slot % PARTS * PART <= position)
