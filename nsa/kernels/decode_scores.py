"""Top-n of one query: scores of the compressed blocks -> the select blocks it attends to.

A program takes a chunk of select blocks: their importance, and the best n of them. The program
that finishes last in its group merges the chunks' candidates. A candidate is one integer, its
importance above its inverted index, so that comparing integers compares importance first and
lets the lower index win a tie.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 8 to 11; nsa.reference.top_blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig
from nsa.kernels.common import padded

CHUNK = 64
"""Select blocks of a program."""
CANDIDATES = 256
"""Candidates merged at once."""
SPLITS = 16
"""Pieces of the log-sum-exp read at once."""

_LAST_INDEX = 0x7FFFFFFF
_ALWAYS = 0x7F800000  # the bits of +inf
_MAX_UNROLLED = 16


@triton.jit
def _log_sum_exp(
    part_lse_ptr,  # the group's pieces, [pieces, G]
    pieces,  # that hold visible blocks
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Log2 of each head's softmax denominator, [G_BLOCK]; 0 where no block is visible."""
    head = tl.arange(0, G_BLOCK)
    largest = tl.full([G_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([G_BLOCK], tl.float32)
    for begin in tl.range(0, pieces, SPLITS):
        piece = begin + tl.arange(0, SPLITS)
        mask = (piece < pieces)[:, None] & (head < G)[None, :]
        offsets = piece[:, None] * G + head[None, :]
        lse = tl.load(part_lse_ptr + offsets, mask=mask, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        total = total * tl.exp2(largest - finite) + tl.sum(tl.exp2(lse - finite[None, :]), 0)
        largest = new_largest
    return tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), 0.0)


@triton.jit
def _shared_probability(
    scores_row,  # [G_BLOCK, 1] pointers: the heads' scores
    lse,  # [G_BLOCK]
    select_block,  # [CHUNK]
    visible,
    offset,  # of the compressed block from the first that begins in the select block
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
):
    """What one compressed block adds to each select block: strides shared, times probability."""
    block = select_block * PER_BLOCK + offset
    seen = (block >= 0) & (block < visible)
    mask = (tl.arange(0, G_BLOCK) < G)[:, None] & seen[None, :]
    scores = tl.load(scores_row + block[None, :], mask=mask, other=float("-inf"))
    first = block - select_block * PER_BLOCK  # the offset, as tensor even where the loop unrolls
    shared = tl.minimum(first + LENGTH, PER_BLOCK) - tl.maximum(first, 0)
    return shared * tl.sum(tl.exp2(scores - lse[:, None]), 0)


@triton.jit(do_not_specialize=["pieces", "piece_blocks", "blocks", "chunks"])
def _choose_kernel(
    scores_ptr,  # [B, HKV, G, blocks], float32, log2 units
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    lengths_ptr,  # [B]
    candidates_ptr,  # [B, HKV, chunks, N_BLOCK], int64
    arrived_ptr,  # [B, HKV], int32, 0
    chosen_ptr,  # [B, HKV, N], int32
    pieces,
    piece_blocks,  # compressed blocks of a piece
    blocks,  # compressed blocks that the cache has room for
    chunks,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,  # l
    STRIDE: tl.constexpr,  # d
    PER_BLOCK: tl.constexpr,  # l' / d
    LENGTH: tl.constexpr,  # l / d
    UNROLLED: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    LAST_INDEX: tl.constexpr,
    ALWAYS: tl.constexpr,
):
    chunk = tl.program_id(0)
    b_h = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b_h // HKV)
    own = (tl.maximum(length, 1) - 1) // (PER_BLOCK * STRIDE)
    if chunk * CHUNK <= own:
        visible = tl.maximum(length - SIZE + STRIDE, 0) // STRIDE
        visible = tl.minimum(visible, blocks)
        live = (visible + piece_blocks - 1) // piece_blocks
        lse = _log_sum_exp(part_lse_ptr + b_h * pieces * G, live, G, G_BLOCK, SPLITS)
        select_block = chunk * CHUNK + tl.arange(0, CHUNK)
        scores_row = scores_ptr + (b_h * G + tl.arange(0, G_BLOCK))[:, None] * blocks
        importance = tl.zeros([CHUNK], tl.float32)
        if UNROLLED:
            for offset in tl.static_range(1 - LENGTH, PER_BLOCK):
                importance += _shared_probability(
                    scores_row, lse, select_block, visible, offset, G, G_BLOCK, PER_BLOCK, LENGTH
                )
        else:
            for offset in tl.range(1 - LENGTH, PER_BLOCK):
                importance += _shared_probability(
                    scores_row, lse, select_block, visible, offset, G, G_BLOCK, PER_BLOCK, LENGTH
                )

        # Importance is not negative, so its bits ascend with it.
        rank = importance.to(tl.int32, bitcast=True)
        always = (select_block < INITIAL) | (select_block > own - LOCAL)
        rank = tl.where(always, ALWAYS, rank)
        key = (rank.to(tl.int64) << 32) | (LAST_INDEX - select_block).to(tl.int64)
        key = tl.where(select_block <= own, key, -1)
        slot = tl.arange(0, N_BLOCK)
        candidates = candidates_ptr + b_h * chunks * N_BLOCK
        tl.store(candidates + chunk * N_BLOCK + slot, tl.topk(key, N_BLOCK))

        # All threads have written before one of them says so, and what it says is ordered after.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + b_h, 1, sem="acq_rel", scope="gpu")
        live_chunks = own // CHUNK + 1
        if before == live_chunks - 1:
            tl.debug_barrier()
            count = live_chunks * N_BLOCK
            best = tl.full([N_BLOCK], -1, tl.int64)
            for begin in tl.range(0, count, CANDIDATES):
                i = begin + tl.arange(0, CANDIDATES)
                some = tl.topk(tl.load(candidates + i, mask=i < count, other=-1), N_BLOCK)
                best = tl.topk(tl.reshape(tl.join(best, some), [2 * N_BLOCK]), N_BLOCK)
            index = LAST_INDEX - (best & LAST_INDEX).to(tl.int32)
            index = tl.where((best >= 0) & (slot < N), index, LAST_INDEX)
            index = tl.sort(index)
            index = tl.where(index == LAST_INDEX, -1, index)
            tl.store(chosen_ptr + b_h * N + slot, index, mask=slot < N)


def choose_blocks(
    scores: Tensor,
    part_lse: Tensor,
    lengths: Tensor,
    arrived: Tensor,
    *,
    config: NSAConfig,
    heads: int,
    capacity: int,
    piece_blocks: int,
) -> Tensor:
    """Launch the kernel.

    Args:
        scores: [B * HKV, G, blocks], float32, scale * q . k in log2 units; visible blocks only.
        part_lse: [B * HKV, pieces, G], float32, log2 units; the first pieces are those of the
            compressed blocks, `piece_blocks` of them each.
        lengths: [B], int32: tokens held, the query's own included.
        arrived: [B * HKV], int32, zeros.
        heads: HKV.
        capacity: Tokens that the cache has room for.

    Returns:
        [B * HKV, n], int32: ascending, -1 at the end where there are fewer.
    """
    groups, G, blocks = scores.shape
    n_block = int(triton.next_power_of_2(config.num_blocks))
    chunk = max(CHUNK, n_block)
    chunks = triton.cdiv(config.select_length(capacity), chunk)
    candidates = torch.empty(groups, chunks, n_block, dtype=torch.int64, device=scores.device)
    chosen = torch.empty(groups, config.num_blocks, dtype=torch.int32, device=scores.device)
    per_block = config.select_block_size // config.compress_stride
    length = config.compress_block_size // config.compress_stride
    _choose_kernel[(chunks, groups)](
        scores,
        part_lse,
        lengths,
        candidates,
        arrived,
        chosen,
        part_lse.shape[1],
        piece_blocks,
        blocks,
        chunks,
        HKV=heads,
        G=G,
        G_BLOCK=padded(G),
        N=config.num_blocks,
        N_BLOCK=n_block,
        CHUNK=chunk,
        CANDIDATES=max(CANDIDATES, n_block),
        SPLITS=SPLITS,
        SIZE=config.compress_block_size,
        STRIDE=config.compress_stride,
        PER_BLOCK=per_block,
        LENGTH=length,
        UNROLLED=per_block + length - 1 <= _MAX_UNROLLED,
        INITIAL=INITIAL_BLOCKS,
        LOCAL=LOCAL_BLOCKS,
        LAST_INDEX=_LAST_INDEX,
        ALWAYS=_ALWAYS,
        num_warps=4,
    )
    return chosen
