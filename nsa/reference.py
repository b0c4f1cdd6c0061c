"""The definition of every branch: eager, any device, float64 capable, obviously right.

Masks are dense, documents are looped over, nothing is chunked: memory grows with T * S. Tests
compare every route of `nsa.ops` with these functions. The two matrix products run in the dtype of
the inputs, softmax in float32 or wider; the scores that select blocks run in float32 or wider
throughout. A query that sees no key yields zeros.

Tensors are [B, T, H, D]. Query i is at position at.q_start + i, or at.rows[i] if these are a few
rows of a sequence; key j is at position j. With `at.cu_seqlens` (the boundaries of a packed batch
with B == 1) every document is computed as if it were alone.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089, section 3.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS, NSAConfig, Positions


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of softmax and of sums over many terms: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible entries of the last axis; a row without any is all zeros.

    Args:
        scores: [..., S].
        visible: Boolean, broadcastable to scores.

    Returns:
        [..., S], float32 or wider.
    """
    scores = scores.to(wide(scores.dtype))
    # The lowest finite number instead of -inf: a row that sees no key then has gradient 0.
    lowest = torch.finfo(scores.dtype).min
    return scores.masked_fill(~visible, lowest).softmax(-1).masked_fill(~visible, 0)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attend from each query to the keys visible to it.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk]; HQ is a multiple of HKV, and G = HQ / HKV query heads share one.
        v: [B, S, HKV, Dv].
        visible: Boolean, broadcastable to [B, HKV, G, T, S].
        scale: Multiplies q . k.

    Returns:
        [B, T, HQ, Dv], dtype of q.
    """
    grouped = q.unflatten(2, (k.shape[2], -1))  # [B, T, HKV, G, Dk]
    scores = torch.einsum("bthgd,bshd->bhgts", grouped, k)
    weights = masked_softmax(scale * scores.to(wide(q.dtype)), visible)
    return torch.einsum("bhgts,bshd->bthgd", weights.to(v.dtype), v).flatten(2, 3)


def compress_blocks(
    x: Tensor,
    phi: Callable[[Tensor], Tensor],
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Turn every block of l tokens, one each d tokens, into one compressed token.

    Args:
        x: Keys or values, [B, T, HKV, D].
        phi: Maps blocks [B, N, l, HKV, D] to [B, N, HKV, D]; N may be 0.
        cu_seqlens: No block crosses a document; the rows of all documents are concatenated. Their
            number depends on the boundaries, so this waits for the device.

    Returns:
        [B, N, HKV, D], N = config.compressed_length(T), or its sum over documents.

    Source: arXiv:2502.11089, eq. 7; the tail of T that fills no block is left out.
    """
    size, stride = config.compress_block_size, config.compress_stride

    def blocks(document: Tensor) -> Tensor:
        if document.shape[1] < size:
            return document[:, :0, None].expand(-1, -1, size, -1, -1)
        return document.unfold(1, size, stride).movedim(-1, 2)

    if cu_seqlens is None:
        return phi(blocks(x))
    return phi(torch.cat([blocks(x[:, s]) for s in _documents(cu_seqlens)], dim=1))


def compress_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions) -> Tensor:
    """Attend to the compressed blocks that end at or before the query.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp: [B, N, HKV, Dk], from `compress_blocks`.
        v_cmp: [B, N, HKV, Dv].

    Returns:
        [B, T, HQ, Dv]. Zeros for the first l - 1 positions.

    Source: arXiv:2502.11089, eq. 5 with the compressed keys of eq. 7.
    """
    if at.cu_seqlens is not None:
        documents = [
            compress_attention(q[:, s], k_cmp[:, c], v_cmp[:, c], at.alone())
            for s, c in _documents_and_blocks(at.cu_seqlens, at.config)
        ]
        return torch.cat(documents, dim=1)
    return masked_attention(q, k_cmp, v_cmp, _visible_blocks(q, k_cmp, at), at.scale)


