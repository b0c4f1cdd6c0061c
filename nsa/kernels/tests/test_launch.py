"""Kept launches are Triton's: the same kernel, called with the same arguments.

Nothing is compiled and nothing runs: Triton chooses as ever, but what it would compile is a
stand-in that records how it is called. So every way in which Triton tells kernels apart can be
tried.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, get_args

import pytest
import torch
import triton.language as tl
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.knobs import HookChain
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.kernels.common import launch
from nsa.kernels.common.device import Architecture
from nsa.kernels.common.launch import KernelLaunch
from nsa.kernels.common.tiles import descriptor
from nsa.kernels.tests.stand_in import StandInDriver, StandInKernel

READ: tl.constexpr = tl.constexpr(8)


def _body(x_ptr, y_ptr, n, free, wide: tl.int64, SIZE: tl.constexpr, FLAG: tl.constexpr):
    tl.store(x_ptr + n, READ)


def _early_constant(x_ptr, SIZE: tl.constexpr, n):
    tl.store(x_ptr + n, SIZE)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> StandInDriver:
    stand_in = StandInDriver()
    monkeypatch.setattr(driver, "_active", stand_in)
    return stand_in


def kernel_of(function: Any = _body) -> Any:
    """`function` under triton.jit, interpreter or not."""
    kernel = JITFunction(function, do_not_specialize=["free"])
    kernel.calls = []

    def compiled(src: Any, target: GPUTarget, options: object) -> StandInKernel:
        _ = kernel.cache_key  # as compilation does; then Triton knows the globals that are read
        return StandInKernel(src, target, kernel.calls)

    binder = kernel.create_binder

    def create_binder() -> Any:
        made = binder()
        kernel.compile = compiled
        return made

    kernel.device_caches.default_factory = create_binder
    return kernel


def tensor(dtype: torch.dtype = torch.float16, *, offset: int = 0) -> Tensor:
    base = torch.empty(256, dtype=dtype)
    assert base.data_ptr() % 16 == 0
    return base[offset : offset + 64]


def tile(dtype: torch.dtype, rows: int, columns: int = 16) -> TensorDescriptor:
    return descriptor(torch.empty(1, 64, 2, 64, dtype=dtype), rows, columns)


TENSORS = [
    None,
    *(tensor(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int32)),
    *(tensor(torch.float16, offset=offset) for offset in (1, 4, 8)),
    tensor(torch.float32, offset=1),
    *(torch.nn.Parameter(tensor(torch.float16, offset=offset)) for offset in (0, 1)),
    *(tile(torch.float16, rows, columns) for rows in (16, 64) for columns in (16, 64)),
    tile(torch.bfloat16, 16),
]
EDGES = [0, 1, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31) - 1, 2**63, 2**63 + 16]
INTS = [*EDGES, True, False]
NUMBERS = [*INTS, None, 1.0, 0.0, 16.0, 0.5]
WIDE = [x for x in EDGES if x < 2**63]
NAMED = [
    {"SIZE": size, "FLAG": flag, "num_warps": warps, "num_stages": stages}
    for size in (16, 64)
    for flag in (False, True)
    for warps, stages in ((4, 3), (8, 3), (4, 2))
]


def taken(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> StandInKernel:
    """Which kernel Triton takes."""
    chosen: StandInKernel = kernel.run(*arguments, grid=None, warmup=True, **named)
    return chosen


def last_call(kernel: Any) -> tuple[StandInKernel, tuple[Any, ...]]:
    """The only launch since the last time: the compiled kernel, and what its launcher was given."""
    ((found, *call),) = kernel.calls
    kernel.calls.clear()
    return found, tuple(call)


@given(
    cases=st.lists(
        st.tuples(
            st.integers(0, len(NAMED) - 1),
            st.integers(0, 1),
            st.sampled_from(["", "", "debug"]),
            st.tuples(st.sampled_from(TENSORS), st.sampled_from(TENSORS)),
            st.tuples(st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.sampled_from(WIDE)),
        ),
        min_size=2,
        max_size=12,
    )
)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(cases=[(0, 0, "", (x, x), (7, 7, 7)) for x in TENSORS])
@example(cases=[(0, 0, "", pair, (7, 7, 7)) for x in TENSORS for pair in ((x, None), (None, x))])
@example(cases=[(0, 0, "", (None, None), (x, 7, 7)) for x in NUMBERS])
@example(cases=[(0, 0, "", (None, None), (7, x, 7)) for x in NUMBERS])
@example(cases=[(0, 0, "", (None, None), (7, 7, x)) for x in WIDE])
@example(cases=[(i, d, "", (None, None), (7, 7, 7)) for i in range(len(NAMED)) for d in (0, 1)])
@example(cases=[(0, 0, x, (None, None), (7, 7, 7)) for x in ("", "debug", "")])
def test_the_kept_kernel_is_the_one_that_triton_takes(
    gpu: StandInDriver, cases: list[tuple[Any, ...]]
) -> None:
    """In any order of calls, the first of a kind and later ones."""
    kernel = kernel_of()
    launches = [KernelLaunch(kernel, **named) for named in NAMED]
    for index, device, debug, pointers, numbers in [*cases, *cases]:
        gpu.device = device
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(knobs.runtime, "debug", debug == "debug")
            expected = taken(kernel, (*pointers, *numbers), NAMED[index])

            launches[index]((5, 2), pointers, numbers)

        found, call = last_call(kernel)
        assert found is expected
        assert call[:6] == (5, 2, 1, 100 + device, found.function, found.packed_metadata)
        given = (*pointers, *numbers, NAMED[index]["SIZE"], NAMED[index]["FLAG"])
        assert len(call) == 9 + len(given)
        assert all(a is b for a, b in zip(call[9:], given, strict=True))


@pytest.fixture
def kept(gpu: StandInDriver) -> tuple[Any, KernelLaunch, list[int]]:
    """A kernel, a KernelLaunch that keeps it, and a list that grows when Triton launches it."""
    kernel = kernel_of()
    launched = KernelLaunch(kernel, SIZE=16, FLAG=True)
    launched((1,), (TENSORS[1], None), (2, 3, 4))
    last_call(kernel)
    triton_launches: list[int] = []
    binders = kernel.device_caches[0]

    def binder(*args: Any, **named: Any) -> Any:
        triton_launches.append(1)
        return binders[4](*args, **named)

    kernel.device_caches[0] = (*binders[:4], binder)
    return kernel, launched, triton_launches


def test_a_kept_launch_does_not_ask_triton(kept: tuple[Any, KernelLaunch, list[int]]) -> None:
    kernel, launched, triton_launches = kept

    launched((3,), (TENSORS[1], None), (2, 3, 4))

    assert triton_launches == []
    assert last_call(kernel)[1][:4] == (3, 1, 1, 100)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_what_triton_shows_them(
    kept: tuple[Any, KernelLaunch, list[int]], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The launcher is given the hooks, and metadata that names the kernel, as by Triton."""
    kernel, launched, triton_launches = kept
    chain: HookChain[Any] = HookChain()
    chain.add(lambda metadata: None)
    monkeypatch.setattr(knobs.runtime, name, chain)

    launched((3,), (TENSORS[1], None), (2, 3, 4))
    _, call = last_call(kernel)
    assert triton_launches == []
    kernel[(3,)](TENSORS[1], None, 2, 3, 4, SIZE=16, FLAG=True)
    _, expected = last_call(kernel)

    assert call[7:] == expected[7:]
    assert call[6].get() == expected[6].get()
    assert call[6].get()["name"] == "_body"


