"""Keys and values for decoding, one cache per layer.

A cache holds all keys and values of the select branch, the last w of the window branch, and the
compressed ones of the compress branch with the raw tail that does not fill a block yet. A prefill
is the first `append`; appending in pieces gives the same cache as appending all at once.

The first `append` allocates the storage, with the dtype and device of its tensors. Caches are for
inference: no gradient passes through them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.config import NSAConfig

Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Raw keys and values, [B, T, HKV, D], from the start of a block on -> those of their whole
blocks, [B, N, HKV, D] (eq. 7)."""


class Heads(NamedTuple):
    """Queries, keys, values and gates of tokens, [B, T, heads, D].

    Queries and the keys of select and window are rotated. Keys of the compress branch are not: phi
    has its own position encoding.
    """

    q: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    k_raw: Tensor
    v_raw: Tensor
    gates: Tensor
    """[B, T, HQ, 3]"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValues:
    """What consecutive queries read: keys and values of each branch, [B, *, HKV, D].

    The second axis counts blocks in `cmp`, tokens in `sel` and `win`. Keys are rotated.
    """

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    q_start: int = 0
    """Position of the first query."""
    k_win_start: int = 0
    """Position of the window branch's first key."""

    def at(self, position: int, config: NSAConfig) -> "KeyValues":
        """What the query at `position` sees; its own key is the last."""
        length = position + 1
        blocks = config.compressed_length(length)
        first = max(length - config.window_size, self.k_win_start)
        window = slice(first - self.k_win_start, length - self.k_win_start)
        return KeyValues(
            k_cmp=self.k_cmp[:, :blocks],
            v_cmp=self.v_cmp[:, :blocks],
            k_sel=self.k_sel[:, :length],
            v_sel=self.v_sel[:, :length],
            k_win=self.k_win[:, window],
            v_win=self.v_win[:, window],
            q_start=position,
            k_win_start=first,
        )

    def document(self, tokens: slice, blocks: slice) -> "KeyValues":
        """One document of a packed batch, as if it were alone."""
        return replace(
            self,
            k_cmp=self.k_cmp[:, blocks],
            v_cmp=self.v_cmp[:, blocks],
            k_sel=self.k_sel[:, tokens],
            v_sel=self.v_sel[:, tokens],
            k_win=self.k_win[:, tokens],
            v_win=self.v_win[:, tokens],
        )


class _CacheRows:
    """Keys or values of all tokens: a [B, capacity, H, D] buffer that fills from the front."""

    def __init__(self, capacity: int, like: Tensor) -> None:
        B, _, H, D = like.shape
        self.buffer = like.new_empty(B, capacity, H, D)
        self.length = 0

    def append(self, rows: Tensor) -> Tensor:
        """Add rows at the end; returns a view of all."""
        end = self.length + rows.shape[1]
        self.buffer[:, self.length : end] = rows
        self.length = end
        return self.buffer[:, :end]

    def mark(self) -> Callable[[], None]:
        """Remember this state; the returned function restores it."""
        length = self.length

        def rewind() -> None:
            self.length = length

        return rewind


class _Window:
    """Keys or values of the last `size` tokens, in order.

    The buffer has room for twice as many: a decoded token is one row written at the end, and only
    when the buffer is full do the visible rows move to the front.
    """

    def __init__(self, size: int, like: Tensor) -> None:
        B, _, H, D = like.shape
        self.size = size
        self.buffer = like.new_empty(B, 2 * size, H, D)
        self.length = 0

    def append(self, rows: Tensor) -> Tensor:
        """Add rows at the end; returns them after the earlier rows that they see."""
        first = max(0, self.length - (self.size - 1))
        end = self.length + rows.shape[1]
        if end <= 2 * self.size:
            self.buffer[:, self.length : end] = rows
            self.length = end
            return self.buffer[:, first:end]
        seen = torch.cat([self.buffer[:, first : self.length], rows], 1)
        last = seen[:, -self.size :]
        self.length = last.shape[1]
        self.buffer[:, : self.length] = last
        return seen

    def mark(self) -> Callable[[], None]:
        """Remember this state; the returned function restores it. Rows may move, so it copies
        them."""
        rows = self.buffer[:, : self.length].clone()

        def rewind() -> None:
            self.length = rows.shape[1]
            self.buffer[:, : self.length] = rows

        return rewind


