"""One new query per sequence against its cache: the whole operator in four launches.

A single query has little to compute and much to read, so every launch is split over keys and its
pieces run side by side. The G query heads of a KV head are the rows of a tile: each key is read
once for all of them.

    compress    pieces of the compressed keys: partial output, and the scores of every block
                (nsa.kernels.decode_pieces, as `attend`)
    choose      chunks of the select blocks; the last chunk to finish merges the top n
                (nsa.kernels.decode_scores)
    attend      pieces of the selected blocks and of the window: partial outputs
    merge       each head's pieces, branch by branch, weighed by the gates
                (nsa.kernels.decode_merge)

The launches depend on the capacity of the cache alone: what a sequence holds is read from
`lengths` on the device, and pieces past its end return at once. One CUDA graph so serves every
step.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5 to 12; Dao et al. 2023, "Flash-Decoding for
long-context inference" (splitting one query's keys and merging by log-sum-exp).
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from nsa.config import NSAConfig
from nsa.kernels.common import LOG2_E, head_blocks, last_contiguous, padded, require
from nsa.kernels.decode_merge import merge_kernel
from nsa.kernels.decode_pieces import attend_kernel, compress_kernel
from nsa.kernels.decode_scores import choose_blocks

PROGRAMS = 1056
"""Pieces wanted of one launch: eight for each of 132 multiprocessors. A longer piece reads its
keys in a pipeline and leaves less to merge; more pieces fill the GPU at a batch of one."""
KEYS = 64
"""Keys of a tile."""
MERGED = 16
"""Pieces that the merge reads at once."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys of a tile, warps of a program, stages of its software pipeline."""

    keys: int
    warps: int
    stages: int


def tile(Dk: int, Dv: int) -> Tile:
    """Two tiles of keys and values on their way fit sm_80's 163 KiB with any heads."""
    return Tile(KEYS if Dk + Dv <= 384 else KEYS // 2, 4, 3)


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
    t = tile(Dk, Dv)
    compress_tiles = triton.cdiv(blocks, t.keys)
    select_tiles = triton.cdiv(config.num_blocks * config.select_block_size, t.keys)
    window_tiles = triton.cdiv(min(config.window_size, ring), t.keys)
    per_piece = max(1, groups * compress_tiles // PROGRAMS)
    attend_per_piece = max(1, groups * (select_tiles + window_tiles) // PROGRAMS)
    compress_pieces = max(1, triton.cdiv(compress_tiles, per_piece))
    select_pieces = triton.cdiv(select_tiles, attend_per_piece)
    window_pieces = triton.cdiv(window_tiles, attend_per_piece)
    pieces = compress_pieces + select_pieces + window_pieces

    def scratch(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=q.device)

    part, part_lse = scratch(groups, pieces, G, Dv), scratch(groups, pieces, G)
    scores, arrived = scratch(groups, G, max(1, blocks)), scratch(groups, dtype=torch.int32)
    D1, D2 = head_blocks(Dk)
    sizes = {"HKV": HKV, "G": G, "DV": Dv, "DV_BLOCK": padded(Dv)}
    heads = {**sizes, "D": Dk, "D1": D1, "D2": D2, "G_BLOCK": padded(G), "KEYS": t.keys}
    launch = {"num_warps": t.warps, "num_stages": t.stages}
    log2_scale = scale * LOG2_E
    q_strides = (q.stride(0), q.stride(2))

    compress_kernel[(compress_pieces, groups)](
        q,
        k_cmp,
        v_cmp,
        lengths,
        part,
        part_lse,
        scores,
        arrived,
        log2_scale,
        *q_strides,
        *k_cmp.stride()[:3],
        *v_cmp.stride()[:3],
        per_piece,
        pieces,
        blocks,
        **heads,
        SIZE=config.compress_block_size,
        STRIDE=config.compress_stride,
        **launch,
    )
    chosen = choose_blocks(
        scores,
        part_lse,
        lengths,
        arrived,
        config=config,
        heads=HKV,
        capacity=k_sel.shape[1],
        piece_blocks=per_piece * t.keys,
    )
    attend_kernel[(select_pieces + window_pieces, groups)](
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
        select_pieces,
        attend_per_piece,
        pieces,
        ring,
        **heads,
        BLOCK=config.select_block_size,
        N=config.num_blocks,
        WINDOW=config.window_size,
        **launch,
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
        select_pieces,
        window_pieces,
        **sizes,
        MERGED=MERGED,
        num_warps=4,
    )
    return out, chosen.view(B, 1, HKV, config.num_blocks)
