"""Operators over packed sequences: [B, T, H, D] as [B * T, H, D]. Their parts follow from two
functions, one that scores compressed blocks and one that attends to blocks.

Operators that call flash-attn for the window get the same algorithm built into PyTorch.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig
from suites.inputs import AttentionInputs
from suites.operators.protocol import PAPER, Definition, Forward, OperatorPart, ascending, window


@dataclass(frozen=True, slots=True)
class Packed:
    """The sizes of packed sequences."""

    config: NSAConfig
    tokens: int
    """Of a sequence."""
    blocks: int
    """Compressed blocks of a sequence."""
    cu: Tensor
    """Where the sequences begin and end, int32, [B + 1]."""
    cu_blocks: Tensor
    """Likewise of the compressed blocks."""
    n: int
    """Blocks to select; 0: none, the compress branch is run alone."""

    @classmethod
    def of(cls, x: AttentionInputs, config: NSAConfig, n: int) -> "Packed":
        (B, T), N = x.q.shape[:2], x.k_cmp.shape[1]
        starts = torch.arange(B + 1, dtype=torch.int32, device=x.q.device)
        return cls(config, T, N, starts * T, starts * N, n)


Scored = Callable[..., Any]
"""Packed q, k_cmp, v_cmp -> the compress branch, and the blocks [HKV, B * T, n] it scores best."""
Attend = Callable[..., Any]
"""Packed q, k, v and blocks in the operator's own form -> the selected branch."""


def parts_of(
    attend: Callable[[Packed], Attend],
    score: Callable[[Packed], Scored] | None = None,
    *,
    given: Callable[[Tensor, Packed], Any] = lambda blocks, _: blocks,
    combine: Callable[..., Any] = reference.gated_sum,
    backward: bool = True,
    whole_is: Definition = PAPER,
    select_is: Definition = PAPER,
) -> Mapping[str, OperatorPart]:
    """The parts of an operator.

    Args:
        given: The operator's form of given blocks [HKV, B * T, n], -1 if unused; not timed.
        combine: The whole from the gates and the three branches, packed.
    """

    def select(x: AttentionInputs, blocks: Tensor, config: NSAConfig) -> Forward:
        sizes = Packed.of(x, config, config.num_blocks)
        run = attend(sizes)
        own = given(blocks.movedim(2, 0).flatten(1, 2).contiguous(), sizes)
        return lambda x: run(*pack(x.q, x.k_sel, x.v_sel), own).unflatten(0, x.q.shape[:2])

    def compress(x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
        assert score
        run = score(Packed.of(x, config, 0))
        return lambda x: run(*pack(x.q, x.k_cmp, x.v_cmp))[0].unflatten(0, x.q.shape[:2])

    def scores(x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
        assert score  # the compress branch, which it needs for this, is part of it
        run = score(Packed.of(x, config, config.num_blocks))
        return lambda x: run(*pack(x.q, x.k_cmp, x.v_cmp))[1]

    def whole(x: AttentionInputs, _blocks: Tensor, config: NSAConfig) -> Forward:
        assert score
        sizes = Packed.of(x, config, config.num_blocks)
        far, near = score(sizes), attend(sizes)

        def run(x: AttentionInputs) -> Any:
            compressed, best = far(*pack(x.q, x.k_cmp, x.v_cmp))
            chosen = near(*pack(x.q, x.k_sel, x.v_sel), best)
            local = window(x.q, x.k_win, x.v_win, config)
            out = combine(*pack(x.gates), compressed, chosen, *pack(local))
            return out.unflatten(0, x.q.shape[:2])

        return run

    parts = {"select": OperatorPart(prepare=select, backward=backward, definition=select_is)}
    if score:
        parts["whole"] = OperatorPart(prepare=whole, definition=whole_is)
        parts["compress"] = OperatorPart(prepare=compress)
        parts["scores"] = OperatorPart(prepare=scores, backward=False)
    return parts


def chosen_by(
    score: Callable[[Packed], Scored],
) -> Callable[[AttentionInputs, NSAConfig], Tensor]:
    """The blocks that an operator with this `score` selects."""

    @torch.no_grad()
    def blocks(x: AttentionInputs, config: NSAConfig) -> Tensor:
        B, T = x.q.shape[:2]
        _, best = score(Packed.of(x, config, config.num_blocks))(*pack(x.q, x.k_cmp, x.v_cmp))
        of_sequences = best.unflatten(1, (B, T)).movedim(0, 2)
        return ascending(of_sequences, config.num_blocks, config.select_length(T))

    return blocks


def pack(*tensors: Tensor) -> Iterator[Tensor]:
    """[B, T, ...] as [B * T, ...]."""
    return (x.flatten(0, 1) for x in tensors)