def test_without_hooks_the_launcher_has_nothing_to_call(
    kept: tuple[Any, KernelLaunch, list[int]],
) -> None:
    kernel, launched, _ = kept

    launched((3,), (TENSORS[1], None), (2, 3, 4))

    assert last_call(kernel)[1][6:9] == (None, None, None)


def test_a_global_that_changed_is_refused_as_by_triton(
    kept: tuple[Any, KernelLaunch, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, launched, _ = kept
    monkeypatch.setitem(_body.__globals__, "READ", tl.constexpr(4))

    with pytest.raises(RuntimeError, match="Global variable READ has changed"):
        launched((3,), (TENSORS[1], None), (2, 3, 4))


@pytest.mark.parametrize("how", ["run", "pre_run_hook", "instrumentation"])
def test_triton_launches_where_somebody_may_be_looking(
    kept: tuple[Any, KernelLaunch, list[int]], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    kernel, launched, triton_launches = kept
    seen: list[int] = []
    run = JITFunction.run

    def looking(self: Any, *args: Any, **named: Any) -> Any:
        seen.append(1)
        return run(self, *args, **named)

    match how:
        case "run":
            monkeypatch.setattr(JITFunction, "run", looking)
        case "pre_run_hook":
            kernel.add_pre_run_hook(lambda *args, **named: seen.append(1))
        case "instrumentation":
            monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "consan")
            seen.append(1)

    launched((3,), (TENSORS[1], None), (2, 3, 4))

    assert triton_launches == [1]
    assert seen == [1]


def test_only_numbers_are_kept_as_numbers(gpu: StandInDriver) -> None:
    """A tensor among them would be a key by its identity, not by its address."""
    launched = KernelLaunch(kernel_of(), SIZE=16, FLAG=True)
    misplaced: Any = TENSORS[1]

    launched((1,), (TENSORS[1], None), (misplaced, 3, 4))

    assert launched.kept == {}


def test_nothing_is_kept_for_another_backend_than_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's distinguishes small storages from large ones, which no key contains."""
    monkeypatch.setattr(driver, "_active", StandInDriver("hip", "gfx942"))
    launched = KernelLaunch(kernel_of(), SIZE=16, FLAG=True)

    launched((1,), (TENSORS[1], None), (2, 3, 4))

    assert launched.kept == {}


def test_what_a_hook_forbids_to_compile_is_not_kept(
    gpu: StandInDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **_: True)
    launched = KernelLaunch(kernel_of(), SIZE=16, FLAG=True)
    monkeypatch.setattr(JITFunction, "_call_hook", lambda *_: True)

    launched((1,), (TENSORS[1], None), (2, 3, 4))

    assert launched.kept == {}


def test_a_sweep_keeps_a_bounded_count(gpu: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_KEPT", 4)
    launched = KernelLaunch(kernel_of(), SIZE=16, FLAG=True)

    for n in range(100):
        launched((1,), (TENSORS[1], None), (n, 3, 4))
        assert len(launched.kept) <= 4


def test_threads_share_a_launch(gpu: StandInDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call goes to the kernel of its own arguments while other threads keep and drop keys."""
    monkeypatch.setattr(launch, "MAX_KEPT", 3)
    kernel = kernel_of()
    launched = KernelLaunch(kernel, SIZE=16, FLAG=True)
    kinds = [(x, n) for x in TENSORS for n in (0, 1, 16, 17)]
    expected = {
        i: taken(kernel, (x, None, n, 3, 4), launched.named) for i, (x, n) in enumerate(kinds)
    }

    def call(i: int) -> None:
        x, n = kinds[i % len(kinds)]
        launched((i,), (x, None), (n, 3, 4))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(2000)))

    calls = {grid: found for found, grid, *_ in kernel.calls}
    assert len(kernel.calls) == 2000
    assert calls == {i: expected[i % len(kinds)] for i in range(2000)}


@pytest.mark.parametrize(
    ("function", "named"),
    [
        pytest.param(_body, {"SIZE": 16}, id="one is missing"),
        pytest.param(_early_constant, {"SIZE": 16}, id="a number follows"),
    ],
)
def test_constants_come_last_and_all_of_them(function: Any, named: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"constants must come last.*SIZE"):
        KernelLaunch(kernel_of(function), **named)


@pytest.mark.slow
@pytest.mark.parametrize("arch", get_args(Architecture))
def test_the_operator_launches_the_second_time_as_triton_would(arch: Architecture) -> None:
    """Every launch, forward and backward: kernel, grid, stream, and arguments in order."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "nsa.kernels.tests.stand_in", arch]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    rounds = json.loads(printed.stdout)

    operator = {launch["kernel"][1] for launch in rounds["operator"][0]}
    assert {"_forward_kernel", "_score_kernel", "_backward_kernel", "_key_kernel"} < operator
    for case, (first, second, by_triton) in rounds.items():
        for launched in (first, second):
            for call, expected in zip(launched, by_triton, strict=True):
                assert (call["kernel"], call["how"]) == (expected["kernel"], expected["how"])
        assert not any(call["kept"] for call in by_triton)
        if case in ("operator", "dense", "dense backward"):
            assert all(call["kept"] for call in second)
