"""The function that is timed: the workload's run, or its replay from a CUDA graph, which excludes
the host's time to launch.

Source: PyTorch, "CUDA semantics", section "CUDA Graphs": warm-up on a side stream, and what a
capture may not do.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from harness.records import MeasureSettings
from harness.workload import Unsupported, Workload

Run = Callable[[], Any]
WARM_UPS = 3
"""Steps before a capture: they compile, tune and create handles, which a capture must not."""


def prepare(workload: Workload, settings: MeasureSettings) -> Run:
    """The run to time; Unsupported if it cannot be captured."""
    if not settings.graph:
        return workload.run
    if not workload.capturable:
        why = "this workload is not marked capturable; a replay might do less than a call"
        raise Unsupported(f"graph: {why}")
    if not torch.cuda.is_available():
        raise Unsupported("graph: replay needs a CUDA device")
    return captured(workload.run)


def captured(run: Run) -> Run:
    """A function that replays a CUDA graph of one run and returns its outputs; Unsupported if the
    run cannot be captured, or a replay does not write its outputs."""
    stream: Any = torch.cuda.Stream()  # untyped in torch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            output = run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # torch has no narrower class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unsupported(f"graph: the run cannot be captured: {reason}") from error

    def replay() -> Any:
        graph.replay()
        return output

    require_written(replay)
    return replay


def require_written(replay: Run) -> None:
    """Overwrite the outputs of a replay (NaN, or the largest integer) and replay; Unsupported if
    that leaves an output as it was: it does less than the run."""
    returned = replay()
    named = returned if isinstance(returned, Mapping) else {"its output": returned}
    outputs = {
        str(name): value.detach()
        for name, value in named.items()
        if isinstance(value, Tensor) and value.numel() and value.dtype is not torch.bool
    }
    for output in outputs.values():
        output.fill_(_marker(output))
    replay()
    missing = [n for n, x in outputs.items() if ((x == _marker(x)) | x.isnan()).all()]
    if missing:
        raise Unsupported(f"graph: a replay does not write {', '.join(missing)}")


def _marker(output: Tensor) -> float | int:
    numbers = output.is_floating_point() or output.is_complex()
    return float("nan") if numbers else torch.iinfo(output.dtype).max
