"""Counts of one step: operators that PyTorch dispatches, and values that the host reads.

A dispatch mode sees every operator below autograd, also in the backward pass. Compiled functions
stay compiled; only operators that their code still calls are seen. The replay of a CUDA graph
dispatches nothing. `tolist`, `numpy` and `cpu` of a tensor on the CPU do not reach the dispatcher,
so these methods are wrapped. (A function mode would recompile compiled functions.)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_READS = frozenset(
    {
        aten._local_scalar_dense,  # item, float(x), bool(x), `if x:`
        aten.equal,
        aten.nonzero,
        aten.masked_select,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.unique_dim_consecutive,
        aten.bincount,
        aten.is_nonzero,
        aten.item,
    }
)
"""Operators for whose values the host waits."""
_MASKED = frozenset(
    {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
)
"""Operators that count the true elements of an index that is a boolean mask."""
_MASK_TYPES = (torch.bool, torch.uint8)
_METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Methods that copy all values to the host."""


@dataclass(slots=True)
class StepCount:
    """Counts of one step; complete when `counting` ends."""

    dispatched_ops: int = 0
    host_syncs: int = 0
    device_allocations: int = 0
    """0 without a GPU."""


@contextmanager
def counting() -> Iterator[StepCount]:
    """Count what this thread, and autograd's threads for it, do until the block ends."""
    step = StepCount()
    allocated = _device_allocations()
    mode = _CountingMode(step)
    watched: dict[str, Any] = {n: _watched(getattr(Tensor, n), mode) for n in _METHODS}
    with mode, patch.multiple(Tensor, **watched):
        yield step
    step.device_allocations = _device_allocations() - allocated


class _CountingMode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, step: StepCount) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = step
        self.inside_method = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, compiled functions would run uncompiled: not as timed."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if getattr(func, "namespace", "") != "profiler":  # a named range computes nothing
            self.step.dispatched_ops += 1
        if not self.inside_method and _reads(func, args, given):
            self.step.host_syncs += 1
        return func(*args, **given)


def _watched(method: Callable[..., Any], mode: _CountingMode) -> Callable[..., Any]:
    """Counts each call as one read, without the operators inside it."""

    @wraps(method)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if mode.inside_method:
            return method(self, *args, **kwargs)
        mode.step.host_syncs += _waited_for((self,))
        mode.inside_method = True
        try:
            return method(self, *args, **kwargs)
        finally:
            mode.inside_method = False

    return call


def _reads(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    packet = getattr(func, "overloadpacket", None)  # a higher-order operator has none
    if packet in _READS:
        return _waited_for(args)
    if packet in _MASKED:
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in _MASK_TYPES]
        return bool(masks) and _waited_for(masks)
    if packet is aten.repeat_interleave:  # its output is as long as the sum of a tensor
        sized = kwargs.get("output_size") is not None
        return not sized and any(isinstance(a, Tensor) for a in args[-2:]) and _waited_for(args)
    if packet in (aten._to_copy, aten.copy_):
        return _copied_to_host(packet, args, kwargs)
    return False


def _waited_for(values: Any) -> bool:
    """Whether the host must wait for one of these tensors; without a GPU, for any."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    return any(t.is_cuda for t in tensors) or (bool(tensors) and not torch.cuda.is_available())


def _copied_to_host(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether this is a copy from the device that the host waits for."""
    if packet is aten._to_copy:
        device = kwargs.get("device")
        away = args[0].is_cuda and device is not None and torch.device(device).type == "cpu"
        return away and not kwargs.get("non_blocking", False)
    asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return args[1].is_cuda and args[0].device.type == "cpu" and not asynchronous


def _device_allocations() -> int:
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
