"""Partial attention of one query: a piece of the compressed keys, of the selected blocks or of the
window.

A program takes one piece for the G query heads of a KV head, which are the rows of its tile: each
key is read once for all of them. It writes the piece's output and log-sum-exp, which `merge` joins.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5, 7, 8 and 12; Dao et al. 2023, "Flash-Decoding
for long-context inference".
"""

import triton
import triton.language as tl


@triton.jit
def _load_heads(
    ptr,  # the query's first head of this group
    stride,
    COLUMN: tl.constexpr,
    BLOCK: tl.constexpr,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
):
    """A block of columns of the group's heads, [G_BLOCK, BLOCK]; 0 outside it."""
    head = tl.arange(0, G_BLOCK)
    column = COLUMN + tl.arange(0, BLOCK)
    mask = (head < G)[:, None] & (column < SIZE)[None, :]
    return tl.load(ptr + head[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit
def _load_rows(ptr, offsets, valid, COLUMN: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """A block of columns of some rows, [N, BLOCK]; 0 outside them. Rows that are not
    valid are not read: they may be NaN."""
    column = COLUMN + tl.arange(0, BLOCK)
    mask = valid[:, None]
    if COLUMN + BLOCK > SIZE:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(ptr + offsets[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def _take(
    acc,  # [G_BLOCK, DV_BLOCK]
    row_max,  # [G_BLOCK], log2 units
    row_sum,  # [G_BLOCK]
    q1,  # [G_BLOCK, D1]
    q2,  # [G_BLOCK, D2], or anything when D2 == 0
    k_ptr,
    v_ptr,
    k_offsets,  # [KEYS]
    v_offsets,  # [KEYS]
    valid,  # [KEYS]
    scale,  # in log2 units
    D: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Take in one tile of keys; returns the new state and the scores, [G_BLOCK, KEYS]."""
    k1 = _load_rows(k_ptr, k_offsets, valid, 0, D1, D)
    if D2 > 0:
        k2 = _load_rows(k_ptr, k_offsets, valid, D1, D2, D)
    v = _load_rows(v_ptr, v_offsets, valid, 0, DV_BLOCK, DV)
    scores = tl.dot(q1, tl.trans(k1))
    if D2 > 0:
        scores = tl.dot(q2, tl.trans(k2), scores)
    scores = tl.where(valid[None, :], scores * scale, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # While no key was seen the maximum is -inf; 0 in its place keeps exp2 from inf - inf.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = tl.exp2(scores - finite_max[:, None])
    rescale = tl.exp2(row_max - finite_max)
    row_sum = row_sum * rescale + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None])
    return acc, new_max, row_sum, scores


@triton.jit
def _store_piece(
    acc,
    row_max,
    row_sum,
    part_ptr,  # this piece, [G, DV]
    part_lse_ptr,  # this piece, [G]
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    DV: tl.constexpr,
    DV_BLOCK: tl.constexpr,
):
    """Write a piece's output and its log-sum-exp; a head that saw no key has 0 and -inf."""
    head = tl.arange(0, G_BLOCK)
    column = tl.arange(0, DV_BLOCK)
    some = tl.where(row_sum > 0, row_sum, 1.0)
    mask = (head < G)[:, None] & (column < DV)[None, :]
    tl.store(part_ptr + head[:, None] * DV + column[None, :], acc / some[:, None], mask=mask)
    tl.store(part_lse_ptr + head, row_max + tl.log2(some), mask=head < G)


@triton.jit
def _store_shares(
    scores,  # [G_BLOCK, KEYS], log2 units; -inf where there is no key
    begin,  # the tile's first compressed block, a multiple of UNIT
    shares_head,  # [G_BLOCK], pointers
    units,
    G: tl.constexpr,
    G_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    LENGTH: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Write the log2 of what each unit of compressed blocks gives the select block it begins in,
    and the SPAN - 1 that follow: the sum of strides shared (eq. 9) times exp2(score).

    A unit's largest score is its own reference, so that equal scores make equal bits wherever
    they lie."""
    unit_scores = tl.reshape(scores, [G_BLOCK, KEYS // UNIT, UNIT])
    largest = tl.max(unit_scores, 2)
    finite = tl.where(largest == float("-inf"), 0.0, largest)
    p = tl.exp2(unit_scores - finite[:, :, None])
    offset = begin % PER_BLOCK + tl.arange(0, KEYS)
    offset = tl.reshape(offset % PER_BLOCK, [KEYS // UNIT, UNIT])
    head = tl.arange(0, G_BLOCK)
    unit = begin // UNIT + tl.arange(0, KEYS // UNIT)
    mask = (head < G)[:, None] & (unit < units)[None, :]
    for ahead in tl.static_range(SPAN):
        first = tl.maximum(offset, ahead * PER_BLOCK)
        shared = tl.minimum(offset + LENGTH, (ahead + 1) * PER_BLOCK) - first
        shared = tl.maximum(shared, 0).to(tl.float32)
        total = tl.sum(p * shared[None, :, :], 2)
        share = finite + tl.log2(tl.where(total > 0, total, 1.0))
        share = tl.where(total > 0, share, float("-inf"))
        tl.store(shares_head[:, None] + (ahead * units + unit)[None, :], share, mask=mask)


@triton.jit(do_not_specialize=["tiles_per_piece", "pieces", "blocks", "units"])
def compress_kernel(
    q_ptr,  # [B, HQ, D]
    k_ptr,  # [B, blocks, HKV, D]
    v_ptr,  # [B, blocks, HKV, DV]
    lengths_ptr,  # [B]
    part_ptr,  # [B, HKV, pieces, G, DV], float32
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    shares_ptr,  # [B, HKV, G, SPAN, units], float32, log2 units; up to the last visible block's
    arrived_ptr,  # [B, HKV], int32: for the next launch, 0
    scale,  # in log2 units
    q_batch: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_row: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_row: tl.int64,
    v_head: tl.int64,
    tiles_per_piece,
    pieces,  # of all branches; those of this one come first
    blocks,  # compressed blocks that the cache has room for
    units,  # runs of UNIT such blocks
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,  # l
    STRIDE: tl.constexpr,  # d
    UNIT: tl.constexpr,
    PER_BLOCK: tl.constexpr,  # l' / d
    LENGTH: tl.constexpr,  # l / d
    SPAN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    piece = tl.program_id(0)
    b_h = tl.program_id(1)
    b = (b_h // HKV).to(tl.int64)
    h = (b_h % HKV).to(tl.int64)
    if piece == 0:
        tl.store(arrived_ptr + b_h, 0)

    length = tl.load(lengths_ptr + b)
    visible = tl.maximum(length - SIZE + STRIDE, 0) // STRIDE  # whole blocks; 0 below l tokens
    visible = tl.minimum(visible, blocks)
    start = piece * tiles_per_piece * KEYS
    stop = tl.minimum(start + tiles_per_piece * KEYS, visible)
    place = b_h.to(tl.int64) * pieces + piece
    head = tl.arange(0, G_BLOCK)
    if start >= visible:
        tl.store(
            part_lse_ptr + place * G + head,
            tl.full([G_BLOCK], float("-inf"), tl.float32),
            mask=head < G,
        )
    else:
        q = q_ptr + b * q_batch + h * G * q_head
        q1 = _load_heads(q, q_head, 0, D1, G, G_BLOCK, D)
        q2 = q1
        if D2 > 0:
            q2 = _load_heads(q, q_head, D1, D2, G, G_BLOCK, D)
        k = k_ptr + b * k_batch + h * k_head
        v = v_ptr + b * v_batch + h * v_head
        shares_head = shares_ptr + (b_h.to(tl.int64) * G + head) * SPAN * units
        acc = tl.zeros([G_BLOCK, DV_BLOCK], tl.float32)
        row_max = tl.full([G_BLOCK], float("-inf"), tl.float32)
        row_sum = tl.zeros([G_BLOCK], tl.float32)
        for begin in tl.range(start, stop, KEYS):
            key = begin + tl.arange(0, KEYS)
            valid = key < stop
            acc, row_max, row_sum, scores = _take(
                acc,
                row_max,
                row_sum,
                q1,
                q2,
                k,
                v,
                key * k_row,
                key * v_row,
                valid,
                scale,
                D,
                D1,
                D2,
                DV,
                DV_BLOCK,
            )
            _store_shares(
                scores,
                begin,
                shares_head,
                units,
                G,
                G_BLOCK,
                KEYS,
                UNIT,
                PER_BLOCK,
                LENGTH,
                SPAN,
            )
        _store_piece(
            acc,
            row_max,
            row_sum,
            part_ptr + place * G * DV,
            part_lse_ptr + place * G,
            G,
            G_BLOCK,
            DV,
            DV_BLOCK,
        )
    # Not before: the programs of the next launch would crowd where there still is room.
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _wait_where(condition):
    if condition:
        tl.extra.cuda.gdc_wait()


@triton.jit(do_not_specialize=["first_piece", "window_pieces", "tiles_per_piece", "pieces", "ring"])
def attend_kernel(
    q_ptr,  # [B, HQ, D]
    k_sel_ptr,  # [B, capacity, HKV, D]
    v_sel_ptr,  # [B, capacity, HKV, DV]
    k_win_ptr,  # [B, ring, HKV, D]; position p is in row p % ring
    v_win_ptr,  # [B, ring, HKV, DV]
    chosen_ptr,  # [B, HKV, N], int32, -1 where a slot is unused
    lengths_ptr,  # [B]
    part_ptr,  # [B, HKV, pieces, G, DV], float32
    part_lse_ptr,  # [B, HKV, pieces, G], float32, log2 units
    scale,  # in log2 units
    q_batch: tl.int64,
    q_head: tl.int64,
    k_sel_batch: tl.int64,
    k_sel_row: tl.int64,
    k_sel_head: tl.int64,
    v_sel_batch: tl.int64,
    v_sel_row: tl.int64,
    v_sel_head: tl.int64,
    k_win_batch: tl.int64,
    k_win_row: tl.int64,
    k_win_head: tl.int64,
    v_win_batch: tl.int64,
    v_win_row: tl.int64,
    v_win_head: tl.int64,
    first_piece,  # the first of this launch among all pieces
    window_pieces,  # how many of this launch's pieces, from the first, read the window
    tiles_per_piece,
    pieces,
    ring,
    HKV: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D1: tl.constexpr,
    D2: tl.constexpr,
    DV_BLOCK: tl.constexpr,
    G_BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,  # l'
    N: tl.constexpr,  # n
    WINDOW: tl.constexpr,  # w
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    piece = tl.program_id(0)
    b_h = tl.program_id(1)
    b = (b_h // HKV).to(tl.int64)
    h = (b_h % HKV).to(tl.int64)
    length = tl.load(lengths_ptr + b)
    q = q_ptr + b * q_batch + h * G * q_head
    q1 = _load_heads(q, q_head, 0, D1, G, G_BLOCK, D)
    q2 = q1
    if D2 > 0:
        q2 = _load_heads(q, q_head, D1, D2, G, G_BLOCK, D)
    acc = tl.zeros([G_BLOCK, DV_BLOCK], tl.float32)
    row_max = tl.full([G_BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([G_BLOCK], tl.float32)

    # One loop for both branches: two would have shared memory of their own each.
    select = piece >= window_pieces
    if OVERLAP:
        _wait_where(select)  # the window does not wait for the choice
    k = tl.where(select, k_sel_ptr, k_win_ptr)
    k += b * tl.where(select, k_sel_batch, k_win_batch) + h * tl.where(
        select, k_sel_head, k_win_head
    )
    v = tl.where(select, v_sel_ptr, v_win_ptr)
    v += b * tl.where(select, v_sel_batch, v_win_batch) + h * tl.where(
        select, v_sel_head, v_win_head
    )
    k_row = tl.where(select, k_sel_row, k_win_row)
    v_row = tl.where(select, v_sel_row, v_win_row)
    window_start = tl.maximum(length - WINDOW, 0)
    first = tl.where(select, piece - window_pieces, piece) * tiles_per_piece * KEYS
    stop = tl.where(select, N * BLOCK, length - window_start)
    for begin in tl.range(first, tl.minimum(first + tiles_per_piece * KEYS, stop), KEYS):
        i = begin + tl.arange(0, KEYS)  # among the branch's keys
        # A tile inside one block looks it up once, and so can be fetched stages ahead.
        slot = begin // BLOCK if BLOCK % KEYS == 0 else i // BLOCK
        block = tl.load(chosen_ptr + b_h * N + slot, mask=select & (slot < N), other=-1)
        key = tl.where(select, block * BLOCK + i % BLOCK, window_start + i)
        valid = (key >= 0) & (key < length)
        row = tl.where(select, key, key % ring)
        acc, row_max, row_sum, _ = _take(
            acc,
            row_max,
            row_sum,
            q1,
            q2,
            k,
            v,
            row * k_row,
            row * v_row,
            valid,
            scale,
            D,
            D1,
            D2,
            DV,
            DV_BLOCK,
        )
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # that this launch ends after the one before, in every program
    place = b_h.to(tl.int64) * pieces + first_piece + piece
    _store_piece(
        acc,
        row_max,
        row_sum,
        part_ptr + place * G * DV,
        part_lse_ptr + place * G,
        G,
        G_BLOCK,
        DV,
        DV_BLOCK,
    )
