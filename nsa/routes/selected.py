"""Routes of the selected branch without Triton: one function, five ways to gather the keys.

    loop    one query and KV head at a time, in Python; waits for the device at each
    gather  every query's blocks copied side by side, unused slots masked
    packed  queries with equally many blocks batched, so that no slot is unused
    varlen  only visible keys copied, end to end, with a softmax per segment
    masked  a [T, S] mask and PyTorch's own attention: nothing copied, nothing skipped

Except in `masked`, memory is linear in T. `loop`, `packed` and `varlen` read the selection on
the host or size tensors by it, and so wait for the device; `gather` and `masked` do not.

A *row* is one query and one KV head, with the G query heads that share it.

Source: arXiv:2502.11089, eq. 5 and 12.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.config import Positions
from nsa.reference import wide
from nsa.routes.eager import attend, by_chunks, places


class _Rows(NamedTuple):
    """The queries as R = B * T * HKV rows, in that order."""

    q: Tensor
    """[R, G, Dk]"""
    blocks: Tensor
    """[R, n] int64, ascending, -1 in unused slots."""
    position: Tensor
    """[R] int64, in the document."""
    first_key: Tensor
    """[R] int64: index of the document's first key among the B * S * HKV flattened keys; the next
    key of the same head is HKV further."""


def gather(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> Tensor:
    """Copy each row's n blocks side by side and attend to them. Shapes as in nsa.reference."""
    rows = _rows(q, k, block_indices, at)
    used = min(at.config.num_blocks, at.config.select_length(k.shape[1]))  # the rest is always -1
    out = _attend_rows(rows._replace(blocks=rows.blocks[:, :used]), k, v, at)
    return out.view(*q.shape[:3], -1)


