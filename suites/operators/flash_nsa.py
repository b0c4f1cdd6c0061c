"""flash_nsa of Scalable-Flash-Native-Sparse-Attention: Triton with TMA descriptors. Its sizes are
global to the process. It keeps scores in float16 and takes logits of the gates."""

from typing import Any

import torch
from torch import Tensor

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS
from suites.operators.packed import Attend, Packed, Scored, chosen_by, parts_of
from suites.operators.protocol import Operator, load


def ready(s: Packed) -> Any:
    """The package, with these sizes and sequences."""
    nsa, c = load("flash_nsa"), s.config
    always = {"num_init_blocks": INITIAL_BLOCKS, "num_local_blocks": LOCAL_BLOCKS}
    sizes = {"kernel_size": c.compress_block_size, "stride": c.compress_stride, **always}
    nsa.NSAHelper.set_hyperparameters(**sizes, block_size=c.select_block_size, top_n=c.num_blocks)
    nsa.NSAHelper.init_cu_seqlens(s.cu)
    return nsa


def score(s: Packed) -> Scored:
    nsa = ready(s)

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = nsa.compress_attn(q, k, v)
        if s.n == 0:
            return out, lse
        with torch.no_grad():
            return out, nsa.slc_topk_indices(q, k, lse, maybe_efficient_version=True)[0]

    return run


def attend(s: Packed) -> Attend:
    nsa = ready(s)
    return lambda q, k, v, blocks: nsa.select_attn(q, k, v, blocks)


def given(blocks: Tensor, s: Packed) -> Tensor:
    return blocks.masked_fill(blocks < 0, s.config.select_length(s.tokens))


def combine(gates: Tensor, *branches: Tensor) -> Any:
    return load("flash_nsa.ops.combine").fused_sigmoid_combine(*branches, gates.float().logit())


OPERATOR = Operator(
    name="flash-nsa",
    package="flash_nsa",
    install="git clone https://github.com/mdy666/Scalable-Flash-Native-Sparse-Attention, "
    "commit fcf117c3, on PYTHONPATH; pip install 'setuptools<81' pandas",
    licence="MIT",
    parts=parts_of(attend, score, given=given, combine=combine),
    blocks=chosen_by(score),
    scores=torch.float16,
)
