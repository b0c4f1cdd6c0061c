"""FlashAttention-2 for the window and compress branches, from two providers.

    fa2-torch    the FlashAttention-2 built into PyTorch
    fa2-package  the flash-attn package

Both run on CUDA, in float16 or bfloat16, with heads of at most 256. A build of the package may lack
a dtype or a head size; one call on one token finds out. Neither replaces the other: a provider that
cannot run raises `Unsupported` with the reason.

Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691; the branches: arXiv:2502.11089.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.config import Positions
from nsa.errors import Unsupported

PROVIDERS = ("fa2-torch", "fa2-package")
MAX_HEAD_DIM = 256
INSTALL = "pip install --no-build-isolation flash-attn: nsa/README.md, 'Install flash-attn'"


class CausalAttention(Protocol):
    """Causal attention aligned at the end: the last query of a sequence sees its last key."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """q [B, T, HQ, Dk], k [B, S, HKV, Dk], v [B, S, HKV, Dv], T <= S -> [B, T, HQ, Dv]."""


def providers() -> Mapping[str, str]:
    """Each provider, and why it cannot run on this machine; an empty string if it can."""
    return {provider: _absence(provider) for provider in PROVIDERS}


def window_attention(q: Tensor, k: Tensor, v: Tensor, at: Positions, *, provider: str) -> Tensor:
    """Window branch as one call. Shapes as in nsa.reference; the last key is the last query's.

    FlashAttention-2 aligns its mask at the end, so the first positions do not matter.

    Raises:
        Unsupported: The provider is absent, or does not take these tensors.
    """
    return flash_attention(
        q,
        k,
        v,
        provider=provider,
        scale=at.scale,
        window_size=at.config.window_size,
        cu_seqlens=at.cu_seqlens,
    )


def compress_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions, *, provider: str
) -> Tensor:
    """Compress branch as two calls a document. Shapes as in nsa.reference.

    With cu_seqlens the boundaries are read on the host, which waits for the device.

    Raises:
        Unsupported: The provider is absent, or does not take these tensors.
    """
    require(provider, q, v_cmp)
    fold = partial(fold_compress, at=at, causal=partial(flash_attention, provider=provider))
    if at.cu_seqlens is None:
        return fold(q, k_cmp, v_cmp)
    tokens = at.cu_seqlens.diff().tolist()
    blocks = [at.config.compressed_length(length) for length in tokens]
    documents = zip(q.split(tokens, 1), k_cmp.split(blocks, 1), v_cmp.split(blocks, 1), strict=True)
    return torch.cat([fold(*document) for document in documents], dim=1)


def fold_compress(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, at: Positions, *, causal: CausalAttention
) -> Tensor:
    """Compute the compress branch, exactly and in linear memory, by plain causal attention.

    Write a query's position as t = d*j + r with 0 <= r < d. Block i ends at i*d + l - 1, so t
    sees it iff i <= j - ceil((l - 1 - r) / d). As d divides l, that is i <= j - l/d for all
    residues r but the last, and i <= j - l/d + 1 for r = d - 1. Queries of one such group see
    the same blocks wherever they share j: their residues become query heads of one KV head, and
    the row of queries j, less those that see nothing, attends causally.

    Args:
        causal: Computes each of the two groups.

    Returns:
        [B, T, HQ, Dv], zeros where no block is visible.
    """
    B, T, HQ, _ = q.shape
    N, HKV, Dv = v_cmp.shape[1:]
    if N == 0:  # no block: zeros, of which every input has a gradient
        scores = torch.einsum("bthgk,bnhk->bthgn", q.unflatten(2, (HKV, -1)), k_cmp)
        return torch.einsum("bthgn,bnhv->bthgv", scores, v_cmp).flatten(2, 3)
    d = at.config.compress_stride
    first_j, stop_j = at.q_start // d, -(-(at.q_start + T) // d)
    before = at.q_start - first_j * d  # queries missing from the first row of d, and from the last
    after = stop_j * d - at.q_start - T
    grid = _pad(q, 0, 0, 0, 0, before, after).unflatten(
        1, (stop_j - first_j, d)
    )  # [B, J, d, HQ, Dk]

    groups = []
    shift = at.config.compress_block_size // d
    for residues, lag in ((grid[:, :, : d - 1], shift), (grid[:, :, d - 1 :], shift - 1)):
        R = residues.shape[2]
        # Rows from `seen` on see a key; rows from N + lag on hold only queries of the padding.
        seen, stop = max(first_j, lag), min(stop_j, N + lag)
        out = q.new_zeros(B, stop_j - first_j, R, HQ, Dv)
        if R and seen < stop:
            rows = residues[:, seen - first_j : stop - first_j].unflatten(3, (HKV, -1))
            folded = rows.transpose(2, 3).flatten(2, 4)  # [B, rows, HKV * R * G, Dk]
            keys = slice(0, stop - lag)
            attended = causal(folded, k_cmp[:, keys], v_cmp[:, keys], scale=at.scale)
            attended = attended.unflatten(2, (HKV, R, -1)).transpose(2, 3).flatten(3, 4)
            margins = (seen - first_j, stop_j - stop)
            out = _pad(attended, 0, 0, 0, 0, 0, 0, *margins)
        groups.append(out)
    whole = torch.cat(groups, dim=2).flatten(1, 2)
    return whole[:, before : before + T]


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    provider: str,
    scale: float,
    window_size: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Causal attention aligned at the end, by FlashAttention-2, differentiable.

    Args:
        q: [B, T, HQ, Dk], float16 or bfloat16, on CUDA.
        k: [B, S, HKV, Dk].
        v: [B, S, HKV, Dv].
        window_size: Keys a query sees at most, its own included; None for all.
        cu_seqlens: Boundaries of packed documents, int32, [documents + 1]; then B == 1, T == S.

    Returns:
        [B, T, HQ, Dv].

    Raises:
        Unsupported: The provider is absent, or does not take these tensors.
    """
    require(provider, q, v)
    B, T = q.shape[:2]
    S, Dv = k.shape[1], v.shape[-1]
    size = _head_size(q, v)
    q, k, v = (_pad(x, 0, size - x.shape[-1]).flatten(0, 1) for x in (q, k, v))
    if cu_seqlens is None:
        cu_q, cu_k = (
            torch.arange(0, (B + 1) * length, length, dtype=torch.int32, device=q.device)
            for length in (T, S)
        )
    else:
        cu_q = cu_k = cu_seqlens
    left = -1 if window_size is None else window_size - 1
    match provider:
        case "fa2-torch":
            out = torch.ops.aten._flash_attention_forward(
                q,
                k,
                v,
                cu_q,
                cu_k,
                T,
                S,
                0.0,  # dropout
                True,  # causal
                False,  # return_debug_mask
                scale=scale,
                window_size_left=left,
                window_size_right=0,
            )[0]
        case "fa2-package":
            out = importlib.import_module("flash_attn").flash_attn_varlen_func(
                q, k, v, cu_q, cu_k, T, S, softmax_scale=scale, causal=True, window_size=(left, 0)
            )
        case _:
            raise ValueError(f"provider {provider!r} is not one of {', '.join(PROVIDERS)}")
    result: Tensor = out[..., :Dv].unflatten(0, (B, T))
    return result


