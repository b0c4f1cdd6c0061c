"""The operator alone: the whole of NSA or one branch, forward or forward and backward."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from harness.records import Scalar
from harness.workload import Workload
from nsa import ops, reference, roofline
from nsa.config import Positions
from nsa.flags import Flags
from nsa.train.loop import describe_routes
from suites.attention_plan import AttentionPlan
from suites.axes import DENSE, target_device, word_of
from suites.inputs import AttentionInputs
from suites.operators.protocol import PAPER, pad_group, unpad_group
from suites.sampling import Sample
from suites.selections import distinct_share, fixed_blocks, trained_blocks

SEED = 0
REFERENCE_BYTES = {"cuda": 8 * 2**30, "cpu": 2 * 2**30}
"""Most memory of the dense float64 reference; of longer sequences some rows are compared."""
SCORES_BYTES = 2**28
"""Of the float64 scores of the rows that are compared at a time. With several such tensors and the
keys in float64, the reference needs about 8 GiB at 64k tokens in the paper's shape."""


Forward = Callable[[AttentionInputs], Tensor]


def attention(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """The NSA operator on Gaussian inputs.

    Axes: seq_len, batch, q_heads, kv_heads, head_dim_qk, head_dim_v, dtype, pass, branch, the
    sizes of NSAConfig by their names, and for branch=select `selection`: the blocks that the
    queries get (suites.selections). The whole operator selects the real top-n of its inputs.
    `definition` is what must be computed (suites.operators): by default what the provider claims.

    Raises:
        AxisError: For an axis that is missing, unknown or out of range.
        Unsupported: The provider cannot run here.
    """
    flags = Flags.from_env()
    p = AttentionPlan.read(provider, axes, flags)
    device = target_device()
    x = _draw(p, device)
    if p.operator:
        p.operator.require(x, p.config, branch=p.branch, backward=p.backward)
    blocks = _select(p, x)
    timed = _as_taken(p, x)
    forward = _prepared(p, timed, blocks)
    sample = _sample(p, device)
    cost = cost_of(p)
    seen: dict[str, Scalar] = {}
    return Workload(
        run=partial(_seen_run, p, timed, forward, seen),
        check=partial(_check, p, x, forward, sample),
        reference=partial(_reference, p, x, blocks, sample, torch.float64),
        eager=partial(_reference, p, x, blocks, sample, p.dtype),
        sampled=(len(sample.rows), p.T) if sample else None,
        tokens=p.B * p.T,
        flops=cost.flops,
        bytes=cost.bytes,
        effective=lambda: {**_effective(p, timed, blocks), **seen},
        flags=flags.asked_for,
        fresh=partial(_write, p, x, timed),
        stateful=False,
        capturable=True,
    )


def _draw(p: AttentionPlan, device: str) -> AttentionInputs:
    N = p.config.compressed_length(p.T)

    def normal(*shape: int) -> Tensor:
        return torch.empty(p.B, *shape, device=device, dtype=p.dtype)

    k, v = (p.HKV, p.Dk), (p.HKV, p.Dv)
    x = AttentionInputs(
        q=normal(p.T, p.HQ, p.Dk),
        k_cmp=normal(N, *k),
        v_cmp=normal(N, *v),
        k_sel=normal(p.T, *k),
        v_sel=normal(p.T, *v),
        k_win=normal(p.T, *k),
        v_win=normal(p.T, *v),
        gates=normal(p.T, p.HQ, 3),
        grad=normal(p.T, p.HQ, p.Dv),
    )
    x.write(SEED)
    return x


def _sample(p: AttentionPlan, device: str) -> Sample | None:
    """The rows to compare; None for all, if their scores and the gradients of these fit."""
    needed = 4 * 8 * p.B * p.HQ * p.T * p.T
    if needed <= REFERENCE_BYTES[device]:
        return None
    return Sample.of(p.T, p.config, p.parts, device)


def _write(p: AttentionPlan, x: AttentionInputs, timed: AttentionInputs, i: int) -> None:
    """Write inputs number i into the tensors that are timed. Given blocks remain."""
    x.write(SEED + i)
    if timed is not x:
        taken = _as_taken(p, x)
        for name in ("q", "gates", "grad"):
            getattr(timed, name).copy_(getattr(taken, name))


def _select(p: AttentionPlan, x: AttentionInputs) -> Tensor:
    """The blocks that the code under test selects or gets: [B, T, HKV, n]; n = 0 if it reads none,
    because selecting without kernels would double the set-up."""
    if not p.reads_blocks:
        return torch.empty(p.B, p.T, p.HKV, 0, dtype=torch.int32, device=x.q.device)
    sizes = {"B": p.B, "T": p.T, "HKV": p.HKV}
    if p.selection == "trained":
        return trained_blocks(**sizes, config=p.config, device=x.q.device.type)
    if p.definition.choose:
        return p.definition.choose(x, p.config)
    if p.selection != "real":
        rng = torch.Generator(x.q.device).manual_seed(SEED)
        return fixed_blocks(p.selection, **sizes, config=p.config, rng=rng)
    if p.operator and p.operator.blocks and p.selects:
        with p.operator.refusals():
            return p.operator.blocks(_as_taken(p, x), p.config)
    x = p.definition.tie(x, p.config)
    fast = "triton" if x.q.is_cuda else "eager"
    route = fast if p.operator else p.routes.scores
    return ops.select_blocks(x.q, x.k_cmp, config=p.config, route=route)


def _as_taken(p: AttentionPlan, x: AttentionInputs) -> AttentionInputs:
    """The tensors as the provider takes them; preparing them is not timed."""
    if not p.operator or p.operator.fewest_heads == 1:
        return x
    fewest = p.operator.fewest_heads
    q, gates, grad = (pad_group(t, p.HKV, fewest) for t in (x.q, x.gates, x.grad))
    return replace(x, q=q, gates=gates, grad=grad)


def _prepared(p: AttentionPlan, x: AttentionInputs, blocks: Tensor) -> Forward:
    """The branch under test; `blocks` is read where selection is not part of what is timed."""
    if not p.operator:
        return partial(_forward, p, blocks=blocks)
    with p.operator.refusals():
        return p.operator.parts[p.branch].prepare(x, blocks, p.config)


def _forward(p: AttentionPlan, x: AttentionInputs, blocks: Tensor) -> Tensor:
    """The branch under test, by nsa.ops."""
    c, r = p.config, p.routes
    if p.provider in DENSE:
        return ops.dense_attention(x.q, x.k_sel, x.v_sel, route=DENSE[p.provider])
    x = p.definition.tie(x, c)
    if p.branch == "compress":
        return ops.compress_attention(x.q, x.k_cmp, x.v_cmp, config=c, route=r.compress)
    if p.branch == "scores":
        return _select(p, x)
    if p.branch == "select":
        return ops.selected_attention(x.q, x.k_sel, x.v_sel, blocks, config=c, route=r.select)
    if p.branch == "window":
        return ops.window_attention(
            x.q, x.k_win, x.v_win, window_size=c.window_size, route=r.window
        )
    return ops.attention(
        x.q, x.k_cmp, x.v_cmp, x.k_sel, x.v_sel, x.k_win, x.v_win, x.gates, config=c, routes=r
    )


def _definition(p: AttentionPlan, x: AttentionInputs, blocks: Tensor, at: Positions) -> Tensor:
    """What `_forward` must compute, given the blocks that were selected.

    Selections are compared separately, by the importance of their blocks: two scores within
    rounding of each other may be chosen either way, and the outputs then differ arbitrarily.
    """
    x = p.definition.tie(x, p.config)
    if p.definition.compute:
        return p.definition.compute(x, blocks, at)
    if p.dense:
        return reference.dense_attention(x.q, x.k_sel, x.v_sel, at)
    branches = {
        "compress": partial(reference.compress_attention, x.q, x.k_cmp, x.v_cmp, at),
        "select": partial(reference.selected_attention, x.q, x.k_sel, x.v_sel, blocks, at),
        "window": partial(reference.window_attention, x.q, x.k_win, x.v_win, at),
    }
    if p.branch != "whole":
        return branches[p.branch]()
    return reference.gated_sum(x.gates, *(branch() for branch in branches.values()))


def worth(q: Tensor, k_cmp: Tensor, blocks: Tensor, at: Positions) -> Tensor:
    """Importance (eq. 10) that the selected blocks hold together, [B, T, HKV], float64; callers
    round it to float32, in which selection works at every precision of the inputs."""
    importance = reference.block_importance(q.double(), k_cmp.double(), at)
    held = importance.gather(-1, blocks.clamp(min=0).long())
    return held.masked_fill(blocks < 0, 0).sum(-1)


def _with_gradients(
    p: AttentionPlan, x: AttentionInputs, forward: Callable[[AttentionInputs], Tensor]
) -> dict[str, Tensor]:
    """The output of a forward and, for pass=forward+backward, the gradient of every input."""
    if not p.backward:
        with torch.no_grad():
            return {"o": forward(x)}
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in p.reads}
    out = forward(replace(x, **leaves))
    grads = torch.autograd.grad(out, tuple(leaves.values()), x.grad.to(out.dtype))
    return {"o": out.detach(), **{f"d{n}": g for n, g in zip(p.reads, grads, strict=True)}}


