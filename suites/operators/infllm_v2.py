"""The second stage of InfLLM-V2: attention to given blocks of 64 keys, in CUDA."""

import torch

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.packed import Attend, Packed, parts_of
from suites.operators.protocol import Operator, load, one_head_size

BLOCK = 64


def attend(s: Packed) -> Attend:
    attention = load("infllm_v2").infllmv2_attn_varlen_func
    sizes = (s.cu, s.cu, s.tokens, s.tokens)
    return lambda q, k, v, blocks: attention(q, k, v, *sizes, causal=True, topk_idx=blocks)


def refuses(x: AttentionInputs, config: NSAConfig) -> str:
    if config.select_block_size != BLOCK:
        return f"takes blocks of {BLOCK} keys, but these have {config.select_block_size}"
    if x.q.dtype != torch.bfloat16:
        return "is documented for bfloat16 alone"
    return one_head_size(x, config)


OPERATOR = Operator(
    name="infllm-v2",
    package="infllm_v2",
    install="needs building from source: https://github.com/OpenBMB/infllmv2_cuda_impl, "
    "commit f908e731",
    licence="Apache-2.0",
    parts=parts_of(attend),
    refuses=refuses,
)
