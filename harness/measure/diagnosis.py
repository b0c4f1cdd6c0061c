"""Where did NaN or Inf come from? A second, watched run of what has failed.

Nothing is watched while a case is measured: it would cost more than the step. After the fact the
workload is built anew, run plainly up to the step that went wrong, and that step and the one
before it (whose update may have spoilt a weight) are run with every operator's result looked at.
The origin is the first operator with such a value in its result and none in its arguments. A
kernel launched past torch's dispatcher is not seen; the operator that takes its NaN is, and so is
the module whose output holds it.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
"""Longest time the search may take; the case has its outcome already."""

_UNINITIALISED = ("empty", "resize", "new_empty")
"""Operators whose result holds whatever lay there."""
_MEANT = ("fill", "full", "masked_fill", "scalar_tensor", "constant_pad", "lift_fresh")
"""Operators that write a number somebody wrote down; -inf in a mask is one."""
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_")
"""Operators that do not read what they write."""


def find(
    build: Callable[[], Workload],
    failure: NonFinite,
    *,
    runs: int,
    progress: Callable[[], None],
    budget_s: float = BUDGET_S,
) -> tuple[NonFiniteOrigin, ...]:
    """Search for the origin of a value that is not finite.

    Args:
        build: Makes the workload as it was made before; called up to twice.
        failure: What was seen, and in which computation.
        runs: How often `run` had been called by then.
        progress: Called between the steps of the search.
        budget_s: No step begins later than that.

    Returns:
        One entry for the code under test; after a failed `check`, also for the definition at the
        working precision and in the reference's, to say whether they stay finite.
    """
    deadline = time.monotonic() + budget_s
    if failure.computation == "run":
        return (_in_run(build, runs, deadline, progress),)
    workload = build()
    parts = {"check": workload.check, "eager": workload.eager, "reference": workload.reference}
    found = []
    for name, compute in parts.items():
        progress()
        if compute is None:
            continue
        if time.monotonic() > deadline:
            note = f"not looked at: {budget_s:g} s were over"
            found.append(NonFiniteOrigin(computation=name, precision="", note=note))
            continue
        with _watching() as watch:
            outputs = compute()
        found.append(watch.origin(name, outputs))
        del outputs
    return tuple(found)


def _in_run(
    build: Callable[[], Workload], runs: int, deadline: float, progress: Callable[[], None]
) -> NonFiniteOrigin:
    workload, output, bad = build(), None, None
    for step in range(runs):
        progress()
        if time.monotonic() > deadline:
            note = f"no such value in the {step} runs that were repeated in the time allowed"
            return NonFiniteOrigin(computation="run", precision="", note=note)
        output = workload.run()
        if _kind(output):
            bad = step
            break
    if bad is None:
        note = f"not seen again in {runs} runs: it does not depend on the case alone"
        return NonFiniteOrigin(computation="run", precision=_precision(output), note=note)

    del workload, output  # or both would be alive
    gc.collect()
    workload = build()
    for _ in range(bad - 1):
        progress()
        workload.run()
    with _watching() as watch:
        for step in range(max(0, bad - 1), bad + 1):
            progress()
            watch.step = step
            output = workload.run()
    return watch.origin("run", output)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Event:
    """The first sight of such a value."""

    value: str
    tensor: str
    precision: str
    operator: str
    module: str
    step: int | None
    note: str = ""


class _Watch(TorchDispatchMode):
    """Looks at every operator's result, and knows which module is running."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step: int | None = None
        self._named: dict[int, str] = {}
        self._paths: dict[int, str] = {}
        self._running: list[nn.Module] = []
        self._first: dict[str, _Event] = {}

    def origin(self, computation: str, outputs: object) -> NonFiniteOrigin:
        """The answer, given what the computation returned."""
        kind = _kind(outputs)
        event = self._first.get(kind)
        if not kind:
            return NonFiniteOrigin(computation=computation, precision=_precision(outputs))
        if event is None:
            note = "no operator of torch made it: a kernel launched past its dispatcher did"
            return NonFiniteOrigin(
                computation=computation,
                precision=_precision(outputs),
                value=kind,
                step=self.step,
                note=note,
            )
        earlier, note = self._first.get("Inf"), event.note
        if kind == "NaN" and earlier is not None and list(self._first) == ["Inf", "NaN"]:
            where = f" in {earlier.module}" if earlier.module else ""
            note = "; ".join(filter(None, [note, f"Inf came before it, from {earlier.tensor}"]))
            note += where
        return NonFiniteOrigin(
            computation=computation,
            precision=event.precision,
            value=kind,
            step=event.step,
            tensor=event.tensor,
            operator=event.operator,
            module=event.module,
            note=note,
        )

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
                self._note(kind, f"aten.{name}", i, tensor, given, arrived)
        return result

    def _note(
        self,
        kind: str,
        operator: str,
        index: int,
        tensor: Tensor,
        given: Sequence[Tensor],
        arrived: Sequence[str],
    ) -> None:
        if kind not in arrived:
            if kind == "Inf" and operator.removeprefix("aten.").startswith(_MEANT):
                return
            self._seen(kind, f"output {index} of {operator}", tensor, operator)
            return
        if kind == "Inf":
            return  # a mask's, or one that was seen where it arose
        source = given[arrived.index(kind)]
        name = self._named.get(_address(source), "")
        which = name or f"input {arrived.index(kind)} of {operator}"
        note = "it was there before any operator ran" if name else "it came from outside torch"
        self._seen(kind, which, source, "", note)

    def _seen(self, kind: str, tensor: str, value: Tensor, operator: str, note: str = "") -> None:
        if torch._C._current_graph_task_id() != -1:
            note = "; ".join(filter(None, [note, "in the backward pass"]))
        self._first[kind] = _Event(
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
                note = "a kernel launched past torch's dispatcher made it"
                self._seen("NaN", "the module's output", bad, "", note)
            self._running.pop()

    def _path(self, module: nn.Module) -> str:
        path = self._paths.get(id(module), "")
        kind = type(module).__name__
        return f"{path} ({kind})" if path else kind


@contextmanager
def _watching() -> Iterator[_Watch]:
    """Watch everything that runs inside."""
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
    """Those that can hold such a value."""
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    return [
        leaf
        for leaf in leaves
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


def _kind(values: object) -> str:
    """NaN, Inf or nothing: the worst that tensors hold."""
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
