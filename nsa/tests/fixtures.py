"""Where there is no GPU, kernels run in Triton's interpreter.

Triton reads the variable when a kernel is defined, so it must be set before nsa.kernels is
imported, and nothing can change it afterwards in the same process.
"""

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

__all__ = ["no_flags", "one_thread", "quick_compiler"]

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
