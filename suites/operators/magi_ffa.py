"""Flex flash attention of MagiAttention by token indices (IndexAttn), forward only.

The tokens of all KV heads are the rows of one list of keys, so that all heads attend at once.
"""

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.packed import Attend, Packed, parts_of
from suites.operators.protocol import Operator, load, one_head_size

SWAPPED = 16
"""Largest group for which keys are the rows of a tile, as in the project's own benchmark."""


def attend(_s: Packed) -> Attend:
    attention = load("magi_attention.functional.flex_flash_attn").flex_flash_attn_func

    def run(q: Tensor, k: Tensor, v: Tensor, tokens: Tensor) -> Any:
        T, HQ, HKV = *q.shape[:2], k.shape[1]
        rows = q.unflatten(1, (HKV, -1)).flatten(0, 1)
        keys, values = (t.flatten(0, 1)[:, None] for t in (k, v))
        options = {"pack_gqa": True, "swap_ab": HQ // HKV <= SWAPPED}
        out, _ = attention(rows, keys, values, index_attn_indices=tokens, **options)
        return out.unflatten(0, (T, HKV)).flatten(1, 2)

    return run


def given(blocks: Tensor, s: Packed) -> Tensor:
    """The tokens of the blocks up to the query, [T, HKV, n * l'], -1 at the end."""
    size, (HKV, T) = s.config.select_block_size, blocks.shape[:2]
    steps = torch.arange(size, device=blocks.device, dtype=torch.int32)
    tokens = (blocks[..., None] * size + steps).flatten(-2)  # [HKV, T, n * l']
    used = (blocks >= 0).repeat_interleave(size, -1)
    used &= tokens <= torch.arange(T, device=blocks.device)[:, None]
    head = torch.arange(HKV, device=blocks.device, dtype=torch.int32)[:, None, None]
    return (tokens * HKV + head).masked_fill(~used, -1).movedim(0, 1).contiguous()


def refuses(x: AttentionInputs, config: NSAConfig) -> str:
    if x.q.shape[0] > 1:
        return "takes one sequence at a time"
    return one_head_size(x, config)


OPERATOR = Operator(
    name="magi-ffa",
    package="magi_attention",
    install="needs building from source: https://github.com/SandAI-org/MagiAttention, "
    "commit 2c641357",
    licence="Apache-2.0",
    parts=parts_of(attend, given=given, backward=False),
    refuses=refuses,
)
