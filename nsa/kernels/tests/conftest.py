"""The fixtures of nsa, and those of tests that call kernels."""

from nsa.tests.fixtures import *  # noqa: F403  # first: it turns Triton's interpreter on

# isort: split
from collections.abc import Iterator
from typing import Any, get_args

import pytest
import torch
from triton.experimental.gluon._runtime import GluonJITFunction

from nsa.kernels import scores
from nsa.kernels.banded import hopper_query
from nsa.kernels.banded import key as banded_key
from nsa.kernels.common import hopper
from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.common.launch import KernelLaunch
from nsa.kernels.selected import forward as selected
from nsa.kernels.selected import inverse
from nsa.kernels.tests.warpgroups import Machine


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


def is_gluon(launch: KernelLaunch) -> bool:
    return isinstance(launch.kernel, GluonJITFunction)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """The kernels that would have been launched, none of which is: whether they are in Gluon."""
    names: dict[str, bool] = {}

    def note(self: KernelLaunch, *_: Any) -> None:
        names[self.kernel.__name__] = is_gluon(self)

    monkeypatch.setattr(KernelLaunch, "__call__", note)
    return names


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """A CPU counts as 9.0, with three programs at once."""
    launch = KernelLaunch.__call__

    def launched(self: KernelLaunch, grid: Any, pointers: Any, numbers: Any) -> None:
        if not is_gluon(self):
            return launch(self, grid, pointers, numbers)
        constants = {name: x for name, x in self.named.items() if name.isupper()}
        return Machine(self.kernel, grid).run(pointers, numbers, constants)

    if device == "cpu":
        monkeypatch.setattr(KernelLaunch, "__call__", launched)
        for module in (hopper, hopper_query):
            monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
