"""Decoding of the language model: `generate`, and a `Decoder` over device caches.

A step of a Decoder is the same launches at the same addresses for all lengths of the sequences, so
that it can be captured once as a CUDA graph and replayed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from nsa import ops
from nsa.config import OFF, ModelConfig, Routes
from nsa.errors import Unsupported
from nsa.flags import Prefill
from nsa.model.attention import NSAttention
from nsa.model.cache import Heads
from nsa.model.compiled import compiled
from nsa.model.device_cache import DeviceCache, Rows
from nsa.model.language_model import Block, ByteLM
from nsa.model.rotary import Rotation, rotate

Function = TypeVar("Function", bound=Callable[..., Any])


class Decoder:
    """Continues a batch of sequences of different lengths, one token each per step."""

    def __init__(
        self,
        model: ByteLM,
        *,
        batch: int,
        capacity: int,
        route: str = "eager",
        compile_parts: bool = False,
        cuda_graph: bool = False,
    ) -> None:
        """Allocate the caches.

        Args:
            model: An NSA model; every step reads its current weights.
            batch: Sequences (B).
            capacity: Tokens that each may hold.
            route: Of nsa.ops.decode_attention; only `triton` does not wait for the device.
            compile_parts: Compile what a token computes on its own.
            cuda_graph: Capture the step at the first `prefill` and replay it from then on.

        Raises:
            ValueError: The model is dense, or the step cannot be captured.
        """
        weight = model.head.weight
        config: ModelConfig = model.config
        if config.attention != "nsa":
            raise ValueError("attention='dense' has no device cache; decode with new_caches")
        if cuda_graph and (route != "triton" or not weight.is_cuda):
            raise ValueError(
                f"a CUDA graph needs the route 'triton' on CUDA, not {route!r} on "
                f"{weight.device.type}; omit cuda_graph"
            )
        self.model = model
        self.route = route
        self.capacity = capacity
        self.replays = 0
        """Steps that were a replay of the graph."""
        self._compile = compile_parts
        self._wants_graph = cuda_graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._held = 0
        self._lengths = torch.zeros(batch, dtype=torch.int32, device=weight.device)
        self._tokens = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self._logits = torch.empty(0)
        self._turns = Rotation.of(config, capacity, like=weight).tokens  # [2, capacity, Dk / 2]
        self.caches = [
            DeviceCache(
                config.nsa,
                capacity,
                lengths=self._lengths,
                heads=config.n_kv_heads,
                head_dim_qk=config.head_dim_qk,
                head_dim_v=config.head_dim_v,
                dtype=weight.dtype,
            )
            for _ in model.blocks
        ]

    @property
    def lengths(self) -> Tensor:
        """Tokens held by each sequence, [B], int32, on the device."""
        return self._lengths

    @torch.no_grad()
    def prefill(
        self,
        prompt: Tensor,
        lengths: Tensor | None = None,
        *,
        routes: Routes | None = None,
        prefill: Prefill = "batched",
    ) -> Tensor:
        """Start over with these prompts.

        Args:
            prompt: [B, T], int64, padded on the right where a sequence is shorter than T.
            lengths: [B], from 1 to T, as the caller ensures; all T when None.
            routes, prefill: As in ByteLM.forward.

        Returns:
            Logits of the byte after each prompt, [B, 1, vocab_size].

        Raises:
            ValueError: The prompt has another batch size, or does not fit.
            Unsupported: A branch is off.
        """
        B, T = prompt.shape
        if routes is not None and OFF in (routes.compress, routes.select, routes.window):
            raise Unsupported(
                "a branch is off, but a decode step computes all three; decode with new_caches"
            )
        if self._lengths.shape[0] != B:
            raise ValueError(f"prompt holds {B} sequences; this decoder {self._lengths.shape[0]}")
        if lengths is not None and list(lengths.shape) != [B]:
            raise ValueError(f"lengths is {list(lengths.shape)}, and must be [{B}]")
        if self._wants_graph and self._graph is None:
            self._capture()
        self._held = T
        self._lengths.fill_(T) if lengths is None else self._lengths.copy_(lengths)
        fillings = [cache.filling() for cache in self.caches]
        logits: Tensor = self.model(prompt, routes=routes, prefill=prefill, caches=fillings)
        last = self._lengths.long() - 1
        return logits[torch.arange(B, device=last.device), last][:, None]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append one token to each sequence.

        Args:
            tokens: [B, 1], int64.

        Returns:
            Logits of the byte after it, [B, 1, vocab_size]. With a CUDA graph the next step
            overwrites them.

        Raises:
            ValueError: There was no prefill, or the longest sequence may be full.
        """
        if self._held == 0:
            raise ValueError("nothing to continue; call prefill first")
        if self._held == self.capacity:
            raise ValueError(
                f"{self._held + 1} tokens do not fit a decoder with capacity={self.capacity}"
            )
        self._held += 1
        self._tokens.copy_(tokens)
        if self._graph is None:
            return self._step()
        self._graph.replay()
        self.replays += 1
        return self._logits

    def _capture(self) -> None:
        """Record the step, on empty caches, which it leaves empty."""
        with torch.cuda.device(self._lengths.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):  # compile, and let libraries allocate their workspaces
                    self._lengths.zero_()
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._logits = self._step()
        self._graph = graph

    def _step(self) -> Tensor:
        """Count the tokens in self._tokens, append and attend, layer by layer."""
        model, nsa = self.model, self.model.config.nsa
        self._lengths += 1
        rows = self._part(Rows.of)(self._lengths, nsa, capacity=self.capacity)
        turns = self._turns[:, rows.token]  # [2, B, Dk / 2]
        # The parts that a token computes on its own treat the batch as a sequence.
        x = self._part(type(model).embed)(model, self._tokens.mT)  # [1, B, dim]
        for block, cache in zip(model.blocks, self.caches, strict=True):
            x = self._layer(block, x, turns, rows, cache)  # type: ignore[arg-type]
        logits: Tensor = self._part(type(model).predict)(model, x)
        return logits.transpose(0, 1)

    def _layer(
        self, block: Block, x: Tensor, turns: Tensor, rows: Rows, cache: DeviceCache
    ) -> Tensor:
        attention = block.attention
        if not isinstance(attention, NSAttention):
            raise TypeError(f"{type(attention).__name__} has no device cache")
        heads = self._part(type(block).enter)(block, x, turns)
        heads = Heads(*(h.transpose(0, 1) for h in heads))
        self._part(_append)(cache, attention, heads, rows, turns)
        out, _ = ops.decode_attention(
            heads.q,
            cache.k_cmp,
            cache.v_cmp,
            cache.k_sel,
            cache.v_sel,
            cache.k_win,
            cache.v_win,
            heads.gates,
            cache.lengths,
            config=cache.config,
            route=self.route,
        )
        y: Tensor = self._part(type(block).leave)(block, x, out.transpose(0, 1))
        return y

    def _part(self, function: Function) -> Function:
        return compiled(function) if self._compile else function


