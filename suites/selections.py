"""Which blocks queries select, when the selected branch is timed separately.

The cost depends on which blocks these are: blocks that neighbouring queries share are read once for
all of them, others come from memory. A time is meaningless without its selection, so it is an axis.
"""

import gc
import math
from dataclasses import replace
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor

from nsa.config import PRESETS, NSAConfig, Routes
from nsa.model.attention import NSAttention
from nsa.reference import top_blocks
from nsa.train.config import TrainConfig
from nsa.train.loop import Trainer

Selection = Literal["real", "random", "local", "trained"]
SELECTIONS: tuple[Selection, ...] = get_args(Selection)
"""real: the top n of the case's Gaussian inputs. random: block 0, the query's own, the one before
it, and distinct others with equal probability. local: the n nearest, block 0 included. trained:
what a trained language model selects in text that it has not read; see TRAINED."""

TRAINED = TrainConfig(
    model=replace(PRESETS["125m"], n_layers=4), dataset="text", seq_len=65_536, steps=100
)
"""The model of `trained`: four layers of 125m, and how it is trained. A case trains it at set-up,
with the case's block sizes and in rows of its length (a model knows no position beyond those that
it was trained on), as many as make 65,536 tokens a step, and at least as many as the case has."""
TRAINED_HEADS = TRAINED.model.n_layers * TRAINED.model.n_kv_heads

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


def trained_blocks(*, B: int, T: int, HKV: int, config: NSAConfig, device: str) -> Tensor:
    """Blocks that the model of TRAINED selects in B held-out texts: [B, T, HKV, n] int32.

    KV heads are the first of each layer in turn, then the second, as queries share more blocks in
    some layers. Training is deterministic: all processes on one kind of GPU get the same blocks,
    if their Python, whose sources are the text, is the same. A process trains once.

    Raises:
        Unsupported: The device is a GPU on which the Triton kernels do not run.
        DataError: The texts are shorter than T.
    """
    fast = device == "cuda"
    recipe = replace(
        TRAINED,
        model=replace(TRAINED.model, nsa=config),
        seq_len=T,
        batch_size=max(B, TRAINED.seq_len // T),
        device=device,
        precision="bf16" if fast else "fp32",
        routes=Routes.triton() if fast else Routes(),  # compiling takes longer than it saves
    )
    return _of_layers(recipe, B, HKV)


@cache
def _of_layers(recipe: TrainConfig, B: int, HKV: int) -> Tensor:
    layers = _train(recipe)
    gc.collect()  # the trainer refers to itself, and its memory would count as the case's
    return torch.stack(layers, 3).flatten(2, 3)[:B, :, :HKV].contiguous()


def _train(recipe: TrainConfig) -> list[Tensor]:
    """Train, then read held-out text: the blocks by layer, [rows, T, heads of a layer, n]."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")  # "error" asks for a variable that cuBLAS reads
    try:
        with Trainer(recipe) as trainer:
            for _ in range(recipe.steps):
                trainer.step()
            loss = float(trainer.held_out_loss(1))
    finally:
        torch.set_deterministic_debug_mode(before)
    if not math.isfinite(loss):
        raise FloatingPointError(f"selection=trained: the model has a held-out loss of {loss}")
    layers = (layer for layer in trainer.model.modules() if isinstance(layer, NSAttention))
    return [layer.aux_stats()["blocks"] for layer in layers]


def distinct_share(blocks: Tensor, queries: int) -> float:
    """Distinct blocks of so many adjacent queries, over the sum of their numbers of blocks.

    1 where no two of them share a block, 1 / queries where they all select the same.

    Args:
        blocks: [B, T, HKV, n], distinct in a row, -1 in unused slots.
    """
    whole = blocks[:, : blocks.shape[1] // queries * queries].unflatten(1, (-1, queries))
    groups = whole.transpose(2, 3).flatten(-2).sort(-1).values
    changes = groups.diff(dim=-1, prepend=torch.full_like(groups[..., :1], -1)) != 0
    return float(changes.sum() / (groups >= 0).sum().clamp(min=1))
