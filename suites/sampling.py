"""Rows of a long sequence whose outputs and gradients are compared with the definition.

The dense definition of T queries needs memory for T * T scores. That of a few queries does not, and
their outputs and gradients depend on no other query. The gradient of a key is a sum over queries,
so the code under test runs once more, with an upstream gradient that is zero in all other rows.

Attention to n Gaussian keys gives each a weight of about 1 / n and adds up to about 1 / sqrt(n).
Errors are relative to the largest value of a tensor, so that late rows, which see many keys, would
count for nothing beside early ones. Therefore outputs are multiplied by sqrt(n) and the upstream
gradient of the keys by n, rounded to powers of two, which changes no digit.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.reference import wide

SEED = 0
ENDS = 4
"""Rows at both ends."""
SPREAD = 64
"""Rows drawn from as many equal parts of the sequence."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The rows, and by how much what they give is multiplied."""

    rows: Tensor
    """Positions, ascending, [R]."""
    weights: Mapping[str, Tensor]
    """What the queries give, by name -> factors, [R, ...]."""
    upstream: Tensor
    """Factors of the upstream gradient that the keys get, [R, 1, parts]."""

    @classmethod
    def of(cls, T: int, config: NSAConfig, parts: tuple[str, ...], device: str) -> "Sample":
        """For attention by these parts: nsa.config.BRANCHES, one of them, or `dense`."""
        rows = rows_of(T, config).to(device)
        seen = torch.stack([_seen(part, rows, config) for part in parts], -1)[:, None]
        size = (seen > 0).div(seen.clamp(min=1)).sum(-1, keepdim=True).sqrt()
        size = size.masked_fill(size == 0, 1)  # of an output: [R, 1, 1]
        # Around 1, so that products fit into float16.
        middle = seen.amax(0, keepdim=True).clamp(min=1).sqrt()
        return cls(
            rows=rows,
            weights={
                "o": _power_of_two(1 / size),
                "dq": _power_of_two(1 / size),
                "dgates": _power_of_two(seen.clamp(min=1).sqrt()),
                "selected": torch.ones(len(rows), 1, device=device),
            },
            upstream=_power_of_two(seen.clamp(min=1) / middle),
        )

    def take(self, outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The rows of what the queries give, [B, T, ...]; all of what the keys get."""
        return {n: x[:, self.rows] if n in self.weights else x for n, x in outputs.items()}

    def join(self, parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Some rows after others: what the queries give, and the sum of what the keys get."""
        joined: dict[str, Tensor] = {}
        dtypes: dict[str, torch.dtype] = {}
        for part in parts:
            for name, x in part.items():
                dtypes[name] = x.dtype
                if name in self.weights:
                    joined[name] = torch.cat([joined[name], x], 1) if name in joined else x
                else:
                    joined[name] = joined.get(name, 0) + x.to(wide(x.dtype))
        return {name: x.to(dtypes[name]) for name, x in joined.items()}

    def weigh(self, queries: Mapping[str, Tensor], keys: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the queries give, [B, R, ...], by its weights, and what the keys get."""
        return {
            name: x * self.weights[name].to(x.dtype)
            for name, x in queries.items()
            if name in self.weights
        } | {name: x for name, x in keys.items() if name not in self.weights}

    def alone(self, grad: Tensor, gates: Tensor) -> tuple[Tensor, Tensor]:
        """The upstream gradient, zero in all other rows, and the gates: [B, T, HQ, Dv or 3].

        The gradient is multiplied for the keys, and the gates by what a part has less than others,
        so that they remain between 0 and 1.
        """
        factors = self.upstream.to(grad.dtype)
        largest = factors.amax(-1, keepdim=True)
        masked, gates = torch.zeros_like(grad), gates.clone()
        masked[:, self.rows] = grad[:, self.rows] * largest
        gates[:, self.rows] *= factors / largest
        return masked, gates


def rows_of(T: int, c: NSAConfig) -> Tensor:
    """Both ends, both sides of the first and the last border of each kind, and some in every part
    of the sequence: positions, ascending, [R]; R is at most 100."""
    sizes = (c.compress_stride, c.select_block_size, c.window_size)
    borders = {
        c.compress_block_size,
        c.compress_block_size + c.compress_stride,
        c.num_blocks * c.select_block_size,
        *sizes,
        *((T - 1) // size * size for size in sizes),
    }
    edges = torch.linspace(0, T, SPREAD + 1, dtype=torch.float64)
    rng = torch.Generator().manual_seed(SEED)
    share = torch.rand(SPREAD, generator=rng, dtype=torch.float64)
    drawn = (edges[:-1] + share * edges.diff()).long().tolist()
    near = [border + side for border in borders for side in (-1, 0)]
    rows = {*drawn, *near, *range(ENDS), *range(T - ENDS, T)}
    return torch.tensor(sorted(row for row in rows if 0 <= row < T))


def _seen(part: str, rows: Tensor, c: NSAConfig) -> Tensor:
    """Keys, or compressed blocks, that each row sees, float64, [R]."""
    tokens = rows + 1
    match part:
        case "compress":
            seen = ((tokens - c.compress_block_size) // c.compress_stride + 1).clamp(min=0)
        case "select":
            seen = tokens.clamp(max=c.num_blocks * c.select_block_size)
        case "window":
            seen = tokens.clamp(max=c.window_size)
        case _:
            seen = tokens
    return seen.double()


def _power_of_two(x: Tensor) -> Tensor:
    return x.log2().round().exp2()