def block_importance(q: Tensor, k_cmp: Tensor, at: Positions) -> Tensor:
    """Score every select block by the attention its compressed blocks receive.

    Compressed block i covers [i*d, i*d + l), select block j covers [j*l', (j+1)*l'); the
    probability of i counts towards j once for every d tokens they share. As printed, eq. 9 is
    shifted by one select block; we follow the overlap, as public kernels do. The sum over the
    group (eq. 10) is taken before the mapping (eq. 9): both are sums.

    Returns:
        [B, T, HKV, M], float32 or wider, M = config.select_length(position of the last query + 1).

    Source: arXiv:2502.11089, eq. 8 to 10.
    """
    stride, size = at.config.compress_stride, at.config.select_block_size
    q, k_cmp = q.to(wide(q.dtype)), k_cmp.to(wide(q.dtype))
    N, HKV = k_cmp.shape[1:3]

    scores = torch.einsum("bthgd,bihd->bthgi", q.unflatten(2, (HKV, -1)), k_cmp)
    visible = _visible_blocks(q, k_cmp, at)[:, None, None]
    probability = masked_softmax(at.scale * scores, visible).sum(3)  # [B, T, HKV, N]
    tokens = at.q_start + q.shape[1] if at.rows is None else int(at.rows[-1]) + 1
    M, strides = at.config.select_length(tokens), size // stride
    # The tokens of stride s are in the compressed blocks s - reach + 1 to s.
    reach = at.config.compress_block_size // stride
    padded = F.pad(probability, (reach - 1, M * strides - N))
    of_strides = torch.stack([padded[..., i : i + M * strides] for i in range(reach)]).sum(0)
    importance: Tensor = of_strides.unflatten(-1, (M, strides)).sum(-1)
    return importance


def top_blocks(importance: Tensor, position: Tensor, *, config: NSAConfig) -> Tensor:
    """Choose n causal blocks: block 0, the query's own, the one before it, then the best.

    Args:
        importance: [B, T, HKV, M].
        position: Position of each query in its document, [T].

    Returns:
        Block indices, int32, [B, T, HKV, n], ascending; -1 fills the end where a query has
        fewer than n causal blocks. Ties go to the lower index.

    Source: arXiv:2502.11089, eq. 11, and section 4.1 for the blocks always selected.
    """
    n, M = config.num_blocks, importance.shape[-1]
    block = torch.arange(M, device=importance.device)
    own = (position // config.select_block_size)[:, None, None]  # [T, 1, 1]
    always = (block < INITIAL_BLOCKS) | (block > own - LOCAL_BLOCKS)
    rank = importance.masked_fill(always, torch.inf).masked_fill(block > own, -torch.inf)
    best = rank.sort(dim=-1, descending=True, stable=True)
    unused = best.values[..., :n] == -torch.inf
    ascending = best.indices[..., :n].masked_fill(unused, M).sort(dim=-1).values
    chosen = ascending.masked_fill(ascending == M, -1)
    return F.pad(chosen, (0, n - chosen.shape[-1]), value=-1).int()


@torch.no_grad()
def select_blocks(q: Tensor, k_cmp: Tensor, at: Positions) -> Tensor:
    """Select n blocks of keys for each query and KV head.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp: [B, N, HKV, Dk], from `compress_blocks`.

    Returns:
        Block indices, int32, [B, T, HKV, n], as `top_blocks` gives them; with cu_seqlens they
        count from the start of the document.

    Source: arXiv:2502.11089, eq. 8 to 11.
    """
    if at.cu_seqlens is not None:
        documents = [
            select_blocks(q[:, s], k_cmp[:, c], at.alone())
            for s, c in _documents_and_blocks(at.cu_seqlens, at.config)
        ]
        return torch.cat(documents, dim=1)
    importance = block_importance(q, k_cmp, at)
    return top_blocks(importance, _positions(q, at), config=at.config)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions
) -> Tensor:
    """Attend to the keys of the selected blocks, causally.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], S = q_start + T.
        v: [B, S, HKV, Dv].
        block_indices: [B, T, HKV, n], from `select_blocks`.

    Returns:
        [B, T, HQ, Dv].

    Source: arXiv:2502.11089, eq. 5 and 12.
    """
    if at.cu_seqlens is not None:
        documents = [
            selected_attention(q[:, s], k[:, s], v[:, s], block_indices[:, s], at.alone())
            for s in _documents(at.cu_seqlens)
        ]
        return torch.cat(documents, dim=1)
    key = torch.arange(k.shape[1], device=q.device)
    block = key // at.config.select_block_size
    selected = (block_indices[..., None] == block).any(3)  # [B, T, HKV, S]
    visible = selected & (key <= _positions(q, at)[:, None, None])
    return masked_attention(q, k, v, visible.transpose(1, 2)[:, :, None], at.scale)


