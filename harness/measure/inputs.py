"""What is run each time a sample is taken: the workload's run, on rotated inputs, or replayed.

Rotated inputs take turns, so that what a run reads has been pushed out of the cache by the runs
between. A replay of a CUDA graph leaves out what launching costs the host. Neither is ever
replaced by the plain run: a workload that cannot be arranged so is unsupported, with the reason.

Source: PyTorch, "CUDA semantics", section "CUDA Graphs": warm-up on a side stream, and what a
capture may not do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from harness.records import MeasureSettings, Scalar
from harness.workload import Unsupported, Workload

Run = Callable[[], Any]
WARM_UPS = 3
"""Runs before a capture: they compile, tune and make handles, which a capture may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """A run as the settings want it."""

    run: Run
    own_bytes: int
    """Device memory of the inputs that were added for rotation."""
    how: Mapping[str, Scalar]
    """What was arranged, for the effective configuration; empty where nothing was."""


def arrange(workload: Workload, settings: MeasureSettings) -> Arranged:
    """The run that is to be timed.

    Raises:
        Unsupported: The workload cannot rotate its inputs, or its run cannot be captured.
    """
    runs, own_bytes, how = [workload.run], 0, dict[str, Scalar]()
    if settings.rotate_inputs > 1:
        if workload.rotated is None:
            raise Unsupported("rotate_inputs: this workload offers no other inputs to rotate")
        before = _allocated_bytes()
        runs = list(workload.rotated(settings.rotate_inputs))
        if len(runs) != settings.rotate_inputs:
            raise ValueError(
                f"rotated({settings.rotate_inputs}) gave {len(runs)} runs; it must give as many"
            )
        added = _allocated_bytes() - before
        own_bytes = added - added // len(runs)
        how["rotated_inputs"] = len(runs)
    if settings.graph:
        if not workload.capturable:
            raise Unsupported(
                "graph: this workload does not say that its run may be captured; a replay might "
                "not do the work of a call"
            )
        if not torch.cuda.is_available():
            raise Unsupported("graph: replay needs a CUDA device")
        runs = [captured(run) for run in runs]
        how["timed_as"] = "graph replay"
    turns = cycle(runs)
    run = runs[0] if len(runs) == 1 else lambda: next(turns)()
    return Arranged(run=run, own_bytes=own_bytes, how=how)


def captured(run: Run) -> Run:
    """One run as a CUDA graph; calling the result replays it, and returns what it writes.

    Raises:
        Unsupported: The run cannot be captured, or its replay does not write what it returns.
    """
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
    except RuntimeError as error:  # torch's one class for what CUDA refuses
        raise Unsupported(f"graph: the run cannot be captured: {_first_line(error)}") from error

    def replay() -> Any:
        graph.replay()
        return output

    require_written(replay)
    return replay


def require_written(replay: Run) -> None:
    """Poison what a replay returns, replay, and look whether it was written again.

    Raises:
        Unsupported: Something was not: the captured run does less than the run.
    """
    outputs = _tensors(replay())
    for output in outputs.values():
        output.fill_(_poison(output))
    replay()
    missing = [name for name, output in outputs.items() if _poisoned(output)]
    if missing:
        raise Unsupported(f"graph: a replay does not write {', '.join(missing)}")


def _tensors(output: object) -> dict[str, Tensor]:
    """What can be poisoned: every tensor that can hold a value no computation returns."""
    named = output if isinstance(output, Mapping) else {"its output": output}
    return {
        str(name): value.detach()
        for name, value in named.items()
        if isinstance(value, Tensor) and value.numel() and value.dtype is not torch.bool
    }


def _poison(output: Tensor) -> float | int:
    if output.is_floating_point() or output.is_complex():
        return float("nan")
    return torch.iinfo(output.dtype).max


def _poisoned(output: Tensor) -> bool:
    """Whether all of it still is what it was filled with; a part may well be NaN by itself."""
    if output.is_floating_point() or output.is_complex():
        return bool(torch.isnan(output).all())
    return bool((output == torch.iinfo(output.dtype).max).all())


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
