"""Descriptors of tiles: what Triton's own class makes and refuses."""

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common.tiles import descriptor


@pytest.mark.parametrize("shape", [(2, 64, 3, 40), (1, 64, 1, 64), (1, 1, 2, 8)])
def test_a_descriptor_is_what_triton_makes(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16)
    strides = [8 if size == 1 else stride for size, stride in zip(shape, x.stride(), strict=True)]
    expected = TensorDescriptor(x, list(shape), [*strides[:3], 1], [1, 32, 1, 16])

    for made in (descriptor(x, 32, 16), descriptor(x, 32, 16)):
        assert made.__dict__.keys() == expected.__dict__.keys()
        assert made.base is x
        assert made.__dict__ | {"base": None} == expected.__dict__ | {"base": None}


@pytest.mark.parametrize(
    ("x", "why"),
    [
        pytest.param(torch.empty(4104)[1:4097].view(1, 64, 1, 64), "base must be", id="address"),
        pytest.param(torch.empty(1, 64, 2, 66), "strides must be", id="strides"),
        pytest.param(torch.empty(1, 0, 2, 64), "shape must be", id="empty"),
        pytest.param(torch.empty(1, 64, 2, 64).mT, "strides must be|contiguous", id="transposed"),
    ],
)
def test_a_descriptor_is_refused_each_time(x: Tensor, why: str) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match=why):
            descriptor(x, 32, 16)
