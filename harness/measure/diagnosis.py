"""Finds the origin of NaN or Inf by running a failed computation again, with checks.

The workload is built again and run to the step that failed; that step and the one before, whose
update may have damaged a weight, run with a check of every operator's result. The origin is the
first operator with such a value in its result and none in its arguments. A kernel launched without
torch's dispatcher is not seen, but the operator that reads its NaN is.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from harness.measure.failures import NonFinite
from harness.records import NonFiniteOrigin
from harness.workload import Workload

CHECKED_STEPS = 2
"""The last steps, whose operators are checked."""

_UNINITIALISED = ("empty", "resize", "new_empty")
"""Operators that return uninitialised memory."""
_LITERAL = ("fill", "full", "masked_fill", "scalar_tensor", "constant_pad", "lift_fresh")
"""Operators that write a given number, such as the -inf of a mask."""
_OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_")
"""Operators that overwrite an argument without reading it."""


def find(
    build: Callable[[], Workload], failure: NonFinite, *, progress: Callable[[], None]
) -> NonFiniteOrigin:
    """Search for the origin. `build` makes the workload anew; `progress` is called before steps."""
    workload, checks = build(), _Checks(failure.source)
    if failure.source == "check" and workload.check is not None:
        return checks.origin(checks.run(workload.check))
    output = None
    for step in range(failure.steps):
        progress()
        if workload.fresh and step:
            workload.fresh(step)
        late = step >= failure.steps - CHECKED_STEPS
        output = checks.run(workload.run, step) if late else workload.run()
        if _kind(output):
            if not late:  # earlier than before: the same step again, with its inputs
                output = checks.run(workload.run, step)
            return checks.origin(output)
    note = f"not reproduced in {failure.steps} steps: it does not depend on the case alone"
    return NonFiniteOrigin(computation="run", precision=_precision(output), note=note)


class _Checks(TorchDispatchMode):
    """Checks every operator's result, and keeps the first one with NaN and the first with Inf."""

    def __init__(self, computation: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._computation = computation
        self._step: int | None = None
        self._modules = ModuleTracker()
        self._first: dict[str, NonFiniteOrigin] = {}

    def run(self, compute: Callable[[], Any], step: int | None = None) -> Any:
        self._step = step
        with self._modules, self:
            return compute()

    def origin(self, output: object) -> NonFiniteOrigin:
        """The origin of NaN or Inf in what the computation returned."""
        kind, note = _kind(output), "finite when it was repeated"
        if kind:
            note = "no operator produced it: a kernel launched without torch's dispatcher did"
        return self._first.get(kind) or self._found(kind, output, note=note)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = func._schema.name.replace("::", ".")
        name = operator.removeprefix("aten.")
        if name.startswith(_UNINITIALISED):
            return func(*args, **kwargs)
        given = [] if name in _OVERWRITING else _tensors((args, kwargs))
        arrived = [_kind(tensor) for tensor in given]
        result = func(*args, **kwargs)
        for i, tensor in enumerate(_tensors(result)):
            kind = _kind(tensor)
            if not kind or kind in self._first:
                continue
            if kind not in arrived and (kind == "NaN" or not name.startswith(_LITERAL)):
                at = {"tensor": f"output {i} of {operator}", "operator": operator}
                self._first[kind] = self._found(kind, tensor, **at)
            elif kind in arrived and kind == "NaN":  # an Inf may be that of a mask, or is kept
                at = {"tensor": f"input {arrived.index(kind)} of {operator}"}
                note = "produced outside torch's operators, or before these steps"
                self._first[kind] = self._found(kind, given[arrived.index(kind)], note=note, **at)
        return result

    def _found(self, kind: str, values: object, note: str = "", **at: str) -> NonFiniteOrigin:
        if at and self._modules.is_bw:
            note = "; ".join(filter(None, [note, "in the backward pass"]))
        return NonFiniteOrigin(
            computation=self._computation,
            value=kind,
            precision=_precision(values),
            module=max(self._modules.parents - {"Global"}, key=len, default="") if at else "",
            step=self._step,
            note=note,
            **at,
        )


def _tensors(values: object) -> list[Tensor]:
    """The floating-point and complex tensors of a nested structure."""
    leaves = tree_leaves(dict(values) if isinstance(values, Mapping) else values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [t for t in tensors if t.is_floating_point() or t.is_complex()]


def _kind(values: object) -> str:
    """NaN if a tensor contains it, else Inf if one contains that, else empty."""
    tensors = [tensor for tensor in _tensors(values) if not tensor.is_meta]
    if any(bool(torch.isnan(tensor).any()) for tensor in tensors):
        return "NaN"
    return "Inf" if any(bool(torch.isinf(tensor).any()) for tensor in tensors) else ""


def _precision(values: object) -> str:
    return ", ".join(dict.fromkeys(str(t.dtype).removeprefix("torch.") for t in _tensors(values)))
