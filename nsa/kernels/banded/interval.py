"""Which keys a query sees, and which queries see a key."""

from typing import NamedTuple

import triton
import triton.language as tl

# Runtime values that must not become part of what is compiled.
UNSPECIALISED = ["T", "S", "q_start", "k_start", "window"]


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, stages of its software pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int


@triton.jit
def interval(
    token, low_ptr, high_ptr, T, S, q_start, k_start, window,  # low, high: see `band.Documents`
    STRIDE: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) that queries see; tokens past the end are taken for the last."""
    token = tl.minimum(token, T - 1)
    if DOCUMENTS:
        low = tl.load(low_ptr + token)
        high = tl.load(high_ptr + token)
    else:
        position = token + q_start
        high = tl.minimum(tl.maximum(position + 1 - SPAN + STRIDE, 0) // STRIDE - k_start, S)
        low = tl.maximum(position - window + 1 - k_start, 0) if WINDOW else high * 0
    return low, high


@triton.jit
def span(
    first_key, split, splits, first_ptr, stop_ptr, T, S, q_start, k_start, window,
    STRIDE: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Queries [begin, end) of a split that see some key of a tile; [all_begin, all_end) see all."""
    last_key = tl.minimum(first_key + BLOCK_N, S) - 1
    if DOCUMENTS:
        begin = tl.load(first_ptr + first_key)
        all_begin = tl.load(first_ptr + last_key)
        all_end = tl.load(stop_ptr + first_key)
        end = tl.load(stop_ptr + last_key)
    else:
        begin = tl.maximum((first_key + k_start) * STRIDE + SPAN - 1 - q_start, 0)
        all_begin = tl.maximum((last_key + k_start) * STRIDE + SPAN - 1 - q_start, 0)
        all_end = T
        end = T
        if WINDOW:
            all_end = tl.minimum(T, first_key + k_start + window - q_start)
            end = tl.minimum(T, last_key + k_start + window - q_start)
    end = tl.maximum(end, begin)
    all_begin = tl.minimum(all_begin, end)

    # This split's share, in whole tiles. A bulk copy of floats begins at a multiple of 16 bytes.
    begin = begin // 4 * 4
    share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_M) * BLOCK_M
    begin = tl.minimum(begin + split * share, end)
    end = tl.minimum(begin + share, end)
    return begin, all_begin, tl.minimum(all_end, end), end
