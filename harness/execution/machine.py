"""Takes hold of the machine for one suite: its GPU locked, a warm launcher, what it is made of."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from harness import environment
from harness.errors import SuiteError
from harness.execution import gpu_lock
from harness.execution.launcher import Launcher
from harness.records import Environment, Suite
from harness.suite import shipped_roots


@dataclass(frozen=True, slots=True)
class Machine:
    """What `take` gives, for as long as it is held."""

    launcher: Launcher
    here: Environment
    lock: gpu_lock.GpuLock | None
    """None on the CPU."""


def take(
    held: ExitStack,
    suite: Suite,
    *,
    command: Sequence[str],
    wait_s: float,
    say: Callable[[str], None],
) -> Machine:
    """Lock the GPU before any worker touches it, then describe the machine.

    Args:
        held: Gives all of it back.
        suite: What is to be measured.
        command: What asks for it, for the record.
        wait_s: Longest wait for a GPU that another harness holds.
        say: Is told of that wait.

    Raises:
        SuiteError: The suite needs a GPU, and none is here.
        ProbeError: Another harness holds it.
        HarnessError: No worker can be started.
    """
    lock = gpu_lock.lock_first(held, suite.device, wait_s=wait_s, say=say)
    launcher = held.enter_context(Launcher.of(suite))
    here = environment.capture(
        launcher.describe(),
        command=command,
        repository=environment.home_of(suite.cases[0].factory, shipped_roots(suite)),
        cases=suite.cases,
    )
    lock = gpu_lock.lock_only(held, lock, here.gpu, wait_s=wait_s, say=say)
    require_gpu(suite, here)
    return Machine(launcher, here, lock)


def require_gpu(
    suite: Suite,
    here: Environment,
    remedy: str = "Run it on a GPU node. `harness list` shows what runs anywhere.",
) -> None:
    """Raise SuiteError, with the remedy, where the suite needs a GPU and there is none."""
    if suite.device == "cuda" and here.gpu is None:
        raise SuiteError(
            suite.path,
            f"this suite needs an NVIDIA GPU, and none is here: {here.gpu_unavailable}",
            remedy,
        )
