"""Kernels of other projects, as providers of the `attention` workload.

    flex      branch window          FlexAttention of PyTorch, compiled
    fla-nsa   whole, branch select   native sparse attention of flash-linear-attention

No suite needs them: a peer that is absent, or does not take a shape, declines the case.
flash-linear-attention is `pip install fla-core`; this module is written for 0.6.0.

`fla-nsa` computes less than the operator of this project: its compressed blocks do not overlap and
have no parameters (l = d = l', the mean of their tokens), so there are l / d times fewer keys to
compress and to score than at the paper's sizes, and its branches share keys and values. With these
sizes nsa.reference defines the same function, and accuracy is checked against it. Its groups must
be a power of two, at least 16: smaller ones are padded, before timing, with zero queries, which do
not change the selection. Its window is that of the flash-attn package; here it is the same
algorithm built into PyTorch.

Considered but not measured: native-sparse-attention-pytorch 0.2.3 (always computes in float16,
Dk == Dv <= 128, groups that divide 16; five more packages), flash-sparse-attn 2.0.6 (sparsity by
a threshold on the softmax: another function), flash-msa 0.1.1 (torch 2.12, FlashAttention 3 or 4;
proxy heads select the blocks) and the kernels of InfLLM-V2 (no package: built from source).
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nsa.config import NSAConfig
from nsa.errors import Unsupported
from nsa.routes import fa2

PEERS: Mapping[str, tuple[str, ...]] = {
    "flex": ("window",),
    "fla-nsa": ("whole", "select"),
}
"""Provider -> the branches it computes."""
MIN_GROUP = 16
"""Fewest query heads of a KV head for fla-nsa."""
MASK_BLOCK = 128
"""Queries and keys of a block of FlexAttention's mask."""


def require(provider: str, q: Tensor, v: Tensor) -> None:
    """Raise Unsupported, with the reason, unless the peer can run on such tensors."""
    if reason := _refusal(provider, q, v):
        raise Unsupported(f"{provider}: {reason}")


def _refusal(provider: str, q: Tensor, v: Tensor) -> str:
    dtype = str(q.dtype).removeprefix("torch.")
    size = max(q.shape[-1], v.shape[-1])
    if provider != "flex" and importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install fla-core)"
    if not q.is_cuda:
        return f"needs tensors on CUDA, but these are on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"is measured in float16 or bfloat16, but these are {dtype}"
    if size > 256:
        return f"takes heads of at most 256, but these have {size}"
    return ""


def nsa_config(config: NSAConfig) -> NSAConfig:
    """The sizes that fla-nsa uses for these."""
    size = config.select_block_size
    return replace(config, compress_block_size=size, compress_stride=size, phi="mean")


def pad_group(x: Tensor, heads: int) -> Tensor:
    """Zeros after the heads of each group, [B, T, HQ, ...], up to a size that fla-nsa takes."""
    group = x.shape[2] // heads
    size = max(MIN_GROUP, 1 << (group - 1).bit_length())
    if size == group:
        return x
    padding = [0, 0] * (x.dim() - 3) + [0, size - group]
    padded: Tensor = F.pad(x.unflatten(2, (heads, group)), padding).flatten(2, 3)
    return padded


def unpad_group(x: Tensor, heads: int, q_heads: int) -> Tensor:
    """Undo `pad_group`."""
    if x.shape[2] == q_heads:
        return x
    grouped: Tensor = x.unflatten(2, (heads, -1))
    return grouped[:, :, :, : q_heads // heads].flatten(2, 3)


def fla_version() -> str:
    """The version of flash-linear-attention that is imported."""
    return str(getattr(importlib.import_module("fla"), "__version__", "unknown"))


def fla_nsa(q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *, config: NSAConfig) -> Tensor:
    """The whole operator; q and gates are padded by `pad_group`."""
    g_compress, g_select, g_window = gates.unbind(-1)
    out = _fla("nsa").parallel_nsa(
        q,
        k,
        v,
        g_cmp=g_compress,
        g_slc=g_select,
        block_counts=config.num_blocks,
        block_size=config.select_block_size,
    )
    window = fa2.flash_attention(
        q,
        k,
        v,
        provider="fa2-torch",
        window_size=config.window_size,
        scale=q.shape[-1] ** -0.5,
    )
    return torch.addcmul(out, window, g_window.unsqueeze(-1))


def fla_selected(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, *, config: NSAConfig
) -> Tensor:
    """Attention to given blocks."""
    result: Tensor = _fla("nsa").parallel_nsa(
        q,
        k,
        v,
        block_indices=block_indices,
        block_counts=config.num_blocks,
        block_size=config.select_block_size,
    )
    return result


@torch.no_grad()
def fla_select_blocks(q: Tensor, k: Tensor, v: Tensor, *, config: NSAConfig) -> Tensor:
    """The blocks that `fla_nsa` selects, [B, T, HKV, n], ascending, -1 at the end."""
    size = config.select_block_size
    nsa = _fla("nsa.parallel")
    k_cmp, v_cmp = (nsa.mean_pooling(x, size) for x in (k, v))
    shared = {"TK": k.shape[1], "block_size": size, "scale": q.shape[-1] ** -0.5}
    _, lse = nsa.parallel_nsa_compression(q=q, k=k_cmp, v=v_cmp, **shared)
    blocks: Tensor = nsa.parallel_nsa_topk(
        q=q, k=k_cmp, lse=lse, block_counts=config.num_blocks, **shared
    )
    last = torch.iinfo(blocks.dtype).max
    ascending = blocks.masked_fill(blocks < 0, last).sort(-1).values
    return ascending.masked_fill(ascending == last, -1)


def flex_window(q: Tensor, k: Tensor, v: Tensor, *, window_size: int) -> Tensor:
    """The window branch by FlexAttention, compiled for these shapes."""
    out: Tensor = _compiled_flex()(
        *(x.transpose(1, 2) for x in (q, k, v)),
        block_mask=window_mask(q.shape[1], window_size, q.device),
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    # Uncompiled it would materialise the scores; fullgraph makes that an error.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


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

    return BlockMask.from_kv_blocks(
        *_lists(some & ~full),
        *_lists(full),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=visible,
        seq_lengths=(T, T),
    )


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks in each row, [1, 1, rows]; indices, those first, [1, 1, rows, rows]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = blocks.int().argsort(dim=-1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()


def _fla(module: str) -> Any:
    """A module of the peer."""
    return importlib.import_module(f"fla.ops.{module}")