def _run(p: AttentionPlan, x: AttentionInputs, forward: Forward) -> dict[str, Tensor]:
    with p.operator.refusals() if p.operator else nullcontext():
        return _with_gradients(p, x, forward)


def _seen_run(
    p: AttentionPlan, x: AttentionInputs, forward: Forward, seen: dict[str, Scalar]
) -> dict[str, Tensor]:
    """What is timed; it records which passes ran."""
    outputs = _run(p, x, forward)
    seen["pass"] = "forward" if outputs.keys() == {"o"} else "forward+backward"
    return outputs


def _check(
    p: AttentionPlan, x: AttentionInputs, forward: Forward, sample: Sample | None
) -> Mapping[str, Tensor]:
    blocks = _select(p, x)

    def compute(x: AttentionInputs) -> dict[str, Tensor]:
        outputs = _run(p, _as_taken(p, x), forward)
        per_head = {name: outputs[name] for name in ("o", "dq", "dgates") if name in outputs}
        outputs |= {n: unpad_group(t, p.HKV, p.HQ) for n, t in per_head.items()}
        return sample.take(outputs) if sample else outputs

    outputs = _compared(p, x, sample, compute) if p.branch != "scores" else {}
    if not p.selects:
        return outputs
    held = []
    for part, chosen, at in _parts(p, x, blocks, sample):
        by = _scoring(p, part)
        held.append(worth(by.q, by.k_cmp, chosen, at))
    return outputs | {"selected": _kept(p, torch.cat(held, 1))}


