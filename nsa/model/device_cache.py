"""A cache whose whole state is on the device, at addresses that never change.

Appending a token is the same launches at every length, so a step captured as a CUDA graph serves
until the cache is full. Each sequence of a batch has its own length. There is one cache per layer;
the layers of a model share `lengths`, and its owner advances it before they append.

The compress branch needs no condition on the host: every step computes the block that ends at the
new token, and writes it to its row if it is one of the whole blocks, else to an unused row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.model.cache import Compress, Heads, KeyValues, LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Row of the last token of each sequence in each store; the same for every layer."""

    sequence: Tensor
    """[B]: 0, 1, ..."""
    token: Tensor
    """[B]: its position, and its row in the select branch."""
    window: Tensor
    """[B]"""
    raw: Tensor
    """[B]"""
    block: Tensor
    """[B]: the compressed block that ends here, or the unused row."""
    block_tokens: Tensor
    """[B, l]: rows of the raw tokens of the block that would end here."""

    @classmethod
    def of(cls, lengths: Tensor, config: NSAConfig, *, capacity: int) -> "Rows":
        """Rows of the tokens at lengths - 1; [B], int32, on the device and not read by the host."""
        size, stride = config.compress_block_size, config.compress_stride
        token = lengths.long() - 1
        start = token + 1 - size
        whole = (start >= 0) & (start % stride == 0)
        order = torch.arange(size, device=lengths.device)
        return cls(
            sequence=torch.arange(lengths.shape[0], device=lengths.device),
            token=token,
            window=token % min(config.window_size, capacity),
            raw=token % size,
            block=torch.where(whole, start // stride, config.compressed_length(capacity)),
            block_tokens=(start[:, None] + order) % size,
        )


class DeviceCache:
    """Keys and values of one layer of Native Sparse Attention, as `decode_attention` reads them.

    Attributes:
        lengths: [B], int32: tokens held by each sequence, as the last `Rows` counted them.
        k_cmp, v_cmp: [B, blocks + 1, HKV, D]; the last row is the unused one.
        k_sel, v_sel: [B, capacity, HKV, D].
        k_win, v_win: [B, min(w, capacity), HKV, D]: rings, position p in row p % size.
        k_raw, v_raw: [B, l, HKV, D]: rings of what phi reads next, before rotary.
    """

    def __init__(
        self,
        config: NSAConfig,
        capacity: int,
        *,
        lengths: Tensor,
        heads: int,
        head_dim_qk: int,
        head_dim_v: int,
        dtype: torch.dtype,
    ) -> None:
        """Allocate room for `capacity` tokens of each of the sequences that `lengths` counts."""
        self.config = config
        self.capacity = capacity
        self.lengths = lengths
        B, device = lengths.shape[0], lengths.device

        def rows(count: int) -> tuple[Tensor, Tensor]:
            k, v = (
                torch.empty(B, count, heads, size, dtype=dtype, device=device)
                for size in (head_dim_qk, head_dim_v)
            )
            return k, v

        self.k_cmp, self.v_cmp = rows(config.compressed_length(capacity) + 1)
        self.k_sel, self.v_sel = rows(capacity)
        self.k_win, self.v_win = rows(min(config.window_size, capacity))
        self.k_raw, self.v_raw = rows(config.compress_block_size)

    def append(self, heads: Heads, rows: Rows, compress: Compress) -> None:
        """Add one token per sequence: the one at lengths - 1, which the owner has counted.

        Args:
            heads: Of these tokens, [B, 1, heads, D].
            rows: Rows of these tokens.
            compress: [B, l, HKV, D] raw keys and values -> [B, 1, HKV, D], the keys rotated as
                at the block's last token, which is the new one.
        """
        b = rows.sequence
        for store, row, new in (
            (self.k_raw, rows.raw, heads.k_raw),
            (self.v_raw, rows.raw, heads.v_raw),
            (self.k_sel, rows.token, heads.k_sel),
            (self.v_sel, rows.token, heads.v_sel),
            (self.k_win, rows.window, heads.k_win),
            (self.v_win, rows.window, heads.v_win),
        ):
            store[b, row] = new[:, 0]
        k, v = (x[b[:, None], rows.block_tokens] for x in (self.k_raw, self.v_raw))
        k_cmp, v_cmp = compress(k, v)
        self.k_cmp[b, rows.block] = k_cmp[:, 0]
        self.v_cmp[b, rows.block] = v_cmp[:, 0]

    def filling(self) -> LayerCache:
        """A cache for one prefill: the prompt, padded on the right beyond `lengths`.

        No token sees a later one, so the padding changes no other token, and the rows that it
        leaves here are overwritten before they are read.
        """
        return _Filling(self)

    def fill(self, kv: KeyValues, k_raw: Tensor, v_raw: Tensor) -> None:
        """Copy the keys and values of a prefill of `lengths` tokens, padded on the right."""
        for store, rows in (
            (self.k_cmp, kv.k_cmp),
            (self.v_cmp, kv.v_cmp),
            (self.k_sel, kv.k_sel),
            (self.v_sel, kv.v_sel),
        ):
            store[:, : rows.shape[1]] = rows
        for ring, rows in (
            (self.k_win, kv.k_win),
            (self.v_win, kv.v_win),
            (self.k_raw, k_raw),
            (self.v_raw, v_raw),
        ):
            self._fill_ring(ring, rows)

    def _fill_ring(self, ring: Tensor, rows: Tensor) -> None:
        """Row r takes the last position below the length that is r modulo the ring's size."""
        size = ring.shape[1]
        last = self.lengths.long()[:, None] - 1
        row = torch.arange(size, device=ring.device)
        position = (last - (last - row) % size).clamp(min=0)
        sequence = torch.arange(ring.shape[0], device=ring.device)[:, None]
        ring.copy_(rows[sequence, position])


class _Filling(LayerCache):
    """A LayerCache that passes its one `append` to a DeviceCache."""

    def __init__(self, target: DeviceCache) -> None:
        super().__init__(target.config, target.capacity)
        self._target = target

    def append(self, heads: Heads, compress: Compress) -> KeyValues:
        """See LayerCache.append; the tokens are those of the whole prompt."""
        if self._take(heads.k_sel) != 0:
            raise ValueError("a device cache takes its prompt in one piece; this is the second")
        k_cmp, v_cmp = compress(heads.k_raw, heads.v_raw)
        kv = KeyValues(
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            k_sel=heads.k_sel,
            v_sel=heads.v_sel,
            k_win=heads.k_win,
            v_win=heads.v_win,
        )
        self._target.fill(kv, heads.k_raw, heads.v_raw)
        return kv

    def mark(self) -> Callable[[], None]:
        """Not available: a prompt is filled in once."""
        raise NotImplementedError("a device cache has no marks")
