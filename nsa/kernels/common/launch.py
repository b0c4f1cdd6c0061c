"""Launches that cost the host little: a compiled kernel is kept with all that chose it.

At each launch Triton asks of every argument what it would be compiled for, makes a key of the
answers, looks the compiled kernel up and calls it. Of kernels with thirty arguments the call is the
smaller part. A `Launch` has a key that costs less, and calls the kernel as Triton would. Where it
has kept none, or cannot be sure, Triton launches.

What decides which kernel Triton 3.6 takes (JITFunction.run), and where it is in the key:

- constants and options (num_warps, num_stages): fixed when the Launch is made;
- a number: its type, its width, whether it is 1, whether 16 divides it. All follow from its
  type and value, which are in the key; not even Triton's do_not_specialize need be known;
- a tensor: its dtype, and whether 16 divides its address. Both are in the key;
- a descriptor: dtype and sides of its tile. They are in the key;
- None: in the key;
- the device, and with it the target: its number is in the key;
- debug and instrumentation: where either is on, Triton launches.

So equal keys mean the same kernel; different ones may share it. Triton also launches where an
argument is of another type, where the target is not CUDA (AMD's asks more of a tensor), where a
global that the kernel reads is no longer the same object (Triton compares, and refuses), and
where somebody replaced JITFunction.run or added hooks before it.

Threads may share a Launch: an entry is whole before it is in the dictionary, and two that are made
of one key at a time are equal. Nothing of a stream or a grid is kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.knobs import HookChain
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KINDS = 256
"""Launches of a kernel that a process holds, for functions that make them: one for each set of
constants. Sets that are equal to Python (True and 1) are so to Triton."""
MAX_KEPT = 256
"""Keys of a Launch; one more, and it starts afresh. A sweep over lengths makes many, which hold
little: the kernels are Triton's, and most of them the same."""

Number = int | float | None

_NUMBERS = frozenset({int, float, type(None)})
_triton_run = JITFunction.run


class Kept(NamedTuple):
    """A compiled kernel, and what its call takes."""

    compiled: CompiledKernel
    run: Callable[..., None]
    """Its launcher."""
    function: int
    """Its handle; Triton has loaded it, on the device of the key."""
    packed_metadata: Any
    read: tuple[tuple[dict[str, Any], str, object], ...]
    """Globals that it was compiled with: where they are, their names, and what they were."""


class Launch:
    """A kernel and what it is compiled for; called with the other arguments, it launches.

    A kernel's parameters are pointers and descriptors, then numbers, then constants.
    """

    def __init__(self, kernel: Any, **named: Any) -> None:
        """Launch nothing yet.

        Args:
            kernel: A function under triton.jit, compiled or interpreted.
            named: All its constants, and Triton's options.

        Raises:
            ValueError: The constants are not the kernel's last parameters, or some are missing.
        """
        self.kernel = kernel
        self.named = named
        self.kept: dict[tuple[object, ...], Kept] = {}
        self._compiles = isinstance(kernel, JITFunction)
        self._constants: tuple[Any, ...] = ()
        if self._compiles:
            count = len(kernel.params)
            first = count - len(kernel.constexprs)
            last = kernel.arg_names[first:]
            if kernel.constexprs != list(range(first, count)) or not named.keys() >= {*last}:
                raise ValueError(
                    f"{kernel.__name__}: its constants must come last, and be given by name; they "
                    f"are {', '.join(kernel.arg_names[i] for i in kernel.constexprs)}"
                )
            self._constants = tuple(named[name] for name in last)

    def __call__(
        self, grid: tuple[int, ...], pointers: Sequence[Any], numbers: tuple[Number, ...]
    ) -> None:
        """Launch on the current stream of the current device.

        Args:
            grid: Programs along one to three axes.
            pointers: The kernel's first arguments: Tensor, TensorDescriptor or None.
            numbers: The arguments that follow.
        """
        key = self.key(pointers, numbers)
        kept = None if key is None else self.kept.get(key)
        if kept is None or (kept.read and _changed(kept)):
            compiled = self.kernel[grid](*pointers, *numbers, **self.named)
            if key is not None:
                self._keep(key, compiled)
            return
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
        metadata = None
        if _idle(enter) and _idle(leave):
            enter = leave = None
        else:
            metadata = kept.compiled.launch_metadata(
                grid, stream, *pointers, *numbers, *self._constants
            )
        axes = len(grid)
        kept.run(
            grid[0],
            grid[1] if axes > 1 else 1,
            grid[2] if axes > 2 else 1,
            stream,
            kept.function,
            kept.packed_metadata,
            metadata,
            enter,
            leave,
            *pointers,
            *numbers,
            *self._constants,
        )

    def key(
        self, pointers: Sequence[Any], numbers: tuple[Number, ...]
    ) -> tuple[object, ...] | None:
        """What decides which compiled kernel Triton takes; None where only Triton can tell."""
        if not self._compiles or JITFunction.run is not _triton_run or self.kernel.pre_run_hooks:
            return None
        if knobs.runtime.debug or knobs.compilation.instrumentation_mode or self.kernel.debug:
            return None
        types = tuple(map(type, numbers))  # 1, 1.0 and True are equal, and compiled differently
        key: list[object] = [driver.active.get_current_device(), numbers, types]
        for x in pointers:
            kind = type(x)
            if kind is Tensor:
                dtype = x.dtype
                key.append((dtype,) if x.data_ptr() % 16 else dtype)
            elif kind is TensorDescriptor:
                key.append((x.base.dtype, *x.block_shape))
            elif x is None:
                key.append(None)
            else:
                return None
        return tuple(key)

    def _keep(self, key: tuple[object, ...], compiled: object) -> None:
        """Keep what Triton took and launched, unless it depends on more than the key."""
        if not isinstance(compiled, CompiledKernel):
            return  # a hook forbade it
        if compiled.metadata.target.backend != "cuda":
            return
        if not all(type(x) in _NUMBERS for x in key[1]):  # type: ignore[attr-defined]
            return
        read = tuple(
            (names, name, names.get(name))
            for (name, _), (_, names) in self.kernel.used_global_vals.items()
        )
        if len(self.kept) >= MAX_KEPT:
            self.kept.clear()
        self.kept[key] = Kept(
            compiled, compiled.run, compiled.function, compiled.packed_metadata, read
        )


def _changed(kept: Kept) -> bool:
    return any(names.get(name) is not x for names, name, x in kept.read)


def _idle(hook: Any) -> bool:
    """Whether it is the chain that Triton has there, and empty: the launcher need not call it."""
    return type(hook) is HookChain and not hook.calls
