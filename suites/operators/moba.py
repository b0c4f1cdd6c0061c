"""MoBA: each query head chooses blocks of keys by the mean of their keys."""

import importlib.metadata
from typing import Any

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators import protocol
from suites.operators.packed import Packed, pack
from suites.operators.protocol import Forward, Operator, OperatorPart, of_heads

CHUNK = 1024
"""Queries whose gates the definition computes at a time."""


@torch.no_grad()
def choose(x: AttentionInputs, config: NSAConfig) -> Tensor:
    size, (B, T, HQ, D) = config.select_block_size, x.q.shape
    full = of_heads(x.k_sel, HQ)[:, : T // size * size].unflatten(1, (-1, size))
    means = torch.zeros(B, config.select_length(T), HQ, D, device=x.q.device)
    means[:, : T // size] = full.mean(2).float()  # a last one that is not full is the query's own

    def gates(rows: slice) -> Tensor:
        return torch.einsum("bthd,bmhd->bthm", x.q[:, rows].float(), means)

    return protocol.own_and_best(gates, config, T, CHUNK)


def whole(x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
    attend, s = protocol.load("moba").moba_attn_varlen, Packed.of(x, config, 0)
    sizes = (s.cu, s.tokens, config.select_block_size, config.num_blocks)

    def run(x: AttentionInputs) -> Any:
        k, v = (of_heads(t, x.q.shape[2]) for t in (x.k_sel, x.v_sel))  # as its own layer does
        return attend(*pack(x.q, k, v), *sizes).unflatten(0, x.q.shape[:2])

    return run


def refuses(_x: AttentionInputs, _config: NSAConfig) -> str:
    major, minor = importlib.metadata.version("flash_attn").split(".")[:2]
    old = (int(major), int(minor)) <= (2, 6)
    return "" if old else "unpacks the results of flash-attn 2.6.3, which newer ones changed"


CLAIMED = protocol.one_branch("moba", "query heads choose blocks by their mean keys", choose)
OPERATOR = Operator(
    name="moba",
    package="moba",
    install="git clone https://github.com/MoonshotAI/MoBA, commit 61e456bc, on PYTHONPATH; "
    "pip install --no-build-isolation flash-attn==2.6.3 transformers einops",
    licence="MIT",
    parts={"whole": OperatorPart(prepare=whole, definition=CLAIMED)},
    refuses=refuses,
)
