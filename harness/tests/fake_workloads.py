"""Workloads that behave, and workloads that misbehave in every way a worker must survive."""

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from harness.messages import Channel
from harness.records import Scalar
from harness.workload import Workload

Axes = Mapping[str, Scalar]


def good(provider: str, axes: Axes) -> Workload:
    """Right, finite, and `step_s` slow."""
    step_s = float(axes.get("step_s", 0.001))
    exact = torch.linspace(0, 1, 64, dtype=torch.float64)

    def run() -> Tensor:
        time.sleep(step_s)
        return exact

    return Workload(
        run=run,
        check=lambda: {"o": exact.float()},
        reference=lambda: {"o": exact},
        eager=lambda: {"o": exact.float()},
        tokens=64,
        flops=128,
        bytes=256,
        effective=lambda: {"provider": provider, "dtype": "float32"},
    )


def _good_but(**changes: Any) -> Workload:
    return replace(good("fake", {}), **changes)


def _after(runs: int, misbehave: Callable[[], Any]) -> Workload:
    """Good for so many runs."""
    left = iter(range(runs))
    return _good_but(run=lambda: time.sleep(0.001) if next(left, None) is not None else misbehave())


def raises(provider: str, axes: Axes) -> Workload:
    def run() -> None:
        raise ValueError("block_size=3 is not a multiple of 16")

    return _good_but(run=run)


def wrong(provider: str, axes: Axes) -> Workload:
    return _good_but(check=lambda: {"o": torch.linspace(0, 1.01, 64)})


def prints(provider: str, axes: Axes) -> Workload:
    """Prints what could be mistaken for messages, without a newline at the end."""

    def run() -> None:
        sys.stdout.write('{"kind": "answer"}\n\x00\xff no message at all')
        os.write(2, b'{"kind": "phase"')

    return _good_but(run=run)


def prints_to_a_full_disk(provider: str, axes: Axes) -> Workload:
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 1)
    os.dup2(full, 2)
    return _good_but(run=lambda: print("more"))


def returns_no_workload(provider: str, axes: Axes) -> dict[str, Any]:
    return {"run": print}


not_a_function = 3


def exits_politely(provider: str, axes: Axes) -> Workload:
    return _good_but(run=lambda: os._exit(0))


def segfaults(provider: str, axes: Axes) -> Workload:
    return _good_but(run=faulthandler._sigsegv)  # type: ignore[attr-defined]


def hangs(provider: str, axes: Axes) -> Workload:
    def wait_for_godot() -> None:
        time.sleep(3600)

    return _after(3, wait_for_godot)


def stops_itself(provider: str, axes: Axes) -> Workload:
    """Can neither write its stacks nor take SIGTERM."""
    return _after(2, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def leaves_orphans(provider: str, axes: Axes) -> Workload:
    """A child in our group, and a daemon: in a session of its own, its parent has died, and it is
    deaf to SIGTERM.

    The file named by the axis `path` gets the ids of all three.
    """
    sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
    daemon = [sys.executable, "-c", deaf]
    code = (
        f"import subprocess; print(subprocess.Popen({daemon!r}, start_new_session=True,"
        " stdout=subprocess.DEVNULL).pid)"
    )
    child = subprocess.Popen(sleep)
    grandchild = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    Path(str(axes["path"])).write_text(f"{os.getpid()} {child.pid} {grandchild}\n")
    return good(provider, axes)


def leaves_orphans_and_hangs(provider: str, axes: Axes) -> Workload:
    leaves_orphans(provider, axes)
    return hangs(provider, axes)


def forks(provider: str, axes: Axes) -> Workload:
    """The child returns into the worker's code and would answer too."""

    def run() -> None:
        os.fork()
        time.sleep(0.01)

    return _good_but(run=run)


def scribbles_on_the_pipe(provider: str, axes: Axes) -> Workload:
    fd = _channel()._fd

    def run() -> None:
        os.write(fd, b"nonsense\n")

    return _good_but(run=run)


def _channel() -> Channel:
    """The worker's own, which no workload should look for."""
    (channel,) = (o for o in gc.get_objects() if isinstance(o, Channel))
    return channel


def reads_environment(provider: str, axes: Axes) -> Workload:
    """Tells what it finds, and what the interpreter found when it started."""
    return _good_but(
        effective=lambda: {
            "flag": os.environ.get("NSA_TEST_FLAG", ""),
            "policy": os.environ.get("OMP_WAIT_POLICY", ""),
            "hash_randomization": bool(sys.flags.hash_randomization),
        }
    )


def reads_a_flag(provider: str, axes: Axes) -> Workload:
    """It knows two flags of NSA_*, and asks for one."""
    known = {"NSA_READ": True, "NSA_UNREAD": False}
    return _good_but(flags=lambda: {n: read for n, read in known.items() if n in os.environ})


def multiplies(provider: str, axes: Axes) -> Workload:
    """One product in a range, and a value read."""
    x = torch.linspace(0, 1, 64).reshape(8, 8)

    def run() -> Tensor:
        with torch.profiler.record_function("product"):
            y = x @ x
        y[0, 0].item()
        return y

    return _good_but(run=run, effective=None)


def multiplies_on_gpu(provider: str, axes: Axes) -> Workload:
    x = torch.randn(1024, 1024, device="cuda")
    return _good_but(run=lambda: x @ x)


def fills_the_gpu(provider: str, axes: Axes) -> Workload:
    _, total_bytes = torch.cuda.mem_get_info()
    return _good_but(run=lambda: torch.empty(2 * total_bytes, dtype=torch.int8, device="cuda"))


def faults_on_the_gpu(provider: str, axes: Axes) -> Workload:
    """An index out of range: a device-side assertion, which spoils the CUDA context."""
    x = torch.zeros(4, device="cuda")
    far = torch.tensor([10**6], device="cuda")
    return _good_but(run=lambda: x[far])
