"""Which blocks queries select, when the selected branch is timed separately.

The cost depends on which blocks these are: blocks that neighbouring queries share are read once for
all of them, others come from memory. A time is meaningless without its selection, so it is an axis.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference import top_blocks

Selection = Literal["real", "random", "local"]
SELECTIONS: tuple[Selection, ...] = get_args(Selection)
"""real: the top n of the case's Gaussian inputs. random: block 0, the query's own, the one before
it, and distinct others with equal probability. local: the n nearest, block 0 included."""

_CHUNK_ELEMENTS = 1 << 27


def fixed_blocks(
    selection: Literal["random", "local"],
    *,
    B: int,
    T: int,
    HKV: int,
    config: NSAConfig,
    rng: torch.Generator,
) -> Tensor:
    """Blocks chosen without scores, as `ops.select_blocks` returns them: [B, T, HKV, n] int32."""
    M = config.select_length(T)
    device = rng.device
    rows = max(1, _CHUNK_ELEMENTS // (B * HKV * M))
    parts = []
    for first in range(0, T, rows):
        position = torch.arange(first, min(T, first + rows), device=device)
        size = (B, len(position), HKV, M)
        if selection == "random":
            rank = torch.rand(size, generator=rng, device=device)
        else:  # a later block is nearer: blocks after the query's own are never chosen
            rank = torch.arange(M, dtype=torch.float32, device=device).expand(size)
        parts.append(top_blocks(rank, position, config=config))
    return torch.cat(parts, 1)
