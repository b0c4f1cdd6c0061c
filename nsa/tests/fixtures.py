"""Where there is no GPU, kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, so it must be set before nsa.kernels is
imported, and nothing can change it afterwards in the same process.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["no_flags", "one_thread", "poisoned_outputs", "quick_compiler"]

POISON = 1 << 30
"""In place of an index that was not written: an address far outside of every tensor."""

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from nsa.tests.interpreter import speed_up  # not above: it imports Triton

    speed_up()


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """The person who runs the tests may have some set."""
    from nsa.flags import Flags  # not above: it imports Triton

    for name in Flags.from_env().set_names:
        monkeypatch.delenv(name)


@pytest.fixture
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Traces, differentiates and partitions as always, but generates no code."""
    monkeypatch.setattr("nsa.model.compiled.BACKEND", "aot_eager")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel does not write stays NaN, or an index that must not be followed."""

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **options: Any) -> Tensor:
            x: Tensor = make(*args, **options)
            return x.fill_(torch.nan if x.is_floating_point() else POISON)

        return empty

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
