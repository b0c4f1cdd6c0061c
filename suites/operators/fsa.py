"""Flash-Sparse-Attention: selected attention by keys for small groups.

The rest is a copy of native-sparse-attention-triton. It scores blocks by one query head of a group,
as written for groups of one, and rounds scores to bfloat16.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from suites.operators.nsa_triton import score_by
from suites.operators.packed import Attend, Packed, Scored, chosen_by, parts_of
from suites.operators.protocol import Definition, Operator, load, one_head_size

LARGEST_GROUP = 8
"""Above it the project's own module calls the older kernel."""


def score(s: Packed) -> Scored:
    return score_by(load("nsa_ref.ops"), s, parallel_topk_compute=False)


def attend(s: Packed) -> Attend:
    of_small = load("fsa.ops").FSA_topk_sparse_attention
    of_large = load("nsa_ref.ops").topk_sparse_attention

    def run(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Any:
        run = of_large if q.shape[1] > LARGEST_GROUP * k.shape[1] else of_small
        return run(q, k, v, blocks, s.config.select_block_size, s.cu)

    return run


OPERATOR = Operator(
    name="fsa",
    package="fsa",
    install="git clone https://github.com/Relaxed-System-Lab/Flash-Sparse-Attention, "
    "commit 1da34f35, on PYTHONPATH; pip install einops",
    licence="Apache-2.0",
    parts=parts_of(
        attend,
        score,
        whole_is=Definition(
            name="first-head",
            differs="the first query head of a group scores blocks for all of it",
            scores_by=lambda x: replace(x, q=x.q[:, :, :: x.q.shape[2] // x.k_cmp.shape[2]]),
        ),
    ),
    blocks=chosen_by(score),
    scores=torch.bfloat16,
    refuses=one_head_size,
)
