"""Attention as a layer: projections, rotary embedding, the three branches and their gate.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089, section 3. This module holds
the parts with parameters: phi (eq. 7), the gate (eq. 5) and the projections; nsa.ops computes the
rest. `DenseAttention` is plain causal attention behind the same interface.
"""

from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nsa import ops
from nsa.config import BRANCHES, OFF, ModelConfig, NSAConfig, Routes
from nsa.flags import Prefill
from nsa.model.cache import DenseCache, Heads, KeyValues, LayerCache
from nsa.model.compiled import compiled
from nsa.model.rotary import Rotation, rotate
from nsa.profiling import named_range

GATE_HIDDEN = 64
"""Inner size of the gate's MLP."""


class Phi(nn.Module):
    """Turns a block of keys or values into one (eq. 7): an MLP with a position encoding.

    One instance serves all heads. The first layer is linear, so the position encoding passes
    through it once, not once per block.
    """

    def __init__(self, block_size: int, dim: int) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.empty(block_size, dim))
        self.mix = nn.Linear(block_size * dim, dim)
        self.out = nn.Linear(dim, dim)
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weights so that a compressed key has about the scale of a key."""
        for weight in (self.position, self.mix.weight, self.out.weight):
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5, generator=generator)
        for linear in (self.mix, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, blocks: Tensor) -> Tensor:
        """[B, N, l, H, D] -> [B, N, H, D]."""
        tokens = blocks.transpose(2, 3).flatten(-2)  # [B, N, H, l * D]
        bias = F.linear(self.position.flatten(), self.mix.weight, self.mix.bias)
        mixed: Tensor = F.linear(tokens, self.mix.weight, bias)
        out: Tensor = self.out(F.silu(mixed))
        return out


class MeanPhi(nn.Module):
    """The ablation: a block becomes its mean. No parameters."""

    def forward(self, blocks: Tensor) -> Tensor:
        """[B, N, l, H, D] -> [B, N, H, D]."""
        return blocks.mean(2)


class Gate(nn.Module):
    """The weight of each branch in each head (eq. 5), from the token's features.

    `sigmoid` weighs every branch independently, as in the paper; `softmax` weights sum to 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.nsa.gate
        self.hidden = nn.Linear(config.dim, GATE_HIDDEN)
        self.out = nn.Linear(GATE_HIDDEN, config.n_heads * len(BRANCHES))

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, HQ, 3], branches in the order of nsa.config.BRANCHES."""
        logits: Tensor = self.out(F.silu(self.hidden(x))).unflatten(-1, (-1, len(BRANCHES)))
        return logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1).to(logits.dtype)


class NSAttention(nn.Module):
    """Native Sparse Attention: one Q, keys and values of its own for each branch, a gate."""

    def __init__(self, config: ModelConfig, *, aux_stats: bool = True) -> None:
        """With aux_stats, `aux_stats()` reports on the last forward."""
        super().__init__()
        self.config = config
        self.keeps_stats = aux_stats
        HQ, HKV = config.n_heads, config.n_kv_heads
        Dk, Dv = config.head_dim_qk, config.head_dim_v
        # Q, then K of select, window and compress, then V of the same: one product for all seven.
        self.qkv = nn.Linear(config.dim, HQ * Dk + 3 * HKV * (Dk + Dv), bias=False)
        self.gate = Gate(config)
        self.phi_k = _phi(config.nsa, Dk)
        self.phi_v = _phi(config.nsa, Dv)
        self.out = nn.Linear(HQ * Dv, config.dim, bias=False)
        self._seen: tuple[Tensor, Tensor] | None = None

    def aux_stats(self) -> Mapping[str, Tensor]:
        """Statistics of the last forward, on its device: `gate_mean` [3], the mean gate of each
        branch in the order of BRANCHES; `blocks` [B, T, HKV, n], what each query selected, -1 in
        unused slots; `selected_blocks` [], the mean number of blocks a query selected.

        Empty before the first forward, and without aux_stats. A forward only keeps the tensors;
        the means are computed here.
        """
        if self._seen is None:
            return {}
        gates, indices = self._seen
        return {
            "gate_mean": gates.mean((0, 1, 2), dtype=torch.float32),
            "blocks": indices,
            "selected_blocks": (indices >= 0).sum(-1, dtype=torch.float32).mean(),
        }

    def forward(
        self,
        x: Tensor,
        *,
        routes: Routes,
        prefill: Prefill = "batched",
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend causally.

        Args:
            x: [B, T, dim]; with a cache, the T tokens after those it holds.
            routes: How each branch is computed.
            prefill: `batched` takes all queries at once; `token` one by one, which is slow. Both
                compute the same.
            cu_seqlens: [documents + 1], int32: bounds of documents packed into one row, B == 1.
                No document sees another. Not together with a cache.
            cache: Remembers keys and values for the next call.
            rotation: Turns of these tokens, when the caller computed them for all layers.

        Returns:
            [B, T, dim].

        Raises:
            ValueError: The prefill is unknown, or documents come with a cache.
            nsa.ops.Unsupported: A route cannot run here.
        """
        _check(prefill, cu_seqlens, cache)
        if rotation is None:
            start = cache.length if cache is not None else 0
            rotation = Rotation.of(
                self.config, x.shape[1], like=x, start=start, cu_seqlens=cu_seqlens
            )
        out = self.attend(
            self.project(x, rotation.tokens),
            routes=routes,
            prefill=prefill,
            cu_seqlens=cu_seqlens,
            cache=cache,
            rotation=rotation,
        )
        y: Tensor = self.out(out.flatten(-2))
        return y

    def project(self, x: Tensor, turns: Tensor) -> Heads:
        """Everything that a token of [B, T, dim] computes on its own; compiles."""
        c = self.config
        HQ, HKV, Dk, Dv = c.n_heads, c.n_kv_heads, c.head_dim_qk, c.head_dim_v
        qk, v = self.qkv(x).split([(HQ + 3 * HKV) * Dk, 3 * HKV * Dv], -1)
        rotated, k_raw = qk.unflatten(-1, (-1, Dk)).split([HQ + 2 * HKV, HKV], 2)
        q, k_sel, k_win = rotate(rotated, turns).split([HQ, HKV, HKV], 2)
        v_sel, v_win, v_raw = v.unflatten(-1, (3, HKV, Dv)).unbind(2)
        return Heads(q, k_sel, v_sel, k_win, v_win, k_raw, v_raw, self.gate(x))

    def compress(
        self, k_raw: Tensor, v_raw: Tensor | None, turns: Tensor, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of whole blocks, [B, N, HKV, D]; without v_raw no values.
        Compiles without documents."""
        cut = partial(ops.compress_blocks, config=self.config.nsa, cu_seqlens=cu_seqlens)
        keys = rotate(cut(k_raw, self.phi_k), turns)
        return keys, keys.new_empty(0, 0) if v_raw is None else cut(v_raw, self.phi_v)

    def attend(
        self,
        heads: Heads,
        *,
        routes: Routes,
        prefill: Prefill,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
        rotation: Rotation,
        compile_parts: bool = False,
    ) -> Tensor:
        """The part between `project` and `out`, in which tokens see each other.

        Args:
            compile_parts: Run phi compiled; not with documents or a cache.

        Returns:
            [B, T, HQ, Dv].
        """
        _check(prefill, cu_seqlens, cache)
        kv = self._key_values(heads, routes, rotation, cu_seqlens, cache, compile_parts)
        attend = self._attend if prefill == "batched" else self._attend_by_token
        out, indices = attend(heads.q, kv, heads.gates, routes, cu_seqlens)
        self._seen = (heads.gates.detach(), indices) if self.keeps_stats else None
        return out

    def _key_values(
        self,
        heads: Heads,
        routes: Routes,
        rotation: Rotation,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
        compile_parts: bool,
    ) -> KeyValues:
        """All keys and values that the queries may read. With the compress branch off phi gives the
        scores their keys, without gradient; a cache holds what every branch would read."""

        def compress(k: Tensor, v: Tensor | None) -> tuple[Tensor, Tensor]:
            with named_range("nsa.phi"):
                run = compiled(NSAttention.compress) if compile_parts else NSAttention.compress
                return run(self, k, v, rotation.blocks, cu_seqlens)

        h = heads
        if cache is not None:
            return cache.append(h, compress)
        if routes.compress != OFF:
            k_cmp, v_cmp = compress(h.k_raw, h.v_raw)
        elif routes.select != OFF:
            with torch.no_grad():
                k_cmp, v_cmp = compress(h.k_raw, None)
        else:
            k_cmp, v_cmp = h.k_raw[:, :0], h.v_raw[:, :0]
        return KeyValues(
            k_cmp=k_cmp, v_cmp=v_cmp, k_sel=h.k_sel, v_sel=h.v_sel, k_win=h.k_win, v_win=h.v_win
        )

    def _attend(
        self,
        q: Tensor,
        kv: KeyValues,
        gates: Tensor,
        routes: Routes,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Eq. 5: output [B, T, HQ, Dv], and the blocks that were selected [B, T, HKV, n]."""
        return ops.attention(
            q,
            kv.k_cmp,
            kv.v_cmp,
            kv.k_sel,
            kv.v_sel,
            kv.k_win,
            kv.v_win,
            gates,
            config=self.config.nsa,
            routes=routes,
            q_start=kv.q_start,
            k_win_start=kv.k_win_start,
            cu_seqlens=cu_seqlens,
            return_blocks=True,
        )

    def _attend_by_token(
        self,
        q: Tensor,
        kv: KeyValues,
        gates: Tensor,
        routes: Routes,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The same, one query at a time and one document after another."""
        nsa = self.config.nsa
        answers = []
        for tokens, blocks in _documents(cu_seqlens, q.shape[1], nsa):
            document = kv if cu_seqlens is None else kv.document(tokens, blocks)
            for i, t in enumerate(range(tokens.start, tokens.stop)):
                one = slice(t, t + 1)
                seen = document.at(kv.q_start + i, nsa)
                answers.append(self._attend(q[:, one], seen, gates[:, one], routes))
        outs, indices = zip(*answers, strict=True)
        return torch.cat(outs, 1), torch.cat(indices, 1)


class DenseHeads(NamedTuple):
    """Queries, keys (both rotated) and values of dense attention, [B, T, heads, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


class DenseAttention(nn.Module):
    """Plain causal grouped-query attention, with the interface of NSAttention."""

    def __init__(self, config: ModelConfig, backend: str = "sdpa") -> None:
        """`backend` is a route of nsa.ops.dense_attention."""
        super().__init__()
        self.config = config
        self.backend = backend
        HQ, HKV = config.n_heads, config.n_kv_heads
        Dk, Dv = config.head_dim_qk, config.head_dim_v
        self.qkv = nn.Linear(config.dim, (HQ + HKV) * Dk + HKV * Dv, bias=False)
        self.out = nn.Linear(HQ * Dv, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        routes: Routes | None = None,
        prefill: Prefill = "batched",
        cu_seqlens: Tensor | None = None,
        cache: DenseCache | None = None,
        rotation: Rotation | None = None,
    ) -> Tensor:
        """Attend causally: see NSAttention.forward. `routes` is unused here."""
        _check(prefill, cu_seqlens, cache)
        if rotation is None:
            start = cache.length if cache is not None else 0
            rotation = Rotation.of(
                self.config, x.shape[1], like=x, start=start, cu_seqlens=cu_seqlens
            )
        out = self.attend(
            self.project(x, rotation.tokens), prefill=prefill, cu_seqlens=cu_seqlens, cache=cache
        )
        y: Tensor = self.out(out.flatten(-2))
        return y

    def project(self, x: Tensor, turns: Tensor) -> DenseHeads:
        """Everything that a token of [B, T, dim] computes on its own; compiles."""
        c = self.config
        HQ, HKV, Dk, Dv = c.n_heads, c.n_kv_heads, c.head_dim_qk, c.head_dim_v
        qk, v = self.qkv(x).split([(HQ + HKV) * Dk, HKV * Dv], -1)
        q, k = rotate(qk.unflatten(-1, (-1, Dk)), turns).split([HQ, HKV], 2)
        return DenseHeads(q, k, v.unflatten(-1, (-1, Dv)))

    def attend(
        self,
        heads: DenseHeads,
        *,
        routes: Routes | None = None,
        prefill: Prefill,
        cu_seqlens: Tensor | None,
        cache: DenseCache | None,
        rotation: Rotation | None = None,
        compile_parts: bool = False,
    ) -> Tensor:
        """See NSAttention.attend. `routes` and the last two arguments are unused here."""
        _check(prefill, cu_seqlens, cache)
        q, k, v = heads
        T, start = q.shape[1], 0
        if cache is not None:
            k, v, start = cache.append(k, v)
        attend = partial(ops.dense_attention, route=self.backend)
        if prefill == "batched":
            with named_range("nsa.attention"):
                return attend(q, k, v, q_start=start, cu_seqlens=cu_seqlens)
        answers = []
        for tokens, _ in _documents(cu_seqlens, T, self.config.nsa):
            for t in range(tokens.start, tokens.stop):
                seen = slice(tokens.start, start + t + 1)
                one = slice(t, t + 1)
                position = seen.stop - seen.start - 1
                answers.append(attend(q[:, one], k[:, seen], v[:, seen], q_start=position))
        return torch.cat(answers, 1)


def _phi(config: NSAConfig, dim: int) -> nn.Module:
    return Phi(config.compress_block_size, dim) if config.phi == "mlp" else MeanPhi()


def _check(prefill: str, cu_seqlens: Tensor | None, cache: LayerCache | DenseCache | None) -> None:
    if prefill not in ("batched", "token"):
        raise ValueError(f"prefill={prefill!r} is neither 'batched' nor 'token'")
    if cu_seqlens is not None and cache is not None:
        raise ValueError("cu_seqlens with a cache: a cache holds one document per sequence")


def _documents(
    cu_seqlens: Tensor | None, length: int, config: NSAConfig
) -> list[tuple[slice, slice]]:
    """Tokens and compressed blocks of each document; one document without cu_seqlens."""
    bounds = [0, length] if cu_seqlens is None else cu_seqlens.tolist()
    documents, block = [], 0
    for start, stop in pairwise(bounds):
        blocks = slice(block, block + config.compressed_length(stop - start))
        documents.append((slice(start, stop), blocks))
        block = blocks.stop
    return documents
