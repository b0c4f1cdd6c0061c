"""Joins the pieces of one query: branch by branch by their log-sum-exp, then by the gates.

A program joins the pieces of all three branches at once: a piece's weight is its share of its
branch's softmax denominator times the branch's gate.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["compress_pieces", "window_pieces", "select_pieces"])
def merge_kernel(
    part_ptr,  # [B, HKV, pieces, G, DV], float32; pieces: of compress, window, select
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    gates_ptr,  # [B, HQ, 3]: of compress, select, window
    out_ptr,  # [B, HQ, DV], contiguous
    gates_batch: tl.int64,
    gates_head: tl.int64,
    gates_branch: tl.int64,
    compress_pieces,
    window_pieces,
    select_pieces,
    HKV: tl.constexpr,
    G: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    WEIGHED: tl.constexpr,
    MERGED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    query_head = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    pieces = compress_pieces + window_pieces + select_pieces
    window_end = compress_pieces + window_pieces
    group = (b * HKV + query_head // G) * pieces * G + query_head % G
    lse_head = part_lse_ptr + group

    branch = tl.arange(0, 4)  # of pieces: compress, window, select, none
    gates = gates_ptr + b * gates_batch + query_head * gates_head
    gate = tl.load(gates + (branch * 2 % 3) * gates_branch, mask=branch < 3, other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()

    largest = tl.full([4], float("-inf"), tl.float32)
    total = tl.zeros([4], tl.float32)
    for begin in tl.range(0, pieces, WEIGHED):
        piece = begin + tl.arange(0, WEIGHED)
        lse = tl.load(lse_head + piece * G, mask=piece < pieces, other=float("-inf"))
        of = (piece >= compress_pieces).to(tl.int32) + (piece >= window_end).to(tl.int32)
        lse = tl.where(branch[:, None] == of[None, :], lse[None, :], float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(lse - finite[:, None]), 1)
        largest = new_largest
    # A branch without keys has no piece above -inf, and so no weight.
    largest = tl.where(total > 0, largest, 0.0)
    factor = gate.to(tl.float32) / tl.where(total > 0, total, 1.0)

    column = tl.arange(0, DV_BLOCK)
    out = tl.zeros([DV_BLOCK], tl.float32)
    for begin in tl.range(0, pieces, MERGED):
        piece = begin + tl.arange(0, MERGED)
        mask = (piece < pieces)[:, None] & (column < DV)[None, :]
        offsets = (group + piece * G)[:, None] * DV + column[None, :]
        part = tl.load(part_ptr + offsets, mask=mask, other=0.0)
        lse = tl.load(lse_head + piece * G, mask=piece < pieces, other=float("-inf"))
        of = (piece >= compress_pieces).to(tl.int32) + (piece >= window_end).to(tl.int32)
        weight = factor[:, None] * tl.exp2(lse[None, :] - largest[:, None])
        weight = tl.sum(tl.where(branch[:, None] == of[None, :], weight, 0.0), 0)
        # A piece without keys may never have written its output.
        seen = (lse > float("-inf"))[:, None]
        out += tl.sum(tl.where(seen, weight[:, None] * part, 0.0), 0)
    offsets = (b * HKV * G + query_head) * DV + column
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=column < DV)
