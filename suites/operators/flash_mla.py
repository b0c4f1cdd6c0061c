"""The sparse forward of FlashMLA (DSA): each query attends to its own list of tokens."""

from dataclasses import replace

import torch

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.packed import Attend, Packed, parts_of
from suites.operators.protocol import Definition, Operator, load

HEAD_V = 512


def attend(_s: Packed) -> Attend:
    attention = load("flash_mla").flash_mla_sparse_fwd
    return lambda q, kv, _v, tokens: attention(q, kv, tokens, q.shape[-1] ** -0.5)[0]


def refuses(x: AttentionInputs, config: NSAConfig) -> str:
    B, _, HQ, Dk = x.q.shape
    if (B, x.k_sel.shape[2], x.v_sel.shape[-1]) != (1, 1, HEAD_V) or Dk not in (512, 576):
        return f"takes one KV head of 512 or 576, values of {HEAD_V}, and one sequence"
    if HQ not in (64, 128):
        return f"takes 64 or 128 query heads, but these are {HQ}"
    if config.select_block_size != 1 or x.q.dtype != torch.bfloat16:
        return "takes blocks of one token, in bfloat16"
    return ""


OPERATOR = Operator(
    name="flash-mla",
    package="flash_mla",
    install="needs building from source: https://github.com/deepseek-ai/FlashMLA, commit 9241ae3e",
    licence="MIT",
    parts=parts_of(
        attend,
        given=lambda tokens, _: tokens.movedim(0, 1).contiguous(),
        backward=False,
        select_is=Definition(
            name="tokens",
            differs="blocks of one token; values are the first numbers of keys",
            tie=lambda x, _: replace(x, v_sel=x.k_sel[..., : x.v_sel.shape[-1]]),
        ),
    ),
    refuses=refuses,
)
