"""The operator alone: the whole of NSA or one branch, forward or forward and backward."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from harness.records import Scalar
from harness.workload import Workload
from nsa import ops, reference, roofline
from nsa.config import ROUTES, NSAConfig, Positions, Routes
from nsa.flags import Flags
from nsa.train.loop import describe_routes
from suites import peers
from suites.axes import DENSE, DTYPES, Axes, AxisError
from suites.selections import SELECTIONS, Selection, fixed_blocks

SEED = 0
BRANCHES: tuple[roofline.Part, ...] = ("whole", "compress", "scores", "select", "window")
REFERENCE_BYTES = {"cuda": 24 * 2**30, "cpu": 2 * 2**30}
"""Most memory of the dense float64 reference; longer sequences are timed but not checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One case of the `attention` workload."""

    provider: str
    B: int
    T: int
    HQ: int
    HKV: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    backward: bool
    branch: roofline.Part
    selection: Selection
    config: NSAConfig
    routes: Routes

    @property
    def dense(self) -> bool:
        """Whether the provider computes plain causal attention."""
        return self.provider in DENSE or (self.provider == "fla-attn" and self.branch == "whole")

    @property
    def shared(self) -> bool:
        """Whether the branches share keys and values, whose means are the compressed ones."""
        return self.provider == "fla-nsa" and self.branch == "whole"

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs of the computation under test: those it has gradients for."""
        if self.shared:
            return ("q", "k_sel", "v_sel", "gates")
        return _READ["dense" if self.dense else self.branch]

    @classmethod
    def read(cls, provider: str, axes: Mapping[str, Scalar], flags: Flags) -> "AttentionPlan":
        """Check the axes of one case.

        The provider is a route of selected attention, while the other branches follow the
        NSA_* flags; or `triton` or `reference`, which is all of them; or a route of the one
        branch under test; or dense attention; or one of suites.peers.
        """
        given = Axes("attention", axes, flags)
        routes = dict.fromkeys(route for part in ROUTES.values() for route in part)
        given.provider(provider, (*routes, *DENSE, *peers.PEERS))
        default = NSAConfig()
        sizes = NSAConfig(
            compress_block_size=given.integer("compress_block_size", default.compress_block_size),
            compress_stride=given.integer("compress_stride", default.compress_stride),
            select_block_size=given.integer("select_block_size", default.select_block_size),
            num_blocks=given.integer("num_blocks", default.num_blocks),
            window_size=given.integer("window_size", default.window_size),
        )
        branch = given.word("branch", BRANCHES, "whole")
        plan = cls(
            provider=provider,
            B=given.integer("batch", 1),
            T=given.integer("seq_len"),
            HQ=given.integer("q_heads"),
            HKV=given.integer("kv_heads"),
            Dk=given.integer("head_dim_qk"),
            Dv=given.integer("head_dim_v"),
            dtype=DTYPES[given.word("dtype", DTYPES)],
            backward=given.word("pass", ("forward", "forward+backward")) != "forward",
            branch=branch,
            selection=given.word("selection", SELECTIONS, "real"),
            config=peers.nsa_config(sizes) if (provider, branch) == ("fla-nsa", "whole") else sizes,
            routes=_routes(provider, branch, given),
        )
        given.finish()
        if plan.selection != "real" and branch != "select":
            raise AxisError(
                f"attention: selection={plan.selection} needs branch=select; the rest of the "
                "operator selects for itself"
            )
        if branch == "scores" and plan.backward:
            raise AxisError("attention: selection has no gradient; branch=scores is forward only")
        return plan


def _routes(provider: str, branch: roofline.Part, given: Axes) -> Routes:
    """The route of each part; an AxisError where the provider has no such branch.

    Flags choose the parts that run and that the provider leaves open.
    """
    own = _own_routes(provider, branch)
    parts = {"whole": tuple(ROUTES), "select": ("scores", "select")}.get(branch, (branch,))
    left = [part for part in parts if part not in own]
    if not left:
        given.unrouted(f"{provider} sets every route that runs")
    return Routes(**own, **{part: given.flags.route(part) for part in left})


