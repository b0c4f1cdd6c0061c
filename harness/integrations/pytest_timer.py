"""A timer for pytest-benchmark that waits for the GPU, so that it times work instead of launches.

    pytest --benchmark-timer=harness.integrations.pytest_timer.synchronised

For single tests: `@pytest.mark.benchmark(timer=pytest_timer.synchronised)`. Every reading waits for
all CUDA streams, which costs some microseconds: time shorter kernels with the harness, which uses
CUDA events.
"""

import sys
import time


def synchronised() -> float:
    """Seconds of time.perf_counter, after the current GPU has finished all work of this process.

    Neither imports torch nor initialises CUDA.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()
