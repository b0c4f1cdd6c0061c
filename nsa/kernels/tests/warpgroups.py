"""Gluon kernels on a CPU: what is asynchronous on sm_90 is so here, and late.

Triton's interpreter does not take Gluon. Here a kernel's functions run as Python over torch
tensors, each partition of `warp_specialize` in a thread. A bulk copy spoils its tile when it is
asked for and fills it when its barrier is waited for; a product reads its operands from when it is
asked for to when it is waited for, and is NaN until then. Whoever waits for a product, for its
copies to global memory, or for a tile from there, goes on when no other partition can. So these
mistakes fail on any machine: reading a tile before it is there, overwriting one that is still in
use, waiting forever, and a missing fence before a product or an arrival. Layouts, registers and
what ptxas makes of it are not seen.
"""

import builtins
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor

PATIENCE = 20.0
"""Seconds until a wait counts as one that never ends."""
SAME = ("exp2", "log2", "sum", "int64", "float32")
"""Names that Gluon and torch share."""


class Stored(threading.local):
    """Where a thread stored tiles that neither products nor copies see before a fence."""

    def __init__(self) -> None:
        self.fresh: set[int] = set()


STORED = Stored()


class Shared:
    """Shared memory, or a view of it."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype, self.shape = data, data.dtype, data.shape

    def index(self, i: Any) -> "Shared":
        assert 0 <= int(i) < len(self.data)
        return Shared(self.data[int(i)])

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(*shape))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Any:
        """A ring as another; or a tile as panels, one after the other, and rows of these."""
        if dtype != self.dtype:
            return Shared(self.data.flatten().view(dtype)[: math.prod(shape)].view(*shape))
        rows, columns = math.prod(shape[1:-1]), shape[-1]

        def index(i: int) -> Shared:
            panel, row = divmod(i * rows, len(self.data))
            part = self.data[row : row + rows, panel * columns : (panel + 1) * columns]
            return Shared(part.view(*shape[1:]))

        return SimpleNamespace(index=index)

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        assert x.dtype == self.dtype
        if self.dtype != torch.float32:
            STORED.fresh.add(self.data.data_ptr())
        self.data.copy_(x)


class Barrier:
    """An mbarrier: a phase is over once all have arrived and all bytes have."""

    MBarrierLayout = MagicMock
    changed = threading.Condition()
    running = 1
    """Partitions that wait for nothing."""
    waits: ClassVar[list[Callable[[], bool]]] = []
    """What others wait for: whether it is over."""
    queue: ClassVar[list[Callable[[], bool]]] = []
    """Of those that are last, who goes first."""
    bytes = phase = 0

    def __init__(self) -> None:
        self.copies: list[tuple[Tensor, Tensor]] = []

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def expect(self, size: int) -> None:
        self.arrive(1, size)

    def arrive(self, count: int, size: int = 0) -> None:
        assert not (count and STORED.fresh), "a copy may not see what was stored"
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
            Barrier.waits.append(over)
            Barrier.pause(over, "this barrier is never completed")
            Barrier.waits.remove(over)

    @staticmethod
    def pause(over: Callable[[], bool], otherwise: str) -> None:
        Barrier.running -= 1
        Barrier.changed.notify_all()
        assert Barrier.changed.wait_for(over, PATIENCE), otherwise
        Barrier.running += 1

    @staticmethod
    def be_last() -> None:
        """Wait until no other partition can run, so that one that forgot to wait runs first."""

        def turn() -> bool:
            free = Barrier.running == 0 and Barrier.queue[0] is turn
            return free and not any(over() for over in Barrier.waits)

        with Barrier.changed:
            Barrier.queue.append(turn)
            Barrier.pause(turn, "another partition never waits or ends")
            Barrier.queue.remove(turn)


class Product:
    """An accumulator: a number of products that no wait has asked for."""

    left = 0

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Pointer:
    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        size = data.untyped_storage().nbytes() // data.itemsize - data.storage_offset()
        self.data, self.offset = data.detach().as_strided((size,), (1,)), offset
        self.dtype = SimpleNamespace(element_ty=data.dtype)

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.data, self.offset + more)


class Tiles:
    """A descriptor."""

    layout = None

    def __init__(self, described: Any) -> None:
        self.x: Tensor = described.base.detach().as_strided(described.shape, described.strides)
        self.block_shape, self.dtype = described.block_shape, self.x.dtype

    def part(self, at: Sequence[Any]) -> Tensor:
        ends = zip(map(int, at), self.block_shape, strict=True)
        return self.x[tuple(slice(i, i + n) for i, n in ends)]

    def tile(self, at: Sequence[Any]) -> Tensor:
        """Zeros outside."""
        out = torch.zeros(self.block_shape, dtype=self.dtype)
        found = self.part(at)
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
        kinds = {Tensor: Pointer, type(None): lambda x: x}
        given = [kinds.get(type(x), Tiles)(x) for x in pointers]
        for program in itertools.product(*map(builtins.range, self.grid)):
            self.program, Barrier.running = program, 1
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
        Barrier.running, Barrier.waits, Barrier.queue = len(all_), [], []
        with ThreadPoolExecutor(len(all_)) as pool:
            for one in as_completed([pool.submit(self._partition, *each) for each in all_]):
                one.result()  # the first to fail

    def _partition(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.local.products, self.local.stores = [], []
        try:
            function(*arguments)
        finally:
            with Barrier.changed:
                Barrier.running -= 1
                Barrier.changed.notify_all()
        assert not self.local.products, "the partition ended without waiting for its products"
        assert not self.local.stores, "the partition ended without waiting for its copies"

    def _copy(self, tiles: Tiles, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        barrier.copy(tiles.tile(at).view(to.data.shape), to.data)

    def _store(self, tiles: Tiles, at: Sequence[Any], source: Shared) -> None:
        self.local.stores.append((tiles.part(at), source.data))

    def _stored(self, left: int) -> None:
        Barrier.be_last()
        while len(self.local.stores) > left:
            to, tile = self.local.stores.pop(0)
            to.copy_(tile)

    def _multiply(
        self, a: Any, b: Shared, acc: Any, *, use_acc: bool = True, is_async: bool
    ) -> Any:
        product = acc if isinstance(acc, Product) else Product(acc)
        held = [x.data for x in (a, b) if isinstance(x, Shared)]
        asked = [x.clone() for x in held]
        assert STORED.fresh.isdisjoint(x.data_ptr() for x in held), "stored without a fence"

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
        Barrier.be_last()  # a tile that was given free too early is overwritten meanwhile
        while len(self.local.products) > left:
            self.local.products.pop(0)()
        found = [
            x.value * (torch.nan if x.left else 1) if isinstance(x, Product) else x for x in deps
        ]
        return found[0] if len(found) == 1 else found

    def _language(self) -> dict[str, Any]:
        def store(to: Pointer, x: Tensor, mask: Tensor) -> None:
            at, x, mask = torch.broadcast_tensors(to.offset, x, mask)
            to.data[at[mask]] = x[mask].to(to.data.dtype)

        def load(at: Pointer, mask: Any = True, other: float = 0) -> Tensor:
            offset, mask = torch.broadcast_tensors(tensor(at.offset), tensor(mask))
            if offset.ndim > 1:
                Barrier.be_last()
            return torch.where(mask, at.data[torch.where(mask, offset, 0)], other)

        def atomic_add(to: Pointer, x: Tensor, mask: Tensor, sem: str) -> None:
            at, x, mask = torch.broadcast_tensors(to.offset, x, mask)
            with Barrier.changed:
                to.data.index_add_(0, at[mask], x[mask])

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
            inline_asm_elementwise=lambda *_: 0,  # a zero that the compiler does not see
            load=load, store=store, atomic_add=atomic_add, allocate_shared_memory=allocate,
            warp_specialize=self._partitions,
        )  # fmt: skip
        return {
            "gl": gl, "tl": gl, "mbarrier": Barrier, "range": self._range,
            "fence_async_shared": lambda: STORED.fresh.clear(),
            "tma": SimpleNamespace(
                async_copy_global_to_shared=self._copy, async_copy_shared_to_global=self._store,
                store_wait=self._stored,
            ),
            "warpgroup_mma": self._multiply, "warpgroup_mma_wait": self._wait,
            "warpgroup_mma_init": Product,
        }  # fmt: skip