@torch.no_grad()
def generate(
    model: ByteLM,
    prompt: Tensor,
    n: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    routes: Routes | None = None,
    prefill: Prefill = "batched",
    decoder: Decoder | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Continue each prompt by n bytes, through caches.

    Args:
        prompt: [B, T], int64, T >= 1; padded on the right where lengths are given.
        n: Bytes to add.
        temperature: 0 takes the most likely byte; above 0, bytes are drawn from the softmax of
            logits / temperature.
        generator: Draws the bytes; by default torch's global one.
        routes, prefill: As in forward.
        decoder: Uses its device caches, with room for T + n - 1 tokens, and starts over. `routes`
            and `prefill` then apply to the prompt.
        lengths: Lengths of the prompts, [B]; only with a decoder.

    Returns:
        The new bytes, [B, n].
    """
    if temperature < 0:
        raise ValueError(f"temperature={temperature} must not be negative")
    if lengths is not None and decoder is None:
        raise ValueError("lengths need a decoder: other caches hold one length for all")
    caches = model.new_caches(prompt.shape[1] + n) if decoder is None else None
    new = prompt.new_empty(prompt.shape[0], n)
    tokens = prompt
    for i in range(n):
        if decoder is None:
            logits = model(tokens, routes=routes, prefill=prefill, caches=caches)
        elif i == 0:
            logits = decoder.prefill(prompt, lengths, routes=routes, prefill=prefill)
        else:
            logits = decoder.step(tokens)
        last = logits[:, -1]
        if temperature:
            weights = (last.float() / temperature).softmax(-1)
            tokens = torch.multinomial(weights, 1, generator=generator)
        else:
            tokens = last.argmax(-1, keepdim=True)
        new[:, i : i + 1] = tokens
    return new


def _append(
    cache: DeviceCache, attention: NSAttention, heads: Heads, rows: Rows, turns: Tensor
) -> None:
    """Add one token of each sequence, and the block that it completes; compiles."""

    def compress(k_raw: Tensor, v_raw: Tensor) -> tuple[Tensor, Tensor]:
        cut = partial(ops.compress_blocks, config=cache.config)
        k = rotate(cut(k_raw, attention.phi_k).transpose(0, 1), turns).transpose(0, 1)
        return k, cut(v_raw, attention.phi_v)

    cache.append(heads, rows, compress)
