"""flash-msa: one proxy query head a KV head scores tokens, whose best name the blocks. Here the
proxies are the first query head of each group and the keys themselves, without gradient."""

from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators import protocol
from suites.operators.protocol import Forward, Operator, OperatorPart

BLOCK, CHUNK = 128, 256
"""Keys of a block, and queries whose scores the definition computes at a time."""


def proxies(x: AttentionInputs) -> Tensor:
    """The proxy queries, [B, T, HKV, D]."""
    return x.q.detach()[:, :, :: x.q.shape[2] // x.k_sel.shape[2]]


@torch.no_grad()
def choose(x: AttentionInputs, config: NSAConfig) -> Tensor:
    q, k = proxies(x).float(), x.k_sel.float()

    def best(rows: slice) -> Any:
        scores = torch.einsum("bthd,bshd->bths", q[:, rows], k)
        return scores.unflatten(-1, (-1, BLOCK)).amax(-1)

    return protocol.own_and_best(best, config, x.q.shape[1], CHUNK)


def whole(_x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
    attend, tokens = protocol.load("flash_msa").flash_msa_func, config.num_blocks * BLOCK

    def run(x: AttentionInputs) -> Any:
        given = (proxies(x), x.k_sel.detach(), x.q, x.k_sel, x.v_sel)
        heads_first = (t.transpose(1, 2).contiguous() for t in given)
        out, _ = attend(*heads_first, tokens, x.q.shape[-1] ** -0.5)
        return out.unflatten(-1, (x.q.shape[2], -1))

    return run


def refuses(_x: AttentionInputs, config: NSAConfig) -> str:
    size = config.select_block_size
    return "" if size == BLOCK else f"takes blocks of {BLOCK} keys, but these have {size}"


CLAIMED = protocol.one_branch("msa", "proxy heads choose blocks by their best token", choose)
OPERATOR = Operator(
    name="flash-msa",
    package="flash_msa",
    install="pip install flash-msa==0.1.1, which needs torch 2.12 and FlashAttention 3 or 4",
    licence="MIT",
    parts={"whole": OperatorPart(prepare=whole, definition=CLAIMED)},
    refuses=refuses,
)