def _own_routes(provider: str, branch: roofline.Part) -> dict[str, str]:
    """Parts of the operator, and the route that the provider is for each."""
    none = {part: getattr(Routes(), part) for part in ROUTES}
    if provider in DENSE:
        if branch != "whole":
            raise AxisError(f"attention: dense attention has no branch {branch!r}; only whole")
        return none
    if provider in peers.PEERS:
        if branch not in peers.PEERS[provider]:
            known = ", ".join(peers.PEERS[provider])
            raise AxisError(f"attention: {provider} has no branch {branch!r}; only {known}")
        return none
    if provider in ("triton", "reference"):
        return dict.fromkeys(ROUTES, provider)
    if provider in ROUTES["select"]:
        return {"select": provider}
    if provider not in ROUTES.get(branch, ()):
        parts = [part for part, routes in ROUTES.items() if provider in routes]
        raise AxisError(f"attention: {provider} has no branch {branch!r}; only {', '.join(parts)}")
    return {branch: provider}


@dataclass(frozen=True, slots=True)
class _AttentionInputs:
    """Gaussian tensors of one case, [B, T, H, D]; each branch has its own keys and values."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    grad: Tensor
    """Gradient of the output, [B, T, HQ, Dv]."""

    def to(self, dtype: torch.dtype) -> "_AttentionInputs":
        return _AttentionInputs(*(getattr(self, name).to(dtype) for name in self.__slots__))

    @classmethod
    def draw(cls, p: AttentionPlan, device: str, seed: int = SEED) -> "_AttentionInputs":
        N = p.config.compressed_length(p.T)

        def normal(*shape: int) -> Tensor:
            return torch.empty(p.B, *shape, device=device, dtype=p.dtype)

        k, v = (p.HKV, p.Dk), (p.HKV, p.Dv)
        x = cls(
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
        x.write(seed)
        return x

    def write(self, seed: int) -> None:
        """Draw the values again, in place."""
        rng = torch.Generator(self.q.device).manual_seed(seed)
        for name in self.__slots__:
            getattr(self, name).normal_(generator=rng)
        self.gates.sigmoid_()


_READ = {
    "whole": ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"),
    "compress": ("q", "k_cmp", "v_cmp"),
    "scores": ("q", "k_cmp"),
    "select": ("q", "k_sel", "v_sel"),
    "window": ("q", "k_win", "v_win"),
    "dense": ("q", "k_sel", "v_sel"),
}


def attention(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """The NSA operator on Gaussian inputs.

    Axes: seq_len, batch, q_heads, kv_heads, head_dim_qk, head_dim_v, dtype, pass, branch, the
    sizes of NSAConfig by their names, and for branch=select `selection`: the blocks that the
    queries get. The whole operator selects the real top-n of its inputs.

    Raises:
        AxisError: For an axis that is missing, unknown or out of range.
        Unsupported: The provider cannot run here.
    """
    flags = Flags.from_env()
    p = AttentionPlan.read(provider, axes, flags)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = _AttentionInputs.draw(p, device)
    if provider in peers.PEERS:
        peers.require(provider, x.q, x.v_sel)
    blocks = _select(p, x)
    timed = _as_taken(p, x)
    needed = 4 * 8 * p.B * p.HQ * p.T * p.T
    affordable = needed <= REFERENCE_BYTES[device]
    cost = cost_of(p)
    seen: dict[str, Scalar] = {}
    return Workload(
        run=partial(_seen_run, p, timed, blocks, seen),
        check=partial(_check, p, x),
        reference=partial(_reference, p, x.to(torch.float64), blocks) if affordable else None,
        eager=partial(_reference, p, x, blocks) if affordable else None,
        no_reference=""
        if affordable
        else f"the dense float64 reference of seq_len={p.T} needs {needed / 2**30:.0f} GiB",
        tokens=p.B * p.T,
        flops=cost.flops,
        bytes=cost.bytes,
        effective=lambda: {**_effective(p, timed, blocks), **seen},
        flags=flags.asked_for,
        rotated=partial(_rotated, p, device, seen),
        fresh=partial(_write, p, x, timed),
        stateful=False,
        capturable=True,
    )


def _rotated(
    p: AttentionPlan, device: str, seen: dict[str, Scalar], count: int
) -> list[Callable[[], dict[str, Tensor]]]:
    """`count` runs, each with its own inputs and selection."""
    runs: list[Callable[[], dict[str, Tensor]]] = []
    for i in range(count):
        x = _AttentionInputs.draw(p, device, seed=SEED + i)
        runs.append(partial(_seen_run, p, _as_taken(p, x), _select(p, x), seen))
    return runs


def _write(p: AttentionPlan, x: _AttentionInputs, timed: _AttentionInputs, i: int) -> None:
    """Write inputs number i into the tensors that are timed. Given blocks remain."""
    x.write(SEED + i)
    if timed is not x:
        taken = _as_taken(p, x)
        for name in ("q", "gates", "grad"):
            getattr(timed, name).copy_(getattr(taken, name))


def _select(p: AttentionPlan, x: _AttentionInputs) -> Tensor:
    """The blocks that the code under test selects or gets: [B, T, HKV, n]."""
    if p.selection != "real":
        rng = torch.Generator(x.q.device).manual_seed(SEED)
        return fixed_blocks(p.selection, B=p.B, T=p.T, HKV=p.HKV, config=p.config, rng=rng)
    if p.shared:
        q = peers.pad_group(x.q, p.HKV)
        return peers.fla_select_blocks(q, x.k_sel, x.v_sel, config=p.config)
    return ops.select_blocks(x.q, x.k_cmp, config=p.config, route=p.routes.scores)


def _as_taken(p: AttentionPlan, x: _AttentionInputs) -> _AttentionInputs:
    """The tensors as the provider takes them; preparing them is not timed."""
    if p.provider != "fla-nsa":
        return x
    q, gates, grad = (peers.pad_group(t, p.HKV) for t in (x.q, x.gates, x.grad))
    return replace(x, q=q, gates=gates, grad=grad)


def _as_shared(p: AttentionPlan, x: _AttentionInputs) -> _AttentionInputs:
    """The same keys and values for all branches, if the provider has no others."""
    if not p.shared:
        return x
    k_cmp, v_cmp = (
        reference.compress_blocks(t, lambda blocks: blocks.mean(2), config=p.config)
        for t in (x.k_sel, x.v_sel)
    )
    return replace(x, k_cmp=k_cmp, v_cmp=v_cmp, k_win=x.k_sel, v_win=x.v_sel)


def _forward(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> Tensor:
    """The branch under test; `blocks` is read where selection is not part of what is timed."""
    c, r = p.config, p.routes
    if p.provider in DENSE:
        return ops.dense_attention(x.q, x.k_sel, x.v_sel, route=DENSE[p.provider])
    if p.provider in peers.PEERS:
        return _forward_of_peer(p, x, blocks)
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


def _forward_of_peer(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> Tensor:
    match p.provider, p.branch:
        case "flex", "window":
            return peers.flex_window(x.q, x.k_win, x.v_win, window_size=p.config.window_size)
        case "fla-attn", "window":
            return peers.fla_attention(x.q, x.k_win, x.v_win, window_size=p.config.window_size)
        case "fla-attn", "whole":
            return peers.fla_attention(x.q, x.k_sel, x.v_sel)
        case "fla-nsa", "select":
            return peers.fla_selected(x.q, x.k_sel, x.v_sel, blocks, config=p.config)
        case "fla-nsa", "whole":
            return peers.fla_nsa(x.q, x.k_sel, x.v_sel, x.gates, config=p.config)
    raise AxisError(f"attention: {p.provider} has no branch {p.branch!r}")


def _definition(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> Tensor:
    """What `_forward` must compute, given the blocks that were selected.

    Selections are compared separately, by the importance of their blocks: two scores within
    rounding of each other may be chosen either way, and the outputs then differ arbitrarily.
    """
    x = _as_shared(p, x)
    at = Positions.of(x.q, config=p.config)
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


def _worth(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> Tensor:
    """Importance (eq. 10) that the selected blocks hold together, [B, T, HKV], float64.

    Callers round it to float32, in which selection works at every precision of the inputs.
    """
    at = Positions.of(x.q, config=p.config)
    importance = reference.block_importance(x.q.double(), x.k_cmp.double(), at)
    held = importance.gather(-1, blocks.clamp(min=0).long())
    return held.masked_fill(blocks < 0, 0).sum(-1)


def _with_gradients(
    p: AttentionPlan, x: _AttentionInputs, forward: Callable[[_AttentionInputs], Tensor]
) -> dict[str, Tensor]:
    """The output of a forward and, for pass=forward+backward, the gradient of every input."""
    if not p.backward:
        with torch.no_grad():
            return {"o": forward(x)}
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in p.reads}
    out = forward(replace(x, **leaves))
    grads = torch.autograd.grad(out, tuple(leaves.values()), x.grad.to(out.dtype))
    return {"o": out.detach(), **{f"d{n}": g for n, g in zip(p.reads, grads, strict=True)}}


def _run(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> dict[str, Tensor]:
    return _with_gradients(p, x, lambda given: _forward(p, given, blocks))


def _seen_run(
    p: AttentionPlan, x: _AttentionInputs, blocks: Tensor, seen: dict[str, Scalar]
) -> dict[str, Tensor]:
    """What is timed; it records which passes ran."""
    outputs = _run(p, x, blocks)
    seen["pass"] = "forward" if outputs.keys() == {"o"} else "forward+backward"
    return outputs


def _check(p: AttentionPlan, x: _AttentionInputs) -> dict[str, Tensor]:
    blocks = _select(p, x)
    if p.branch == "scores":
        return {"selected": _worth(p, x, blocks).float()}
    outputs = _run(p, _as_taken(p, x), blocks)
    if p.provider == "fla-nsa":
        per_head = {name: outputs[name] for name in ("o", "dq", "dgates") if name in outputs}
        outputs |= {n: peers.unpad_group(t, p.HKV, p.HQ) for n, t in per_head.items()}
    if p.branch == "whole" and not p.dense:
        outputs["selected"] = _worth(p, _as_shared(p, x), blocks).float()
    return outputs


def _reference(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> dict[str, Tensor]:
    """The definition in the dtype of x: the truth in float64, the bound in the working dtype."""
    outputs: dict[str, Tensor] = {}
    if p.branch != "scores":
        outputs = _with_gradients(p, x, lambda given: _definition(p, given, blocks))
    if p.branch in ("scores", "whole") and not p.dense:
        x = _as_shared(p, x)
        best = reference.select_blocks(x.q, x.k_cmp, Positions.of(x.q, config=p.config))
        worth = _worth(p, x, best)
        outputs["selected"] = worth if x.q.dtype == torch.float64 else worth.float()
    return outputs


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
    return roofline.operator_cost(shape, p.config, p.branch, backward=p.backward)


def _effective(p: AttentionPlan, x: _AttentionInputs, blocks: Tensor) -> dict[str, Scalar]:
    """Shapes, dtype and selection of the tensors that were timed."""
    seen: dict[str, Scalar] = {
        "batch": x.q.shape[0],
        "seq_len": x.q.shape[1],
        "padded_q_heads" if p.provider == "fla-nsa" else "q_heads": x.q.shape[2],
        "kv_heads": x.k_sel.shape[2],
        "head_dim_qk": x.k_sel.shape[3],
        "head_dim_v": x.v_sel.shape[3],
        "dtype": next(name for name, dtype in DTYPES.items() if dtype is x.q.dtype),
        "device": str(x.q.device),
        "routes": _route_taken(p),
    }
    if p.branch in ("whole", "scores", "select") and not p.dense:
        used = blocks >= 0
        own = torch.arange(p.T, device=blocks.device)[:, None, None] // p.config.select_block_size
        back = (own - blocks).masked_fill(~used, 0)
        seen["selection"] = p.selection
        seen["blocks_per_query"] = round(float(used.sum(-1).double().mean()), 2)
        seen["blocks_back"] = round(float(back.sum() / used.sum()), 2)
    if p.shared:
        seen["compressed"] = f"means of {p.config.compress_block_size} tokens, apart"
    return seen


def _route_taken(p: AttentionPlan) -> str:
    if p.provider in DENSE:
        return f"dense:{DENSE[p.provider]}"
    if p.provider in peers.PEERS:
        return f"{p.branch}:{p.provider}"
    return describe_routes(p.routes)