def _scoring(p: AttentionPlan, x: AttentionInputs) -> AttentionInputs:
    """The inputs by which blocks are scored."""
    x = p.definition.tie(x, p.config)
    return p.definition.scores_by(x) if p.definition.scores_by else x


def _kept(p: AttentionPlan, held: Tensor) -> Tensor:
    """As the provider keeps scores: blocks whose scores round to the same number are as good."""
    return held.to(p.operator.scores if p.operator else torch.float32).float()


def _reference(
    p: AttentionPlan, x: AttentionInputs, blocks: Tensor, sample: Sample | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The definition in this dtype: the truth in float64, the bound in the working dtype."""

    def compute(x: AttentionInputs) -> dict[str, Tensor]:
        found = (
            _defined(p, part.to(dtype), chosen, at)
            for part, chosen, at in _parts(p, x, blocks, sample)
        )
        return sample.join(found) if sample else next(found)

    return _compared(p, x, sample, compute)


def _compared(
    p: AttentionPlan,
    x: AttentionInputs,
    sample: Sample | None,
    compute: Callable[[AttentionInputs], dict[str, Tensor]],
) -> dict[str, Tensor]:
    """All outputs, or those of the sample: of its queries, and of the keys for these alone."""
    outputs = compute(x)
    if not sample:
        return outputs
    keys = {}
    if p.backward:
        grad, gates = sample.alone(x.grad, x.gates)
        keys = compute(replace(x, grad=grad, gates=gates))
    return sample.weigh(outputs, keys)


def _defined(
    p: AttentionPlan, x: AttentionInputs, blocks: Tensor, at: Positions
) -> dict[str, Tensor]:
    outputs: dict[str, Tensor] = {}
    if p.branch != "scores":
        outputs = _with_gradients(p, x, partial(_definition, p, blocks=blocks, at=at))
    if p.selects:
        x = _scoring(p, x)
        best = worth(x.q, x.k_cmp, reference.select_blocks(x.q, x.k_cmp, at), at)
        outputs["selected"] = best if x.q.dtype == torch.float64 else _kept(p, best)
    return outputs


def _parts(
    p: AttentionPlan, x: AttentionInputs, blocks: Tensor, sample: Sample | None
) -> Iterator[tuple[AttentionInputs, Tensor, Positions]]:
    """The rows to compare, few enough at a time, with their blocks and positions."""
    at = Positions.of(x.q, config=p.config)
    if not sample:
        yield x, blocks, at
        return
    for rows in sample.rows.split(max(1, SCORES_BYTES // (8 * p.B * p.HQ * p.T))):
        yield x.at(rows), blocks[:, rows], replace(at, rows=rows)


def cost_of(p: AttentionPlan) -> roofline.Cost:
    """FLOPs and bytes of one run of a case."""
    shape = roofline.Shape(
        batch=p.B,
        tokens=p.T,
        q_heads=p.HQ,
        kv_heads=p.HKV,
        head_dim_qk=p.Dk,
        head_dim_v=p.Dv,
        element_bytes=p.dtype.itemsize,
    )
    if p.dense:
        return roofline.dense_cost(shape, backward=p.backward)
    part = "select" if p.definition.compute else p.branch
    return roofline.operator_cost(shape, p.config, part, backward=p.backward)


def _effective(p: AttentionPlan, x: AttentionInputs, blocks: Tensor) -> dict[str, Scalar]:
    """Shapes, dtype and selection of the tensors that were timed."""
    seen: dict[str, Scalar] = {
        "batch": x.q.shape[0],
        "seq_len": x.q.shape[1],
        "q_heads" if x.q.shape[2] == p.HQ else "padded_q_heads": x.q.shape[2],
        "kv_heads": x.k_sel.shape[2],
        "head_dim_qk": x.k_sel.shape[3],
        "head_dim_v": x.v_sel.shape[3],
        "dtype": word_of(x.q.dtype),
        "device": str(x.q.device),
        "routes": _route_taken(p),
    }
    if p.reads_blocks:
        used = blocks >= 0
        own = torch.arange(p.T, device=blocks.device)[:, None, None] // p.config.select_block_size
        back = (own - blocks).masked_fill(~used, 0)
        seen["selection"] = p.selection
        seen["blocks_per_query"] = round(float(used.sum(-1).double().mean()), 2)
        seen["blocks_back"] = round(float(back.sum() / used.sum()), 2)
        seen |= {f"distinct_of_{g}": round(distinct_share(blocks, g), 3) for g in (4, 16)}
    if p.operator:
        seen |= p.operator.record(p.branch)
    elif p.definition is not PAPER:
        seen["definition"] = p.definition.name
    return seen


def _route_taken(p: AttentionPlan) -> str:
    if p.provider in DENSE:
        return f"dense:{DENSE[p.provider]}"
    if p.operator:
        return f"{p.branch}:{p.provider}"
    return describe_routes(p.routes)