def _head_size(q: Tensor, v: Tensor) -> int:
    """One head size for all, and a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _pad(x: Tensor, *widths: int) -> Tensor:
    """F.pad, without the copy that it makes when there is nothing to add."""
    return F.pad(x, widths) if any(widths) else x


def require(provider: str, q: Tensor, v: Tensor) -> None:
    """Raise Unsupported, with the reason, unless the provider can run on such tensors."""
    if reason := _absence(provider) or _refusal(q, v) or refusal_of_build(provider, q, v):
        raise Unsupported(f"{provider}: {reason}; the `eager` route runs anywhere")


@cache
def _absence(provider: str) -> str:
    """Why the provider cannot run on this machine; empty if it can."""
    if provider == "fa2-package" and importlib.util.find_spec("flash_attn") is None:
        return f"the flash-attn package is not installed ({INSTALL})"
    if not torch.cuda.is_available():
        return "needs an NVIDIA GPU, but PyTorch sees none"
    if provider == "fa2-torch" and not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} was built without FlashAttention"
    if (capability := torch.cuda.get_device_capability()) < (8, 0):
        return "needs compute capability 8.0, but this GPU has {}.{}".format(*capability)
    return ""


def _refusal(q: Tensor, v: Tensor) -> str:
    """Why FlashAttention-2 does not take such tensors; empty if it does."""
    if not q.is_cuda:
        return f"needs tensors on CUDA, but these are on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, but these are {str(q.dtype).removeprefix('torch.')}"
    if (size := max(q.shape[-1], v.shape[-1])) > MAX_HEAD_DIM:
        return f"takes heads of at most {MAX_HEAD_DIM}, but these have {size}"
    return ""


def refusal_of_build(provider: str, q: Tensor, v: Tensor) -> str:
    """Why the package, as it was built, does not take such tensors; empty if it does."""
    return _asked(q.dtype, _head_size(q, v), q.device) if provider == "fa2-package" else ""


@cache
def _asked(dtype: torch.dtype, size: int, device: torch.device) -> str:
    """Attend to one token by the package: its own refusal, or nothing."""
    x = torch.zeros(1, 1, size, dtype=dtype, device=device)
    bounds = torch.arange(2, dtype=torch.int32, device=device)
    try:
        importlib.import_module("flash_attn").flash_attn_varlen_func(
            x, x, x, bounds, bounds, 1, 1, softmax_scale=1.0, causal=True, window_size=(-1, 0)
        )
    except (ImportError, RuntimeError) as error:
        said = str(error).partition("\n")[0]
        if "CUDA " in said and "no kernel image" not in said:
            raise  # no refusal: memory, or a fault of this or of an earlier kernel
        fact = f"this build of flash-attn does not take {dtype} with heads of {size}"
        return f"{fact} ({said}); build one that does ({INSTALL})"
    return ""
