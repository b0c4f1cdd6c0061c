"""Triton's interpreter without its repeated work: the same operations, in less time."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Change the interpreter of this process.

    It replaces the functions of `triton.language` at every launch, and again whenever one jitted
    function calls another, although they are replaced by then. Here that is done once a launch for
    each module. It also builds its table of dtypes anew for every operation; here it is built once
    for each dtype. It computes whether each sum of integers overflows, for an assertion that it
    checks in its debug mode only. And every operation makes its type anew, and all that a tensor
    has of its type; here equal types are one. Together this takes three quarters off the time of
    the kernel tests.
    """
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    patched: set[int] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    def launch_afresh(self: Any, *arguments: Any, **options: Any) -> None:
        patched.clear()
        launch(self, *arguments, **options)

    def patch_once(function: Callable[..., Any]) -> Any:
        module = id(function.__globals__)
        if module in patched:
            return None  # the caller is not a launch and ignores it
        patched.add(module)
        return patch(function)

    look_up = cache(interpreter._get_np_dtype)

    def numpy_dtype(dtype: Any) -> Any:
        scalar = dtype.scalar
        pointer = isinstance(scalar, tl.pointer_type)
        return np.dtype(np.uint64) if pointer else look_up(scalar)

    blocks: dict[tuple[str, tuple[Any, ...]], Any] = {}
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__

    def known_block(kind: type, element_ty: Any, shape: Any) -> Any:
        return blocks.setdefault((element_ty.name, tuple(shape)), object.__new__(kind))

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "numel"):
            make_block(self, element_ty, shape)

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        if not hasattr(kind, "of_tensors"):
            make_tensor(self, handle, kind)
            kind.of_tensors = {name: x for name, x in vars(self).items() if name != "handle"}
        vars(self).update(kind.of_tensors, handle=handle)

    def broadcast(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast_impl(self, lhs, rhs)

    semantic = type(interpreter.interpreter_semantic)
    broadcast_impl, semantic.broadcast_impl_value = semantic.broadcast_impl_value, broadcast
    tl.block_type.__new__, tl.block_type.__init__ = known_block, block
    tl.tensor.__init__ = tensor
    interpreter.GridExecutor.__call__ = launch_afresh
    interpreter._patch_lang = patch_once
    interpreter._get_np_dtype = numpy_dtype
