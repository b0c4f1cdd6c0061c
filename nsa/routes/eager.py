"""Vectorised routes for the compress and window branches and for the selection scores.

They compute what `nsa.reference` defines, in plain PyTorch, with memory linear in T: queries are
taken in chunks, and the backward pass recomputes a chunk instead of keeping it. None of them waits
for the device. `nsa.ops` has validated the inputs.

Source: arXiv:2502.11089, section 3.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nsa.config import NSAConfig, Positions
from nsa.reference import masked_softmax, top_blocks, wide

CHUNK_ELEMENTS = 1 << 27
"""Most elements of the largest intermediate of a chunk: 512 MiB in float32."""
WINDOW_TILE = 128
"""Queries that share one slice of window keys; each reads at most this many masked keys."""


class Places(NamedTuple):
    """Positions of the queries, each [1, T] int64; without cu_seqlens there is one document."""

    document: Tensor
    start: Tensor
    """First token of the query's document in the packed batch."""
    position: Tensor
    """Position of the query in its document."""


def places(q: Tensor, q_start: int, cu_seqlens: Tensor | None) -> Places:
    """Locate the queries [B, T, HQ, D] in their documents."""
    token = torch.arange(q_start, q_start + q.shape[1], device=q.device)[None]
    if cu_seqlens is None:
        zero = torch.zeros_like(token)
        return Places(zero, zero, token)
    bounds = cu_seqlens.long()
    document = torch.searchsorted(bounds, token, right=True) - 1
    start = bounds[document]
    return Places(document, start, token - start)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attend from tiles of queries that share their keys.

    Args:
        q: [..., R, G, Dk]; the R queries of a tile and their G heads are rows of one product.
        k: [..., S, Dk].
        v: [..., S, Dv].
        visible: Boolean, broadcastable to [..., R, G, S].

    Returns:
        [..., R, G, Dv], dtype of q. A query that sees no key yields zeros.
    """
    R, G = q.shape[-3:-1]
    scores = (q.flatten(-3, -2) @ k.mT).unflatten(-2, (R, G))
    weights = masked_softmax(scale * scores.to(wide(q.dtype)), visible)
    out: Tensor = (weights.to(v.dtype).flatten(-3, -2) @ v).unflatten(-2, (R, G))
    return out


def by_chunks(
    step: Callable[..., Tensor],
    split: Sequence[Tensor],
    shared: Sequence[Tensor],
    *,
    dim: int,
    row_elements: int,
) -> Tensor:
    """Run step(*split, *shared) over chunks of dimension dim, and join its outputs there.

    Args:
        step: One chunk of a computation whose rows are independent.
        split: Tensors of one length in dim, cut into the same chunks.
        shared: Tensors that every chunk sees whole, passed in float32 or wider, because autograd
            adds up the gradients of the chunks in this dtype and bfloat16 would lose them.
        row_elements: Elements of step's largest intermediate per row.

    Returns:
        What step would return for all rows at once. With several chunks, each keeps only its
        inputs and is recomputed in the backward pass.
    """
    shared = [x.to(wide(x.dtype)) for x in shared]
    rows = max(1, CHUNK_ELEMENTS // row_elements)
    if split[0].shape[dim] <= rows:
        return step(*split, *shared)
    parts = zip(*(x.split(rows, dim) for x in split), strict=True)
    return torch.cat(
        [
            checkpoint(step, *part, *shared, use_reentrant=False, preserve_rng_state=False)
            for part in parts
        ],
        dim,
    )


def compress_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions) -> Tensor:
    """Compress branch (eq. 5 and 7), a chunk of queries at a time. Shapes as in nsa.reference."""
    place = places(q, at.q_start, at.cu_seqlens)
    document, last_token, _ = _compressed_places(k_cmp, at)

    def step(q: Tensor, query_document: Tensor, position: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = _sees(query_document, position, document, last_token)
        tile = q.unflatten(2, (k.shape[2], -1)).transpose(1, 2)  # [B, HKV, C, G, Dk]
        k, v = (x.to(q.dtype).transpose(1, 2) for x in (k, v))  # [B, HKV, N, D]
        out = attend(tile, k, v, visible[:, None, :, None], at.scale)
        return out.transpose(1, 2).flatten(2, 3)

    return by_chunks(
        step,
        (q, place.document, place.position),
        (k_cmp, v_cmp),
        dim=1,
        row_elements=q.shape[0] * q.shape[2] * max(k_cmp.shape[1], v_cmp.shape[3]),
    )


@torch.no_grad()
def select_blocks(q: Tensor, k_cmp: Tensor, at: Positions) -> Tensor:
    """Scores and top-n (eq. 8 to 11), a chunk of queries at a time. As in nsa.reference."""
    place = places(q, at.q_start, at.cu_seqlens)
    document, last_token, first_row = _compressed_places(k_cmp, at)
    tokens = at.q_start + q.shape[1]

    def step(q: Tensor, query_document: Tensor, position: Tensor, k: Tensor) -> Tensor:
        visible = _sees(query_document, position, document, last_token)[:, :, None, None]
        grouped = q.to(k.dtype).unflatten(2, (k.shape[2], -1))  # [B, C, HKV, G, Dk]
        scores = torch.einsum("bthgd,bihd->bthgi", grouped, k)
        probability = masked_softmax(at.scale * scores, visible).sum(3)  # [B, C, HKV, N]
        if at.cu_seqlens is not None:
            probability = _from_row(probability, first_row[query_document[0]])
        importance = to_select_blocks(probability, tokens, at.config)
        return top_blocks(importance, position[0], config=at.config)

    return by_chunks(
        step,
        (q, place.document, place.position),
        (k_cmp,),
        dim=1,
        row_elements=q.shape[0] * q.shape[2] * max(k_cmp.shape[1], q.shape[3]),
    )


def window_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """Window branch: each tile of R queries against the R + w - 1 keys that one of them sees.

    Shapes as in nsa.reference; the last key is the last query's own.

    Source: arXiv:2502.11089, eq. 5 and section 3.3.3.
    """
    B, T, HQ, _ = q.shape
    S, HKV, Dv = v.shape[1:]
    w = min(at.config.window_size, S)
    R = min(WINDOW_TILE, T)
    tail = -T % R
    # Tile i begins at query i*R, and its keys at i*R after `lead` keys of padding.
    lead = w - 1 - (S - T)

    def tiles(x: Tensor) -> Tensor:  # [B, S, ...] -> [B, tiles, ..., R + w - 1]
        padding = [0, 0] * (x.dim() - 2) + [lead, tail]
        return F.pad(x, padding, value=-1 if x.dim() == 2 else 0).unfold(1, R + w - 1, R)

    # Padding belongs to no document.
    document = places(k, at.k_start, at.cu_seqlens).document
    queries = F.pad(q, (0, 0, 0, 0, 0, tail)).unflatten(1, (-1, R))  # [B, tiles, R, HQ, Dk]
    query_document = F.pad(document[:, S - T :], (0, tail)).unflatten(1, (-1, R))
    age = torch.arange(R, device=q.device)[:, None] - torch.arange(1 - w, R, device=q.device)
    band = (age >= 0) & (age < w)  # [R, R + w - 1]

    def step(q: Tensor, query_document: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
        visible = band & (query_document[..., None] == document[:, :, None])
        tile = q.unflatten(3, (HKV, -1)).transpose(2, 3)  # [B, tiles, HKV, R, G, Dk]
        k, v = k.to(q.dtype).mT, v.to(q.dtype).mT  # [B, tiles, HKV, R + w - 1, D]
        out = attend(tile, k, v, visible[:, :, None, :, None], at.scale)
        return out.transpose(2, 3).flatten(3, 4)

    out = by_chunks(
        step,
        (queries, query_document, tiles(_widen(k)), tiles(_widen(v)), tiles(document)),
        (),
        dim=1,
        row_elements=B * R * HQ * max(R + w - 1, Dv),
    )
    return out.flatten(1, 2)[:, :T]


def _widen(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))


def _compressed_places(k_cmp: Tensor, at: Positions) -> tuple[Tensor, Tensor, Tensor]:
    """Locate the compressed blocks.

    Returns:
        Document of each block, [N]; position of its last token in the document, [N]; first row
        of each document, [documents].
    """
    row = torch.arange(k_cmp.shape[1], device=k_cmp.device)
    if at.cu_seqlens is None:
        document, first_row = torch.zeros_like(row), row.new_zeros(1)
    else:
        size, stride = at.config.compress_block_size, at.config.compress_stride
        blocks = ((at.cu_seqlens.diff().long() - size) // stride + 1).clamp(min=0)
        end_row = blocks.cumsum(0)
        document = torch.searchsorted(end_row, row, right=True)
        first_row = end_row - blocks
    in_document = row - first_row[document]
    last_token = in_document * at.config.compress_stride + at.config.compress_block_size - 1
    return document, last_token, first_row


def _sees(query_document: Tensor, position: Tensor, document: Tensor, last_token: Tensor) -> Tensor:
    """[1, C, N]: whether a block is in the query's document and ends at or before the query."""
    return (query_document[..., None] == document) & (last_token <= position[..., None])


