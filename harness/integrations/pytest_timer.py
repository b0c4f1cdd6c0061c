"""A timer for pytest-benchmark that waits for the GPU, so that it times work and not launches.

    pytest --benchmark-timer=harness.integrations.pytest_timer.synchronised

For some tests only: `@pytest.mark.benchmark(timer=pytest_timer.synchronised)`. CUDA runs behind
the program that launches it, so every reading first waits for all streams. That wait costs some
microseconds: time shorter kernels by the harness, which reads CUDA's own events.
"""

import sys
import time


def synchronised() -> float:
    """Seconds of time.perf_counter, read once the current GPU has nothing left to do.

    A process that has not imported torch, or not used CUDA through it, is not made to: nothing of
    it can be running there.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
