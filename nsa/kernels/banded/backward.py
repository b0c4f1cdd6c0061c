"""Gradients of attention over a band.

Two kernels without atomics: one owns a tile of queries of a head and walks keys (dQ, in `query`),
the other owns a tile of keys and walks the queries of every head of its group (dK and dV, in
`key`). Both recompute the weights from `lse`.

With p the weights and g the gate of the branch:  dV = (p g)^T dO,  dS = p g (dO V^T - delta),
dQ = scale dS K,  dK = scale dS^T Q,  where delta = rowsum(dO o) of the branch's own output o.

Source: Dao 2023, arXiv:2307.08691, algorithm 2.
"""

import torch
from torch import Tensor

from nsa.kernels.banded.band import Band
from nsa.kernels.banded.hopper_key import HOPPER_KEY_TILE, hopper_key_gradients
from nsa.kernels.banded.hopper_query import hopper_query_gradient
from nsa.kernels.banded.key import KeyGradients, add_parts, key_tile, write_key_gradients
from nsa.kernels.banded.planes import Sizes, empty_planes, write_planes
from nsa.kernels.banded.query import query_tile, write_query_gradient
from nsa.kernels.common.device import architecture
from nsa.kernels.common.hopper import takes
from nsa.kernels.common.streams import SideStream
from nsa.kernels.common.tiles import aligned


def banded_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    band: Band,
    *,
    scale: float,
    gate: Tensor | None = None,
    side: SideStream | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `banded_forward`.

    Args:
        do: Gradient of the output, [B, T, HQ, Dv]; with `gate` that of the gated sum.
        lse: From the forward pass.
        delta: [B, T, HQ], float32, any strides: rowsum(do * o), the branch's own o.
        gate: [B, T, HQ], any strides: what the branch's output is multiplied by.
        side: The stream of the kernels; the result is valid once it is joined.

    Returns:
        dq, dk, dv, contiguous, in the dtype of q.
    """
    D, DV, window = q.shape[-1], v.shape[-1], band.window > 0
    if k.shape[1] == 0:
        return torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    arch = architecture(q.device)
    query, key = query_tile(arch, D, DV, window=window), key_tile(arch, D, DV, window=window)
    write_keys = write_key_gradients
    hopper = takes(q, v)
    if hopper and (D > 128 or not window):  # at 128 the twin is faster
        key, write_keys = HOPPER_KEY_TILE, hopper_key_gradients
    sizes = Sizes.of(q, k, v, band, gated=gate is not None)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    to = KeyGradients.empty(q, k, v, band, key)
    planes = empty_planes(lse)
    do, q, k, v = aligned(do), aligned(q), aligned(k), aligned(v)
    with (side or SideStream()).launches(do, q, k, v, planes, *to.parts):
        write_planes(planes, lse, delta, gate)
        if hopper:
            hopper_query_gradient(dq, do, q, k, v, planes, band, scale=scale, sizes=sizes)
        else:
            write_query_gradient(
                dq, do, q, k, v, planes, band, scale=scale, tile=query, sizes=sizes
            )
        write_keys(to, do, q, k, v, planes, band, scale=scale, tile=key, sizes=sizes)
        add_parts(to)
    return dq, to.dk, to.dv
