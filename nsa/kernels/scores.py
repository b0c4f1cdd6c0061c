"""Which blocks a query selects: scores and top-n, in memory linear in T.

Two kernels for each chunk of queries. The first owns a tile of queries and compressed blocks,
holds the keys, and walks the G heads of the group: with the `lse` of the compress branch it adds up
probabilities in registers (eq. 8 and 10), and writes only their sums over select blocks (eq. 9), to
a scratch of fixed size. The second takes the n best blocks of each query (eq. 11).

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 8 to 11. In the paper stride is d, SELECT l'.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig, Positions
from nsa.errors import Unsupported
from nsa.kernels.common.device import (
    LOG2_E,
    MAX_GRID_Y,
    Architecture,
    architecture,
    ceil_div,
    head_blocks,
    last_contiguous,
    power_of_2,
)
from nsa.kernels.common.launch import KINDS, KernelLaunch
from nsa.kernels.common.tiles import aligned, has_bulk_copies, load_tile, sources, units

SCRATCH_BYTES = 1 << 27
"""Most memory for the importances of one chunk of queries."""
TOP_ROWS = 1
TOP_COLUMNS = 1024
"""Queries and select blocks that a program of the top-n kernel handles together."""


class ScoreTile(NamedTuple):
    """Queries and compressed blocks of a tile, warps of a program, stages of its pipeline."""

    queries: int
    blocks: int
    warps: int
    stages: int


def score_tile(arch: Architecture, head: int) -> ScoreTile:
    """For keys of at most `head`."""
    if arch == "sm_80":
        return ScoreTile(64, 128 if head <= 192 else 64, 4, 2)
    return ScoreTile(64, 128, 4, 3 if head <= 192 else 2)


@triton.jit
def _locate(tile, cu_seqlens_ptr, cu_tiles_ptr, cu_blocks_ptr, T, tiles, documents,
            DOCUMENTS: tl.constexpr):  # fmt: skip
    """Of a tile of queries: batch entry, its sequence's first query and first block, the tile's
    number in it, and how many queries and blocks the sequence has."""
    if DOCUMENTS:
        # The last document whose tiles begin at or before this one.
        low, high = tile * 0, documents
        while high - low > 1:
            centre = (low + high) // 2
            if tl.load(cu_tiles_ptr + centre) <= tile:
                low = centre
            else:
                high = centre
        start = tl.load(cu_seqlens_ptr + low)
        first_block = tl.load(cu_blocks_ptr + low)
        length = tl.load(cu_seqlens_ptr + low + 1) - start
        blocks = tl.load(cu_blocks_ptr + low + 1) - first_block
        return tile * 0, start, first_block, tile - tl.load(cu_tiles_ptr + low), length, blocks
    return tile // tiles, tile * 0, tile * 0, tile % tiles, T, tile * 0


@triton.jit(
    do_not_specialize=[
        *("first_tile", "T", "N", "q_start", "tiles", "documents", "columns"),
        *("lse_batch", "lse_token", "lse_head"),  # multiples of 16 at some lengths only
        *("q_batch", "q_token", "q_head"),
    ]
)
def _score_kernel(
    q1_tiles,  # of [B, T, HKV * G, D]: QUERIES tokens of a head, D1 channels
    q2_tiles,  # D2 channels
    k_ptr,  # [B, N, HKV, D]
    lse_ptr,  # [B, T, HKV * G], float32, log2 units
    scratch_ptr,  # [chunk of tiles, HKV, SPILL + 1, QUERIES, columns], float32
    cu_seqlens_ptr,
    cu_tiles_ptr,
    cu_blocks_ptr,
    scale,  # times log2(e)
    first_tile,
    T,
    N,
    q_start,
    tiles,  # of queries in a sequence
    documents,
    columns,
    lse_batch: tl.int64,
    lse_token: tl.int64,
    lse_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    q_batch,  # see `tiles.units`
    q_token,
    q_head,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    STRIDE: tl.constexpr,  # d
    SPAN: tl.constexpr,  # l
    SELECT: tl.constexpr,  # l'
    SPILL: tl.constexpr,  # select blocks that a compressed block reaches into, after its own
    DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCKS: tl.constexpr,
    BULK: tl.constexpr,
):
    PER_SELECT: tl.constexpr = SELECT // STRIDE
    STRIDES: tl.constexpr = SPAN // STRIDE
    COLUMNS: tl.constexpr = BLOCKS // PER_SELECT

    local_tile = tl.program_id(1)
    b, start, first_block, tile, length, blocks = _locate(
        first_tile + local_tile, cu_seqlens_ptr, cu_tiles_ptr, cu_blocks_ptr, T, tiles, documents,
        DOCUMENTS,
    )  # fmt: skip
    if not DOCUMENTS:
        blocks = N
    h = tl.program_id(2)
    query = tile * QUERIES + tl.arange(0, QUERIES)
    valid = query < length
    position = query + q_start
    last_position = tl.minimum(tile * QUERIES + QUERIES, length) - 1 + q_start
    column = tl.program_id(0) * COLUMNS
    # Past the last query's own block, and past the last tile of a document's: never read.
    if (column * SELECT > last_position) | (tile * QUERIES >= length):
        return

    block = column * PER_SELECT + tl.arange(0, BLOCKS)
    acc = tl.zeros([QUERIES, BLOCKS], tl.float32)
    if column * SELECT + SPAN - 1 <= last_position:
        columns1 = tl.arange(0, D1)
        exists = block < blocks
        k_rows = (first_block + block).to(tl.int64)[:, None] * k_token
        k_base = k_ptr + b.to(tl.int64) * k_batch + h * k_head
        k1 = tl.load(
            k_base + k_rows + columns1[None, :],
            mask=exists[:, None] & (columns1 < D)[None, :],
            other=0.0,
        )
        if D2 > 0:
            columns2 = D1 + tl.arange(0, D2)
            k2 = tl.load(
                k_base + k_rows + columns2[None, :],
                mask=exists[:, None] & (columns2 < D)[None, :],
                other=0.0,
            )
        token = start + tile * QUERIES
        q_strides = (q_batch, q_token, q_head)
        lse_rows = lse_ptr + b.to(tl.int64) * lse_batch + (start + query).to(tl.int64) * lse_token
        for g in tl.range(G):
            q1 = load_tile(
                q1_tiles, q_strides, b, token, h * G + g, T, 0, D1, D, QUERIES, True, BULK
            )
            s = tl.dot(q1, tl.trans(k1))
            if D2 > 0:
                q2 = load_tile(
                    q2_tiles, q_strides, b, token, h * G + g, T, D1, D2, D, QUERIES, True, BULK
                )
                s = tl.dot(q2, tl.trans(k2), s)
            lse = tl.load(lse_rows + (h * G + g) * lse_head, mask=valid, other=0.0)
            acc += tl.exp2(s * scale - lse[:, None])
        # Sums over blocks that the query does not see are of no account, and dropped here.
        end = block * STRIDE + SPAN - 1
        acc = tl.where((end[None, :] <= position[:, None]) & exists[None, :], acc, 0.0)

    offset = tl.arange(0, PER_SELECT)
    grouped = tl.reshape(acc, [QUERIES, COLUMNS, PER_SELECT])
    out_row = (local_tile.to(tl.int64) * HKV + h) * (SPILL + 1)
    out_query = tl.arange(0, QUERIES)
    out_column = column + tl.arange(0, COLUMNS)
    for spill in tl.static_range(SPILL + 1):
        # Strides that compressed block p*j + offset shares with select block j + spill.
        low = tl.maximum(offset, spill * PER_SELECT)
        high = tl.minimum(offset + STRIDES, (spill + 1) * PER_SELECT)
        weight = tl.maximum(high - low, 0).to(tl.float32)
        importance = tl.sum(grouped * weight[None, None, :], 2)
        pointers = scratch_ptr + ((out_row + spill) * QUERIES + out_query)[:, None] * columns
        tl.store(pointers + out_column[None, :], importance, mask=(out_column < columns)[None, :])


@triton.jit(do_not_specialize=["first_tile", "T", "q_start", "tiles", "documents", "columns"])
def _top_kernel(
    scratch_ptr,  # [chunk of tiles, HKV, SPILL + 1, QUERIES, columns], float32
    indices_ptr,  # [B, T, HKV, N_SELECT], int32
    cu_seqlens_ptr,
    cu_tiles_ptr,
    cu_blocks_ptr,
    first_tile,
    T,
    q_start,
    tiles,
    documents,
    columns,
    HKV: tl.constexpr,
    SELECT: tl.constexpr,
    N_SELECT: tl.constexpr,
    N_PADDED: tl.constexpr,
    SPILL: tl.constexpr,
    INITIAL: tl.constexpr,
    LOCAL: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    NONE: tl.constexpr = 2147483647
    FREE: tl.constexpr = N_SELECT - INITIAL - LOCAL
    LANES: tl.constexpr = 32
    local_tile = tl.program_id(1)
    b, start, _, tile, length, _ = _locate(
        first_tile + local_tile, cu_seqlens_ptr, cu_tiles_ptr, cu_blocks_ptr, T, tiles, documents,
        DOCUMENTS,
    )  # fmt: skip
    h = tl.program_id(2)
    in_tile = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query = tile * QUERIES + in_tile
    valid = query < length
    own = tl.where(valid, (query + q_start) // SELECT, -1)
    slot = tl.arange(0, N_PADDED)
    best = tl.full([ROWS, N_PADDED], -1.0, tl.float32)
    index = tl.full([ROWS, N_PADDED], NONE, tl.int32)

    row = ((local_tile.to(tl.int64) * HKV + h) * ((SPILL + 1) * QUERIES) + in_tile) * columns
    spill_step = QUERIES * columns
    step = tl.arange(0, COLUMNS // LANES)
    lane = tl.arange(0, LANES)
    for begin in tl.range(0, tl.max(own, 0) - LOCAL + 1, COLUMNS):
        # Columns fall into groups, one a lane. A round takes the best of the groups' best, and
        # then looks again only at the group that lost it.
        block = begin + step[None, :, None] * LANES + lane[None, None, :]
        x = _importance(
            scratch_ptr + row[:, None, None], block, own[:, None, None], spill_step, SPILL, INITIAL,
            LOCAL,
        )  # fmt: skip
        value = tl.max(x, 1)  # [ROWS, LANES]
        place = tl.min(tl.where(x == value[:, None, :], block, NONE), 1)
        new_best = tl.full([ROWS, N_PADDED], -1.0, tl.float32)
        new_index = tl.full([ROWS, N_PADDED], NONE, tl.int32)
        for k in tl.range(FREE):
            top = tl.max(value, 1)
            at = tl.min(tl.where(value == top[:, None], place, NONE), 1)
            old_top = tl.max(best, 1)
            old_at = tl.min(tl.where(best == old_top[:, None], index, NONE), 1)
            # Earlier columns are lower blocks, to which a tie goes.
            take_old = old_top >= top
            chosen_at = tl.where(take_old, old_at, at)
            here = (slot == k)[None, :]
            new_best = tl.where(here, tl.where(take_old, old_top, top)[:, None], new_best)
            new_index = tl.where(here, chosen_at[:, None], new_index)
            best = tl.where(index == chosen_at[:, None], -1.0, best)
            group = at % LANES
            rest = begin + step[None, :] * LANES + group[:, None]
            y = _importance(
                scratch_ptr + row[:, None], rest, own[:, None], spill_step, SPILL, INITIAL, LOCAL
            )
            later = (y < top[:, None]) | ((y == top[:, None]) & (rest > at[:, None]))
            y = tl.where(later, y, -1.0)
            next_top = tl.max(y, 1)
            next_at = tl.min(tl.where(y == next_top[:, None], rest, NONE), 1)
            update = (lane[None, :] == group[:, None]) & (take_old == 0)[:, None]
            value = tl.where(update, next_top[:, None], value)
            place = tl.where(update, next_at[:, None], place)
        best = new_best
        index = tl.where(new_best >= 0, new_index, NONE)

    for i in tl.static_range(INITIAL):
        forced = tl.where(own - LOCAL >= i, i, NONE)  # else it is one of the local ones
        index = tl.where((slot == FREE + i)[None, :], forced[:, None], index)
    for i in tl.static_range(LOCAL):
        forced = tl.where(own >= i, own - i, NONE)
        index = tl.where((slot == FREE + INITIAL + i)[None, :], forced[:, None], index)

    # Ascending: a block's place is how many of the chosen lie below it; the unused come last.
    used = index != NONE
    below = index[:, None, :] < index[:, :, None]
    earlier = (index[:, None, :] == index[:, :, None]) & (slot[None, None, :] < slot[None, :, None])
    rank = tl.sum((below | earlier).to(tl.int32), 2)
    out_row = ((b.to(tl.int64) * T + start + query) * HKV + h) * N_SELECT
    tl.store(
        indices_ptr + out_row[:, None] + rank,
        tl.where(used, index, -1),
        mask=valid[:, None] & (rank < N_SELECT),
    )


@triton.jit
def _importance(
    ptr, block, own, spill_step, SPILL: tl.constexpr, INITIAL: tl.constexpr, LOCAL: tl.constexpr
):
    """Importance of select blocks (eq. 9), -1 for those that are not free to be chosen."""
    free = (block >= INITIAL) & (block <= own - LOCAL)
    x = tl.load(ptr + block, mask=free, other=-1.0)
    for spill in tl.static_range(1, SPILL + 1):
        x += tl.load(
            ptr + spill * spill_step + block - spill, mask=free & (block >= spill), other=0.0
        )
    return x


def select_blocks(
    q: Tensor, k_cmp: Tensor, lse: Tensor, at: Positions, *, tile: ScoreTile | None = None
) -> Tensor:
    """Select n blocks of keys for each query and KV head.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp: [B, N, HKV, Dk].
        lse: [B, T, HQ], float32, log2 units, any strides: of the compress branch on the same
            q and k_cmp.

    Returns:
        Block indices, int32, [B, T, HKV, n], ascending, -1 at the end.

    Raises:
        Unsupported: l' / d is not a power of two.
    """
    B, T, HQ, D = q.shape
    N, HKV = k_cmp.shape[1:3]
    config, q_start, cu_seqlens = at.config, at.q_start, at.cu_seqlens
    per_select = config.select_block_size // config.compress_stride
    if per_select & (per_select - 1):
        raise Unsupported(
            f"triton: scores need select_block_size / compress_stride to be a power of two, but it "
            f"is {config.select_block_size} / {config.compress_stride} = {per_select}; the `eager` "
            "route has no such limit"
        )
    q, k_cmp = aligned(q), last_contiguous(k_cmp)
    score, top, tile, blocks, spill, bulk = _launches(
        architecture(q.device), config, HKV, HQ // HKV, D, cu_seqlens is not None, tile
    )
    columns = config.select_length(q_start + T)
    tiles = ceil_div(T, tile.queries)
    documents, total = 0, B * tiles
    cu_tiles = cu_blocks = cu_seqlens
    if cu_seqlens is not None:
        documents = cu_seqlens.shape[0] - 1
        total = tiles + documents  # at most: each document ends within a tile of its own
        cu_tiles, cu_blocks = _prefix_sums(cu_seqlens, config, tile.queries)
    indices = torch.empty(B, T, HKV, config.num_blocks, dtype=torch.int32, device=q.device)
    row_bytes = HKV * (spill + 1) * tile.queries * columns * 4
    chunk = max(1, min(total, MAX_GRID_Y, SCRATCH_BYTES // row_bytes))
    scratch = torch.empty(
        chunk, HKV, spill + 1, tile.queries, columns, dtype=torch.float32, device=q.device
    )
    D1, D2 = head_blocks(D)
    queries = sources(q, tile.queries, D1, D2, bulk=bulk)
    tables = (
        (indices, indices, indices) if cu_seqlens is None else (cu_seqlens, cu_tiles, cu_blocks)
    )
    strides = (*lse.stride(), *k_cmp.stride()[:3], *units(q, bulk=bulk))
    for first in range(0, total, chunk):
        count = min(chunk, total - first)
        seen = columns
        if B == 1 and cu_seqlens is None:  # no query of this chunk sees further
            seen = config.select_length(q_start + min(T, (first + count) * tile.queries))
        score(
            (ceil_div(seen * per_select, blocks), count, HKV),
            (*queries, k_cmp, lse, scratch, *tables),
            (at.scale * LOG2_E, first, T, N, q_start, tiles, documents, columns, *strides),
        )
        top(
            (ceil_div(tile.queries, TOP_ROWS), count, HKV),
            (scratch, indices, *tables),
            (first, T, q_start, tiles, documents, columns),
        )
    return indices


@lru_cache(maxsize=KINDS)
def _launches(
    arch: Architecture,
    config: NSAConfig,
    HKV: int,
    G: int,
    D: int,
    documents: bool,
    tile: ScoreTile | None,
) -> tuple[KernelLaunch, KernelLaunch, ScoreTile, int, int, bool]:
    """Both kernels; the tile, its BLOCKS, SPILL, and whether tiles have descriptors."""
    bulk = has_bulk_copies(arch)
    tile = score_tile(arch, D) if tile is None else tile
    per_select = config.select_block_size // config.compress_stride
    blocks = max(tile.blocks, per_select)  # both are powers of two
    spill = (
        per_select - 1 + config.compress_block_size // config.compress_stride - 1
    ) // per_select
    D1, D2 = head_blocks(D)
    sizes: dict[str, Any] = {
        "HKV": HKV,
        "SELECT": config.select_block_size,
        "SPILL": spill,
        "DOCUMENTS": documents,
        "QUERIES": tile.queries,
    }
    score = KernelLaunch(
        _score_kernel, G=G, D=D, D1=D1, D2=D2, STRIDE=config.compress_stride,
        SPAN=config.compress_block_size, BLOCKS=blocks, BULK=bulk, **sizes,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    top = KernelLaunch(
        _top_kernel, N_SELECT=config.num_blocks, N_PADDED=power_of_2(config.num_blocks),
        INITIAL=INITIAL_BLOCKS, LOCAL=LOCAL_BLOCKS, ROWS=TOP_ROWS, COLUMNS=TOP_COLUMNS,
        **sizes, num_warps=1,
    )  # fmt: skip
    return score, top, tile, blocks, spill, bulk


def _prefix_sums(cu_seqlens: Tensor, config: NSAConfig, queries: int) -> tuple[Tensor, Tensor]:
    """Tiles of queries, and compressed blocks, before each document: int32, [documents + 1]."""
    lengths = cu_seqlens.diff()
    tiles = (lengths + queries - 1) // queries
    size, stride = config.compress_block_size, config.compress_stride
    blocks = ((lengths - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    zero = cu_seqlens.new_zeros(1)
    return (
        torch.cat([zero, tiles.cumsum(0, dtype=torch.int32)]),
        torch.cat([zero, blocks.cumsum(0, dtype=torch.int32)]),
    )
