"""FlexAttention of PyTorch, compiled: the window branch."""

from collections.abc import Callable
from functools import cache, partial
from typing import cast

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.protocol import Forward, Operator, OperatorPart

MASK_BLOCK = 128
"""Queries and keys of a block of the mask."""


def window(x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
    mask = window_mask(x.q.shape[1], config.window_size, x.q.device)
    attend = partial(compiled(), block_mask=mask, enable_gqa=x.q.shape[2] != x.k_win.shape[2])
    return lambda x: attend(*(t.transpose(1, 2) for t in (x.q, x.k_win, x.v_win))).transpose(1, 2)


@cache
def compiled() -> Callable[..., Tensor]:
    # Uncompiled it would materialise the scores; fullgraph makes that an error.
    attend = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return cast(Callable[..., Tensor], attend)


@cache
def window_mask(T: int, window_size: int, device: torch.device) -> BlockMask:
    """Keys in (t - window_size, t], as blocks built from bounds: a T * T mask may not fit."""
    row = torch.arange(-(-T // MASK_BLOCK), device=device)[:, None]
    column = row.T
    first, end = row * MASK_BLOCK, (row + 1) * MASK_BLOCK  # queries of a row of blocks
    some = ((column + 1) * MASK_BLOCK > first - window_size + 1) & (column <= row)
    # Full: its last key is at or before the first query, its first key in the last one's window.
    full = (column < row) & (column * MASK_BLOCK >= end - window_size) & (end <= T)

    def visible(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query - key < window_size)

    lists = (*_lists(some & ~full), *_lists(full))
    return BlockMask.from_kv_blocks(*lists, MASK_BLOCK, visible, seq_lengths=(T, T))


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks in each row, [1, 1, rows]; indices, those first, [1, 1, rows, rows]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()


OPERATOR = Operator(
    name="flex",
    package="torch",
    install="part of PyTorch",
    licence="BSD-3-Clause",
    parts={"window": OperatorPart(prepare=window)},
)
