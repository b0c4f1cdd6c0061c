"""Functions compiled on request, whole and for each shape, with a count of what ran.

Calls of our own kernels stay outside, because the compiler cannot look into them; the parts of a
layer around them are functions of tensors only and compile without a break.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule

BACKEND = "inductor"
"""A name of torch.compiler.list_backends(None)."""

Function = TypeVar("Function", bound=Callable[..., Any])

_ran = [0]


def runs() -> int:
    """Forward runs of compiled graphs in this process."""
    return _ran[0]


@cache
def compiled(function: Function) -> Function:
    """The same function, compiled at its first call and for each new shape.

    Layers that differ only in their weights share the compiled code. A function that does not
    compile whole raises torch._dynamo.exc.TorchDynamoException; it never runs uncompiled.
    """
    compiled: Any = torch.compile(function, backend=_counting, fullgraph=True, dynamic=False)
    result: Function = compiled
    return result


def _counting(graph: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    from torch._dynamo import lookup_backend  # here: it is slow to import, and rarely needed

    run = lookup_backend(BACKEND)(graph, inputs)

    def counted(*args: Any) -> Any:
        _ran[0] += 1
        return run(*args)

    return counted
