"""native-sparse-attention-triton: NSA in Triton over packed sequences."""

from typing import Any

from nsa.config import INITIAL_BLOCKS, LOCAL_BLOCKS
from suites.operators.packed import Attend, Packed, Scored, chosen_by, parts_of
from suites.operators.protocol import Operator, load, one_head_size

OPS = "native_sparse_attention.ops"


def score_by(ops: Any, s: Packed, **options: bool) -> Scored:
    """By `compressed_attention`, whose API another project has copied."""
    c = s.config
    sizes = (c.compress_block_size, c.compress_stride, c.select_block_size, s.n)
    lengths = (s.cu, s.cu_blocks, s.tokens, s.blocks)
    always = {"init_blocks": INITIAL_BLOCKS, "local_blocks": LOCAL_BLOCKS}
    return lambda q, k, v: ops.compressed_attention(q, k, v, *sizes, *lengths, **always, **options)


def score(s: Packed) -> Scored:
    return score_by(load(OPS), s)


def attend(s: Packed) -> Attend:
    run, size = load(OPS).topk_sparse_attention, s.config.select_block_size
    return lambda q, k, v, blocks: run(q, k, v, blocks, size, s.cu)


OPERATOR = Operator(
    name="nsa-triton",
    package="native_sparse_attention",
    install="git clone https://github.com/XunhaoLai/native-sparse-attention-triton, "
    "commit 9bea856c, on PYTHONPATH; pip install einops",
    licence="Apache-2.0",
    parts=parts_of(attend, score),
    blocks=chosen_by(score),
    refuses=one_head_size,
)
