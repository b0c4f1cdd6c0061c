"""native-sparse-attention-pytorch: attention to given blocks in Triton, in float16 at any input.

It attends to the query's own block unasked, and to listed ones without a causal mask: it gets the
lists without the own block. Heads of other sizes than powers of two it reads out of bounds.
"""

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.protocol import Forward, Operator, OperatorPart, load

KERNELS = "native_sparse_attention_pytorch.triton_native_sparse_attention"
ROWS = 128
"""Its buffers have a multiple of so many rows a sequence."""


def select(_x: AttentionInputs, blocks: Tensor, config: NSAConfig) -> Forward:
    attend, size = load(KERNELS).native_sparse_attend, config.select_block_size
    listed = earlier(blocks, size)
    indices, used = listed.clamp(min=0), listed >= 0

    def run(x: AttentionInputs) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (x.q, x.k_sel, x.v_sel))
        # None: by matrix products for groups of two heads or more, as its backward pass decides.
        out: Tensor = attend(*heads_first, size, indices, used, block_dk_dv_use_dot=None)
        return out.transpose(1, 2)

    return run


def earlier(blocks: Tensor, size: int) -> Tensor:
    """Blocks [B, T, HKV, n] without the query's own: [B, HKV, T, n - 1], -1 at the end."""
    own = torch.arange(blocks.shape[1], device=blocks.device)[:, None, None] // size
    ordered = blocks.masked_fill(blocks == own, -1).sort(-1, descending=True).values
    return ordered[..., :-1].transpose(1, 2).contiguous()


def refuses(x: AttentionInputs, config: NSAConfig) -> str:
    (_, T, _, D), size = x.k_sel.shape, config.select_block_size
    if D < 16 or D & (D - 1):
        return f"takes heads of a power of two from 16 on, but these have {D}"
    if -T % size > -T % ROWS:
        return f"writes beyond sequences of {T}, whose last block of {size} is not full"
    return ""


OPERATOR = Operator(
    name="nsa-pytorch",
    package="native_sparse_attention_pytorch",
    install="pip install native-sparse-attention-pytorch==0.2.3",
    licence="MIT",
    parts={"select": OperatorPart(prepare=select)},
    refuses=refuses,
)
