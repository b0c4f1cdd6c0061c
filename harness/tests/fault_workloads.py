"""Workloads with one fault each, planted where the harness must find it."""

import ctypes
import os
import queue
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from harness.tests.fake_workloads import *  # noqa: F403  a case may name any of both modules
from harness.tests.fake_workloads import Axes, _good_but, good
from harness.workload import Workload


def _counted(step: Callable[[int], object]) -> Workload:
    """A workload whose run gets its number, from 0."""
    runs = iter(range(10**9))

    def run() -> object:
        time.sleep(0.001)
        return step(next(runs))

    return _good_but(run=run)


def _hang(axes: Axes) -> None:
    """Make the file that the axis `path` names, then hang; no other Python frame comes between."""

    def wait_for_godot() -> None:
        os.close(os.open(str(axes["path"]), os.O_CREAT))
        time.sleep(3600)

    wait_for_godot()


def hangs_at_5(provider: str, axes: Axes) -> Workload:
    losses = iter(range(10**9))
    hangs = _counted(lambda i: _hang(axes) if i == 5 else None)
    return replace(hangs, recorded=lambda: {"loss": next(losses)})


def hangs_after_compiling(provider: str, axes: Axes) -> Workload:
    """LLVM, which Triton brings along, takes signals for itself when it first compiles."""
    os.environ["TRITON_ALWAYS_COMPILE"] = "1"
    from triton import compiler
    from triton.backends.compiler import GPUTarget

    from harness.tests.fault_kernels import spin

    source = compiler.ASTSource(fn=spin, signature={"x_ptr": "*i32"}, constexprs={})
    compiler.compile(source, target=GPUTarget("cuda", 90, 32))
    return hangs_at_5(provider, axes)


def spins_on_the_gpu(provider: str, axes: Axes) -> Workload:
    """From run 3 on a Triton kernel does not end; nothing on the host waits but a synchronise."""
    from harness.tests.fault_kernels import spin

    x = torch.ones(1, dtype=torch.int32, device="cuda")
    spin[(1,)](x)  # compiled here, where silence is allowed; of 1 it ends
    torch.cuda.synchronize()
    x.zero_()

    def step(i: int) -> None:
        y = x + 1
        if i == 3:
            spin[(1,)](x)
            os.close(os.open(str(axes["path"]), os.O_CREAT))
        (y * 2).cpu()

    return _counted(step)


class Overflowing(nn.Module):
    """Two layers; the second one's exponential overflows from step `bad` on, to Inf - Inf."""

    def __init__(self, bad: int) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Module()
        self.second.forward = self._second
        self.bad, self.step = bad, -1

    def _second(self, x: Tensor) -> Tensor:
        mask = torch.zeros(4).masked_fill(torch.arange(4) > 2, float("-inf"))
        weights = (mask + x).softmax(-1)  # -inf that is meant, and no fault
        huge = torch.exp(weights * (1e3 if self.step >= self.bad else 1.0))
        return (huge - huge).sum() + weights.sum()

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        y: Tensor = self.second(self.first(x))
        return y


def nan_at_step(provider: str, axes: Axes) -> Workload:
    torch.manual_seed(0)
    model, x = Overflowing(int(axes["bad"])), torch.ones(2, 4)

    @torch.no_grad()
    def run() -> dict[str, Tensor]:
        return {"loss": model(x)}

    return _good_but(run=run)


def overflows_float16(provider: str, axes: Axes) -> Workload:
    x = torch.full((4,), 300.0, dtype=torch.float16)
    return _good_but(run=lambda: {"o": x * x})


def nan_from_a_gradient(provider: str, axes: Axes) -> Workload:
    """The gradient of sqrt at zero spoils a weight in step 2; the loss shows it in step 3."""
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)

    def step(i: int) -> Tensor:
        nonlocal weight
        loss = (weight * (0.0 if i == 2 else 1.0) * x).square().sum().sqrt()
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight.detach() - 0.01 * gradient).requires_grad_()
        return loss.detach()

    return _counted(step)


