"""A byte-level language model in the manner of Llama: RMSNorm, rotary, SwiGLU, pre-norm.

Its attention is NSA or dense, by configuration; everything else is equal, so that the two can be
compared.
Sources: Touvron et al. 2023, arXiv:2302.13971, section 2.2 (architecture); Shazeer 2020,
arXiv:2002.05202 (SwiGLU); Radford et al. 2019, section 2.3 (residual initialisation).
"""

import re
from collections.abc import Callable, Collection
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nsa.config import ModelConfig, Routes
from nsa.flags import Prefill
from nsa.model.attention import DenseAttention, NSAttention, Phi
from nsa.model.cache import DenseCache, LayerCache
from nsa.model.compiled import compiled
from nsa.model.rotary import Rotation
from nsa.profiling import named_range

INIT_STD = 0.02


def parse_checkpointing(text: str, n_layers: int) -> frozenset[int]:
    """Layers whose activations are recomputed: `off`, `on`, or a range such as `2-7` (both
    ends included, from 0).

    Raises:
        ValueError: The text is not one of these, or the range exceeds the model.
    """
    if text == "off":
        return frozenset()
    if text == "on":
        return frozenset(range(n_layers))
    if found := re.fullmatch(r"(\d+)-(\d+)", text):
        first, last = map(int, found.groups())
        if first <= last < n_layers:
            return frozenset(range(first, last + 1))
    raise ValueError(
        f"gradient checkpointing {text!r} is neither 'off', 'on' nor a range of layers "
        f"within '0-{n_layers - 1}'"
    )


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class Block(nn.Module):
    """One layer: attention, then the feed-forward network, each added to the stream."""

    def __init__(self, config: ModelConfig, attention: NSAttention | DenseAttention) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.attention = attention
        self.ffn_norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.ffn = SwiGLU(config.dim, config.ffn_dim)

    def forward(
        self,
        x: Tensor,
        *,
        routes: Routes,
        prefill: Prefill,
        cu_seqlens: Tensor | None,
        cache: LayerCache | DenseCache | None,
        rotation: Rotation,
        compile_parts: bool = False,
    ) -> Tensor:
        """[B, T, dim] -> [B, T, dim]; arguments as in NSAttention.forward, and ByteLM's."""
        enter, leave = Block.enter, Block.leave
        if compile_parts:
            enter, leave = compiled(enter), compiled(leave)
        attend: Callable[..., Tensor] = self.attention.attend
        with named_range("nsa.projections"):
            heads = enter(self, x, rotation.tokens)
        attended = attend(
            heads,
            routes=routes,
            prefill=prefill,
            cu_seqlens=cu_seqlens,
            cache=cache,
            rotation=rotation,
            compile_parts=compile_parts,
        )
        with named_range("nsa.feed_forward"):  # and the projection of the output
            return leave(self, x, attended)

    def enter(self, x: Tensor, turns: Tensor) -> Any:
        """The heads of the attention's `project`."""
        heads = self.attention.project(self.attention_norm(x), turns)
        if torch.compiler.is_compiling():
            # Compiled code copies gradients to the strides of its outputs, and gradients arrive
            # contiguous. Contiguous outputs cost nothing (fused); the copies would.
            return type(heads)(*(head.contiguous() for head in heads))
        return heads

    def leave(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention's output [B, T, HQ, Dv] to the stream, then the feed-forward network's."""
        x = x + self.attention.out(attended.flatten(-2))
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class ByteLM(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dense_backend: str = "sdpa",
        aux_stats: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        """Build the model with fresh weights, on the CPU.

        Args:
            config: Sizes, and whether attention is NSA or dense.
            dense_backend: Route of nsa.ops.dense_attention, where attention is dense.
            aux_stats: Whether NSA layers keep statistics (NSAttention.aux_stats).
            generator: Draws the weights; by default torch's global one, which the caller seeds.
        """
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            Block(
                config,
                NSAttention(config, aux_stats=aux_stats)
                if config.attention == "nsa"
                else DenseAttention(config, dense_backend),
            )
            for _ in range(config.n_layers)
        )
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw new weights.

        Normal with standard deviation 0.02, and 0.02 / sqrt(2 * n_layers) where a layer adds to
        the stream, so that its scale does not grow with depth. Gates begin near their middle, so
        that all branches have the same weight. Phi sets its own scale.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INIT_STD, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
        for module in self.modules():
            if isinstance(module, Phi):
                module.reset_parameters(generator)
            if isinstance(module, Block):
                for linear in (module.attention.out, module.ffn.down):
                    std = INIT_STD * (2 * self.config.n_layers) ** -0.5
                    nn.init.normal_(linear.weight, std=std, generator=generator)

    @property
    def num_parameters(self) -> int:
        """Trainable scalars, embedding and head included."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def forward(
        self,
        tokens: Tensor,
        *,
        routes: Routes | None = None,
        prefill: Prefill = "batched",
        cu_seqlens: Tensor | None = None,
        checkpointing: Collection[int] | None = None,
        caches: list[LayerCache] | list[DenseCache] | None = None,
        rotation: Rotation | None = None,
        compile_parts: bool = False,
    ) -> Tensor:
        """Logits of the byte after each token.

        Args:
            tokens: [B, T], int64; with caches, the T tokens after those they hold.
            routes: How the branches of NSA are computed; the default routes when None. Dense
                attention ignores it and uses its own backend.
            prefill: `batched` takes all queries at once, `token` one by one.
            cu_seqlens: [documents + 1], int32: bounds of documents packed into one row, B == 1.
            checkpointing: Layers whose activations are recomputed in the backward pass; see
                parse_checkpointing.
            caches: One per layer, from new_caches.
            rotation: Turns of these tokens, when the caller has them from an earlier call.
            compile_parts: Compile everything but `attend`, once for each shape. Not with documents
                or caches.

        Returns:
            [B, T, vocab_size].

        Raises:
            ValueError: compile_parts with documents or caches.
            torch._dynamo.exc.TorchDynamoException: A part does not compile here.
        """
        if compile_parts and (caches is not None or cu_seqlens is not None):
            raise ValueError("compile_parts takes neither cu_seqlens nor caches")
        routes = Routes() if routes is None else routes
        embed, predict = ByteLM.embed, ByteLM.predict
        if compile_parts:
            embed, predict = compiled(embed), compiled(predict)
        x = embed(self, tokens)
        if rotation is None:
            rotation = Rotation.of(
                self.config,
                tokens.shape[1],
                like=x,
                start=caches[0].length if caches else 0,
                cu_seqlens=cu_seqlens,
            )
        for i, block in enumerate(self.blocks):
            options: dict[str, Any] = {
                "routes": routes,
                "prefill": prefill,
                "cu_seqlens": cu_seqlens,
                "cache": caches[i] if caches else None,
                "rotation": rotation,
                "compile_parts": compile_parts,
            }
            if checkpointing and i in checkpointing and torch.is_grad_enabled():
                # Nothing in a block draws random numbers, so their state need not be kept.
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, **options)
            else:
                x = block(x, **options)
        with named_range("nsa.loss"):
            return predict(self, x)

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, T] -> [B, T, dim], where the stream begins."""
        x: Tensor = self.embedding(tokens)
        return x

    def predict(self, x: Tensor) -> Tensor:
        """[B, T, dim] -> [B, T, vocab_size], where it ends."""
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        reduction: Literal["mean", "none"] = "mean",
        routes: Routes | None = None,
        prefill: Prefill = "batched",
        cu_seqlens: Tensor | None = None,
        checkpointing: Collection[int] | None = None,
        rotation: Rotation | None = None,
        compile_parts: bool = False,
    ) -> Tensor:
        """Cross-entropy in nats: a scalar, or [B, T] with reduction="none". See forward."""
        logits = self(
            tokens,
            routes=routes,
            prefill=prefill,
            cu_seqlens=cu_seqlens,
            checkpointing=checkpointing,
            rotation=rotation,
            compile_parts=compile_parts,
        )
        measure = compiled(cross_entropy) if compile_parts else cross_entropy
        return measure(logits, targets, reduction=reduction)

    def new_caches(self, capacity: int) -> list[LayerCache] | list[DenseCache]:
        """An empty cache for every layer, with room for `capacity` tokens."""
        if self.config.attention == "dense":
            return [DenseCache(capacity) for _ in self.blocks]
        return [LayerCache(self.config.nsa, capacity) for _ in self.blocks]


def cross_entropy(
    logits: Tensor, targets: Tensor, *, reduction: Literal["mean", "none"] = "mean"
) -> Tensor:
    """Cross-entropy in nats of logits [B, T, V] against targets [B, T], in float32 or better."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
    return losses if reduction == "mean" else losses.view_as(targets)
