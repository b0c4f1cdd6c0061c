"""Finds the origin of NaN or Inf by running a failed computation again, with checks.

Checks would slow a measured step down. So the workload is built again, run to the step that failed,
and that step and the one before (whose update may have damaged a weight) run with a check of every
operator's result. The origin is the first operator with such a value in its result and none in its
arguments. A kernel launched without torch's dispatcher is not seen, but the operator that reads its
NaN is, and so is the module that returns it.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.measure.accuracy import NonFinite
from harness.records import NonFiniteOrigin
from harness.workload import Workload

BUDGET_S = 60.0
"""Longest time of the search."""

_UNINITIALISED = ("empty", "resize", "new_empty")
"""Operators that return uninitialised memory."""
_LITERAL = ("fill", "full", "masked_fill", "scalar_tensor", "constant_pad", "lift_fresh")
"""Operators that write a given number, such as the -inf of a mask."""
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_")
"""Operators that overwrite an argument without reading it."""


def find(
    build: Callable[[], Workload], failure: NonFinite, *, progress: Callable[[], None]
) -> tuple[NonFiniteOrigin, ...]:
    """Search for the origin of NaN or Inf.

    Args:
        build: Builds the workload as before; called up to twice.
        failure: The error, with its computation and steps.
        progress: Called between the steps of the search.

    Returns:
        One origin for the code under test; after a failed `check`, also one for `eager` and
        `reference`, which shows whether they stay finite.
    """
    deadline = time.monotonic() + BUDGET_S
    if failure.computation == "run":
        return (_in_run(build, failure.steps, deadline, progress),)
    workload = build()
    parts = {"check": workload.check, "eager": workload.eager, "reference": workload.reference}
    found = []
    for name, compute in parts.items():
        progress()
        if compute is None:
            continue
        if time.monotonic() > deadline:
            note = f"not checked: the limit of {BUDGET_S:g} s was reached"
            found.append(NonFiniteOrigin(computation=name, precision="", note=note))
            continue
        with _watching() as watch:
            outputs = compute()
        found.append(watch.origin(name, outputs))
        del outputs
    return tuple(found)


def _in_run(
    build: Callable[[], Workload], steps: int, deadline: float, progress: Callable[[], None]
) -> NonFiniteOrigin:
    workload, output, bad = build(), None, None
    for step in range(steps):
        progress()
        if time.monotonic() > deadline:
            note = f"no such value in the {step} steps that could be repeated in the time allowed"
            return NonFiniteOrigin(computation="run", precision="", note=note)
        output = _step(workload, step)
        if _kind(output):
            bad = step
            break
    if bad is None:
        note = f"not reproduced in {steps} steps: it does not depend on the case alone"
        return NonFiniteOrigin(computation="run", precision=_precision(output), note=note)

    del workload, output  # so that only one workload is alive
    gc.collect()
    workload = build()
    for step in range(bad - 1):
        progress()
        _step(workload, step)
    with _watching() as watch:
        for step in range(max(0, bad - 1), bad + 1):
            progress()
            watch.step = step
            output = _step(workload, step)
    return watch.origin("run", output)


def _step(workload: Workload, number: int) -> Any:
    """The output of a step, with the inputs that it was timed with."""
    if workload.fresh and number:
        workload.fresh(number)
    return workload.run()


class _Watch(TorchDispatchMode):
    """Checks every operator's result and tracks the running module."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step: int | None = None
        self._named: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._running: list[nn.Module] = []
        self._first: dict[str, NonFiniteOrigin] = {}

    def origin(self, computation: str, outputs: object) -> NonFiniteOrigin:
        """The origin of NaN or Inf in what the computation returned."""
        kind = _kind(outputs)
        event = self._first.get(kind)
        if not kind:
            return NonFiniteOrigin(computation=computation, precision=_precision(outputs))
        if event is None:
            event = NonFiniteOrigin(
                computation=computation,
                precision=_precision(outputs),
                value=kind,
                step=self.step,
                note="no operator produced it: a kernel launched without torch's dispatcher did",
            )
        earlier, note = self._first.get("Inf"), event.note
        if kind == "NaN" and earlier is not None and list(self._first) == ["Inf", "NaN"]:
            where = f" in {earlier.module}" if earlier.module else ""
            before = f"Inf appeared earlier, from {earlier.tensor}{where}"
            note = "; ".join(filter(None, [note, before]))
        return replace(event, computation=computation, note=note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name.startswith(_UNINITIALISED):
            return func(*args, **kwargs)
        given = [] if name in _OVERWRITING else _tensors((args, kwargs))
        writes = func._schema.is_mutable
        before = [_kind(t) for t in given] if writes else []
        result = func(*args, **kwargs)
        for i, tensor in enumerate(_tensors(result)):
            kind = _kind(tensor)
            if kind and kind not in self._first:
                arrived = before if writes else [_kind(t) for t in given]
                self._record(kind, f"aten.{name}", i, tensor, given, arrived)
        return result

    def _record(
        self,
        kind: str,
        operator: str,
        index: int,
        tensor: Tensor,
        given: Sequence[Tensor],
        arrived: Sequence[str],
    ) -> None:
        if kind not in arrived:
            if kind == "Inf" and operator.removeprefix("aten.").startswith(_LITERAL):
                return
            self._seen(kind, f"output {index} of {operator}", tensor, operator)
            return
        if kind == "Inf":
            return  # from a mask, or recorded where it appeared
        source = given[arrived.index(kind)]
        name = self._named.get(_address(source), "")
        which = name or f"input {arrived.index(kind)} of {operator}"
        note = "present before any operator ran" if name else "produced outside torch's operators"
        self._seen(kind, which, source, "", note)

    def _seen(self, kind: str, tensor: str, value: Tensor, operator: str, note: str = "") -> None:
        if torch._C._current_graph_task_id() != -1:
            note = "; ".join(filter(None, [note, "in the backward pass"]))
        self._first[kind] = NonFiniteOrigin(
            computation="",
            value=kind,
            tensor=tensor,
            precision=_precision(value),
            operator=operator,
            module=self._path(self._running[-1]) if self._running else "",
            step=self.step,
            note=note,
        )

    def entered(self, module: nn.Module, _: Any) -> None:
        if not self._running:
            self._paths |= {id(m): path for path, m in module.named_modules() if path}
            for path, parameter in module.named_parameters():
                self._named.setdefault(_address(parameter), path)
        self._running.append(module)

    def left(self, module: nn.Module, given: Any, output: Any) -> None:
        if self._running and self._running[-1] is module:
            if _kind(output) == "NaN" and "NaN" not in self._first and _kind(given) != "NaN":
                (bad, *_) = (t for t in _tensors(output) if _kind(t) == "NaN")
                note = "produced by a kernel launched without torch's dispatcher"
                self._seen("NaN", "the module's output", bad, "", note)
            self._running.pop()

    def _path(self, module: nn.Module) -> str:
        path = self._paths.get(id(module), "")
        kind = type(module).__name__
        return f"{path} ({kind})" if path else kind


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Check every operator and module that runs inside."""
    watch = _Watch()
    handles = (
        hooks.register_module_forward_pre_hook(watch.entered),
        hooks.register_module_forward_hook(watch.left),
    )
    try:
        with watch:
            yield watch
    finally:
        for handle in handles:
            handle.remove()


def _tensors(values: object) -> list[Tensor]:
    """The floating-point and complex tensors of a nested structure."""
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def _kind(values: object) -> str:
    """NaN if a tensor contains it, else Inf if one contains that, else empty."""
    worst = ""
    for tensor in _tensors(values):
        if tensor.is_meta or tensor.numel() == 0:
            continue
        if bool(torch.isnan(tensor).any()):
            return "NaN"
        if not worst and bool(torch.isinf(tensor).any()):
            worst = "Inf"
    return worst


def _precision(values: object) -> str:
    names = dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in _tensors(values))
    return ", ".join(names)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
