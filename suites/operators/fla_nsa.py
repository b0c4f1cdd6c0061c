"""Native sparse attention of flash-linear-attention.

It has l / d times fewer compressed keys than the paper's sizes, and no parameters of phi.
"""

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators import protocol
from suites.operators.protocol import MEANS, Forward, Operator, OperatorPart


def whole(_x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
    run_nsa = protocol.load("fla.ops.nsa").parallel_nsa
    sizes = {"block_counts": config.num_blocks, "block_size": config.select_block_size}

    def run(x: AttentionInputs) -> Tensor:
        g_cmp, g_slc, g_win = x.gates.unbind(-1)
        out = run_nsa(x.q, x.k_sel, x.v_sel, g_cmp=g_cmp, g_slc=g_slc, **sizes)
        near = protocol.window(x.q, x.k_sel, x.v_sel, config)
        return torch.addcmul(out, near, g_win.unsqueeze(-1))

    return run


def select(_x: AttentionInputs, blocks: Tensor, config: NSAConfig) -> Forward:
    run_nsa = protocol.load("fla.ops.nsa").parallel_nsa
    sizes = {"block_counts": config.num_blocks, "block_size": config.select_block_size}
    return lambda x: run_nsa(x.q, x.k_sel, x.v_sel, block_indices=blocks, **sizes)


@torch.no_grad()
def blocks_of(x: AttentionInputs, config: NSAConfig) -> Tensor:
    size, n, T = config.select_block_size, config.num_blocks, x.q.shape[1]
    nsa = protocol.load("fla.ops.nsa.parallel")
    k, v = (nsa.mean_pooling(t, size) for t in (x.k_sel, x.v_sel))
    shared = {"TK": T, "block_size": size, "scale": x.q.shape[-1] ** -0.5}
    _, lse = nsa.parallel_nsa_compression(q=x.q, k=k, v=v, **shared)
    best = nsa.parallel_nsa_topk(q=x.q, k=k, lse=lse, block_counts=n, **shared)
    return protocol.ascending(best, n, config.select_length(T))


OPERATOR = Operator(
    name="fla-nsa",
    package="fla",
    install="pip install fla-core==0.6.0",
    licence="MIT",
    parts={
        "whole": OperatorPart(prepare=whole, definition=MEANS),
        "select": OperatorPart(prepare=select),
    },
    blocks=blocks_of,
    fewest_heads=16,
)