def nan_in_check(provider: str, axes: Axes) -> Workload:
    """The code under test divides by zero in bfloat16; the definition does not."""
    x = torch.zeros(8, dtype=torch.bfloat16)
    return _good_but(
        check=lambda: {"o": x / x},
        reference=lambda: {"o": torch.zeros(8, dtype=torch.float64)},
        eager=lambda: {"o": x + 0},
    )


def nan_past_the_dispatcher(provider: str, axes: Axes) -> Workload:
    """Written through a raw pointer, as a kernel of Triton's does."""
    out = torch.zeros(4)
    plain = out.numpy()

    def step(i: int) -> Tensor:
        plain[:] = float("nan") if i >= 1 else 0.0
        return out * 2

    return _counted(step)


def nan_once(provider: str, axes: Axes) -> Workload:
    """By a file that is gone the second time: no second run shows it."""
    mark = Path(str(axes["path"]))
    bad = mark.exists()
    mark.unlink(missing_ok=True)
    return _counted(lambda i: torch.tensor(float("nan") if bad and i == 3 else 1.0))


def inf_loss(provider: str, axes: Axes) -> Workload:
    return _counted(lambda i: {"loss": 1.0 / torch.zeros(()) if i == 2 else torch.ones(())})


def hangs_in_diagnosis(provider: str, axes: Axes) -> Workload:
    """The second time it is built it never ends."""
    built = Path(f"{axes['path']}.built")
    if built.exists():
        _hang(axes)
    built.touch()
    return inf_loss(provider, axes)


def exhausts_host_memory(provider: str, axes: Axes) -> Workload:
    """The address space is limited, as a container or a shell would; the allocation is torch's."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))
    return _counted(lambda i: torch.ones(2**29))


def nan_of_inputs(provider: str, axes: Axes) -> Workload:
    """NaN in the step that gets inputs number `bad`."""
    x = torch.ones(8)

    def fresh(number: int) -> None:
        x.fill_(-1.0 if number == axes["bad"] else 1.0 + number)

    return Workload(
        run=lambda: x.log(), fresh=fresh, tokens=1, no_reference="its inputs are the fault"
    )


def slows_the_clock(provider: str, axes: Axes) -> Workload:
    """In the module that times, where the harness has bound it."""
    from harness.measure import timing

    slow = time.perf_counter
    setattr(timing, "perf_counter", lambda: slow() / 10)  # noqa: B010  mypy knows no such name
    return good(provider, {"step_s": 0.02})


def kills_itself(provider: str, axes: Axes) -> Workload:
    return _counted(lambda i: os.kill(os.getpid(), signal.SIGKILL) if i == 3 else None)


def _waits_for_a_queue(axes: Axes) -> None:
    queue.Queue[None]().get()


def _spins(axes: Axes) -> None:
    while True:
        pass


def _holds_the_gil(axes: Axes) -> None:
    ctypes.PyDLL(None).sleep(3600)


def _waits_for_a_peer(axes: Axes) -> None:
    """In a collective: the peer joins the group and calls none."""
    rank = 0 if os.fork() else 1
    place = f"file://{axes['path']}"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    if rank == 1:
        time.sleep(3600)
    distributed.barrier()


def stands_still(provider: str, axes: Axes) -> Workload:
    """As the axis `how` says; `when`: as it is built, in a step, or after its answer."""
    fault: Callable[[Axes], None] = globals()[f"_{axes['how']}"]
    if axes["when"] == "start-up":
        fault(axes)
    if axes["when"] == "teardown":
        os._exit = lambda _: fault(axes)  # type: ignore[assignment,return-value]
        return good(provider, axes)
    return _counted(lambda i: fault(axes) if i == 3 else None)


def computes_on_the_gpu(provider: str, axes: Axes) -> Workload:
    """Two steps queue `products` of 20 ms and a kernel that idles for `wait_s`; then they wait."""
    x = torch.randn(8192, 8192, device="cuda")

    def step(i: int) -> None:
        for _ in range(int(axes["products"]) if i < 2 else 1):
            y = x @ x
        torch.cuda._sleep(int(float(axes["wait_s"]) * 1.8e9) if i < 2 else 1)
        y[0, 0].item()

    return _counted(step)
