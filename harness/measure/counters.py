"""Count, without a clock, what one step asks of PyTorch: operators, and values read by the host.

A dispatch mode sees every operator below autograd, in the backward pass too, because autograd
carries the mode to its threads. Compiled functions stay compiled under it: of them it sees what
their code still calls. The replay of a CUDA graph dispatches nothing.

Some reads never reach the dispatcher on a CPU: `tolist`, `numpy` and `cpu` of a tensor that lies
there already. Those are counted where they are called, once, whatever they call. (A function
mode would see them too, but compiled functions are compiled anew under one.)
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

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
"""Operators that need a value on the host before they, or their caller, can go on."""
_MASKED = frozenset(
    {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
)
"""Operators that count the true elements where an index is a boolean mask."""
_SIZED_BY_VALUES = frozenset({aten.repeat_interleave})
"""Operators whose output is as long as the sum of a tensor, unless they are told its length."""
_METHODS = ("tolist", "numpy", "cpu", "__array__")
"""Methods that need all values on the host."""


@dataclass(frozen=True, slots=True)
class Counted:
    """One step."""

    dispatched_ops: int
    host_syncs: int
    device_allocations: int | None
    """None without a GPU."""


class Counting:
    """One step that is being counted."""

    counted: Counted
    """Once it is over."""


def count(run: Callable[[], Any]) -> Counted:
    """Run once, and count."""
    with counting() as step:
        output = run()
    del output
    return step.counted


@contextmanager
def counting() -> Iterator[Counting]:
    """Count what this thread does until the block ends, autograd's threads on its behalf too."""
    step = Counting()
    allocated = _device_allocations()
    with _Operators() as operators, _watching_methods(operators):
        yield step
    after = _device_allocations()
    step.counted = Counted(
        dispatched_ops=operators.seen,
        host_syncs=operators.reads,
        device_allocations=None if allocated is None or after is None else after - allocated,
    )


class _Operators(TorchDispatchMode):
    """Sees every operator that torch dispatches, autograd's threads' too."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = 0
        self.reads = 0
        self.inside_method = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Or compiled functions would run uncompiled, which is neither what is timed nor, at
        long lengths, what fits in memory."""
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
            self.seen += 1
        if not self.inside_method and _reads(func, args, given):
            self.reads += 1
        return func(*args, **given)


@contextmanager
def _watching_methods(operators: _Operators) -> Iterator[None]:
    """Count calls of _METHODS as reads, and no operator inside them."""
    own = {name: vars(Tensor)[name] for name in _METHODS if name in vars(Tensor)}
    for name in _METHODS:
        setattr(Tensor, name, _watched(getattr(Tensor, name), operators))
    try:
        yield
    finally:
        for name in _METHODS:
            if name in own:
                setattr(Tensor, name, own[name])
            else:
                delattr(Tensor, name)  # what it inherits shows again


def _watched(method: Callable[..., Any], operators: _Operators) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if operators.inside_method:
            return method(self, *args, **kwargs)
        operators.reads += _waited_for((self,))
        operators.inside_method = True
        try:
            return method(self, *args, **kwargs)
        finally:
            operators.inside_method = False

    return call


def _reads(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    packet = getattr(func, "overloadpacket", None)  # a higher-order operator has none
    if packet in _READS:
        return _waited_for(args)
    if packet in _MASKED:
        masks = [i for i in args[1] if isinstance(i, Tensor) and i.dtype in _MASK_TYPES]
        return bool(masks) and _waited_for(masks)
    if packet in _SIZED_BY_VALUES:
        told = kwargs.get("output_size") is not None
        return not told and any(isinstance(a, Tensor) for a in args[-2:]) and _waited_for(args)
    if packet in (aten._to_copy, aten.copy_):
        return _copied_to_host(packet, args, kwargs)
    return False


_MASK_TYPES = (torch.bool, torch.uint8)


def _waited_for(values: Any) -> bool:
    """Whether one of these tensors lies where the host must wait for it."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    return any(t.is_cuda for t in tensors) or (bool(tensors) and not torch.cuda.is_available())


def _copied_to_host(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """A copy from the device that the host waits for."""
    if packet is aten._to_copy:
        device = kwargs.get("device")
        away = args[0].is_cuda and device is not None and torch.device(device).type == "cpu"
        return away and not kwargs.get("non_blocking", False)
    asynchronous = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
    return args[1].is_cuda and args[0].device.type == "cpu" and not asynchronous


def _device_allocations() -> int | None:
    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0))
