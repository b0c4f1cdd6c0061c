"""What the mathematics costs and what a GPU can do: the two sides of the roofline.

FLOPs and bytes are exact, by branch and for a training step.

Only visible pairs of query and key count, not masked or padded work. A pair costs 2*Dk in q . k and
2*Dv in p . v, for each query head; softmax, gates and norms are left out, as is usual.
The backward pass counts 2.5 times the forward: five products where the forward has two, since
the weights are computed again (Dao 2023, arXiv:2307.08691). Selection scores have no backward.
Bytes are those of a perfect implementation: each input read once, each output written once.

Source: arXiv:2502.11089; pair counts follow from the definitions in `nsa.reference`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, cast

import torch

from nsa.config import BRANCHES, ROUTES, ModelConfig, NSAConfig

BACKWARD_OVER_FORWARD = 2.5
_INDEX_BYTES = 4  # block indices are int32

# Dense bf16 and fp16 tensor-core FLOP/s with float32 accumulation, by the exact name the driver
# gives. Data sheets print them with 2:4 sparsity; ours are half. NVIDIA data sheets: A100 (2021),
# H100 (2022, 2024), H200 (2024), L40S (2023).
_PEAKS: Mapping[str, float] = {
    "NVIDIA A100-*GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA H200": 989e12,
    "NVIDIA L40S": 362e12,
}

Part = Literal["whole", "compress", "scores", "select", "window"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """FLOPs and bytes of one computation. Costs of documents or layers add up."""

    flops: int
    bytes: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(flops=self.flops + other.flops, bytes=self.bytes + other.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one call of the operator; one document per batch entry."""

    batch: int
    tokens: int
    """Queries per batch entry (T)."""
    q_heads: int
    kv_heads: int
    head_dim_qk: int
    head_dim_v: int
    element_bytes: int
    q_start: int = 0
    """Tokens before the first query: they are keys only."""


def dense_pairs(tokens: int, q_start: int = 0) -> int:
    """Pairs of query and key at or before it, for queries q_start ... q_start + tokens - 1."""
    return _triangle(q_start + tokens) - _triangle(q_start)


def window_pairs(tokens: int, window_size: int, q_start: int = 0) -> int:
    """Pairs in the sliding window: query t sees min(t + 1, w) keys."""

    def up_to(stop: int) -> int:
        growing = min(stop, window_size)
        return _triangle(growing) + (stop - growing) * window_size

    return up_to(q_start + tokens) - up_to(q_start)


def compress_pairs(tokens: int, config: NSAConfig, q_start: int = 0) -> int:
    """Pairs with compressed blocks: query t sees floor((t - l + 1) / d) + 1, from t = l - 1 on."""

    def up_to(stop: int) -> int:
        seeing = max(0, stop - config.compress_block_size + 1)
        full, rest = divmod(seeing, config.compress_stride)
        return config.compress_stride * _triangle(full) + rest * (full + 1)

    return up_to(q_start + tokens) - up_to(q_start)


def selected_pairs(tokens: int, config: NSAConfig, q_start: int = 0) -> int:
    """Pairs in the selected blocks; their number does not depend on which blocks they are.

    Query t selects min(n, t // l' + 1) blocks: its own, up to t itself, and the rest whole.
    """
    size, n = config.select_block_size, config.num_blocks

    def up_to(stop: int) -> int:
        full, rest = divmod(stop, size)
        growing = min(full, n)
        others = size * (_triangle(growing - 1) + (full - growing) * (n - 1))
        others += rest * (min(n, full + 1) - 1)
        return size * others + full * _triangle(size) + _triangle(rest)

    return up_to(q_start + tokens) - up_to(q_start)


def operator_cost(
    shape: Shape, config: NSAConfig, part: Part = "whole", *, backward: bool = False
) -> Cost:
    """Cost of `nsa.ops.attention`, or of one part of it.

    Args:
        part: A branch, `scores` (eq. 8 to 11), or `whole`: everything, from projected and
            compressed keys on, with nothing in between written to memory.
        backward: Forward and backward pass together; the backward reads the inputs, the output
            and its gradient, and writes the gradients of the inputs.
    """
    s = shape
    keys = s.q_start + s.tokens
    blocks = config.compressed_length(keys)
    window_keys = min(keys, s.tokens + config.window_size - 1)
    rows = s.batch * s.tokens
    indices = rows * s.kv_heads * config.num_blocks * _INDEX_BYTES
    q = rows * s.q_heads * s.head_dim_qk * s.element_bytes
    out = rows * s.q_heads * s.head_dim_v * s.element_bytes
    gates = rows * s.q_heads * len(BRANCHES) * s.element_bytes

    pairs_compress = compress_pairs(s.tokens, config, s.q_start)
    scores = s.batch * 2 * pairs_compress * s.head_dim_qk * s.q_heads
    match part:
        case "compress":
            return _cost(s, pairs_compress, q + _kv_bytes(s, blocks), out, backward)
        case "scores":
            k_cmp = s.batch * blocks * s.kv_heads * s.head_dim_qk * s.element_bytes
            return Cost(flops=scores, bytes=q + k_cmp + indices)
        case "select":
            pairs = selected_pairs(s.tokens, config, s.q_start)
            cost = _cost(s, pairs, q + _kv_bytes(s, keys), out, backward)
            return cost + Cost(flops=0, bytes=indices * (2 if backward else 1))
        case "window":
            pairs = window_pairs(s.tokens, config.window_size, s.q_start)
            return _cost(s, pairs, q + _kv_bytes(s, window_keys), out, backward)
        case "whole":
            pairs = (
                pairs_compress
                + selected_pairs(s.tokens, config, s.q_start)
                + window_pairs(s.tokens, config.window_size, s.q_start)
            )
            inputs = q + _kv_bytes(s, blocks + keys + window_keys) + gates
            return _cost(s, pairs, inputs, out, backward) + Cost(flops=scores, bytes=0)
    raise ValueError(f"part={part!r} is not one of whole, compress, scores, select, window")


