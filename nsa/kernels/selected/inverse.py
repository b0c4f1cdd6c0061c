"""The selection inverted: for each block of keys, the queries that selected it.

A query selects n blocks; the key-major kernels walk over blocks instead, and need the list of
*pairs* (token, slot) of each. Tokens count over the flattened [B, T]; a pair is written
token * N + slot. Lists are cut into *items* of a bounded number of pairs, as every query selects
block 0; an item is the work of one program. Queries are cut into chunks, whose partial results
fit a scratch buffer; a list holds the queries of one chunk.

A *bin* is (sequence or piece of one, KV head, part of a block). Blocks of more than 64 keys are
walked in parts, each with a slot of its own: N = n * PARTS. In packed documents, the bins of a
document start at (start // l' + document) * PARTS: no prefix sum is needed, some stay empty.

Three launches and a memset, without waiting for the device: bins are counted (the counter's value
is the pair's rank in its list), counts become offsets, and pairs and items are written there.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.errors import Unsupported
from nsa.kernels.common.device import ceil_div, power_of_2
from nsa.kernels.common.launch import KINDS, KernelLaunch

MAX_PART = 64
"""Keys of a block that one program holds; larger blocks are walked in parts."""
MAX_BLOCK_SIZE = 128
MAX_PAIRS = 1 << 31
ITEM_ROWS = 2048
"""Most rows (pairs times heads of the group) of an item; each item loads its keys again."""
SMALL_HEAD = 128
"""Channels of a key and a value together up to which loading again costs little; then items have
half the rows, so that more of them fit on the GPU and it finishes more evenly."""
MIN_ITEM_ROWS = 512
"""Smallest items, used where there are few of them."""
FULL_ITEMS = 1024
"""Enough items to fill a large GPU several times."""
ITEM_FIELDS = tl.constexpr(5)
"""first pair, end of pairs, sequence * HKV + KV head, first key, end of keys."""

_PLACES = (
    *("T", "tokens", "q_start", "piece_tokens", "pieces"),
    *("M", "documents", "search_steps"),
)
"""Runtime values of both kernels below that must not become part of what is compiled."""
_TOKENS = 64  # of one program that counts or writes pairs
_SCAN = 4096  # bins of one step of the scan
_LINE = 32
"""Counters that share a cache line. Additions to one line wait for each other, so that each of few
counters gets its own line."""
_SPREAD_COUNTS = 1 << 16
"""Counters, idle ones included, up to which they are spread."""


class Chunk(NamedTuple):
    """Queries of one launch; all fields are known on the host."""

    first_token: int
    tokens: int
    first_bin: int
    end_bin: int
    max_items: int
    """Upper bound; programs past the real number return at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The queries that selected each block, as the key-major kernels read them."""

    blocks: Tensor
    """[B, T, HKV, n], the selection itself, contiguous."""
    pairs: Tensor
    """[B * T * HKV * N] int32, the lists end to end; undefined after the last."""
    items: Tensor
    """[items, ITEM_FIELDS] int32."""
    first_item: Tensor
    """[bins + 1] int32: where the items of a bin start."""
    document_start: Tensor | None
    """[T] int32: first token of a token's document; None without documents."""
    chunks: tuple[Chunk, ...]
    piece_tokens: int
    """Most queries of one sequence in a chunk."""
    block_size: int
    parts: int
    """PARTS above."""

    @property
    def slots(self) -> int:
        """N above."""
        return int(self.blocks.shape[3]) * self.parts


@triton.jit
def _document_of(token, cu_ptr, documents, search_steps):
    """The last document that starts at or before each token, by bisection."""
    document = tl.zeros_like(token)
    step = 1 << search_steps
    for _ in range(search_steps):
        step = step >> 1
        candidate = document + step
        inside = candidate < documents
        start = tl.load(cu_ptr + candidate, mask=inside, other=0)
        document = tl.where(inside & (start <= token), candidate, document)
    return document


