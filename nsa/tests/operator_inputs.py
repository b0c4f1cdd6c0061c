"""Inputs of the operator's tests, and one way to call any route of any part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import ops
from nsa.config import NSAConfig
from nsa.routes import fa2

SMALL = NSAConfig(
    compress_block_size=8, compress_stride=4, select_block_size=16, num_blocks=4, window_size=21
)
"""The paper's proportions at a size where 60 tokens exercise every branch."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]

PORTABLE = {
    "compress": ["eager"],
    "select": ["loop", "gather", "masked", "packed", "varlen"],
    "window": ["eager"],
    "dense": ["sdpa", "math"],
}
"""Part -> routes that run on any device, the definition itself aside."""
PORTABLE_ROUTES = [(part, route) for part, routes in PORTABLE.items() for route in routes]
ALL_ROUTES = [(part, "reference") for part in PORTABLE] + PORTABLE_ROUTES


def fa2_params() -> list[object]:
    """(part, provider) of every FlashAttention-2 route, skipped with the reason where absent."""
    return [
        pytest.param(
            part,
            provider,
            marks=[pytest.mark.gpu, pytest.mark.skipif(bool(absence), reason=absence or "present")],
        )
        for provider, absence in fa2.providers().items()
        for part in ("compress", "window")
    ]


def skip_what_the_build_lacks(route: str, x: "Inputs") -> None:
    """A build of the flash-attn package may lack a dtype or a head size; it says so itself."""
    if why := fa2.refusal_of_build(route, x.q, x.v):
        pytest.skip(why)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one part reads. k and v are the compressed ones for `compress`."""

    q: Tensor
    k: Tensor
    v: Tensor
    blocks: Tensor
    cu_seqlens: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "Inputs":
        q, k, v = (x.detach().to(dtype) for x in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    def tail(self, part: str, T: int) -> "Inputs":
        """The last T queries, all keys."""
        return replace(self, q=self.q[:, -T:], blocks=self.blocks[:, -T:])


def mean(blocks: Tensor) -> Tensor:
    """phi without parameters."""
    return blocks.mean(2)


def normal(
    *size: int, seed: int, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*size, generator=rng, dtype=torch.float64).to(device, dtype)


def draw(
    part: str,
    T: int,
    *,
    HQ: int = 6,
    HKV: int = 2,
    Dk: int = 16,
    Dv: int = 8,
    config: NSAConfig = SMALL,
    documents: Sequence[int] = (),
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
    B: int = 2,
) -> Inputs:
    """Gaussian inputs of one part, with the real selection; documents are lengths, summing to T."""
    bounds = [sum(documents[:i]) for i in range(len(documents) + 1)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=device) if documents else None
    B = 1 if documents else B
    q, k, v = (
        normal(B, T, H, D, seed=seed, device=device, dtype=dtype)
        for seed, (H, D) in enumerate([(HQ, Dk), (HKV, Dk), (HKV, Dv)])
    )
    k_cmp, v_cmp = (
        ops.compress_blocks(x, mean, config=config, cu_seqlens=cu_seqlens) for x in (k, v)
    )
    blocks = ops.select_blocks(q, k_cmp, config=config, route="reference", cu_seqlens=cu_seqlens)
    if part == "compress":
        k, v = k_cmp, v_cmp
    return Inputs(q, k, v, blocks, cu_seqlens)


def run(part: str, route: str, x: Inputs, *, config: NSAConfig = SMALL, q_start: int = 0) -> Tensor:
    """Call one part by one route."""
    where: dict[str, Any] = {"route": route, "q_start": q_start, "cu_seqlens": x.cu_seqlens}
    match part:
        case "compress":
            return ops.compress_attention(x.q, x.k, x.v, config=config, **where)
        case "select":
            return ops.selected_attention(x.q, x.k, x.v, x.blocks, config=config, **where)
        case "window":
            return ops.window_attention(x.q, x.k, x.v, window_size=config.window_size, **where)
        case "dense":
            return ops.dense_attention(x.q, x.k, x.v, **where)
    raise ValueError(part)


def outputs_and_gradients(
    part: str, route: str, x: Inputs, *, config: NSAConfig = SMALL
) -> Mapping[str, Tensor]:
    """The output and the gradients of q, k and v for a fixed Gaussian gradient of the output."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = run(part, route, replace(x, q=q, k=k, v=v), config=config)
    grad = normal(*out.shape, seed=9, device=str(out.device), dtype=out.dtype)
    grads = torch.autograd.grad(out, (q, k, v), grad)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
