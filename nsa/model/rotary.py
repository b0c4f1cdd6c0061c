"""Rotary embedding: rotates each head's channel pairs by angles that grow with the position.

Source: Su et al. 2021, "RoFormer", arXiv:2104.09864, eq. 34.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from nsa import ops
from nsa.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """The turns of rotary embedding for consecutive tokens; every layer uses the same.

    A turn is the cosine and sine of position * theta ** (-2 j / Dk), for pair j of a head. A
    compressed key has the position of its block's last token, so q . k depends on the relative
    position in every branch.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34; pairs are neighbouring channels.
    """

    tokens: Tensor
    """[2, T, Dk / 2]: cosines, then sines."""
    blocks: Tensor
    """[2, N, Dk / 2]: one for each compressed block that these tokens complete."""

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        length: int,
        *,
        like: Tensor,
        start: int = 0,
        cu_seqlens: Tensor | None = None,
    ) -> Self:
        """Turns for `length` tokens from position `start`, on the device of `like`.

        With cu_seqlens, positions restart in each document. Turns are float64 if `like` is, else
        float32; angles are always computed in float64.
        """
        nsa, device = config.nsa, like.device
        tokens = torch.arange(start, start + length, device=device)
        if cu_seqlens is None:
            first, last = nsa.compressed_length(start), nsa.compressed_length(start + length)
            ends = torch.arange(first, last, device=device) * nsa.compress_stride
            ends = ends + (nsa.compress_block_size - 1)
        else:
            document = torch.searchsorted(cu_seqlens.to(tokens.dtype), tokens, right=True) - 1
            tokens = tokens - cu_seqlens[document]
            ends = ops.compress_blocks(
                tokens.double().view(1, -1, 1, 1),
                lambda blocks: blocks[:, :, -1],
                config=nsa,
                cu_seqlens=cu_seqlens,
            ).flatten()
        Dk = config.head_dim_qk
        pairs = torch.arange(0, Dk, 2, device=device, dtype=torch.float64)
        frequencies = config.rope_theta ** (-pairs / Dk)
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32

        def turns(positions: Tensor) -> Tensor:
            angles = positions.double()[:, None] * frequencies
            return torch.stack((angles.cos(), angles.sin())).to(dtype)

        return cls(tokens=turns(tokens), blocks=turns(ends))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """Turn the channel pairs of every head by its token's angles: [B, T, H, D] -> the same."""
    pairs = x.to(turns.dtype).unflatten(-1, (-1, 2))  # [B, T, H, D / 2, 2]
    quarter = torch.stack((-pairs[..., 1], pairs[..., 0]), -1)  # each pair turned by 90 degrees
    cos, sin = turns[:, :, None, :, None].unbind()  # [T, 1, D / 2, 1]
    return torch.addcmul(pairs * cos, quarter, sin).flatten(-2).to(x.dtype)
