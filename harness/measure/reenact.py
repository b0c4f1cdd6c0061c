"""What hung once more, told launch by launch: see harness.execution.reenactment.

Every launch is awaited (CUDA_LAUNCH_BLOCKING), so that a kernel that does not end keeps its launch
from returning. Too slow to be timed, and never is.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from harness.measure import accuracy
from harness.measure.dispatched import Dispatched
from harness.measure.launches import BEGAN, RETURNED, Teller, telling_into
from harness.records import Case
from harness.workload import Factory


def reenact(
    build: Factory, case: Case, told: Path, *, runs: int, comparing: bool, alive: Callable[[], None]
) -> None:
    """Build the workload and run it, or only compare it with its definition.

    Args:
        told: The file to tell into.
        runs: How often; not at all where the comparison hung.
        comparing: It hung in the comparison.
        alive: Called between parts of the comparison.
    """
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # CUDA is untouched yet, and will ask
    with telling_into(told) as teller, _Operators(teller), kernels(teller):
        workload = build(case.provider, case.axes)
        if comparing:
            accuracy.compare(workload, alive)
            return
        for run in range(runs):
            teller.run = run
            workload.run()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()


class _Operators(Dispatched):
    def __init__(self, teller: Teller) -> None:
        super().__init__()
        self._teller = teller

    def call(self, func: Any, args: tuple[Any, ...], given: Mapping[str, Any]) -> Any:
        name = str(getattr(func, "overloadpacket", func))
        self._teller.tell(BEGAN, name)
        result = func(*args, **given)
        self._teller.tell(RETURNED, name)
        return result


@contextmanager
def kernels(teller: Teller) -> Iterator[None]:
    """Triton kernels, where Triton is installed."""
    if find_spec("triton") is None:
        yield
        return
    from triton import knobs  # here: slow to import, and only this needs it

    def enter(launch: Any) -> None:
        teller.tell(BEGAN, str(launch.get()["name"]))

    def leave(launch: Any) -> None:
        teller.tell(RETURNED, str(launch.get()["name"]))

    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        yield
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
