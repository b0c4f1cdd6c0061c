"""Decoding: one new query per sequence, each against its own cache.

The operator of `nsa.ops.attention` at T == 1 where sequences of one batch have different lengths.
`lengths` stays on the device. Keys are in storage of fixed size; a sequence uses the first
rows (compress, select) or a ring (window: position p in row p % ring). Unused rows have no effect.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from nsa import reference
from nsa.checks import check_keys, need, shape
from nsa.config import BRANCHES, NSAConfig, Positions, check_route
from nsa.errors import Unsupported
from nsa.routes import eager, selected

_Route = Callable[..., tuple[Tensor, Tensor]]


def decode_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
    route: str = "eager",
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Native sparse attention of the last token of each sequence; not differentiable.

    Args:
        q: [B, 1, HQ, Dk].
        k_cmp, v_cmp: [B, blocks, HKV, Dk] and [.., Dv]: compressed keys and values from the
            front, with room for every whole block of `capacity` tokens.
        k_sel, v_sel: [B, capacity, HKV, Dk] and [.., Dv]: tokens from the front.
        k_win, v_win: [B, ring, HKV, Dk] and [.., Dv]: position p is in row p % ring; ring is
            at least window_size, or at least capacity.
        gates: [B, 1, HQ, 3], in the order of nsa.config.BRANCHES.
        lengths: [B], int32: tokens held, the query's own included. The caller ensures that they
            are from 1 to capacity: a check would wait for the device.
        route: One of DECODE_ROUTES. `reference` and `eager` take the sequences one by one and
            wait for the device once; `triton` does neither.

    Returns:
        out: [B, 1, HQ, Dv], dtype of q.
        blocks: [B, 1, HKV, n], int32: the blocks that were selected, as select_blocks gives them.

    Raises:
        Unsupported: The route cannot run here.

    Source: arXiv:2502.11089, eq. 5 to 12.
    """
    check_route("decode", route, _IMPLEMENTATIONS)
    pairs = {"cmp": (k_cmp, v_cmp), "sel": (k_sel, v_sel), "win": (k_win, v_win)}
    for name, (k, v) in pairs.items():
        check_keys(q, k, v, names=(f"k_{name}", f"v_{name}"))
        heads = [*k_sel.shape[2:], v_sel.shape[3]]
        got = [*k.shape[2:], v.shape[3]]
        need(got == heads, f"k_{name}, v_{name}", f"of HKV, Dk, Dv = {got}", f"of {heads}, as sel")
    B, T, HQ, _ = q.shape
    capacity = k_sel.shape[1]
    need(T == 1, "q", shape(q), "[B, 1, HQ, Dk]: one new token per sequence")
    need(capacity >= 1, "k_sel", shape(k_sel), "of capacity at least 1")
    blocks = config.compressed_length(capacity)
    need(
        k_cmp.shape[1] >= blocks,
        "k_cmp",
        f"of {k_cmp.shape[1]} blocks",
        f"of at least {blocks}: the whole blocks of {capacity} tokens",
    )
    ring = min(config.window_size, capacity)
    need(k_win.shape[1] >= ring, "k_win", f"of {k_win.shape[1]} rows", f"of at least {ring}")
    need(
        list(gates.shape) == [B, 1, HQ, len(BRANCHES)],
        "gates",
        shape(gates),
        [B, 1, HQ, len(BRANCHES)],
    )
    need(list(lengths.shape) == [B], "lengths", shape(lengths), [B])
    need(lengths.dtype == torch.int32, "lengths", lengths.dtype, "int32")
    for name, x in {"gates": gates, "lengths": lengths}.items():
        need(x.device == q.device, name, f"on {x.device}", f"on {q.device}, as q")
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _IMPLEMENTATIONS[route](
            q,
            k_cmp,
            v_cmp,
            k_sel,
            v_sel,
            k_win,
            v_win,
            gates,
            lengths,
            config=config,
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
        )


def _by_sequence(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    k_sel: Tensor,
    v_sel: Tensor,
    k_win: Tensor,
    v_win: Tensor,
    gates: Tensor,
    lengths: Tensor,
    *,
    config: NSAConfig,
    scale: float,
    compress_attention: Callable[..., Tensor],
    select_blocks: Callable[..., Tensor],
    selected_attention: Callable[..., Tensor],
    window_attention: Callable[..., Tensor],
) -> tuple[Tensor, Tensor]:
    """One sequence after another, by the functions that compute a prefill."""
    outs, choices = [], []
    for b, length in enumerate(lengths.tolist()):
        one = slice(b, b + 1)
        held, whole = slice(length), slice(config.compressed_length(length))
        first = max(0, length - config.window_size)
        at = Positions(config=config, scale=scale, q_start=length - 1, k_start=first)
        rows = torch.arange(first, length, device=q.device) % k_win.shape[1]
        blocks = select_blocks(q[one], k_cmp[one, whole], at)
        choices.append(blocks)
        outs.append(
            reference.gated_sum(
                gates[one],
                compress_attention(q[one], k_cmp[one, whole], v_cmp[one, whole], at),
                selected_attention(q[one], k_sel[one, held], v_sel[one, held], blocks, at),
                window_attention(q[one], k_win[one, rows], v_win[one, rows], at),
            )
        )
    return torch.cat(outs), torch.cat(choices)


def _triton(*tensors: Tensor, config: NSAConfig, scale: float) -> tuple[Tensor, Tensor]:
    if find_spec("triton") is None:
        raise Unsupported("triton: the package is not installed; the route `eager` runs anywhere")
    from nsa.kernels.decode.attend import decode

    return decode(*tensors, config=config, scale=scale)


_IMPLEMENTATIONS: Mapping[str, _Route] = {
    "reference": partial(
        _by_sequence,
        compress_attention=reference.compress_attention,
        select_blocks=reference.select_blocks,
        selected_attention=reference.selected_attention,
        window_attention=reference.window_attention,
    ),
    "eager": partial(
        _by_sequence,
        compress_attention=eager.compress_attention,
        select_blocks=eager.select_blocks,
        selected_attention=selected.gather,
        window_attention=eager.window_attention,
    ),
    "triton": _triton,
}

DECODE_ROUTES: tuple[str, ...] = tuple(_IMPLEMENTATIONS)
"""Routes of `decode_attention`."""
