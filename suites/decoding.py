"""The operator at one query per sequence, against caches of fixed size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.records import Scalar
from harness.workload import Workload
from nsa import ops, reference, roofline
from nsa.config import NSAConfig, Positions
from nsa.errors import Unsupported
from nsa.flags import Flags
from suites.attention import worth
from suites.axes import DENSE, DTYPES, Axes, AxisError, target_device, word_of

SEED = 0
SPLIT = "dense-split"
"""FlashAttention-2 from torch, with its keys split over the GPU, as for decoding."""
PROVIDERS = (*ops.DECODE_ROUTES, *DENSE, SPLIT)
CHECKED_SEQUENCES = 2
"""Sequences on which accuracy is compared: their float64 copies are a few GB at 64k tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodePlan:
    """One case of the `decode_attention` workload."""

    provider: str
    B: int
    context: int
    """Tokens each sequence holds, the query's own included."""
    HQ: int
    HKV: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    graph: bool
    config: NSAConfig

    @classmethod
    def read(cls, provider: str, axes: Mapping[str, Scalar], flags: Flags) -> "DecodePlan":
        """Check the axes of one case. The provider is a route, or a way of dense attention."""
        given = Axes("decode_attention", axes, flags)
        given.provider(provider, PROVIDERS)
        plan = cls(
            provider=provider,
            B=given.integer("batch", 1),
            context=given.integer("context"),
            HQ=given.integer("q_heads"),
            HKV=given.integer("kv_heads"),
            Dk=given.integer("head_dim_qk"),
            Dv=given.integer("head_dim_v"),
            dtype=DTYPES[given.word("dtype", DTYPES)],
            graph=given.word("graph", ("off", "on"), "off") == "on",
            config=given.sizes(),
        )
        given.finish()
        if plan.graph and provider in ("reference", "eager"):
            raise AxisError(
                f"decode_attention: {provider} waits for the device, which a CUDA graph cannot do; "
                "use graph=off"
            )
        return plan

    @property
    def dense(self) -> bool:
        """Whether the provider is dense attention, the baseline for NSA."""
        return self.provider not in ops.DECODE_ROUTES


@dataclass(frozen=True, slots=True)
class _DecodeInputs:
    """Gaussian caches, filled to the last row, [B, rows, HKV, D]; dense attention has k and v."""

    q: Tensor
    k: Tensor
    """Keys of the select branch, or of dense attention."""
    v: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    lengths: Tensor

    @classmethod
    def draw(cls, p: DecodePlan, device: str) -> "_DecodeInputs":
        rng = torch.Generator(device).manual_seed(SEED)

        def normal(rows: int, heads: int, size: int) -> Tensor:
            shape = (p.B, rows, heads, size)
            return torch.randn(shape, generator=rng, device=device, dtype=p.dtype)

        blocks = 0 if p.dense else p.config.compressed_length(p.context)
        ring = 0 if p.dense else min(p.config.window_size, p.context)
        k, v = (p.HKV, p.Dk), (p.HKV, p.Dv)
        return cls(
            q=normal(1, p.HQ, p.Dk),
            k=normal(p.context, *k),
            v=normal(p.context, *v),
            k_cmp=normal(blocks, *k),
            v_cmp=normal(blocks, *v),
            k_win=normal(ring, *k),
            v_win=normal(ring, *v),
            gates=normal(1, p.HQ, 3).sigmoid(),
            lengths=torch.full((p.B,), p.context, dtype=torch.int32, device=device),
        )

    def checked(self, dtype: torch.dtype) -> "_DecodeInputs":
        """The sequences whose outputs are compared."""
        few = (getattr(self, name)[:CHECKED_SEQUENCES] for name in self.__slots__)
        return _DecodeInputs(*(x.to(dtype) if x.is_floating_point() else x for x in few))