def packed(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> Tensor:
    """`gather`, once for each number of selected blocks, to avoid padding."""
    rows = _rows(q, k, block_indices, at)
    counts = (rows.blocks >= 0).sum(1)
    members, outputs = [], []
    for count in range(at.config.num_blocks + 1):
        member = (counts == count).nonzero().squeeze(1)
        batch = _Rows(*(x.index_select(0, member) for x in rows))
        batch = batch._replace(blocks=batch.blocks[:, :count])
        if member.numel():
            members.append(member)
            outputs.append(_attend_rows(batch, k, v, at))
    in_order = torch.cat(members).argsort()
    return torch.cat(outputs).index_select(0, in_order).view(*q.shape[:3], -1)


def varlen(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> Tensor:
    """Copy only the visible keys, all rows end to end, and take the softmax of each segment."""
    HKV = k.shape[2]

    def step(
        q: Tensor, blocks: Tensor, position: Tensor, first_key: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        index, visible = _keys(blocks, position, first_key, at.config.select_block_size, HKV)
        packed, lengths = index[visible], visible.sum(1)  # [P], [R]
        keys = k.index_select(0, packed).to(q.dtype)  # [P, Dk]
        values = v.index_select(0, packed)  # [P, Dv], wide
        queries = q.repeat_interleave(lengths, 0)  # [P, G, Dk]
        scores = at.scale * (queries @ keys[:, :, None]).squeeze(-1).to(v.dtype)  # [P, G]
        weights = _segment_softmax(scores, lengths).to(q.dtype).to(v.dtype)
        return _segment_sum(weights[:, :, None] * values[:, None], lengths).to(q.dtype)

    rows = _rows(q, k, block_indices, at)
    G, size = rows.q.shape[1], at.config.num_blocks * at.config.select_block_size
    out = by_chunks(
        step,
        rows,
        (k.flatten(0, 2), v.flatten(0, 2)),
        dim=0,
        row_elements=min(size, k.shape[1]) * G * max(k.shape[3], v.shape[3]),
    )
    return out.view(*q.shape[:3], -1)


def loop(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> Tensor:
    """Slice each row's blocks out of k and v, one row after the other."""
    size, HKV = at.config.select_block_size, k.shape[2]
    rows = _rows(q, k, block_indices, at)
    keys, values = (x.to(wide(x.dtype)).flatten(0, 2) for x in (k, v))
    everything = torch.ones(1, dtype=torch.bool, device=q.device)

    outputs = []
    for row_q, row_blocks, row_position, row_first in zip(*rows, strict=True):
        length, first = int(row_position) + 1, int(row_first)
        slices = [
            slice(first + b * size * HKV, first + min((b + 1) * size, length) * HKV, HKV)
            for b in row_blocks.tolist()
            if b >= 0
        ]
        if not slices:
            outputs.append(row_q.new_zeros(row_q.shape[0], v.shape[3]))
            continue
        row_k, row_v = (torch.cat([x[s] for s in slices]).to(q.dtype) for x in (keys, values))
        outputs.append(attend(row_q[None], row_k, row_v, everything, at.scale)[0])
    return torch.stack(outputs).view(*q.shape[:3], -1)


def masked(q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions) -> Tensor:
    """Turn the selection into a mask [B, HKV, T, S] and call PyTorch's attention with it."""
    B, T, HQ, _ = q.shape
    S, HKV, Dv = v.shape[1:]
    M = at.config.select_length(S)
    query, key = places(q, at.q_start, at.cu_seqlens), places(k, 0, at.cu_seqlens)

    slot = block_indices.long().masked_fill(block_indices < 0, M)  # unused ones go to column M
    selected = torch.zeros(B, T, HKV, M + 1, dtype=torch.bool, device=q.device)
    selected = selected.scatter(-1, slot, torch.ones_like(slot, dtype=torch.bool))
    visible = selected.index_select(-1, key.position[0] // at.config.select_block_size)
    same = query.document[0][:, None] == key.document  # [T, S]
    causal = same & (key.position <= query.position[0][:, None])
    visible = (visible & causal[:, None]).transpose(1, 2).flatten(0, 1)[:, None]
    # Softmax over no key is NaN: such rows attend to every key, and are zeroed afterwards.
    seeing = visible.any(-1, keepdim=True)  # [B * HKV, 1, T, 1]

    def heads(x: Tensor) -> Tensor:  # [B, S, H, D] -> [B * HKV, H / HKV, S, D]
        return x.transpose(1, 2).reshape(B * HKV, -1, x.shape[1], x.shape[3])

    G = HQ // HKV
    out = F.scaled_dot_product_attention(
        heads(q),
        heads(k).expand(-1, G, -1, -1),
        heads(v).expand(-1, G, -1, -1),
        attn_mask=visible | ~seeing,
        scale=at.scale,
    )
    return out.where(seeing, 0).reshape(B, HQ, T, Dv).transpose(1, 2)


def _rows(q: Tensor, k: Tensor, block_indices: Tensor, at: Positions) -> _Rows:
    B, T = q.shape[:2]
    S, HKV = k.shape[1:3]
    place = places(q, at.q_start, at.cu_seqlens)
    batch = torch.arange(B, device=q.device)[:, None, None]
    head = torch.arange(HKV, device=q.device)
    first_key = (batch * S + place.start[:, :, None]) * HKV + head  # [B, T, HKV]
    return _Rows(
        q.unflatten(2, (HKV, -1)).flatten(0, 2),
        block_indices.long().flatten(0, 2),
        place.position[:, :, None].expand(B, T, HKV).flatten(),
        first_key.flatten(),
    )


def _keys(
    blocks: Tensor, position: Tensor, first_key: Tensor, size: int, HKV: int
) -> tuple[Tensor, Tensor]:
    """Keys of the selected blocks: index into the flattened keys, and visibility, [R, n * l'].

    A key of an unused slot (before the document) or of the future is invisible, and its index is
    that of another key that the row may read.
    """
    offset = torch.arange(size, device=blocks.device)
    key = (blocks[:, :, None] * size + offset).flatten(1)
    position = position[:, None]
    visible = (key >= 0) & (key <= position)
    return first_key[:, None] + key.clamp(min=0).minimum(position) * HKV, visible


def _attend_rows(rows: _Rows, k: Tensor, v: Tensor, at: Positions) -> Tensor:
    """Copy the keys of all slots and attend, invisible ones masked: [R, G, Dv]."""
    size, HKV = at.config.select_block_size, k.shape[2]

    def step(
        q: Tensor, blocks: Tensor, position: Tensor, first_key: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        index, visible = _keys(blocks, position, first_key, size, HKV)

        def copy(x: Tensor) -> Tensor:  # [B * S * HKV, D] -> [R, n * l', D]
            return x.index_select(0, index.flatten()).view(*index.shape, x.shape[1]).to(q.dtype)

        return attend(q[:, None], copy(k), copy(v), visible[:, None, None], at.scale)[:, 0]

    keys, G = rows.blocks.shape[1] * size, rows.q.shape[1]
    return by_chunks(
        step,
        rows,
        (k.flatten(0, 2), v.flatten(0, 2)),
        dim=0,
        row_elements=max(1, keys) * max(G, k.shape[3], v.shape[3]),
    )


def _segment_sum(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum x, [P, ...], over consecutive segments: [R, ...]; an empty segment yields zeros."""
    return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=True, initial=0)


def _segment_softmax(scores: Tensor, lengths: Tensor) -> Tensor:
    """Softmax of scores, [P, G], within consecutive segments."""
    largest = torch.segment_reduce(scores.detach(), "max", lengths=lengths, unsafe=True)
    weights = (scores - largest.repeat_interleave(lengths, 0)).exp()
    return weights / _segment_sum(weights, lengths).repeat_interleave(lengths, 0)