@triton.jit
def _bins(
    token,  # [TOKENS, 1], in the flattened [B, T]
    h,
    blocks_ptr,
    cu_ptr,
    T,
    tokens,
    q_start,
    piece_tokens,
    pieces,
    M,
    documents,
    search_steps,
    HKV: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
):
    """Where each pair of a tile [TOKENS, N_PAD] belongs, and whether it sees any key."""
    slot = tl.arange(0, N_PAD)[None, :]
    inside = (token < tokens) & (slot < N)
    row = token.to(tl.int64) * HKV + h
    block = tl.load(blocks_ptr + row * (N // PARTS) + slot // PARTS, mask=inside, other=-1).to(
        tl.int32
    )
    b = token // T
    position = token - b * T
    bin_ = ((b * pieces + position // piece_tokens) * HKV + h) * M
    if VARLEN:
        document = _document_of(token, cu_ptr, documents, search_steps)
        start = tl.load(cu_ptr + document)
        bin_ += (start // BLOCK_SIZE + document) * PARTS
        end = tl.load(cu_ptr + document + 1)
    else:
        start = tl.zeros_like(token)
        end = start + q_start + T
    PART: tl.constexpr = (BLOCK_SIZE + PARTS - 1) // PARTS
    first_key = start + block * BLOCK_SIZE + slot % PARTS * PART
    end_key = tl.minimum(tl.minimum(first_key + PART, start + block * BLOCK_SIZE + BLOCK_SIZE), end)
    valid = inside & (block >= 0) & (first_key <= q_start + position)
    return valid, bin_ + block * PARTS + slot % PARTS, start, b, first_key, end_key


@triton.jit(do_not_specialize=[*_PLACES, "spread", "bins"])
def _count_kernel(
    blocks_ptr,  # [B * T, HKV, N / PARTS]
    cu_ptr,  # [documents + 1] int32, or None
    counts_ptr,  # [bins, spread] int32, zeroed; the first of each row counts
    rank_ptr,  # [B * T, HKV, N] int32: place in its list, -1 where a slot sees no key
    document_start_ptr,  # [T] int32, or None
    T,
    tokens,  # B * T
    q_start,
    piece_tokens,
    pieces,  # of a sequence
    M,  # bins of one sequence and KV head
    documents,
    search_steps,
    spread,
    bins,
    HKV: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
    WRITE_BINS: tl.constexpr,  # store the bin, and `bins` where a slot sees no key, not the rank
    TOKENS: tl.constexpr,
):
    h = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    valid, bin_, start, _, _, _ = _bins(
        token,
        h,
        blocks_ptr,
        cu_ptr,
        T,
        tokens,
        q_start,
        piece_tokens,
        pieces,
        M,
        documents,
        search_steps,
        HKV,
        N,
        N_PAD,
        BLOCK_SIZE,
        PARTS,
        VARLEN,
    )
    rank = tl.atomic_add(counts_ptr + bin_ * spread, 1, mask=valid, sem="relaxed")
    rank = tl.where(valid, bin_, bins) if WRITE_BINS else tl.where(valid, rank, -1)
    slot = tl.arange(0, N_PAD)[None, :]
    row = token.to(tl.int64) * HKV + h
    tl.store(rank_ptr + row * N + slot, rank, mask=(token < tokens) & (slot < N))
    if VARLEN:
        tl.store(document_start_ptr + token, start, mask=(token < tokens) & (h == 0))


@triton.jit(do_not_specialize=["spread", "bins", "item_pairs"])
def _scan_kernel(
    counts_ptr,  # [bins, spread] int32
    first_pair_ptr,  # [bins] int32
    first_item_ptr,  # [bins + 1] int32
    spread,
    bins,
    item_pairs,
    STEP: tl.constexpr,
):
    """One program: sums of what comes before, of pairs and of items."""
    pairs = 0
    items = 0
    for start in range(0, bins, STEP):
        bin_ = start + tl.arange(0, STEP)
        inside = bin_ < bins
        count = tl.load(counts_ptr + bin_ * spread, mask=inside, other=0)
        item_count = (count + item_pairs - 1) // item_pairs
        tl.store(first_pair_ptr + bin_, pairs + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(first_item_ptr + bin_, items + tl.cumsum(item_count, 0) - item_count, mask=inside)
        pairs += tl.sum(count, 0)
        items += tl.sum(item_count, 0)
    tl.store(first_item_ptr + bins, items)


@triton.jit(do_not_specialize=[*_PLACES, "spread", "item_pairs"])
def _write_kernel(
    blocks_ptr,  # [B * T, HKV, N / PARTS]
    cu_ptr,  # [documents + 1] int32, or None
    counts_ptr,  # [bins, spread] int32
    rank_ptr,  # [B * T, HKV, N] int32
    first_pair_ptr,  # [bins] int32
    first_item_ptr,  # [bins + 1] int32
    pairs_ptr,  # [B * T * HKV * N] int32
    items_ptr,  # [items, ITEM_FIELDS] int32
    T,
    tokens,
    q_start,
    piece_tokens,
    pieces,
    M,
    documents,
    search_steps,
    spread,
    item_pairs,
    HKV: tl.constexpr,
    N: tl.constexpr,
    N_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    VARLEN: tl.constexpr,
    TOKENS: tl.constexpr,
):
    h = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    valid, bin_, _, b, first_key, end_key = _bins(
        token,
        h,
        blocks_ptr,
        cu_ptr,
        T,
        tokens,
        q_start,
        piece_tokens,
        pieces,
        M,
        documents,
        search_steps,
        HKV,
        N,
        N_PAD,
        BLOCK_SIZE,
        PARTS,
        VARLEN,
    )
    slot = tl.arange(0, N_PAD)[None, :]
    row = token.to(tl.int64) * HKV + h
    rank = tl.load(rank_ptr + row * N + slot, mask=valid, other=0)
    first = tl.load(first_pair_ptr + bin_, mask=valid, other=0)
    pair = first + rank
    tl.store(pairs_ptr + pair, token * N + slot, mask=valid)

    # The pair that opens an item writes the item.
    opens = valid & (rank % item_pairs == 0)
    item = tl.load(first_item_ptr + bin_, mask=opens, other=0) + rank // item_pairs
    count = tl.load(counts_ptr + bin_ * spread, mask=opens, other=0)
    field = items_ptr + item.to(tl.int64) * ITEM_FIELDS
    tl.store(field, pair, mask=opens)
    tl.store(field + 1, tl.minimum(pair + item_pairs, first + count), mask=opens)
    tl.store(field + 2, b * HKV + h + tl.zeros_like(pair), mask=opens)
    tl.store(field + 3, first_key, mask=opens)
    tl.store(field + 4, end_key, mask=opens)


def invert(
    block_indices: Tensor,
    *,
    keys: int,
    group: int,
    channels: int,
    block_size: int,
    chunk_tokens: int,
    q_start: int = 0,
    cu_seqlens: Tensor | None = None,
    deterministic: bool = False,
) -> Selected:
    """List the queries of every block.

    Args:
        block_indices: [B, T, HKV, n], distinct in a row, in any order; -1 in unused slots. A
            block after the query's own counts as unused.
        keys: S = q_start + T.
        group: G; with `channels` it decides how many pairs make an item.
        channels: Dk + Dv.
        chunk_tokens: Most queries whose partial results fit the scratch buffer.
        deterministic: Lists ascend, and no bin of a chunk has two items. Otherwise the order in
            a list differs from run to run.
    """
    if not 1 <= block_size <= MAX_BLOCK_SIZE:
        raise Unsupported(
            f"triton: takes select blocks of at most {MAX_BLOCK_SIZE} keys, but these have "
            f"{block_size}"
        )
    B, T, HKV, n = block_indices.shape
    parts = -(-block_size // MAX_PART)
    N = n * parts
    tokens, pairs = B * T, B * T * HKV * N
    if pairs >= MAX_PAIRS:
        raise Unsupported(
            f"triton: B * T * HKV * n * parts is {pairs}, but must be less than {MAX_PAIRS}"
        )
    blocks = block_indices.contiguous()
    documents = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    M = (keys // block_size + documents if documents else -(-keys // block_size)) * parts
    pieces = -(-T // chunk_tokens)
    piece_tokens = -(-T // pieces)
    bins = B * pieces * HKV * M
    item_pairs = tokens if deterministic else _item_pairs(pairs, group, channels)
    chunks = _chunks(
        B=B,
        T=T,
        HKV=HKV,
        N=N,
        M=M,
        sequences=max(1, chunk_tokens // T),
        piece_tokens=piece_tokens,
        item_pairs=item_pairs,
        reach=None if documents else (q_start, block_size, parts),
    )

    def ints(*size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.int32, device=blocks.device)

    spread = max(1, min(_LINE, _SPREAD_COUNTS // bins))
    counts = torch.zeros(bins, spread, dtype=torch.int32, device=blocks.device)
    ranks, first_pair, first_item, lists = ints(pairs), ints(bins), ints(bins + 1), ints(pairs)
    items = ints(max(1, pairs // item_pairs + min(pairs, bins)), ITEM_FIELDS.value)
    document_start = ints(T) if documents else None
    grid = (ceil_div(tokens, _TOKENS), HKV)
    places = (T, tokens, q_start, piece_tokens, pieces, M, documents, documents.bit_length())
    count, scan, write = _launches(HKV, N, block_size, parts, documents > 0, deterministic)
    count(grid, (blocks, cu_seqlens, counts, ranks, document_start), (*places, spread, bins))
    scan((1,), (counts, first_pair, first_item), (spread, bins, item_pairs))
    if deterministic:
        ranks = _stable_ranks(ranks, first_pair)
    write(
        grid,
        (blocks, cu_seqlens, counts, ranks, first_pair, first_item, lists, items),
        (*places, spread, item_pairs),
    )
    return Selected(
        blocks=blocks,
        pairs=lists,
        items=items,
        first_item=first_item,
        document_start=document_start,
        chunks=chunks,
        piece_tokens=piece_tokens,
        block_size=block_size,
        parts=parts,
    )


@lru_cache(maxsize=KINDS)
def _launches(
    HKV: int, N: int, block_size: int, parts: int, documents: bool, deterministic: bool
) -> tuple[KernelLaunch, KernelLaunch, KernelLaunch]:
    """Count, scan and write."""
    constants: dict[str, Any] = {
        "HKV": HKV,
        "N": N,
        "N_PAD": power_of_2(N),
        "BLOCK_SIZE": block_size,
        "PARTS": parts,
        "VARLEN": documents,
        "TOKENS": _TOKENS,
    }
    return (
        KernelLaunch(_count_kernel, **constants, WRITE_BINS=deterministic),
        KernelLaunch(_scan_kernel, STEP=_SCAN, num_warps=8),
        KernelLaunch(_write_kernel, **constants),
    )


def _stable_ranks(bins: Tensor, first_pair: Tensor) -> Tensor:
    """The rank of each pair in its bin, in ascending order of pairs; bins are [pairs]."""
    ascending, order = bins.sort(stable=True)
    starts = first_pair.index_select(0, ascending.clamp(max=first_pair.shape[0] - 1))
    place = torch.arange(bins.shape[0], dtype=torch.int32, device=bins.device)
    return torch.empty_like(bins).scatter_(0, order, place - starts)


def _item_pairs(pairs: int, group: int, channels: int) -> int:
    most = ITEM_ROWS // 2 if channels <= SMALL_HEAD else ITEM_ROWS
    rows = min(most, max(MIN_ITEM_ROWS, pairs * group // FULL_ITEMS))
    return max(1, rows // group)


def _chunks(
    *,
    B: int,
    T: int,
    HKV: int,
    N: int,
    M: int,
    sequences: int,
    piece_tokens: int,
    item_pairs: int,
    reach: tuple[int, int, int] | None,
) -> tuple[Chunk, ...]:
    """Chunks of whole sequences, or pieces of one that does not fit.

    Args:
        sequences: Sequences of a chunk, if a sequence is one piece.
        reach: q_start, l' and PARTS, to bound the blocks that queries of a piece can see; None
            bounds them by M.
    """
    chunks = []
    if piece_tokens >= T:
        bounds = [(b, min(B, b + sequences), 0, T) for b in range(0, B, sequences)]
    else:
        starts = range(0, T, piece_tokens)
        bounds = [(b, b + 1, t, min(T, t + piece_tokens)) for b in range(B) for t in starts]
    first_bin = 0
    for b, end_b, t, end_t in bounds:
        count = end_b - b
        seen = M
        if reach is not None:
            q_start, block_size, parts = reach
            seen = min(M, -(-(q_start + end_t) // block_size) * parts)
        tokens = count * (end_t - t)
        pairs = tokens * HKV * N
        end_bin = first_bin + count * HKV * M
        chunks.append(
            Chunk(
                first_token=b * T + t,
                tokens=tokens,
                first_bin=first_bin,
                end_bin=end_bin,
                max_items=pairs // item_pairs + min(pairs, count * HKV * seen),
            )
        )
        first_bin = end_bin
    return tuple(chunks)