def decode_attention(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """One new token for each of `batch` sequences that hold `context` tokens.

    Axes: context, batch, q_heads, kv_heads, head_dim_qk, head_dim_v, dtype, graph (on: a run
    replays a CUDA graph), and the sizes of NSAConfig by their names.

    Raises:
        AxisError: For an axis that is missing, unknown or out of range.
    """
    flags = Flags.from_env()
    p = DecodePlan.read(provider, axes, flags)
    device = target_device()
    x = _DecodeInputs.draw(p, device)
    step = _dense_step(p, x) if p.dense else partial(_nsa_step, p, x)
    replays = [0]
    run = _captured(step, replays) if p.graph else step
    first = run()
    cost = cost_of(p)
    return Workload(
        run=run,
        check=lambda: _checked(p, x, run()),
        reference=partial(_reference, p, x, first, torch.float64),
        eager=partial(_reference, p, x, first, p.dtype),
        tokens=p.B,
        flops=cost.flops,
        bytes=cost.bytes,
        effective=partial(_effective, p, x, first, replays),
        flags=flags.asked_for,
        stateful=False,
    )


def _nsa_step(p: DecodePlan, x: _DecodeInputs) -> dict[str, Tensor]:
    caches = x.k_cmp, x.v_cmp, x.k, x.v, x.k_win, x.v_win
    out, blocks = ops.decode_attention(
        x.q, *caches, x.gates, x.lengths, config=p.config, route=p.provider
    )
    return {"o": out, "blocks": blocks}


def _dense_step(p: DecodePlan, x: _DecodeInputs) -> Callable[[], dict[str, Tensor]]:
    """One query against the whole cache; its preparation is not timed."""
    if p.provider in DENSE:
        route = DENSE[p.provider]
        start = p.context - 1
        return lambda: {"o": ops.dense_attention(x.q, x.k, x.v, route=route, q_start=start)}
    if not x.q.is_cuda:
        raise Unsupported(f"{SPLIT}: needs tensors on CUDA, but these are on {x.q.device}")
    # The kernel has one head size, a multiple of 8; zeros add nothing to a product.
    size = -(-max(p.Dk, p.Dv) // 8) * 8
    q, k, v = (F.pad(t, (0, size - t.shape[-1])) for t in (x.q, x.k, x.v))

    def split() -> dict[str, Tensor]:
        out = torch.ops.aten._flash_attention_forward(
            q,
            k,
            v,
            None,
            None,
            1,
            p.context,
            0.0,  # dropout
            False,  # causal: the one query sees every key
            False,  # return_debug_mask
            scale=p.Dk**-0.5,
        )[0]
        return {"o": out[..., : p.Dv]}

    return split


def _captured(
    step: Callable[[], dict[str, Tensor]], replays: list[int]
) -> Callable[[], dict[str, Tensor]]:
    """A call that replays the step and counts the replays."""
    if not torch.cuda.is_available():
        raise Unsupported("graph=on: CUDA graphs need an NVIDIA GPU")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compile, and let libraries allocate their workspaces
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()

    return partial(_replay, graph, outputs, replays, step)


def _replay(
    graph: torch.cuda.CUDAGraph,
    outputs: dict[str, Tensor],
    replays: list[int],
    step: Callable[[], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """Replay. `step` is not called: it keeps alive what the graph reads, such as padded caches."""
    graph.replay()
    replays[0] += 1
    return outputs


def _checked(p: DecodePlan, x: _DecodeInputs, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    out = {"o": outputs["o"][:CHECKED_SEQUENCES].clone()}
    if not p.dense:
        few, blocks = x.checked(torch.float64), outputs["blocks"][:CHECKED_SEQUENCES]
        out["selected"] = worth(few.q, few.k_cmp, blocks, _last(p, few)).float()
    return out


def _last(p: DecodePlan, few: _DecodeInputs) -> Positions:
    """The position of the one query."""
    return Positions.of(few.q, config=p.config, q_start=p.context - 1)


def _reference(
    p: DecodePlan, x: _DecodeInputs, outputs: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The definition, given the blocks that were selected: scores within rounding of each other
    may be chosen either way. Selections are compared by the importance of their blocks."""
    few = x.checked(dtype)
    at = _last(p, few)
    if p.dense:
        return {"o": reference.dense_attention(few.q, few.k, few.v, at)}
    blocks = outputs["blocks"][:CHECKED_SEQUENCES]
    first = max(0, p.context - p.config.window_size)
    ring = torch.arange(first, p.context, device=x.q.device) % x.k_win.shape[1]
    k_win, v_win = few.k_win[:, ring], few.v_win[:, ring]
    out = reference.gated_sum(
        few.gates,
        reference.compress_attention(few.q, few.k_cmp, few.v_cmp, at),
        reference.selected_attention(few.q, few.k, few.v, blocks, at),
        reference.window_attention(few.q, k_win, v_win, replace(at, k_start=first)),
    )
    exact, best = x.checked(torch.float64), reference.select_blocks(few.q, few.k_cmp, at)
    held = worth(exact.q, exact.k_cmp, best, _last(p, exact))
    return {"o": out, "selected": held if dtype == torch.float64 else held.float()}


def cost_of(p: DecodePlan) -> roofline.Cost:
    """FLOPs and bytes of one run of a case."""
    shape = roofline.Shape(
        batch=p.B,
        tokens=1,
        q_heads=p.HQ,
        kv_heads=p.HKV,
        head_dim_qk=p.Dk,
        head_dim_v=p.Dv,
        element_bytes=p.dtype.itemsize,
        q_start=p.context - 1,
    )
    return roofline.dense_cost(shape) if p.dense else roofline.decode_cost(shape, p.config)


def _effective(
    p: DecodePlan, x: _DecodeInputs, outputs: Mapping[str, Tensor], replays: list[int]
) -> dict[str, Scalar]:
    """Shapes, dtype, selection and replays of what was timed."""
    seen: dict[str, Scalar] = {
        "batch": x.q.shape[0],
        "context": x.k.shape[1] if p.dense else int(x.lengths.max()),
        "q_heads": x.q.shape[2],
        "kv_heads": x.k.shape[2],
        "head_dim_qk": x.k.shape[3],
        "head_dim_v": x.v.shape[3],
        "dtype": word_of(x.q.dtype),
        "device": str(x.q.device),
        "route": p.provider,
        "graph": "on" if replays[0] else "off",
        "checked_sequences": min(p.B, CHECKED_SEQUENCES),
    }
    if not p.dense:
        used = (outputs["blocks"] >= 0).sum(-1).double().mean()
        seen |= {"blocks_per_query": round(float(used), 2), "selection": "top-n of Gaussian inputs"}
    return seen