def decode_cost(shape: Shape, config: NSAConfig) -> Cost:
    """Cost of `nsa.ops.decode_attention` where every sequence holds q_start + 1 tokens.

    A single query reads only the selected keys of the select branch. `operator_cost` counts every
    key once, since with many queries each key is selected by one of them.
    """
    if shape.tokens != 1:
        raise ValueError(f"tokens={shape.tokens}; decoding has one query per sequence")
    whole = operator_cost(shape, config)
    unread = shape.q_start + 1 - selected_pairs(1, config, shape.q_start)
    return Cost(flops=whole.flops, bytes=whole.bytes - _kv_bytes(shape, unread))


def dense_cost(shape: Shape, *, backward: bool = False) -> Cost:
    """Cost of dense causal attention on the same shape; `backward` as in `operator_cost`."""
    s = shape
    q = s.batch * s.tokens * s.q_heads * s.head_dim_qk * s.element_bytes
    out = s.batch * s.tokens * s.q_heads * s.head_dim_v * s.element_bytes
    keys = s.q_start + s.tokens
    return _cost(s, dense_pairs(s.tokens, s.q_start), q + _kv_bytes(s, keys), out, backward)


def matmul_parameters(config: ModelConfig) -> int:
    """Parameters of the language model that multiply every token: N of the 6N rule.

    Query, key, value and output projections (three pairs of K and V with NSA, one without),
    SwiGLU, and the output layer. The embedding is a look-up. phi and the gate's MLP, a few percent,
    are left out so that N does not depend on their inner sizes.
    """
    kv_pairs = len(BRANCHES) if config.attention == "nsa" else 1
    heads = config.n_heads * (config.head_dim_qk + config.head_dim_v)
    kv_heads = config.n_kv_heads * (config.head_dim_qk + config.head_dim_v)
    layer = config.dim * (heads + kv_pairs * kv_heads + 3 * config.ffn_dim)
    return config.n_layers * layer + config.dim * config.vocab_size


def forward_flops(config: ModelConfig, *, batch: int, tokens: int, q_start: int = 0) -> int:
    """FLOPs of one forward pass over [batch, tokens]: 2N a token, and attention."""
    matmul = 2 * matmul_parameters(config) * batch * tokens
    return matmul + _attention_flops(config, batch, tokens, q_start, backward=False)


def training_flops(
    config: ModelConfig, *, batch: int, tokens: int, parts: Collection[str] = tuple(ROUTES)
) -> int:
    """FLOPs of one forward and backward pass over [batch, tokens]: 6N a token, and the parts of
    attention that run.

    Work repeated by gradient checkpointing is not counted: these are the model's FLOPs.

    Source: Kaplan et al. 2020, arXiv:2001.08361, section 2.1, for 6N.
    """
    matmul = 6 * matmul_parameters(config) * batch * tokens
    return matmul + _attention_flops(config, batch, tokens, 0, parts, backward=True)


def _attention_flops(
    config: ModelConfig,
    batch: int,
    tokens: int,
    q_start: int,
    parts: Collection[str] = tuple(ROUTES),
    *,
    backward: bool,
) -> int:
    shape = Shape(
        batch=batch,
        tokens=tokens,
        q_heads=config.n_heads,
        kv_heads=config.n_kv_heads,
        head_dim_qk=config.head_dim_qk,
        head_dim_v=config.head_dim_v,
        element_bytes=1,  # only FLOPs are used
        q_start=q_start,
    )
    if config.attention == "nsa":
        costs = [
            operator_cost(shape, config.nsa, cast(Part, part), backward=backward) for part in parts
        ]
    else:
        costs = [dense_cost(shape, backward=backward)]
    return config.n_layers * sum(cost.flops for cost in costs)


def _cost(shape: Shape, pairs: int, inputs: int, out: int, backward: bool) -> Cost:
    forward = 2 * shape.batch * pairs * (shape.head_dim_qk + shape.head_dim_v) * shape.q_heads
    if not backward:
        return Cost(flops=forward, bytes=inputs + out)
    both = forward + round(BACKWARD_OVER_FORWARD * forward)
    # Forward: inputs, out. Backward: inputs, out and its gradient, gradients of the inputs.
    return Cost(flops=both, bytes=3 * inputs + 3 * out)


def _kv_bytes(shape: Shape, keys: int) -> int:
    head = shape.head_dim_qk + shape.head_dim_v
    return shape.batch * keys * shape.kv_heads * head * shape.element_bytes


def _triangle(n: int) -> int:
    """1 + 2 + ... + n; 0 for n < 1."""
    return n * (n + 1) // 2 if n > 0 else 0


def peak_flops(gpu: str, dtype: torch.dtype | None) -> float | None:
    """FLOP/s of matrix products in this dtype; None if the GPU or dtype is not in the table."""
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    return next((flops for name, flops in _PEAKS.items() if fnmatchcase(gpu, name)), None)
