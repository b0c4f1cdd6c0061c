"""The tensors of one case of the `attention` workload."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Gaussian tensors, [B, T, H, D]; each branch has its own keys and values."""

    q: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    gates: Tensor
    grad: Tensor
    """Gradient of the output, [B, T, HQ, Dv]."""

    def to(self, dtype: torch.dtype) -> "AttentionInputs":
        return AttentionInputs(*(getattr(self, name).to(dtype) for name in self.__slots__))

    def at(self, rows: Tensor) -> "AttentionInputs":
        """The queries of some rows, and all keys."""
        q, gates, grad = (x[:, rows] for x in (self.q, self.gates, self.grad))
        return replace(self, q=q, gates=gates, grad=grad)

    def write(self, seed: int) -> None:
        """Draw the values again, in place. Gates are below 1: an operator may take their logits."""
        rng = torch.Generator(self.q.device).manual_seed(seed)
        for name in self.__slots__:
            getattr(self, name).normal_(generator=rng)
        self.gates.sigmoid_().clamp_(max=1 - 2**-8)
