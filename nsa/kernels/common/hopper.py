"""Kernels for sm_90 in Gluon: products of one tile run under the softmax of another.

The equations and the order of keys are those of Triton twins, which serve everything else; Gluon
says when a product starts and when it is waited for. One program runs on an SM, with two
warpgroups that compute and keep nearly all registers.

Beside Triton, in Gluon:

- `warp_specialize` runs functions side by side, each on warps of its own. The first has the
  launch's `num_warps`; its two lists are warps, and registers a thread, of the others.
- A tensor has a layout, which says what thread holds what element. `accumulator` is that of a
  product, `SliceLayout(1, x)` has one number a row of x, `SliceLayout(0, x)` one a column, and
  `DotOperandLayout(0, x, 2)` is that of a left operand in registers, for a product of layout x.
- `warpgroup_mma` only asks. `warpgroup_mma_wait(n, x)` goes on once at most the n newest products
  are unfinished, and returns x, which can be read from then on.
- What a thread stores in shared memory is seen by products and copies after `fence_async_shared`.

What the kernels have in common:

- **Copies.** The bulk copy engine brings tiles into rings of shared memory, as far ahead as there
  are slots. One more warp asks for them; where sums need its registers (dK and dV of a band), the
  first warpgroup does.
- **Barriers.** A slot of a ring has two: `full` is over once the bytes of the tile are there,
  `empty` once all are done with it. They count phases, and a wait names a phase by its parity. For
  a slot's n-th tile, counted from 0, it is phase n of `full` and phase n - 1 of `empty`; phase -1
  counts as over. `expect` arrives, and says how many bytes copies will bring.
- **Two warpgroups**, HALF 0 and 1. While one computes weights the other multiplies. Each owns 64
  rows of a band and walks the same tiles, so that a tile is read from L2 once for 128 rows; those
  of selected attention take turns with the tiles. Within a warpgroup, too, a product runs while
  something else is computed; each kernel says which.

Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, algorithms 1 and 2.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
)

from nsa.kernels.common.device import architecture

ROWS: gl.constexpr = gl.constexpr(64)
"""Of a warpgroup: those of one wgmma."""
HEADS = {(128, 128), (192, 128)}
"""D and DV. Heads of 64 are slower than in Triton, larger ones do not fit."""
TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
"""Its version; 3.5 takes partitions in another form."""


@gluon.constexpr_function
def accumulator(columns: int) -> Any:
    """The layout of a warpgroup's product, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def product(a, b, N: gl.constexpr, K: gl.constexpr):
    """Ask for a b^T, [ROWS, N]; it is there once it has been waited for."""
    x = warpgroup_mma_init(gl.zeros([ROWS, N], gl.float32, accumulator(N)))
    return warpgroup_mma(
        a.reshape([ROWS, K]), b.reshape([N, K]).permute([1, 0]), x, use_acc=False, is_async=True
    )


@gluon.jit
def scores(a1, a2, b1, b2, N: gl.constexpr, SIZES: gl.constexpr):
    """Ask for q k^T or k q^T."""
    s = product(a1, b1, N, SIZES.D1)
    if SIZES.D2 > 0:
        s = warpgroup_mma(
            a2.reshape([ROWS, SIZES.D2]),
            b2.reshape([N, SIZES.D2]).permute([1, 0]),
            s,
            is_async=True,
        )
    return s


@cache
def multiprocessors(device: torch.device) -> int:
    """0 if the device has no wgmma: 9.0 has, not what comes after. `meta` is as an H200."""
    if device.type != "cuda":
        return 132 if device.type == "meta" else 0
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count if (found.major, found.minor) == (9, 0) else 0


def takes(q: Tensor, v: Tensor) -> bool:
    """Whether these kernels serve such heads, on their device."""
    serves = (q.shape[-1], v.shape[-1]) in HEADS and architecture(q.device) == "sm_90"
    return serves and TRITON >= (3, 6) and multiprocessors(q.device) > 0
