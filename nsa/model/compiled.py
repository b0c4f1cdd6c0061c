"""Functions compiled on request: whole and at one shape, or an error; and a count of what ran.

What calls a kernel of ours stays outside, for the compiler cannot look into it; the parts of a
layer around it are functions of tensors alone and compile without a break.
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
    """How many compiled graphs this process has run forward, each run counted."""
    return _ran[0]


@cache
def compiled(function: Function) -> Function:
    """The same function, compiled at its first call and for each new shape.

    Layers that differ in their weights alone share what was compiled. A function that does not
    compile whole raises torch._dynamo.exc.TorchDynamoException; it never runs as it was.
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