class _Cache:
    """Room for `capacity` tokens, taken in order."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        """Tokens held, which is the position of the next one."""
        self._batch_size: int | None = None

    def _take(self, k: Tensor) -> int:
        """Check that the tokens of k fit and count them; returns the position of the first."""
        B, T = k.shape[:2]
        if torch.is_grad_enabled() and k.requires_grad:
            raise ValueError("k requires a gradient, but a cache passes none; use torch.no_grad")
        if self._batch_size not in (None, B):
            raise ValueError(f"k holds {B} sequences; this cache holds {self._batch_size}")
        if (needed := self.length + T) > self.capacity:
            raise ValueError(f"{needed} tokens do not fit a cache with capacity={self.capacity}")
        start, self.length, self._batch_size = self.length, needed, B
        return start

    def mark(self) -> Callable[[], None]:
        """Remember the tokens held now.

        Returns:
            A function that removes all later tokens, and may be called more than once. It costs
            one copy of the window branch.
        """
        length, rewinds = self.length, [rows.mark() for rows in self._stores()]

        def rewind() -> None:
            self.length = length
            for rewind_one in rewinds:
                rewind_one()

        return rewind

    def _stores(self) -> list["_CacheRows | _Window"]:
        """The stores of rows, after the first append."""
        raise NotImplementedError


class DenseCache(_Cache):
    """Keys and values of one layer of dense attention."""

    _k: _CacheRows
    _v: _CacheRows

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Add T tokens, k [B, T, HKV, Dk] (rotated) and v [B, T, HKV, Dv].

        Returns:
            All keys and values held, as views, and the position of the first token added.

        Raises:
            ValueError: They do not fit, have another batch size, or require a gradient.
        """
        start = self._take(k)
        if start == 0:
            self._k, self._v = _CacheRows(self.capacity, k), _CacheRows(self.capacity, v)
        return self._k.append(k), self._v.append(v), start

    def _stores(self) -> list[_CacheRows | _Window]:
        return [self._k, self._v]


class LayerCache(_Cache):
    """Keys and values of one layer of Native Sparse Attention."""

    _tail: tuple[Tensor, Tensor]
    """Raw keys and values from the start of the first incomplete block."""

    def __init__(self, config: NSAConfig, capacity: int) -> None:
        super().__init__(capacity)
        self.config = config

    def append(self, heads: Heads, compress: Compress) -> KeyValues:
        """Add T tokens to every branch.

        Args:
            compress: Called once, with the raw tail and the new tokens; returns the keys
                (rotated) and values of the blocks that these tokens complete, possibly none.

        Returns:
            What the T queries of these tokens read: views, valid until the next call.

        Raises:
            ValueError: They do not fit, have another batch size, or require a gradient.
        """
        start = self._take(heads.k_sel)
        if start == 0:
            self._allocate(heads.k_sel, heads.v_sel)
            self._tail = heads.k_raw[:, :0], heads.v_raw[:, :0]
        k_raw = torch.cat((self._tail[0], heads.k_raw), 1)
        v_raw = torch.cat((self._tail[1], heads.v_raw), 1)
        k_cmp, v_cmp = compress(k_raw, v_raw)
        done = k_cmp.shape[1] * self.config.compress_stride
        self._tail = k_raw[:, done:].clone(), v_raw[:, done:].clone()
        k_seen = self._k_win.append(heads.k_win)
        return KeyValues(
            k_cmp=self._k_cmp.append(k_cmp),
            v_cmp=self._v_cmp.append(v_cmp),
            k_sel=self._k_sel.append(heads.k_sel),
            v_sel=self._v_sel.append(heads.v_sel),
            k_win=k_seen,
            v_win=self._v_win.append(heads.v_win),
            q_start=start,
            k_win_start=self.length - k_seen.shape[1],
        )

    def mark(self) -> Callable[[], None]:
        """See _Cache.mark."""
        rewind_stores, tail = super().mark(), self._tail

        def rewind() -> None:
            rewind_stores()
            self._tail = tail  # replaced by every append, never written to

        return rewind

    def _stores(self) -> list[_CacheRows | _Window]:
        return [self._k_cmp, self._v_cmp, self._k_sel, self._v_sel, self._k_win, self._v_win]

    def _allocate(self, k: Tensor, v: Tensor) -> None:
        blocks = self.config.compressed_length(self.capacity)
        self._k_cmp, self._v_cmp = _CacheRows(blocks, k), _CacheRows(blocks, v)
        self._k_sel, self._v_sel = _CacheRows(self.capacity, k), _CacheRows(self.capacity, v)
        size = min(self.config.window_size, self.capacity)
        self._k_win, self._v_win = _Window(size, k), _Window(size, v)
