"""Launches that cost the host little: a compiled kernel is kept under everything that selects it.

At each launch Triton inspects every argument, makes a key of the results, looks up the compiled
kernel and calls it. For kernels with thirty arguments the call is the smaller part. A KernelLaunch
has a cheaper key, and calls the kernel as Triton would. Without a kept kernel, or in doubt, Triton
launches.

What selects the kernel in Triton 3.6 (JITFunction.run), and where it is in the key:

- constants and options (num_warps, num_stages): fixed when the KernelLaunch is made;
- a number: its type, its width, whether it is 1, whether 16 divides it. All follow from its
  type and value, which are in the key even with do_not_specialize;
- a tensor: its dtype, and whether 16 divides its address. Both are in the key;
- a descriptor: dtype and sides of its tile, from which the layout of a Gluon one follows. They are
  in the key;
- None: in the key;
- the device, and with it the target: its number is in the key;
- debug and instrumentation: if either is on, Triton launches.

So equal keys mean the same kernel; different keys may share one. Triton also launches if an
argument has another type, if the target is not CUDA (AMD's inspects more of a tensor), if a global
that the kernel reads is no longer the same object (Triton compares, and refuses), and if
JITFunction.run was replaced or has hooks before it.

Threads may share a KernelLaunch: an entry is complete before it is in the dictionary, and two
entries for one key are equal. Streams and grids are not kept.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.knobs import HookChain
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

KINDS = 256
"""Most KernelLaunches of a kernel in a process, for the functions that make them: one for each set
of constants. Sets that are equal in Python (True and 1) are equal in Triton."""
MAX_KEPT = 256
"""Most keys of a KernelLaunch; then it starts over. A sweep over lengths makes many, each of them
small: the kernels are Triton's, and mostly the same."""

Number = int | float | None

_NUMBERS = frozenset({int, float, type(None)})
_triton_run = JITFunction.run


class Kept(NamedTuple):
    """A compiled kernel, and what its call needs."""

    compiled: CompiledKernel
    run: Callable[..., None]
    """Its launcher."""
    function: int
    """Its handle; Triton has loaded it, on the device of the key."""
    packed_metadata: Any
    read: tuple[tuple[dict[str, Any], str, object], ...]
    """Globals that it was compiled with: their namespaces, names and values."""


class KernelLaunch:
    """A kernel and its constants; calling it with the other arguments launches the kernel.

    A kernel's parameters are pointers and descriptors, then numbers, then constants.
    """

    def __init__(self, kernel: Any, **named: Any) -> None:
        """Prepare; nothing is launched yet.

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
                    f"{kernel.__name__}: constants must come last and be passed by name: "
                    f"{', '.join(kernel.arg_names[i] for i in kernel.constexprs)}"
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
        if key is None or kept is None or (kept.read and _changed(kept)):
            compiled = self.kernel[grid](*pointers, *numbers, **self.named)
            if key is not None:
                self._keep(key, compiled)
            return
        stream = driver.active.get_current_stream(key[0])  # of the current device
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
        """The key of the compiled kernel that Triton takes; None if only Triton can decide."""
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
            elif kind is TensorDescriptor or kind is GluonDescriptor:
                key.append((x.base.dtype, *x.block_shape))
            elif x is None:
                key.append(None)
            else:
                return None
        return tuple(key)

    def _keep(self, key: tuple[object, ...], compiled: object) -> None:
        """Keep the kernel that Triton launched, unless it depends on more than the key."""
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
    """Whether it is Triton's own chain of hooks, and empty, so that it need not be called."""
    return type(hook) is HookChain and not hook.calls
