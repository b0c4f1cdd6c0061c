"""The kernels as differentiable functions: each branch, and the whole operator.

In the whole operator the branches share intermediate results: the scores use the softmax
denominators of the compress branch, the gated sum is formed where the selected branch combines its
parts, one pass over the gradient yields the row products of all three branches, and the gradients
of the queries are added up where the last of them is formed.

A branch that is off launches nothing. Its output is one row of zeros, read with strides of 0 by
the kernels that join the branches; with select off `gate_forward` forms the gated sum, and with
compress off the scores compute the softmax denominators on their own.

Under torch.use_deterministic_algorithms gradients are the same in every run of the same inputs.
Otherwise those of the selected keys and values are added up in the order in which programs finish.

Source: Yuan et al. 2025, arXiv:2502.11089, eq. 5.
"""

from collections.abc import Collection
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from nsa.config import ROUTES, Positions
from nsa.kernels.banded.backward import banded_backward
from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import banded_forward
from nsa.kernels.common.streams import side_streams
from nsa.kernels.gate import gate_backward, gate_forward, row_dot
from nsa.kernels.scores import select_blocks
from nsa.kernels.selected.backward import selected_backward
from nsa.kernels.selected.forward import selected_forward
from nsa.kernels.selected.inverse import Selected
from nsa.profiling import named_range

Gradients = tuple[Tensor | None, ...]


class BandedAttention(torch.autograd.Function):
    """Attention over a band: the compress branch, the window branch, or dense attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, band: Band, scale: float) -> Tensor:
        o, lse = banded_forward(q, k, v, band, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.band, ctx.scale = band, scale
        assert o is not None  # only without values
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Gradients:
        q, k, v, o, lse = ctx.saved_tensors
        delta = row_dot(do, o)
        dq, dk, dv = banded_backward(do, q, k, v, lse, delta, ctx.band, scale=ctx.scale)
        return dq, dk, dv, None, None


class SelectedAttention(torch.autograd.Function):
    """The selected branch."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, block_indices: Tensor, at: Positions
    ) -> Tensor:
        ctx.deterministic = torch.are_deterministic_algorithms_enabled()
        o, lse, index, _ = selected_forward(
            q, k, v, block_indices, at, deterministic=ctx.deterministic
        )
        ctx.save_for_backward(q, k, v, o, lse, *_tensors(index))
        ctx.at, ctx.index = at, _without_tensors(index)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Gradients:
        q, k, v, o, lse, *tensors = ctx.saved_tensors
        index, delta = _with_tensors(ctx.index, tensors), row_dot(do, o)
        dq, dk, dv = selected_backward(
            do, q, k, v, lse, delta, index, ctx.at, deterministic=ctx.deterministic
        )
        return dq, dk, dv, None, None


class Attention(torch.autograd.Function):
    """The whole operator; returns its output and the blocks that were selected."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k_cmp: Tensor,
        v_cmp: Tensor,
        k_sel: Tensor,
        v_sel: Tensor,
        k_win: Tensor,
        v_win: Tensor,
        gates: Tensor,
        at: Positions,
        running: Collection[str],
    ) -> tuple[Tensor, Tensor]:
        ctx.deterministic = torch.are_deterministic_algorithms_enabled()
        compress = Band.compress(at, tokens=q.shape[1], blocks=k_cmp.shape[1])
        window = Band.causal(at, tokens=q.shape[1], window=at.config.window_size)
        o_cmp = o_sel = o_win = lse_cmp = lse_sel = lse_win = index = None
        if len(running) < len(ROUTES):
            o_cmp = o_sel = o_win = q.new_zeros(v_sel.shape[-1]).expand(*q.shape[:3], -1)
        if "compress" in running:
            with named_range("nsa.compress"):
                o_cmp, lse_cmp = banded_forward(q, k_cmp, v_cmp, compress, scale=at.scale)
        if "select" in running:
            with named_range("nsa.scores"):
                lse = lse_cmp
                if lse is None:
                    _, lse = banded_forward(q, k_cmp, None, compress, scale=at.scale)
                blocks = select_blocks(q, k_cmp, lse, at)
        if "window" in running:
            with named_range("nsa.window"):
                o_win, lse_win = banded_forward(q, k_win, v_win, window, scale=at.scale)
        assert o_cmp is not None
        assert o_win is not None  # both are None only without values
        if "select" in running:
            with named_range("nsa.select"):
                o_sel, lse_sel, index, out = selected_forward(
                    q, k_sel, v_sel, blocks, at,
                    deterministic=ctx.deterministic, gated=(gates, o_cmp, o_win),
                )  # fmt: skip
        else:
            assert o_sel is not None
            blocks = k_sel.new_empty(*q.shape[:2], k_sel.shape[2], 0, dtype=torch.int32)
            with named_range("nsa.gate"):
                out = gate_forward(gates, o_cmp, o_sel, o_win)
        assert out is not None
        ctx.save_for_backward(
            *(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates),
            *(o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win),
            *(() if index is None else _tensors(index)),
        )
        ctx.at, ctx.bands, ctx.running = at, (compress, window), running
        ctx.index = None if index is None else _without_tensors(index)
        ctx.mark_non_differentiable(blocks)
        return out, blocks

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor) -> Gradients:
        q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, *saved = ctx.saved_tensors
        o_cmp, o_sel, o_win, lse_cmp, lse_sel, lse_win, *tensors = saved
        at, (compress, window) = ctx.at, ctx.bands
        with named_range("nsa.gate"):
            delta = gate_backward(do, o_cmp, o_sel, o_win)
        shares, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win = [], *[None] * 6
        with side_streams(q.device, 2, q.numel() + do.numel()) as sides:
            if "compress" in ctx.running:
                with named_range("nsa.compress"):
                    dq, dk_cmp, dv_cmp = banded_backward(
                        do, q, k_cmp, v_cmp, lse_cmp, delta[..., 0], compress,
                        scale=at.scale, gate=gates[..., 0], side=sides[0],
                    )  # fmt: skip
                    shares.append(dq)
            if "window" in ctx.running:
                with named_range("nsa.window"):
                    dq, dk_win, dv_win = banded_backward(
                        do, q, k_win, v_win, lse_win, delta[..., 2], window,
                        scale=at.scale, gate=gates[..., 2], side=sides[1],
                    )  # fmt: skip
                    shares.append(dq)
            if "select" in ctx.running:
                with named_range("nsa.select"):
                    index = _with_tensors(ctx.index, tensors)
                    dq, dk_sel, dv_sel = selected_backward(
                        do, q, k_sel, v_sel, lse_sel, delta[..., 1], index, at,
                        deterministic=ctx.deterministic, gate=gates[..., 1],
                        add_dq=shares, added_by=sides,
                    )  # fmt: skip
        if "select" not in ctx.running:  # the streams are joined
            dq = reduce(add, shares)
        keys = (dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win)
        return dq, *keys, delta.to(gates.dtype), None, None


def _tensors(index: Selected) -> list[Tensor | None]:
    """The tensors of an index, in the order of its fields, to be saved with the others."""
    return [getattr(index, name) for name in _TENSOR_FIELDS]


def _without_tensors(index: Selected) -> Selected:
    nothing: dict[str, Any] = dict.fromkeys(_TENSOR_FIELDS)
    return replace(index, **nothing)


def _with_tensors(index: Selected, tensors: list[Tensor | None]) -> Selected:
    saved: dict[str, Any] = dict(zip(_TENSOR_FIELDS, tensors, strict=True))
    return replace(index, **saved)


_TENSOR_FIELDS = [f.name for f in fields(Selected) if "Tensor" in str(f.type)]
