"""A band: each query sees one interval of keys.

Key i of a sequence ends at position i * stride + span - 1. A query sees the keys that end at or
before it and, with a window, later than `window` positions before it. So the compress branch is
(d, l, no window), the window branch (1, 1, w) and dense attention (1, 1, no window). Both ends of
the interval ascend with the query.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa.config import Positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The same intervals for packed documents, as tables on the device, all int32.

    Queries and keys are numbered through the whole batch. No host value depends on the content.
    """

    low: Tensor
    """[T]: first key that the query sees."""
    high: Tensor
    """[T]: one past the last; at most `low` if it sees none."""
    first: Tensor
    """[S]: first query that sees the key."""
    stop: Tensor
    """[S]: one past the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Stride, span and window of the keys, and where queries and keys begin."""

    stride: int = 1
    span: int = 1
    window: int = 0
    """0: no window. Only with stride and span 1."""
    q_start: int = 0
    """Position of the first query."""
    k_start: int = 0
    """Position of the first key, in keys."""
    documents: Documents | None = None

    def tables(self, other: Tensor) -> tuple[Tensor, ...]:
        """low, high, first and stop of the documents; `other` where there are none."""
        d = self.documents
        return (other,) * 4 if d is None else (d.low, d.high, d.first, d.stop)

    @classmethod
    def compress(cls, at: Positions, *, tokens: int, blocks: int) -> Self:
        """The compress branch: `tokens` queries, `blocks` compressed keys."""
        size, stride = at.config.compress_block_size, at.config.compress_stride
        documents = None
        if (cu_seqlens := at.cu_seqlens) is not None:
            starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            rows = ((ends - starts - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
            row_ends = rows.cumsum(0)
            row_starts = row_ends - rows
            token = torch.arange(tokens, device=cu_seqlens.device)
            document = torch.searchsorted(ends, token, right=True)
            low = row_starts[document]
            seen = (token - starts[document] + 1 - size + stride).clamp(min=0) // stride
            block = torch.arange(blocks, device=cu_seqlens.device)
            owner = torch.searchsorted(row_ends, block, right=True)
            first = starts[owner] + (block - row_starts[owner]) * stride + size - 1
            documents = _as_int32(low, low + seen, first, ends[owner])
        return cls(stride=stride, span=size, q_start=at.q_start, documents=documents)

    @classmethod
    def causal(cls, at: Positions, *, tokens: int, window: int = 0) -> Self:
        """The window branch, or dense attention where window is 0."""
        documents = None
        if (cu_seqlens := at.cu_seqlens) is not None:
            starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
            token = torch.arange(tokens, device=cu_seqlens.device)
            document = torch.searchsorted(ends, token, right=True)
            low, stop = starts[document], ends[document]
            if window:
                low, stop = low.maximum(token - window + 1), stop.minimum(token + window)
            documents = _as_int32(low, token + 1, token, stop)
        return cls(window=window, q_start=at.q_start, k_start=at.k_start, documents=documents)


def _as_int32(low: Tensor, high: Tensor, first: Tensor, stop: Tensor) -> Documents:
    return Documents(
        low=low.to(torch.int32),
        high=high.to(torch.int32),
        first=first.to(torch.int32),
        stop=stop.to(torch.int32),
    )
