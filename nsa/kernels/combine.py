"""Selected attention, forward, second half: the parts of each query become one.

A program owns one query and KV head: the parts of its N slots lie side by side, [N, G, DV], and
are read once, all in flight together. The gated sum of the three branches (eq. 5) is formed on
the way. It moves bytes and does little else.

Source: Dao et al. 2022, arXiv:2205.14135, section 3.1 (how softmax of parts is joined).
"""

import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.inverse import Chunk, Selected
from nsa.kernels.keymajor import seen_slots, store_rows, strides

COMBINE_ELEMENTS = 256
"""Of a row tile [G, DV], per warp."""


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
    G_BLOCK: tl.constexpr,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
    GATED: tl.constexpr,
):
    local = tl.program_id(0) // HKV
    h = tl.program_id(0) % HKV
    token = first_token + local
    g = tl.arange(0, G_BLOCK)
    is_head = g < G
    slot = tl.arange(0, N_BLOCK)
    seen = seen_slots(
        blocks_ptr, document_start_ptr, token, h, slot, T, q_start, HKV, N, BLOCK_SIZE, PARTS,
        VARLEN,
    )  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * (N * G)
    lse = tl.load(
        partial_lse_ptr + first + slot[:, None] * G + g[None, :],
        mask=seen[:, None] & is_head[None, :],
        other=float("-inf"),
    )  # [N, G]
    row_max = tl.max(lse, 0)
    finite_max = tl.where(row_max > float("-inf"), row_max, 0.0)
    row_sum = tl.sum(tl.exp2(lse - finite_max[None, :]), 0)
    # A query without a block has row_sum == 0 and row_max == -inf: output 0, lse -inf.
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    row_lse = row_max + tl.log2(row_sum)
    finite_lse = finite_max + tl.log2(row_sum)

    column = tl.arange(0, DV_BLOCK)
    is_value = is_head[:, None] & (column < DV)[None, :]
    offsets = g[:, None] * DV + column[None, :]
    o = tl.zeros([G_BLOCK, DV_BLOCK], tl.float32)
    for s in tl.static_range(N):
        there = seen_slots(
            blocks_ptr, document_start_ptr, token, h, s, T, q_start, HKV, N, BLOCK_SIZE, PARTS,
            VARLEN,
        )  # fmt: skip
        at = first + s * G
        weight = tl.exp2(
            tl.load(partial_lse_ptr + at + g, mask=is_head & there, other=float("-inf"))
            - finite_lse
        )
        part = tl.load(partial_ptr + at * DV + offsets, mask=is_value & there, other=0.0)
        o += part.to(tl.float32) * weight[:, None]

    head = h * G + g
    row = token.to(tl.int64) * (HKV * G) + head
    store_rows(o_ptr, row * DV, is_head, o, 0, DV_BLOCK, DV)
    tl.store(lse_ptr + row, row_lse, mask=is_head)
    if GATED:
        b = (token // T).to(tl.int64)
        t = token % T
        gate = gates_ptr + b * gates_b + t * gates_t + head * gates_h
        cmp = o_cmp_ptr + b * cmp_b + t * cmp_t + h * G * cmp_h
        cmp += g[:, None] * cmp_h + column[None, :]
        win = o_win_ptr + b * win_b + t * win_t + h * G * win_h
        win += g[:, None] * win_h + column[None, :]
        g_cmp = tl.load(gate, mask=is_head, other=0.0).to(tl.float32)
        g_sel = tl.load(gate + gates_c, mask=is_head, other=0.0).to(tl.float32)
        g_win = tl.load(gate + 2 * gates_c, mask=is_head, other=0.0).to(tl.float32)
        out = (
            g_cmp[:, None] * tl.load(cmp, mask=is_value, other=0.0).to(tl.float32)
            + g_sel[:, None] * o
            + g_win[:, None] * tl.load(win, mask=is_value, other=0.0).to(tl.float32)
        )
        store_rows(out_ptr, row * DV, is_head, out, 0, DV_BLOCK, DV)


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
    DV_BLOCK, G_BLOCK = triton.next_power_of_2(DV), triton.next_power_of_2(G)
    gates, o_cmp, o_win = (None, None, None) if gated is None else gated
    warps = max(1, min(8, G_BLOCK * DV_BLOCK // COMBINE_ELEMENTS))
    _combine_kernel[(chunk.tokens * HKV,)](
        partial, partial_lse, index.blocks, index.document_start, o, lse, gates, o_cmp, o_win, out,
        *strides(gates, 4), *strides(o_cmp, 3), *strides(o_win, 3),
        chunk.first_token, o.shape[1], q_start, HKV=HKV, G=G, G_BLOCK=G_BLOCK, N=N,
        N_BLOCK=triton.next_power_of_2(N), DV=DV, DV_BLOCK=DV_BLOCK, BLOCK_SIZE=index.block_size,
        PARTS=index.parts, VARLEN=index.document_start is not None, GATED=gated is not None,
        num_warps=warps,
    )  # fmt: skip
