"""Fixtures of all tests of the harness."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.runner import evidence, watchdog
from harness.runner.launcher import Launcher
from harness.store.writer import RunWriter, create
from harness.tests.faulty import LeapingClock
from harness.tests.gate_repositories import repository
from harness.tests.small_run import ENVIRONMENT, SUITE

for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)  # set by readline, which pytest imports: a pipe has no width


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start a harness come first: it needs a GPU that no test has taken before."""
    items.sort(key=lambda item: item.get_closest_marker("free_gpu") is None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs an NVIDIA GPU")


def pytest_collection_finish() -> None:
    """What pytest has loaded is not searched in the collection before each measured step."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def warm() -> Iterator[Launcher]:
    """One for all tests of a process, started at once: it has the environment of no test."""
    with Launcher() as one:
        one.describe()
        yield one


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LeapingClock:
    """The watchdog's. On a loaded machine the stacks of a process come late."""
    clock = LeapingClock(tmp_path / "mark")
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(evidence, "PYTHON_S", 60.0)
    return clock


@pytest.fixture
def toys(tmp_path: Path) -> Path:
    return repository(tmp_path / "toys")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RunWriter]:
    with create(tmp_path, SUITE, ENVIRONMENT) as writer:
        yield writer