def _from_row(probability: Tensor, first_row: Tensor) -> Tensor:
    """Shift each query's probabilities [B, C, HKV, N] so that its document's blocks come first.

    Blocks of other documents carry probability 0, so those that follow need no mask.
    """
    N = probability.shape[-1]
    row = first_row[:, None] + torch.arange(N, device=first_row.device)  # [C, N]
    row = row.clamp(max=N)[None, :, None].expand(*probability.shape)
    return F.pad(probability, (0, 1)).gather(-1, row)


def to_select_blocks(probability: Tensor, tokens: int, config: NSAConfig) -> Tensor:
    """Map compressed blocks onto select blocks by overlap (eq. 9).

    With p = l'/d, select block j overlaps compressed blocks p*j - l/d + 1 ... p*(j+1) - 1, each
    in as many strides as they share: 1, 2, 2, 2, 1 for the paper's sizes.

    Args:
        probability: [B, C, HKV, N], summed over the group.

    Returns:
        [B, C, HKV, M], M = config.select_length(tokens).
    """
    M = config.select_length(tokens)
    length = config.compress_block_size // config.compress_stride
    per_block = config.select_block_size // config.compress_stride
    padding = (length - 1, per_block * M - probability.shape[-1])
    padded = F.pad(probability, padding)
    importance = probability.new_zeros(*probability.shape[:-1], M)
    for offset in range(1 - length, per_block):
        shared = min(offset + length, per_block) - max(offset, 0)
        importance += shared * padded[..., offset + length - 1 :: per_block][..., :M]
    return importance
