"""What is compiled ahead of time: the launchers, and the shapes and lengths they are called with.

To add a kernel, write a function of a shape and a length that calls its launcher with `meta`
tensors, and list it in CASES.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.config import PRESETS, ROUTES, NSAConfig, Positions
from nsa.kernels import gate, routes
from nsa.kernels.banded.backward import banded_backward
from nsa.kernels.banded.band import Band
from nsa.kernels.banded.forward import banded_forward
from nsa.kernels.common.device import Architecture
from nsa.kernels.decode.attend import decode
from nsa.kernels.selected.backward import selected_backward
from nsa.kernels.selected.forward import selected_forward

LENGTHS = (257, 1 << 18)
"""Lengths at which nothing new may be compiled: one that 16 does not divide, and one at which
strides pass 2**31."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes that a kernel is compiled for; heads as in HQ/HKV/Dk/Dv."""

    name: str
    HQ: int
    HKV: int
    Dk: int
    Dv: int
    T: int = 2048
    B: int = 1
    config: NSAConfig = field(default_factory=NSAConfig)
    architectures: tuple[Architecture, ...] = ()
    """The architectures that the tests compile it for; the command compiles it for both."""

    def tensor(
        self, T: int, heads: int, size: int, *, dtype: torch.dtype = torch.bfloat16
    ) -> Tensor:
        return torch.empty(self.B, T, heads, size, dtype=dtype, device="meta")

    def q(self, T: int) -> Tensor:
        return self.tensor(T, self.HQ, self.Dk)

    def k(self, T: int) -> Tensor:
        return self.tensor(T, self.HKV, self.Dk)

    def v(self, T: int) -> Tensor:
        return self.tensor(T, self.HKV, self.Dv)

    def o(self, T: int) -> Tensor:
        """An output, or its gradient."""
        return self.tensor(T, self.HQ, self.Dv)

    def gates(self, T: int) -> Tensor:
        return self.tensor(T, self.HQ, 3)

    def rows(self, T: int) -> Tensor:
        """One float32 a row of the scores: `lse`."""
        return torch.empty(self.B, T, self.HQ, dtype=torch.float32, device="meta")

    def blocks(self, T: int) -> Tensor:
        size = (self.B, T, self.HKV, self.config.num_blocks)
        return torch.empty(size, dtype=torch.int32, device="meta")


def _preset(name: str) -> Shape:
    model = PRESETS[name]
    return Shape(
        name=name,
        HQ=model.n_heads,
        HKV=model.n_kv_heads,
        Dk=model.head_dim_qk,
        Dv=model.head_dim_v,
        T=256,
        B=2,
        config=model.nsa,
    )


