"""Dense causal attention through PyTorch's `scaled_dot_product_attention`, by named backend.

Its `is_causal=True` aligns the mask at the first key. With fewer queries than keys that is wrong: a
single query would see only the first key. There an explicit mask is passed.
"""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa.config import Positions
from nsa.errors import Unsupported
from nsa.routes.eager import places

BACKENDS: Mapping[str, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_CAN_USE = {
    "cudnn": torch.backends.cuda.can_use_cudnn_attention,
    "flash": torch.backends.cuda.can_use_flash_attention,
    "efficient": torch.backends.cuda.can_use_efficient_attention,
}


def sdpa_attention(
    q: Tensor, k: Tensor, v: Tensor, at: Positions, *, backend: str | None
) -> Tensor:
    """Attend to every key up to the query. Shapes as in nsa.reference.dense_attention.

    Args:
        backend: A name of BACKENDS, or None to let PyTorch choose. `efficient` has no
            grouped-query attention, so there each KV head is repeated for its group.

    Raises:
        Unsupported: The backend does not take these tensors or this mask.
    """
    T, S = q.shape[1], k.shape[1]
    G = q.shape[2] // k.shape[2]
    mask = None
    if at.cu_seqlens is not None or 1 < T < S:
        query, key = places(q, at.q_start, at.cu_seqlens), places(k, 0, at.cu_seqlens)
        mask = (query.position.mT >= key.position) & (query.document.mT == key.document)  # [T, S]
    is_causal = mask is None and T > 1
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, T, D]
    if backend == "efficient":
        k, v = (x.repeat_interleave(G, dim=1) for x in (k, v))
    grouped = q.shape[1] != k.shape[1]
    if backend is not None:
        _require(backend, q, k, v, mask, is_causal, grouped)
    with nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=at.scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _require(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    grouped: bool,
) -> None:
    """Raise Unsupported, with PyTorch's own reasons, unless the backend takes these tensors."""
    if backend == "math":
        return
    remedy = "the routes `math` and `sdpa` run anywhere"
    if not q.is_cuda:
        raise Unsupported(
            f"{backend}: needs tensors on CUDA, but these are on {q.device}; {remedy}"
        )
    can_use = _CAN_USE[backend]
    params = torch.backends.cuda.SDPAParams(q, k, v, mask, 0.0, is_causal, grouped)
    if can_use(params):
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        can_use(params, debug=True)
    reasons = " ".join(str(w.message).split(" (Triggered")[0] for w in caught)
    raise Unsupported(f"{backend}: {reasons or 'PyTorch declines without a reason'}; {remedy}")