def window_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """Attend to the last w positions, the query's own included.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk]; key j is at position at.k_start + j.
        v: [B, S, HKV, Dv].

    Returns:
        [B, T, HQ, Dv].

    Source: arXiv:2502.11089, eq. 5 and section 3.3.3.
    """
    if at.cu_seqlens is not None:
        documents = [
            window_attention(q[:, s], k[:, s], v[:, s], at.alone())
            for s in _documents(at.cu_seqlens)
        ]
        return torch.cat(documents, dim=1)
    key = torch.arange(at.k_start, at.k_start + k.shape[1], device=k.device)
    age = _positions(q, at)[:, None] - key
    return masked_attention(q, k, v, (age >= 0) & (age < at.config.window_size), at.scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """Attend to every key up to the query: the attention that NSA replaces.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], S = q_start + T.
        v: [B, S, HKV, Dv].

    Returns:
        [B, T, HQ, Dv].
    """
    everything = replace(at.config, window_size=k.shape[1])
    return window_attention(q, k, v, replace(at, config=everything))


def gated_sum(
    gates: Tensor, compress: Tensor | None, select: Tensor | None, window: Tensor | None
) -> Tensor:
    """Add up the outputs of the branches, weighed by their gates. None is a branch that is off.

    Args:
        gates: [B, T, HQ, 3], in the order of nsa.config.BRANCHES.
        compress, select, window: [B, T, HQ, Dv].

    Returns:
        [B, T, HQ, Dv], in the dtype of the branches.

    Source: arXiv:2502.11089, eq. 5.
    """
    weights = gates.unsqueeze(-1).unbind(-2)  # each [B, T, HQ, 1]
    on = [(g, o) for g, o in zip(weights, (compress, select, window), strict=True) if o is not None]
    return reduce(add, (g * o for g, o in on)).to(on[0][1].dtype)


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    at: Positions,
) -> Tensor:
    """Native sparse attention: three branches and their gates. Arguments are those of the branches.

    Returns:
        [B, T, HQ, Dv].

    Source: arXiv:2502.11089, eq. 5.
    """
    blocks = select_blocks(q, k_cmp, at)
    return gated_sum(
        gates,
        compress_attention(q, k_cmp, v_cmp, at),
        selected_attention(q, k_sel, v_sel, blocks, at),
        window_attention(q, k_win, v_win, at),
    )


def _positions(q: Tensor, at: Positions) -> Tensor:
    if at.rows is not None:
        return at.rows
    return torch.arange(at.q_start, at.q_start + q.shape[1], device=q.device)


def _visible_blocks(q: Tensor, k_cmp: Tensor, at: Positions) -> Tensor:
    """[T, N]: whether the last token of block i is at or before query t."""
    block = torch.arange(k_cmp.shape[1], device=q.device)
    last_token = block * at.config.compress_stride + at.config.compress_block_size - 1
    return last_token <= _positions(q, at)[:, None]


def _documents(cu_seqlens: Tensor) -> list[slice]:
    bounds: list[int] = cu_seqlens.tolist()
    return [slice(a, b) for a, b in pairwise(bounds)]


def _documents_and_blocks(cu_seqlens: Tensor, config: NSAConfig) -> list[tuple[slice, slice]]:
    """The tokens of each document, and its rows among the compressed blocks."""
    pairs, start = [], 0
    for tokens in _documents(cu_seqlens):
        stop = start + config.compressed_length(tokens.stop - tokens.start)
        pairs.append((tokens, slice(start, stop)))
        start = stop
    return pairs
