"""Top-n of one query: scores of the compressed blocks -> the select blocks it attends to.

A program takes a chunk of select blocks: their importance, and the best n of them. The program
that finishes last in its group merges the chunks' candidates. A candidate is one integer, its
importance above its inverted index, so that comparing integers compares importance first and
prefers the lower index in a tie. All are compared with all, which gives the place of each at once;
a sorting network would take tens of dependent steps.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 8 to 11; nsa.reference.top_blocks.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig
from nsa.kernels.common.device import ceil_div, padded, power_of_2

CHUNK = 128
"""Select blocks of a program, and candidates that are merged at once: a power of two."""
SPLITS = 64
"""Pieces of the log-sum-exp read at once."""
LARGEST_UNIT = 16
"""Compressed blocks that the compress launch adds up before it writes them, at most."""

_LAST_INDEX = 0x7FFFFFFF
_ALWAYS = 0x7F800000  # the bits of +inf


@dataclass(frozen=True, slots=True)
class Shares:
    """How compressed blocks map to select blocks, and are added up before they are written."""

    unit: int
    """Compressed blocks added up: a power of two that divides `per_block`."""
    per_block: int
    """Compressed blocks that begin in a select block (l' / d)."""
    length: int
    """Strides of a compressed block (l / d)."""
    span: int
    """Select blocks that one compressed block reaches, from the one it begins in."""

    @staticmethod
    def of(config: NSAConfig) -> "Shares":
        per_block = config.select_block_size // config.compress_stride
        length = config.compress_block_size // config.compress_stride
        unit = min(per_block & -per_block, LARGEST_UNIT)
        return Shares(unit, per_block, length, (per_block + length - 2) // per_block + 1)


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
def _rank(key):
    """How many keys are larger than each. Only keys of -1 may be equal."""
    return tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)


@triton.jit(do_not_specialize=["pieces", "piece_blocks", "blocks", "units", "chunks"])
def _choose_kernel(
    shares_ptr,  # [B, HKV, G, SPAN, units], float32, log2 units
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    lengths_ptr,  # [B]
    candidates_ptr,  # [B, HKV, chunks, N_BLOCK], int64
    arrived_ptr,  # [B, HKV], int32, 0
    chosen_ptr,  # [B, HKV, N], int32
    pieces,
    piece_blocks,  # compressed blocks of a piece
    blocks,  # compressed blocks that the cache has room for
    units,  # runs of UNIT such blocks
    chunks,
    HKV: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    N: tl.constexpr,
    N_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,  # l
    STRIDE: tl.constexpr,  # d
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # l' / d
    SPAN: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    LAST_INDEX: tl.constexpr,
    ALWAYS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    chunk = tl.program_id(0)
    b_h = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths_ptr + b_h // HKV)
    own = (tl.maximum(length, 1) - 1) // (PER_BLOCK * STRIDE)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    if chunk * CHUNK <= own:
        visible = tl.maximum(length - SIZE + STRIDE, 0) // STRIDE
        visible = tl.minimum(visible, blocks)
        live_units = (visible + UNIT - 1) // UNIT
        live_pieces = (visible + piece_blocks - 1) // piece_blocks
        lse = _log_sum_exp(part_lse_ptr + b_h * pieces * G, live_pieces, G, G_BLOCK, SPLITS)
        slot = tl.arange(0, CHUNK)
        select_block = chunk * CHUNK + slot
        head = tl.arange(0, G_BLOCK)
        importance = tl.zeros([CHUNK], tl.float32)
        for behind in tl.static_range(SPAN):
            shares_head = shares_ptr + ((b_h * G + head) * SPAN + behind) * units
            for i in tl.static_range(PER_BLOCK // UNIT):
                unit = (select_block - behind) * (PER_BLOCK // UNIT) + i
                mask = (head < G)[:, None] & ((unit >= 0) & (unit < live_units))[None, :]
                pointers = shares_head[:, None] + unit[None, :]
                share = tl.load(pointers, mask=mask, other=float("-inf"))
                importance += tl.sum(tl.exp2(share - lse[:, None]), 0)

        # Importance is not negative, so its bits ascend with it.
        rank = importance.to(tl.int32, bitcast=True)
        always = (select_block < INITIAL) | (select_block > own - LOCAL)
        rank = tl.where(always, ALWAYS, rank)
        key = (rank.to(tl.int64) << 32) | (LAST_INDEX - select_block).to(tl.int64)
        key = tl.where(select_block <= own, key, -1)

        live_chunks = own // CHUNK + 1
        last = live_chunks == 1
        if live_chunks > 1:
            candidates = candidates_ptr + b_h * chunks * N_BLOCK
            # The keys of no block, all -1, are the last of the chunk: their slots are their ranks.
            place = tl.where(key >= 0, _rank(key), slot)
            tl.store(candidates + chunk * N_BLOCK + place, key, mask=place < N_BLOCK)
            # All threads have written before one says so, and what it says is ordered after.
            tl.debug_barrier()
            before = tl.atomic_add(arrived_ptr + b_h, 1, sem="acq_rel", scope="gpu")
            last = before == live_chunks - 1
            if last:
                tl.debug_barrier()
                count = live_chunks * N_BLOCK
                begin = count * 0
                while begin + CHUNK < count:
                    # The best of these take the places of the last of them, which the next round
                    # reads first.
                    key = tl.load(candidates + begin + slot)
                    place = tl.where(key >= 0, _rank(key), CHUNK)
                    begin += CHUNK - N_BLOCK
                    tl.debug_barrier()
                    tl.store(candidates + begin + place, key, mask=place < N_BLOCK)
                    tl.debug_barrier()
                key = tl.load(candidates + begin + slot, mask=begin + slot < count, other=-1)
        if last:
            index = LAST_INDEX - (key & LAST_INDEX).to(tl.int32)
            best = (_rank(key) < N) & (key >= 0)
            index = tl.where(best, index, LAST_INDEX)
            place = tl.sum((index[:, None] < index[None, :]).to(tl.int32), 0)
            chosen = chosen_ptr + b_h * N
            tl.store(chosen + place, index, mask=best)
            tl.store(chosen + slot, -1, mask=(slot > own) & (slot < N))


def choose_blocks(
    shares: Tensor,
    part_lse: Tensor,
    lengths: Tensor,
    arrived: Tensor,
    *,
    config: NSAConfig,
    heads: int,
    blocks: int,
    capacity: int,
    piece_blocks: int,
    overlap: bool,
) -> Tensor:
    """Launch the kernel.

    Args:
        shares: [B * HKV, G, span, units], float32, log2 units: the contribution of every unit of
            compressed blocks to the select blocks that it reaches; visible blocks only.
        part_lse: [B * HKV, pieces, G], float32, log2 units; the first pieces are those of the
            compressed blocks, `piece_blocks` of them each.
        lengths: [B], int32: tokens held, the query's own included.
        arrived: [B * HKV], int32, zeros.
        heads: HKV.
        blocks: Compressed blocks that the cache has room for.
        capacity: Tokens that the cache has room for.
        overlap: Start before the previous launch has ended.

    Returns:
        [B * HKV, n], int32: ascending, -1 at the end where there are fewer.
    """
    groups, G, span, units = shares.shape
    how = Shares.of(config)
    n_block = power_of_2(config.num_blocks)
    chunk = max(CHUNK, 2 * n_block)
    chunks = ceil_div(config.select_length(capacity), chunk)
    candidates = torch.empty(groups, chunks, n_block, dtype=torch.int64, device=shares.device)
    chosen = torch.empty(groups, config.num_blocks, dtype=torch.int32, device=shares.device)
    _choose_kernel[(chunks, groups)](
        shares,
        part_lse,
        lengths,
        candidates,
        arrived,
        chosen,
        part_lse.shape[1],
        piece_blocks,
        blocks,
        units,
        chunks,
        HKV=heads,
        G=G,
        G_BLOCK=padded(G),
        N=config.num_blocks,
        N_BLOCK=n_block,
        CHUNK=chunk,
        SPLITS=SPLITS,
        SIZE=config.compress_block_size,
        STRIDE=config.compress_stride,
        UNIT=how.unit,
        PER_BLOCK=how.per_block,
        SPAN=span,
        INITIAL=INITIAL_BLOCKS,
        LOCAL=LOCAL_BLOCKS,
        LAST_INDEX=_LAST_INDEX,
        ALWAYS=_ALWAYS,
        OVERLAP=overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return chosen
