"""Sizes of the attention and of the model, and names of routes: frozen, validated, printable."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Literal, Self

from torch import Tensor

INITIAL_BLOCKS = 1
"""Select blocks at the start of the sequence that every query selects (section 4.1)."""
LOCAL_BLOCKS = 2
"""Select blocks that every query selects around itself: its own and the one before."""

BRANCHES = ("compress", "select", "window")
"""Order of the branches wherever one axis holds all three (gates, K/V projections)."""

_BANDED = ("reference", "eager", "fa2-torch", "fa2-package", "triton")
ROUTES: Mapping[str, tuple[str, ...]] = {
    "compress": _BANDED,
    "scores": ("reference", "eager", "triton"),
    "select": ("reference", "loop", "gather", "masked", "packed", "varlen", "triton"),
    "window": _BANDED,
}
"""Part of the operator -> names of its routes."""
OFF = "off"
"""In place of a branch's route: nothing of the branch runs, and its output is zero."""


def check_route(part: str, route: str, known: Collection[str]) -> None:
    """Raise ValueError with the nearest route, unless the part has this one."""
    if route not in known:
        near = get_close_matches(route, known, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{part}={route!r} is not a route; did you mean {near!r}? Routes: {', '.join(known)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Which route computes each part of the operator; names are those of `ROUTES`.

    A branch may be `OFF`, but one must run. The weights of the others stay what they are: a softmax
    gate spans all three branches.
    """

    compress: str = "eager"
    scores: str = "eager"
    select: str = "gather"
    window: str = "eager"

    def __post_init__(self) -> None:
        for part in fields(self):
            off = (OFF,) if part.name in BRANCHES else ()
            check_route(part.name, getattr(self, part.name), ROUTES[part.name] + off)
        if not self.running():
            raise ValueError("every branch is off; at least one must run")

    @classmethod
    def by(cls, route: str, branches: Collection[str] = BRANCHES) -> "Routes":
        """Every part by the route of this name; branches that are not listed are off."""
        off = (branch for branch in BRANCHES if branch not in branches)
        return cls(**dict.fromkeys(ROUTES, route) | dict.fromkeys(off, OFF))

    @classmethod
    def reference(cls, branches: Collection[str] = BRANCHES) -> "Routes":
        """Every part by its definition."""
        return cls.by("reference", branches)

    @classmethod
    def triton(cls, branches: Collection[str] = BRANCHES) -> "Routes":
        """Every part by its Triton kernels, which then share intermediate results."""
        return cls.by("triton", branches)

    def running(self) -> dict[str, str]:
        """Part -> route of the parts that run. Without the select branch there are no scores."""
        routes = {part: getattr(self, part) for part in ROUTES}
        if self.select == OFF:
            del routes["scores"]
        return {part: route for part, route in routes.items() if route != OFF}


@dataclass(frozen=True, slots=True, kw_only=True)
class NSAConfig:
    """Sizes in tokens. Defaults and (symbols) are those of arXiv:2502.11089, section 4.1."""

    compress_block_size: int = 32
    """Tokens pooled into one compressed key (l)."""
    compress_stride: int = 16
    """Distance between compressed blocks (d); divides the other two block sizes."""
    select_block_size: int = 64
    """Tokens per selectable block (l')."""
    num_blocks: int = 16
    """Blocks each query selects, the always-selected ones included (n)."""
    window_size: int = 512
    """Sliding window, the query itself included (w)."""
    phi: Literal["mlp", "mean"] = "mlp"
    """How a block of keys or values becomes one (eq. 7); `mean` is the ablation."""
    gate: Literal["sigmoid", "softmax"] = "sigmoid"
    """How the three branches are weighed (eq. 5); `softmax` over branches is the variant."""

    def __post_init__(self) -> None:
        for name in (
            "compress_block_size",
            "compress_stride",
            "select_block_size",
            "num_blocks",
            "window_size",
        ):
            if (size := getattr(self, name)) < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        for name in ("compress_block_size", "select_block_size"):
            if (size := getattr(self, name)) % self.compress_stride:
                raise ValueError(
                    f"{name}={size} is not a multiple of compress_stride={self.compress_stride}; "
                    "eq. 9 needs one to map compressed blocks onto selected ones"
                )
        if self.num_blocks < INITIAL_BLOCKS + LOCAL_BLOCKS:
            raise ValueError(
                f"num_blocks={self.num_blocks} is too small for the {INITIAL_BLOCKS} initial and "
                f"{LOCAL_BLOCKS} local blocks that every query selects"
            )
        if self.phi not in ("mlp", "mean"):
            raise ValueError(f"phi={self.phi!r} is neither 'mlp' nor 'mean'")
        if self.gate not in ("sigmoid", "softmax"):
            raise ValueError(f"gate={self.gate!r} is neither 'sigmoid' nor 'softmax'")

    def compressed_length(self, tokens: int) -> int:
        """Number of whole compressed blocks in a sequence of `tokens` tokens."""
        if tokens < self.compress_block_size:
            return 0
        return (tokens - self.compress_block_size) // self.compress_stride + 1

    def select_length(self, tokens: int) -> int:
        """Number of select blocks that hold at least one of `tokens` tokens."""
        return -(-tokens // self.select_block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """Which keys a query sees, and the scale: what a branch needs besides its tensors.

    Query i is at position q_start + i (prefill: 0; decode: the number of cached tokens), and keys
    end where queries end.
    """

    config: NSAConfig
    """Sizes of blocks and window; each branch reads its own, dense attention none."""
    scale: float
    """Multiplies q . k."""
    q_start: int = 0
    """Position of the first query."""
    k_start: int = 0
    """Position of the first key of the window branch; the other branches hold all keys."""
    cu_seqlens: Tensor | None = None
    """Boundaries of packed documents, int32, [documents + 1]; then B == 1 and q_start == 0."""
    rows: Tensor | None = None
    """Positions of the queries, ascending, [T], if they are a few rows of a sequence; in place of
    q_start, and read by nsa.reference alone."""

    @classmethod
    def of(
        cls,
        q: Tensor,
        *,
        config: NSAConfig | None = None,
        q_start: int = 0,
        k_start: int = 0,
        cu_seqlens: Tensor | None = None,
        scale: float | None = None,
    ) -> Self:
        """For queries [B, T, HQ, Dk]. `scale` defaults to Dk ** -0.5, `config` to the paper's."""
        return cls(
            config=NSAConfig() if config is None else config,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            q_start=q_start,
            k_start=k_start,
            cu_seqlens=cu_seqlens,
        )

    def alone(self) -> Self:
        """The same for one document, taken out of its batch."""
        return replace(self, cu_seqlens=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A byte-level Llama-style language model (RMSNorm, rotary, SwiGLU, pre-norm)."""

    dim: int
    n_layers: int
    n_heads: int
    """Query heads (HQ)."""
    n_kv_heads: int
    """KV heads (HKV); each serves n_heads / n_kv_heads query heads (G)."""
    head_dim_qk: int
    """Size of a query or key head (Dk)."""
    head_dim_v: int
    """Size of a value head (Dv)."""
    vocab_size: int = 256
    hidden_dim: int | None = None
    """SwiGLU's inner size; 8/3 of dim rounded up to a multiple of 64 when None."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    attention: Literal["nsa", "dense"] = "nsa"
    """`dense` is causal attention in the same model, as in Llama, to compare with."""
    nsa: NSAConfig = field(default_factory=NSAConfig)

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}; "
                "every KV head must serve the same number of query heads"
            )
        if self.head_dim_qk % 2:
            raise ValueError(
                f"head_dim_qk={self.head_dim_qk} must be even: rotary embedding rotates pairs"
            )
        if self.attention not in ("nsa", "dense"):
            raise ValueError(f"attention={self.attention!r} is neither 'nsa' nor 'dense'")

    @property
    def ffn_dim(self) -> int:
        """SwiGLU's inner size."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return -(-8 * self.dim // 3 // 64) * 64


PRESETS: dict[str, ModelConfig] = {
    # Called 125m for its parameters with a larger vocabulary; with bytes it has 82M.
    "125m": ModelConfig(
        dim=768, n_layers=12, n_heads=12, n_kv_heads=2, head_dim_qk=64, head_dim_v=64
    ),
    # Small enough to learn on two CPU cores in a minute; every branch is exercised at T = 256.
    "small": ModelConfig(
        dim=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim_qk=32,
        head_dim_v=32,
        nsa=NSAConfig(
            compress_block_size=16,
            compress_stride=8,
            select_block_size=16,
            num_blocks=6,
            window_size=64,
        ),
    ),
    # For tests.
    "tiny": ModelConfig(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim_qk=16,
        head_dim_v=8,
        nsa=NSAConfig(
            compress_block_size=8,
            compress_stride=4,
            select_block_size=8,
            num_blocks=4,
            window_size=16,
        ),
    ),
}
