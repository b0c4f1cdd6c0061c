"""The pieces of one query joined: branch by branch by their log-sum-exp, then by the gates.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5.
"""

import triton
import triton.language as tl


@triton.jit
def _merged(
    part_ptr,  # the group's pieces of this head, G * DV apart
    part_lse_ptr,  # likewise, G apart
    first,
    stop,
    G: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):
    """The output of one branch from its pieces, [DV_BLOCK], float32; 0 if none saw a key."""
    column = tl.arange(0, DV_BLOCK)
    acc = tl.zeros([DV_BLOCK], tl.float32)
    largest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for begin in tl.range(first, stop, MERGED):
        piece = begin + tl.arange(0, MERGED)
        lse = tl.load(part_lse_ptr + piece * G, mask=piece < stop, other=float("-inf"))
        # A piece without keys may never have written its output.
        mask = (lse > float("-inf"))[:, None] & (column < DV)[None, :]
        offsets = (piece * G * DV)[:, None] + column[None, :]
        part = tl.load(part_ptr + offsets, mask=mask, other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(lse - finite)
        rescale = tl.exp2(largest - finite)
        total = total * rescale + tl.sum(weight, 0)
        acc = acc * rescale + tl.sum(weight[:, None] * part, 0)
        largest = new_largest
    return acc / tl.where(total > 0, total, 1.0)


@triton.jit(do_not_specialize=["compress_pieces", "select_pieces", "window_pieces"])
def merge_kernel(
    part_ptr,  # [B, HKV, pieces, G, DV], float32; pieces: of compress, select, window
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    gates_ptr,  # [B, HQ, 3]
    out_ptr,  # [B, HQ, DV], contiguous
    gates_batch: tl.int64,
    gates_head: tl.int64,
    gates_branch: tl.int64,
    compress_pieces,
    select_pieces,
    window_pieces,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    MERGED: tl.constexpr,
):
    query_head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    pieces = compress_pieces + select_pieces + window_pieces
    group = (b * HKV + query_head // G) * pieces * G + query_head % G
    part = part_ptr + group * DV
    lse = part_lse_ptr + group
    window = compress_pieces + select_pieces
    gate = gates_ptr + b * gates_batch + query_head * gates_head
    out = tl.load(gate).to(tl.float32) * _merged(
        part, lse, 0, compress_pieces, G, DV, DV_BLOCK, MERGED
    )
    out += tl.load(gate + gates_branch).to(tl.float32) * _merged(
        part, lse, compress_pieces, window, G, DV, DV_BLOCK, MERGED
    )
    out += tl.load(gate + 2 * gates_branch).to(tl.float32) * _merged(
        part, lse, window, pieces, G, DV, DV_BLOCK, MERGED
    )
    column = tl.arange(0, DV_BLOCK)
    offsets = (b * HKV * G + query_head) * DV + column
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=column < DV)
