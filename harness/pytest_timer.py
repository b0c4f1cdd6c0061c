"""A timer for pytest-benchmark that waits for the GPU, so that it times work and not launches.

    pytest --benchmark-timer=harness.pytest_timer.synchronised

or, for some tests only, `@pytest.mark.benchmark(timer=harness.pytest_timer.synchronised)`. CUDA
runs behind the program that launches it; every reading here first lets it catch up, on all of its
streams. That waiting costs some microseconds a reading: time kernels shorter than that by the
harness, which reads CUDA's own events.
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
