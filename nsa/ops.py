"""The operator: inputs are validated once, then the requested route runs or raises `Unsupported`.

Every route of a function computes what `nsa.reference` defines; they differ in speed, memory
and where they run. Nothing falls back: the name in `Routes` is the code that runs; a branch that is
`off` does not run.

Tensors are [B, T, H, D]. Query i is at position q_start + i (prefill: 0; decode: the number of
cached tokens) and keys end where queries end. `cu_seqlens`, int32 [documents + 1], holds the
boundaries of documents packed into a batch of one (then q_start is 0); no document sees another,
and blocks count from the document's start. The caller ensures that the boundaries ascend from 0 to
T: a check would wait for the device. `scale` defaults to Dk ** -0.5. The dtype of the inputs
decides the precision: autocast has no effect inside.

Source: Yuan et al. 2025, "Native Sparse Attention", arXiv:2502.11089.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Literal, overload

import torch
from torch import Tensor

from nsa import reference
from nsa.checks import (
    check_compress,
    check_dense,
    check_documents,
    check_scores,
    check_select,
    check_window,
    need,
    shape,
)
from nsa.config import BRANCHES, NSAConfig, Positions, Routes, check_route
from nsa.errors import Unsupported
from nsa.profiling import named_range
from nsa.routes import dense, eager, fa2, selected
from nsa.routes.decode import DECODE_ROUTES, decode_attention

__all__ = [
    "DECODE_ROUTES",
    "DENSE_ROUTES",
    "Unsupported",
    "attention",
    "compress_attention",
    "compress_blocks",
    "decode_attention",
    "dense_attention",
    "select_blocks",
    "selected_attention",
    "window_attention",
]

_Route = Callable[..., Tensor]


def _triton(name: str) -> Callable[..., Any]:
    """A function of nsa.kernels.routes, imported at its first call: without Triton everything else
    still runs."""

    def run(*args: object, **kwargs: object) -> object:
        try:
            routes = import_module("nsa.kernels.routes")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise Unsupported("triton: the package is not installed (pip install triton)") from None
        return getattr(routes, name)(*args, **kwargs)

    # torch.compile must not look into the kernels.
    opaque: Callable[..., Any] = torch.compiler.disable(run)
    return opaque


_IMPLEMENTATIONS: Mapping[str, Mapping[str, _Route]] = {
    "compress": {
        "reference": reference.compress_attention,
        "eager": eager.compress_attention,
        **{p: partial(fa2.compress_attention, provider=p) for p in fa2.PROVIDERS},
        "triton": _triton("compress_attention"),
    },
    "scores": {
        "reference": reference.select_blocks,
        "eager": eager.select_blocks,
        "triton": _triton("select_blocks"),
    },
    "select": {
        "reference": reference.selected_attention,
        "loop": selected.loop,
        "gather": selected.gather,
        "masked": selected.masked,
        "packed": selected.packed,
        "varlen": selected.varlen,
        "triton": _triton("selected_attention"),
    },
    "window": {
        "reference": reference.window_attention,
        "eager": eager.window_attention,
        **{p: partial(fa2.window_attention, provider=p) for p in fa2.PROVIDERS},
        "triton": _triton("window_attention"),
    },
    "dense": {
        "reference": reference.dense_attention,
        "sdpa": partial(dense.sdpa_attention, backend=None),
        **{name: partial(dense.sdpa_attention, backend=name) for name in dense.BACKENDS},
        "triton": _triton("dense_attention"),
    },
}

DENSE_ROUTES: tuple[str, ...] = tuple(_IMPLEMENTATIONS["dense"])
"""Routes of `dense_attention`; `sdpa` lets PyTorch choose among its backends."""
_WHOLE = _triton("attention")


def compress_blocks(
    x: Tensor,
    phi: Callable[[Tensor], Tensor],
    *,
    config: NSAConfig,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Turn every block of l tokens, one each d tokens, into one compressed token.

    Args:
        x: Keys or values, [B, T, HKV, D].
        phi: Maps blocks [B, N, l, HKV, D] to [B, N, HKV, D]; N may be 0.
        cu_seqlens: No block crosses a document; the rows of all documents are concatenated. Their
            number depends on the boundaries, so this waits for the device.

    Returns:
        [B, N, HKV, D], N = config.compressed_length(T), or its sum over documents.

    Source: arXiv:2502.11089, eq. 7.
    """
    need(x.dim() == 4, "x", shape(x), "[B, T, HKV, D]")
    check_documents(x, Positions.of(x, config=config, cu_seqlens=cu_seqlens))
    return reference.compress_blocks(x, phi, config=config, cu_seqlens=cu_seqlens)


