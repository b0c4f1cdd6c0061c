"""The fixtures of nsa, and those of tests that call kernels."""

from nsa.tests.fixtures import *  # noqa: F403  # first: it turns Triton's interpreter on

# isort: split
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from nsa.kernels import scores
from nsa.kernels.banded import key as banded_key
from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.selected import forward as selected
from nsa.kernels.selected import inverse


@pytest.fixture(params=get_args(Architecture))
def architecture(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiles by bulk copy, as on sm_90, and by pointers, as on sm_80: a GPU of 9.0 can do both."""
    here = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    if request.param == "sm_90" and here < (9, 0):
        pytest.skip("tiles of sm_90 may not fit the shared memory of this GPU")
    with as_architecture(request.param):
        yield


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are taken in several chunks, those of a block in several items, and those that see a
    tile of keys in several splits."""
    monkeypatch.setattr(scores, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(selected, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(inverse, "ITEM_ROWS", 32)
    monkeypatch.setattr(inverse, "MIN_ITEM_ROWS", 32)
    monkeypatch.setattr(banded_key, "MIN_SPLIT_ROWS", 32)
    monkeypatch.setattr(banded_key, "MIN_WINDOW_ROWS", 32)
