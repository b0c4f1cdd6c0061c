"""What every kernel module needs: head blocks, architectures, and the limits of the kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

import torch
import triton
from torch import Tensor

from nsa.errors import Unsupported

Architecture = Literal["sm_80", "sm_90"]
"""The GPU that a configuration is made for: sm_80 has 163 KiB of shared memory a block and
mma.sync, sm_90 has 227 KiB and wgmma. Later GPUs use the configurations of sm_90."""

LOG2_E = 1.4426950408889634
"""exp(x) == exp2(x * LOG2_E)."""
MAX_HEAD_DIM = 256
MAX_GROUP = 64
MAX_GRID_Y = 65_535
"""Programs along the second axis of a CUDA grid."""
MIN_DOT = 16
"""Smallest side of a tensor-core product."""

_forced: list[Architecture] = []


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes as long on the host as half a launch."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


@cache
def head_blocks(size: int) -> tuple[int, int]:
    """Cut a head into powers of two: 192 -> (128, 64), 64 -> (64, 0), 80 -> (64, 16).

    A tile's sides are powers of two; one block of 256 would waste a quarter of 192.
    """
    if size <= MIN_DOT:
        return MIN_DOT, 0
    first = 1 << (size.bit_length() - 1)
    rest = size - first
    return first, max(MIN_DOT, power_of_2(rest)) if rest else 0


def padded(size: int) -> int:
    """The power of two that holds `size`, at least one tensor-core side."""
    return max(MIN_DOT, power_of_2(size))


def architecture(device: torch.device) -> Architecture:
    """The configurations that a device uses."""
    if _forced:
        return _forced[-1]
    return _architecture_of(device)


@cache
def _architecture_of(device: torch.device) -> Architecture:
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "sm_80"
    return "sm_90"


@contextmanager
def as_architecture(name: Architecture) -> Iterator[None]:
    """Make `architecture` return `name`, to compile for a GPU that is absent."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()


def last_contiguous(x: Tensor) -> Tensor:
    """x, or a copy if its last axis is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    return bool(triton.knobs.runtime.interpret)


def require(q: Tensor, v: Tensor, heads: int) -> None:
    """Raise Unsupported, with the limit, unless the kernels can run on such tensors.

    Args:
        q: Queries, [B, ..., HQ, Dk].
        v: Values, [..., Dv].
        heads: KV heads (HKV).
    """
    if reason := _refusal(q, v, heads):
        raise Unsupported(f"triton: {reason}; the `eager` and `gather` routes run anywhere")


def _refusal(q: Tensor, v: Tensor, heads: int) -> str:
    dtype = str(q.dtype).removeprefix("torch.")
    if not q.is_cuda and not interpreted() and not _forced:
        return f"needs tensors on CUDA, but these are on {q.device.type}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, but these are {dtype}"
    if interpreted() and q.dtype != torch.float16:
        return "the interpreter computes wrong numbers in bfloat16; use float16"
    if q.is_cuda and torch.cuda.get_device_capability(q.device) < (8, 0):
        return "needs compute capability 8.0"
    if (size := max(q.shape[-1], v.shape[-1])) > MAX_HEAD_DIM:
        return f"takes heads of at most {MAX_HEAD_DIM}, but these have {size}"
    if (group := q.shape[-2] // heads) > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads a KV head, but these have {group}"
    if (grid_y := q.shape[0] * heads) > MAX_GRID_Y:
        return f"takes B * HKV of at most {MAX_GRID_Y}, but it is {grid_y}"
    return ""