def compress_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    config: NSAConfig,
    route: str = "eager",
    q_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the compressed blocks that end at or before the query.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp: [B, N, HKV, Dk], from `compress_blocks`; HQ is a multiple of HKV.
        v_cmp: [B, N, HKV, Dv].
        route: One of ROUTES["compress"].

    Returns:
        [B, T, HQ, Dv]. Zeros where no block is visible: the first l - 1 positions.

    Raises:
        Unsupported: The route cannot run here.

    Source: arXiv:2502.11089, eq. 5 with the compressed keys of eq. 7.
    """
    at = Positions.of(q, config=config, q_start=q_start, cu_seqlens=cu_seqlens, scale=scale)
    return _run("compress", route, at, q, k_cmp, v_cmp)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    route: str = "eager",
    q_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Select n blocks of keys for each query and KV head; not differentiable.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp: [B, N, HKV, Dk], from `compress_blocks`.
        route: One of ROUTES["scores"].

    Returns:
        Block indices, int32, [B, T, HKV, n], ascending; -1 fills the end where a query has
        fewer than n causal blocks. With cu_seqlens they count from the document's start.

    Raises:
        Unsupported: The route cannot run here.

    Source: arXiv:2502.11089, eq. 8 to 11.
    """
    at = Positions.of(q, config=config, q_start=q_start, cu_seqlens=cu_seqlens, scale=scale)
    return _run("scores", route, at, q, k_cmp)


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    *,
    config: NSAConfig,
    route: str = "gather",
    q_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the keys of the selected blocks, causally.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], S = q_start + T; HQ is a multiple of HKV.
        v: [B, S, HKV, Dv].
        block_indices: [B, T, HKV, n], int32 or int64: ascending, distinct, -1 at the end, as
            `select_blocks` gives them. Its content is not checked: a check would wait for the
            device.
        route: One of ROUTES["select"].

    Returns:
        [B, T, HQ, Dv]. A query without a selected block yields zeros.

    Raises:
        Unsupported: The route cannot run here.

    Source: arXiv:2502.11089, eq. 5 and 12.
    """
    at = Positions.of(q, config=config, q_start=q_start, cu_seqlens=cu_seqlens, scale=scale)
    return _run("select", route, at, q, k, v, block_indices)


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window_size: int,
    route: str = "eager",
    q_start: int = 0,
    k_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to the last window_size positions, the query's own included.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], from position k_start to the last query's.
        v: [B, S, HKV, Dv].
        window_size: w in the paper.
        route: One of ROUTES["window"].
        k_start: Position of the first key: at most q_start - window_size + 1, or 0.

    Returns:
        [B, T, HQ, Dv].

    Raises:
        Unsupported: The route cannot run here.

    Source: arXiv:2502.11089, eq. 5 and section 3.3.3.
    """
    need(window_size >= 1, "window_size", window_size, "at least 1")
    at = Positions.of(
        q,
        config=NSAConfig(window_size=window_size),
        q_start=q_start,
        k_start=k_start,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    return _run("window", route, at, q, k, v)


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    route: str = "sdpa",
    q_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend to every key up to the query: the baseline for NSA.

    Args:
        q: [B, T, HQ, Dk].
        k: [B, S, HKV, Dk], S = q_start + T; HQ is a multiple of HKV.
        v: [B, S, HKV, Dv].
        route: One of DENSE_ROUTES.

    Returns:
        [B, T, HQ, Dv].

    Raises:
        Unsupported: The route cannot run here.
    """
    at = Positions.of(q, q_start=q_start, cu_seqlens=cu_seqlens, scale=scale)
    return _run("dense", route, at, q, k, v)


@overload
def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    routes: Routes,
    q_start: int = 0,
    k_win_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_blocks: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    routes: Routes,
    q_start: int = 0,
    k_win_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_blocks: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    *,
    config: NSAConfig,
    routes: Routes,
    q_start: int = 0,
    k_win_start: int = 0,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    return_blocks: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Native sparse attention: the three branches, weighed by their gates and added up.

    A branch whose route is `off` adds nothing and its gate has no gradient. What only it would read
    is not looked at, and gets no gradient.

    Args:
        q: [B, T, HQ, Dk].
        k_cmp, v_cmp: [B, N, HKV, Dk] and [B, N, HKV, Dv], from `compress_blocks`.
        k_sel, v_sel: [B, q_start + T, HKV, Dk] and [.., Dv].
        k_win, v_win: The same of the window branch, from position k_win_start on.
        gates: [B, T, HQ, 3], in the order of nsa.config.BRANCHES.
        return_blocks: Return the selected blocks too, as `select_blocks` does; none of them,
            [B, T, HKV, 0], where select is off.

    Returns:
        [B, T, HQ, Dv], dtype of q. Where every route is `triton` the branches share what they can:
        softmax denominators, the gated sum, and one pass over the gradient.

    Raises:
        Unsupported: One of the routes cannot run here.

    Source: arXiv:2502.11089, eq. 5.
    """
    expected = [*q.shape[:3], len(BRANCHES)]
    need(list(gates.shape) == expected, "gates", shape(gates), expected)
    at = Positions.of(
        q,
        config=config,
        q_start=q_start,
        k_start=k_win_start,
        cu_seqlens=cu_seqlens,
        scale=scale,
    )
    running = routes.running()
    if set(running.values()) == {"triton"}:
        if "compress" in running:
            check_compress(q, k_cmp, v_cmp, at)
        elif "scores" in running:
            check_scores(q, k_cmp, at)
        if "select" in running:
            check_dense(q, k_sel, v_sel, at)
        if "window" in running:
            check_window(q, k_win, v_win, at)
        with _own_dtype(q):
            out, blocks = _WHOLE(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, at, running)
        return (out, blocks) if return_blocks else out
    compressed = selected = window = None
    if "compress" in running:
        with named_range("nsa.compress"):
            compressed = _run("compress", routes.compress, at, q, k_cmp, v_cmp)
    if "select" in running:
        with named_range("nsa.scores"):
            blocks = _run("scores", routes.scores, at, q, k_cmp)
        with named_range("nsa.select"):
            selected = _run("select", routes.select, at, q, k_sel, v_sel, blocks)
    else:
        blocks = k_sel.new_empty(*q.shape[:2], k_sel.shape[2], 0, dtype=torch.int32)
    if "window" in running:
        with named_range("nsa.window"):
            window = _run("window", routes.window, at, q, k_win, v_win)
    with named_range("nsa.gate"):
        out = reference.gated_sum(gates, compressed, selected, window)
    return (out, blocks) if return_blocks else out


def _run(part: str, route: str, at: Positions, *tensors: Tensor) -> Tensor:
    """Check the tensors of one part, then compute it."""
    check_route(part, route, _IMPLEMENTATIONS[part])
    _CHECKS[part](*tensors, at)
    with _own_dtype(tensors[0]):
        return _IMPLEMENTATIONS[part][route](*tensors, at)


_CHECKS: Mapping[str, Callable[..., None]] = {
    "compress": check_compress,
    "scores": check_scores,
    "select": check_select,
    "window": check_window,
    "dense": check_dense,
}


def _own_dtype(q: Tensor) -> AbstractContextManager[object]:
    """Disable autocast, which would round scores to bfloat16 that must be float32."""
    if torch.is_autocast_enabled(q.device.type):
        return torch.autocast(q.device.type, enabled=False)
    return nullcontext()
