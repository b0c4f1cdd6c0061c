"""Gluon kernels on a CPU: what is asynchronous on sm_90 is so here, and late.

Triton's interpreter does not take Gluon. Here a kernel's functions run as Python over torch
tensors, each partition of `warp_specialize` in a thread. A bulk copy spoils its tile when it is
asked for and fills it when its barrier is waited for; a product reads its operands from when it is
asked for to when it is waited for, and is NaN until then. So a tile that is read too early or
filled too early, and a wait for a barrier that nobody completes, fail on any machine. Layouts,
registers and what ptxas makes of it are not seen.
"""

import builtins
import itertools
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor

PATIENCE = 20.0
"""Seconds until a wait counts as one that never ends."""
SAME = ("exp2", "log2", "sum", "int64", "float32")
"""Names that Gluon and torch share."""


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def load(self, layout: object) -> Tensor:
        return self.data.clone()


class Barrier:
    """An mbarrier: a phase is over once all have arrived and all bytes have."""

    MBarrierLayout = MagicMock
    changed = threading.Condition()
    bytes = phase = 0

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def expect(self, size: int) -> None:
        self.arrive(1, size)

    def arrive(self, count: int, size: int = 0) -> None:
        with Barrier.changed:
            self.missing -= count
            self.bytes += size
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.phase += 1
                self.missing = self.count
                Barrier.changed.notify_all()

    def copy(self, tile: Tensor, to: Tensor) -> None:
        with Barrier.changed:
            to.fill_(torch.nan)
            self.copies.append((tile, to))
            Barrier.changed.notify_all()

    def wait(self, parity: Any) -> None:
        def over() -> bool:
            while self.copies:
                tile, to = self.copies.pop()
                to.copy_(tile)
                self.arrive(0, -tile.nbytes)
            return self.phase % 2 != int(parity)

        with Barrier.changed:
            assert Barrier.changed.wait_for(over, PATIENCE), "a barrier that nobody completes"


class Product:
    """An accumulator: a number of products that no wait has asked for."""

    left = 0

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Pointer:
    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data.detach(), offset
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.data, self.offset + more)


class Tiles:
    """A descriptor."""

    layout = None

    def __init__(self, described: Any) -> None:
        self.x = described.base.detach().as_strided(described.shape, described.strides)
        self.block_shape, self.dtype = described.block_shape, self.x.dtype

    def tile(self, at: Sequence[Any]) -> Tensor:
        """Zeros outside."""
        out = torch.zeros(self.block_shape, dtype=self.dtype)
        ends = zip(map(int, at), self.block_shape, strict=True)
        found = self.x[tuple(slice(i, i + n) for i, n in ends)]
        out[tuple(map(slice, found.shape))] = found
        return out


class Machine:
    """Runs one launch, program after program."""

    def __init__(self, kernel: Any, grid: Sequence[int]) -> None:
        self.grid = grid
        self.local = threading.local()
        self.fakes = self._language()
        self.modules: dict[str, dict[str, Any]] = {}
        self.kernel = self._names(kernel.fn.__globals__)[kernel.__name__]

    def run(self, pointers: Sequence[Any], numbers: Sequence[Any], constants: Any) -> None:
        given = [Pointer(x) if isinstance(x, Tensor) else Tiles(x) for x in pointers]
        for program in itertools.product(*map(builtins.range, self.grid)):
            self.program = program
            self.kernel(*given, *map(torch.tensor, numbers), **constants)

    def _names(self, module: dict[str, Any]) -> dict[str, Any]:
        """The names of a module, its kernels' functions and constants as Python's."""
        if module["__name__"] in self.modules:
            return self.modules[module["__name__"]]
        names = self.modules[module["__name__"]] = module | self.fakes
        for name, held in module.items():
            if name in self.fakes:
                continue
            if isinstance(body := getattr(held, "fn", None), types.FunctionType):
                known = self._names(body.__globals__)
                names[name] = types.FunctionType(body.__code__, known, name, body.__defaults__)
            elif isinstance(getattr(held, "value", None), int):
                names[name] = held.value
        return names

    def _range(self, *bounds: Any) -> Iterator[Tensor]:
        return map(torch.tensor, builtins.range(*map(int, bounds)))

    def _partitions(self, all_: Sequence[Any], warps: object, registers: object) -> None:
        with ThreadPoolExecutor(len(all_)) as pool:
            for one in as_completed([pool.submit(self._partition, *each) for each in all_]):
                one.result()  # the first to fail

    def _partition(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.local.products = []
        function(*arguments)
        assert not self.local.products, "a product that nobody waits for"

    def _copy(self, tiles: Tiles, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        barrier.copy(tiles.tile(at).view(to.data.shape), to.data)

    def _multiply(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool
    ) -> Any:
        product = acc if isinstance(acc, Product) else Product(acc)
        held = [x.data for x in (a, b) if isinstance(x, Shared)]
        asked = [x.clone() for x in held]

        def multiply() -> None:
            done = (a.data if isinstance(a, Shared) else a).float() @ b.data.float()
            if not all(map(torch.equal, asked, held)):  # NaN, not yet there, equals nothing
                done.fill_(float("nan"))
            product.value = product.value + done if use_acc else done
            product.left -= 1

        assert is_async
        product.left += 1
        self.local.products.append(multiply)
        return product

    def _wait(self, left: int, deps: Sequence[Any]) -> Any:
        time.sleep(5e-4)  # a tile that was given free too early is overwritten meanwhile
        while len(self.local.products) > left:
            self.local.products.pop(0)()
        found = [
            x.value * (torch.nan if x.left else 1) if isinstance(x, Product) else x for x in deps
        ]
        return found[0] if len(found) == 1 else found

    def _language(self) -> dict[str, Any]:
        def store(to: Pointer, x: Tensor, mask: Tensor) -> None:
            at, x, mask = torch.broadcast_tensors(to.offset, x, mask)
            to.data.view(-1)[at[mask]] = x[mask].to(to.data.dtype)

        def allocate(dtype: Any, shape: Sequence[int], layout: object) -> Any:
            if dtype == torch.int64:
                return SimpleNamespace(index=[Barrier() for _ in range(shape[0])].__getitem__)
            return Shared(torch.full(list(shape), torch.nan, dtype=dtype))

        tensor = torch.as_tensor
        gl = MagicMock(  # and layouts that say nothing
            **{name: getattr(torch, name) for name in SAME},
            program_id=lambda axis: torch.tensor(self.program[axis]),
            num_programs=lambda axis: self.grid[axis],
            static_range=builtins.range,
            arange=lambda first, end, layout=None: torch.arange(first, end),
            zeros=lambda shape, dtype, layout=None: torch.zeros(shape),
            full=lambda shape, x, dtype, layout=None: torch.full(shape, x),
            convert_layout=lambda x, layout: x,
            where=lambda mask, a, b: torch.where(mask, tensor(a), tensor(b)),
            maximum=lambda a, b: torch.maximum(tensor(a), tensor(b)),
            minimum=lambda a, b: torch.minimum(tensor(a), tensor(b)),
            cdiv=lambda a, b: -(-a // b),
            max=lambda x, axis: x.max(axis).values,
            load=lambda at: at.data.reshape(-1)[at.offset],
            store=store, allocate_shared_memory=allocate, warp_specialize=self._partitions,
        )  # fmt: skip
        return {
            "gl": gl, "tl": gl, "mbarrier": Barrier, "range": self._range,
            "fence_async_shared": MagicMock(),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy),
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._wait,
            "warpgroup_mma_init": Product,
        }  # fmt: skip