BOTH: tuple[Architecture, ...] = ("sm_80", "sm_90")
SHAPES = [
    Shape(name="64/4/192/128", HQ=64, HKV=4, Dk=192, Dv=128, architectures=BOTH),
    Shape(name="64/4/128/128", HQ=64, HKV=4, Dk=128, Dv=128),
    Shape(name="32/8/128/128", HQ=32, HKV=8, Dk=128, Dv=128),
    Shape(name="32/2/128/128", HQ=32, HKV=2, Dk=128, Dv=128),
    Shape(name="12/2/64/64", HQ=12, HKV=2, Dk=64, Dv=64, B=2, architectures=BOTH),
    _preset("small"),
    _preset("tiny"),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to call one launcher."""

    name: str
    launch: Callable[[Shape, int], object]
    sweep: tuple[int, ...] = LENGTHS
    only: tuple[str, ...] = ()
    """Shapes that the tests compile it for; empty for all."""

    def takes(self, shape: Shape) -> bool:
        return not self.only or shape.name in self.only


def _operator(packed: bool) -> Callable[[Shape, int], object]:
    """Forward and backward of the whole, as the layer calls it."""

    def launch(s: Shape, T: int) -> object:
        N = s.config.compressed_length(T)
        inputs = (s.q(T), s.k(N), s.v(N), s.k(T), s.v(T), s.k(T), s.v(T), s.gates(T))
        leaves = tuple(x.requires_grad_() for x in inputs)
        arguments: tuple[Any, ...] = (*leaves, _at(s, _documents() if packed else None), ROUTES)
        out, _ = routes.attention(*arguments)
        return torch.autograd.grad(out, leaves, torch.empty_like(out))

    return launch


def _at(s: Shape, cu_seqlens: Tensor | None = None) -> Positions:
    return Positions(config=s.config, scale=s.Dk**-0.5, cu_seqlens=cu_seqlens)


def _documents() -> Tensor:
    return torch.empty(5, dtype=torch.int32, device="meta")


def _compress(s: Shape, T: int) -> Band:
    return Band.compress(_at(s), tokens=T, blocks=s.config.compressed_length(T))


def _dense(s: Shape, T: int) -> Band:
    return Band.causal(_at(s), tokens=T)


def _banded(
    band: Callable[[Shape, int], Band], *, values: bool = True
) -> Callable[[Shape, int], object]:
    def launch(s: Shape, T: int) -> object:
        keys = s.config.compressed_length(T) if band is _compress else T
        v = s.v(keys) if values else None
        return banded_forward(s.q(T), s.k(keys), v, band(s, T), scale=s.Dk**-0.5)

    return launch


def _banded_backward(band: Callable[[Shape, int], Band]) -> Callable[[Shape, int], object]:
    def launch(s: Shape, T: int) -> object:
        keys = s.config.compressed_length(T) if band is _compress else T
        k, v, scale = s.k(keys), s.v(keys), s.Dk**-0.5
        return banded_backward(s.o(T), s.q(T), k, v, s.rows(T), s.rows(T), band(s, T), scale=scale)

    return launch


def _selected_backward(*, deterministic: bool = False) -> Callable[[Shape, int], object]:
    """And the forward pass before it."""

    def launch(s: Shape, T: int) -> object:
        q, k, v, at = s.q(T), s.k(T), s.v(T), _at(s)
        _, lse, index, _ = selected_forward(q, k, v, s.blocks(T), at, deterministic=deterministic)
        return selected_backward(
            s.o(T), q, k, v, lse, s.rows(T), index, at, deterministic=deterministic
        )

    return launch


def _decode(s: Shape, T: int) -> object:
    """One query of each sequence; T is the cache's capacity."""
    N, ring = s.config.compressed_length(T), s.config.window_size
    lengths = torch.empty(s.B, dtype=torch.int32, device="meta")
    return decode(
        s.q(1),
        s.k(N),
        s.v(N),
        s.k(T),
        s.v(T),
        s.k(ring),
        s.v(ring),
        s.gates(1),
        lengths,
        config=s.config,
        scale=s.Dk**-0.5,
    )


PAPER = ("64/4/192/128",)
TRAINED = ("12/2/64/64",)
BOTH_SHAPES = (*PAPER, *TRAINED)
CASES = [
    Case("operator", _operator(packed=False)),
    Case("operator, documents", _operator(packed=True), only=TRAINED),
    Case("dense", _banded(_dense), only=BOTH_SHAPES),
    Case("dense backward", _banded_backward(_dense), only=BOTH_SHAPES),
    Case("compress, lse alone", _banded(_compress, values=False), only=PAPER),
    Case("select backward", _selected_backward(), only=PAPER),
    Case("select backward, deterministic", _selected_backward(deterministic=True), only=PAPER),
    Case("gate", lambda s, T: gate.gate_forward(s.gates(T), s.o(T), s.o(T), s.o(T)), only=PAPER),
    Case("one branch backward", lambda s, T: gate.row_dot(s.o(T), s.o(T)), only=PAPER),
    Case("decode", _decode),
]
"""The operator launches most kernels, for every shape. The other cases launch them with other
constants and the same tiles, so one shape is enough for the tests; the command
`python -m nsa.kernels.tests.aot --every-shape` compiles all of them."""
