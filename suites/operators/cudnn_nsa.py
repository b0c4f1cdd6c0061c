"""Selected attention of NVIDIA's cuDNN frontend, in CuTe DSL: by queries, forward only."""

import torch
from torch import Tensor

from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.packed import Attend, Packed, parts_of
from suites.operators.protocol import Operator, load


def attend(s: Packed) -> Attend:
    select = load("cudnn").NSA.selection_attention_wrapper
    sizes = {"max_s_q": s.tokens, "max_s_k": s.tokens, "block_size": s.config.select_block_size}
    cu = {"cum_seqlen_q_tensor": s.cu, "cum_seqlen_k_tensor": s.cu}

    return lambda q, k, v, blocks: select(
        *(q, k, v, *blocks), **cu, **sizes, scale_softmax=q.shape[-1] ** -0.5, is_causal=True
    )["o_tensor"]


def given(blocks: Tensor, _: Packed) -> tuple[Tensor, Tensor]:
    """Blocks, [B * T, HKV, n], and how many of them are used, [B * T, HKV]."""
    ordered = blocks.movedim(0, 1).contiguous()
    return ordered.clamp(min=0), (ordered >= 0).sum(-1, dtype=torch.int32)


def refuses(_x: AttentionInputs, _config: NSAConfig) -> str:
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0)
    return "needs compute capability 9.0" if old else ""


OPERATOR = Operator(
    name="cudnn-nsa",
    package="cudnn",
    install="pip install nvidia-cudnn-frontend==1.32.0 nvidia-cutlass-dsl==4.8.1",
    licence="Apache-2.0",
    parts=parts_of(attend, given=given, backward=False),
    refuses=refuses,
)
