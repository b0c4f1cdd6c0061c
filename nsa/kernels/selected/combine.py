"""Selected attention, forward, second half: joins the partial results of each query.

A program is one warp and owns one row, a head of a query: the parts of its N slots, [N, DV], are
read once, all in flight together. It also forms the gated sum of the three branches (eq. 5). The
kernel is bound by memory.

Source: Dao et al. 2022, arXiv:2205.14135, section 3.1 (how softmax of parts is joined).
"""

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.common.device import power_of_2
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.selected.inverse import Chunk, Selected
from nsa.kernels.selected.keymajor import seen_slots, strides

SLOTS = 16
"""Slots of a row that a program has in flight together."""


# Strides of the gates are multiples of 16 at some lengths only.
@triton.jit(
    do_not_specialize=[
        *("first_token", "T", "q_start"),
        *("gates_b", "gates_t", "gates_h", "gates_c"),
    ]
)
def _combine_kernel(
    partial_ptr,  # [tokens of the chunk, HKV, N, G, DV]
    partial_lse_ptr,  # [tokens of the chunk, HKV, N, G]
    blocks_ptr,  # [B * T, HKV, N / PARTS]
    document_start_ptr,  # [T], or None
    o_ptr,  # [B * T, HKV * G, DV]
    lse_ptr,  # [B * T, HKV * G] float32, log2 units
    gates_ptr,  # [B, T, HKV * G, 3], or None
    o_cmp_ptr,  # [B, T, HKV * G, DV]
    o_win_ptr,  # [B, T, HKV * G, DV]
    out_ptr,  # [B * T, HKV * G, DV]
    gates_b: tl.int64,
    gates_t: tl.int64,
    gates_h: tl.int64,
    gates_c: tl.int64,
    cmp_b: tl.int64,
    cmp_t: tl.int64,
    cmp_h: tl.int64,
    win_b: tl.int64,
    win_t: tl.int64,
    win_h: tl.int64,
    first_token,
    T,
    q_start,
    HKV: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
    GATED: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row = tl.program_id(0)  # (token of the chunk, head)
    local = row // (HKV * G)
    head = row % (HKV * G)
    h = head // G
    token = first_token + local
    # Of slot 0; the next slot is G rows further.
    first = (local.to(tl.int64) * HKV + h) * (N * G) + head % G
    all_slots = tl.arange(0, N_BLOCK)
    seen = seen_slots(
        blocks_ptr, document_start_ptr, token, h, all_slots, T, q_start, HKV, N, BLOCK_SIZE, PARTS,
        VARLEN,
    )  # fmt: skip
    # The content of a slot that was not written is read and discarded: no load then waits
    # for another.
    lse = tl.load(partial_lse_ptr + first + all_slots * G, mask=all_slots < N, other=0.0)
    lse = tl.where(seen, lse, float("-inf"))
    row_max = tl.max(lse, 0)
    finite_max = tl.where(row_max > float("-inf"), row_max, 0.0)
    row_sum = tl.sum(tl.exp2(lse - finite_max), 0)
    # A query without a block has row_sum == 0 and row_max == -inf: output 0, lse -inf.
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    finite_lse = finite_max + tl.log2(row_sum)

    column = tl.arange(0, DV_BLOCK)
    is_value = column < DV
    o = tl.zeros([DV_BLOCK], tl.float32)
    for begin in tl.static_range(0, N, SLOTS):
        slot = begin + tl.arange(0, SLOTS)
        part = tl.load(
            partial_ptr + (first + slot * G)[:, None] * DV + column[None, :],
            mask=(slot < N)[:, None] & is_value[None, :],
            other=0.0,
        )
        seen = seen_slots(
            blocks_ptr, document_start_ptr, token, h, slot, T, q_start, HKV, N, BLOCK_SIZE, PARTS,
            VARLEN,
        )  # fmt: skip
        lse = tl.load(partial_lse_ptr + first + slot * G, mask=slot < N, other=0.0)
        weight = tl.where(seen, tl.exp2(lse - finite_lse), 0.0)
        weighted = part.to(tl.float32) * weight[:, None]
        o += tl.sum(tl.where(seen[:, None], weighted, 0.0), 0)

    at = token.to(tl.int64) * (HKV * G) + head
    tl.store(o_ptr + at * DV + column, o.to(o_ptr.dtype.element_ty), mask=is_value)
    tl.store(lse_ptr + at, row_max + tl.log2(row_sum))
    if GATED:
        b = (token // T).to(tl.int64)
        t = token % T
        gate = gates_ptr + b * gates_b + t * gates_t + head * gates_h
        cmp = o_cmp_ptr + b * cmp_b + t * cmp_t + head * cmp_h + column
        win = o_win_ptr + b * win_b + t * win_t + head * win_h + column
        out = (
            tl.load(gate).to(tl.float32) * tl.load(cmp, mask=is_value, other=0.0).to(tl.float32)
            + tl.load(gate + gates_c).to(tl.float32) * o
            + tl.load(gate + 2 * gates_c).to(tl.float32)
            * tl.load(win, mask=is_value, other=0.0).to(tl.float32)
        )
        tl.store(out_ptr + at * DV + column, out.to(out_ptr.dtype.element_ty), mask=is_value)


def combine(
    partial: Tensor,
    partial_lse: Tensor,
    index: Selected,
    chunk: Chunk,
    o: Tensor,
    lse: Tensor,
    gated: tuple[Tensor, Tensor, Tensor] | None,
    out: Tensor | None,
    *,
    q_start: int,
) -> None:
    """Join the parts of a chunk's queries, into o, lse and, with gates, out.

    Args:
        partial: [tokens of the chunk, HKV, N, G, Dv]; undefined where no part is seen.
        partial_lse: [tokens of the chunk, HKV, N, G], float32, log2 units.
        o: [B, T, HQ, Dv], contiguous, and lse: [B, T, HQ]: written for the chunk's queries.
        gated: The gates [B, T, HQ, 3] and the outputs of compress and window, [B, T, HQ, Dv].
        out: The gated sum, [B, T, HQ, Dv], contiguous.
    """
    HKV, N, G, DV = partial.shape[1:]
    gates, o_cmp, o_win = (None, None, None) if gated is None else gated
    documents = index.document_start
    launch = _launch(
        HKV, G, N, DV, index.block_size, index.parts, documents is not None, gated is not None
    )
    launch(
        (chunk.tokens * HKV * G,),
        (partial, partial_lse, index.blocks, documents, o, lse, gates, o_cmp, o_win, out),
        (
            *strides(gates, 4), *strides(o_cmp, 3), *strides(o_win, 3),
            chunk.first_token, o.shape[1], q_start,
        ),
    )  # fmt: skip


@lru_cache(maxsize=KINDS)
def _launch(
    HKV: int, G: int, N: int, DV: int, block_size: int, parts: int, documents: bool, gated: bool
) -> KernelLaunch:
    N_BLOCK = power_of_2(N)
    return KernelLaunch(
        _combine_kernel, HKV=HKV, G=G, N=N, N_BLOCK=N_BLOCK, DV=DV, DV_BLOCK=power_of_2(DV),
        BLOCK_SIZE=block_size, PARTS=parts, VARLEN=documents, GATED=gated,
        SLOTS=min(SLOTS, N_BLOCK), num_warps=1,
    )  # fmt: skip
