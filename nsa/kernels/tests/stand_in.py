"""An absent GPU: Triton chooses kernels as usual, but nothing is compiled or runs.

`python -m nsa.kernels.tests.stand_in sm_90` launches the cases of `aot_cases` and prints how their
kernels were called. It runs in its own process: kernels defined under TRITON_INTERPRET are never
compiled.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any, cast

import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common.device import Architecture, as_architecture
from nsa.kernels.common.launch import KernelLaunch
from nsa.kernels.tests.aot_cases import CASES, SHAPES

SHAPE = "64/4/192/128"
"""Of `aot_cases`: on sm_90 Gluon kernels serve it."""


class StandInDriver:
    """`device` is the current one."""

    def __init__(self, backend: str = "cuda", arch: int | str = 90) -> None:
        self.device = 0
        self.target = GPUTarget(backend, arch, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 100 + device


class StandInKernel(CompiledKernel):  # type: ignore[misc]
    """What Triton takes for compiled."""

    def __init__(self, src: Any, target: GPUTarget, calls: list[tuple[Any, ...]]) -> None:
        """`calls`: what its launcher is given, itself first, is appended there."""
        self.src, self.name = src, src.fn.__name__
        self.metadata = SimpleNamespace(target=target)
        self.module, self.function, self.packed_metadata = object(), object(), object()
        self._run = lambda *args: calls.append((self, *args))


def described(x: object) -> object:
    """An argument, so that JSON and another run can say whether it is the same."""
    if isinstance(x, Tensor):
        return [str(x.dtype), list(x.shape), list(x.stride()), x.storage_offset()]
    if isinstance(x, TensorDescriptor | GluonDescriptor):
        return [described(x.base), x.shape, x.strides, x.block_shape, x.padding]
    return [type(x).__name__, x]


def rounds(arch: Architecture) -> dict[str, list[list[dict[str, Any]]]]:
    """By case, three rounds of launches: the first, the second, and one that keeps nothing."""
    calls: list[tuple[Any, ...]] = []
    numbers: dict[int, int] = {}
    compiled: list[StandInKernel] = []  # so that no id is given twice

    def compile_nothing(src: Any, target: GPUTarget, options: object) -> StandInKernel:
        _ = src.fn.cache_key  # as compilation does; then Triton knows the globals that are read
        compiled.append(StandInKernel(src, target, calls))
        numbers[id(compiled[-1])] = len(numbers)
        return compiled[-1]

    def described_call(kernel: StandInKernel, *call: Any) -> dict[str, Any]:
        x, y, z, stream, *_, enter, _, arguments = *call[:9], call[9:]
        return {
            "kernel": [numbers[id(kernel)], kernel.name],
            "how": [x, y, z, stream, [described(argument) for argument in arguments]],
            "kept": enter is None,  # Triton passes its chain of hooks, empty or not
        }

    triton.compiler.compile = compile_nothing
    driver.set_active(StandInDriver(arch=int(arch.removeprefix("sm_"))))
    shape = next(shape for shape in SHAPES if shape.name == SHAPE)
    key = KernelLaunch.key
    done: dict[str, list[list[dict[str, Any]]]] = {}
    with as_architecture(arch):
        for case in CASES:
            for keeps in (True, True, False) if case.takes(shape) else ():
                KernelLaunch.key = key if keeps else lambda *_: None  # type: ignore[method-assign]
                case.launch(shape, shape.T)
                done.setdefault(case.name, []).append([described_call(*call) for call in calls])
                calls.clear()
    return done


if __name__ == "__main__":
    print(json.dumps(rounds(cast(Architecture, sys.argv[1]))))
