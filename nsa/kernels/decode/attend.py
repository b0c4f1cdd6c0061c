"""One new query per sequence against its cache: the whole operator in four launches.

A single query has little to compute and much to read, so every launch is split over keys and its
pieces run side by side. The G query heads of a KV head are the rows of a tile: each key is read
once for all of them.

    compress    pieces of the compressed keys: partial output, and what every block gives the
                select blocks it overlaps (nsa.kernels.decode.pieces, as `attend`)
    choose      chunks of the select blocks; the last chunk to finish merges the top n
                (nsa.kernels.decode.scores)
    attend      pieces of the window and of the selected blocks: partial outputs
    merge       each head's pieces, branch by branch, weighed by the gates
                (nsa.kernels.decode.merge)

On sm_90 a launch begins while the one before it ends (programmatic dependent launch): it first
reads what is older than both, and waits before it reads what the other wrote. So the window is
computed while the blocks are chosen.

The launches depend only on the capacity of the cache: the length of a sequence is read from
`lengths` on the device, and pieces past its end return at once. One CUDA graph serves every step.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5 to 12; Dao et al. 2023, "Flash-Decoding for
long-context inference" (splitting one query's keys and merging by log-sum-exp).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kernels.common.device import (
    LOG2_E,
    architecture,
    ceil_div,
    head_blocks,
    interpreted,
    last_contiguous,
    padded,
    require,
)
from nsa.kernels.decode.merge import merge_kernel
from nsa.kernels.decode.pieces import attend_kernel, compress_kernel
from nsa.kernels.decode.scores import Shares, choose_blocks

COMPRESS_WARPS = 1056
"""Most warps of the compress launch: eight for each of 132 multiprocessors, which all fit at once.
A longer piece reads its keys in a pipeline and leaves less to merge."""
ATTEND_PROGRAMS = 792
"""Most pieces of the attend launch; its first run while the blocks are chosen."""
CROWDED = 64
"""Sequences times KV heads from which every multiprocessor runs several programs: programs of few
warps then hide each other's latency. Below, more warps shorten each program."""
KEYS = 64
"""Keys of a tile."""
WEIGHED = 128
"""Pieces whose log-sum-exp the merge reads at once."""
MERGED, MERGED_CROWDED = 128, 16
"""Pieces whose output it reads at once, with four warps and, where crowded, with one."""


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Keys of a tile, warps of a program, stages of its software pipeline."""

    keys: int
    warps: int
    stages: int


def compress_tile(Dk: int, Dv: int, crowded: bool) -> DecodeTile:
    """Two tiles of keys and values in flight fit sm_80's 163 KiB for heads of any size."""
    if crowded and Dk + Dv <= 128:
        return DecodeTile(16, 1, 3)
    return DecodeTile(KEYS if Dk + Dv <= 384 else KEYS // 2, 4, 3)


def attend_tile(Dk: int, Dv: int, crowded: bool) -> DecodeTile:
    """Its pieces, and so its tiles, are shorter than those of the compress launch."""
    if Dk + Dv <= 256:
        return DecodeTile(min(KEYS, 32), 4, 3)
    return DecodeTile(16, 2, 3) if crowded else compress_tile(Dk, Dv, crowded)


def decode(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Launch the four kernels. Shapes and meanings as in nsa.ops.decode_attention.

    Returns:
        out: [B, 1, HQ, Dv], dtype of q.
        blocks: [B, 1, HKV, n], int32, the blocks that were selected.

    Raises:
        Unsupported: The kernels cannot run on such tensors.
    """
    require(q, v_sel, k_sel.shape[2])
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = map(
        last_contiguous, (q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win)
    )
    B, _, HQ, Dk = q.shape
    HKV, Dv = v_sel.shape[2:]
    G = HQ // HKV
    groups, blocks, ring = B * HKV, k_cmp.shape[1], k_win.shape[1]
    crowded = groups >= CROWDED
    compress, attend = compress_tile(Dk, Dv, crowded), attend_tile(Dk, Dv, crowded)
    compress_tiles = ceil_div(blocks, compress.keys)
    select_tiles = ceil_div(config.num_blocks * config.select_block_size, attend.keys)
    window_tiles = ceil_div(min(config.window_size, ring), attend.keys)
    compress_programs = max(1, COMPRESS_WARPS // compress.warps)
    per_piece = max(1, ceil_div(groups * compress_tiles, compress_programs))
    attend_tiles = groups * (select_tiles + window_tiles)
    attend_per_piece = ceil_div(attend_tiles, ATTEND_PROGRAMS)
    compress_pieces = max(1, ceil_div(compress_tiles, per_piece))
    select_pieces = ceil_div(select_tiles, attend_per_piece)
    window_pieces = ceil_div(window_tiles, attend_per_piece)
    pieces = compress_pieces + window_pieces + select_pieces
    how = Shares.of(config)
    units = max(1, ceil_div(blocks, how.unit))
    overlap = architecture(q.device) == "sm_90" and not interpreted()

    def scratch(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    part, part_lse = scratch(groups, pieces, G, Dv), scratch(groups, pieces, G)
    shares, arrived = scratch(groups, G, how.span, units), scratch(groups, dtype=torch.int32)
    D1, D2 = head_blocks(Dk)
    sizes = {"HKV": HKV, "G": G, "DV": Dv, "DV_BLOCK": padded(Dv)}
    heads = {**sizes, "D": Dk, "D1": D1, "D2": D2, "G_BLOCK": padded(G)}
    log2_scale = scale * LOG2_E
    q_strides = (q.stride(0), q.stride(2))

    compress_kernel[(compress_pieces, groups)](
        q,
        k_cmp,
        v_cmp,
        lengths,
        part,
        part_lse,
        shares,
        arrived,
        log2_scale,
        *q_strides,
        *k_cmp.stride()[:3],
        *v_cmp.stride()[:3],
        per_piece,
        pieces,
        blocks,
        units,
        **heads,
        SIZE=config.compress_block_size,
        STRIDE=config.compress_stride,
        UNIT=how.unit,
        PER_BLOCK=how.per_block,
        LENGTH=how.length,
        SPAN=how.span,
        KEYS=compress.keys,
        OVERLAP=overlap,
        num_warps=compress.warps,
        num_stages=compress.stages,
    )
    chosen = choose_blocks(
        shares,
        part_lse,
        lengths,
        arrived,
        config=config,
        heads=HKV,
        blocks=blocks,
        capacity=k_sel.shape[1],
        piece_blocks=per_piece * compress.keys,
        overlap=overlap,
    )
    attend_kernel[(window_pieces + select_pieces, groups)](
        q,
        k_sel,
        v_sel,
        k_win,
        v_win,
        chosen,
        lengths,
        part,
        part_lse,
        log2_scale,
        *q_strides,
        *k_sel.stride()[:3],
        *v_sel.stride()[:3],
        *k_win.stride()[:3],
        *v_win.stride()[:3],
        compress_pieces,
        window_pieces,
        attend_per_piece,
        pieces,
        ring,
        **heads,
        BLOCK=config.select_block_size,
        N=config.num_blocks,
        WINDOW=config.window_size,
        KEYS=attend.keys,
        OVERLAP=overlap,
        num_warps=attend.warps,
        num_stages=attend.stages,
        launch_pdl=overlap,
    )
    out = torch.empty(B, 1, HQ, Dv, dtype=q.dtype, device=q.device)
    merge_kernel[(HQ, B)](
        part,
        part_lse,
        gates,
        out,
        gates.stride(0),
        gates.stride(2),
        gates.stride(3),
        compress_pieces,
        window_pieces,
        select_pieces,
        **sizes,
        WEIGHED=WEIGHED,
        MERGED=MERGED_CROWDED if crowded else MERGED * 128 // max(128, sizes["DV_BLOCK"]),
        OVERLAP=overlap,
        num_warps=1 if crowded else 4,
        launch_pdl=overlap,
    )
    return out, chosen.view(B, 1, HKV, config.num_blocks)
