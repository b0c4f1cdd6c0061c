"""A training step recorded once as a CUDA graph, and replayed: one launch for the whole step.

Source: PyTorch, "CUDA semantics", section "CUDA Graphs": warm-up on a side stream, static
inputs, everything the step allocates in the graph's own pool; and its "Usage with
DistributedDataParallel", where the graph has the collectives of NCCL, too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UPS = 3
"""Steps before the capture: they compile, tune and create handles, which a capture must not do."""
DDP_WARM_UPS = 11
"""The same with DDP, which times its first 10 averages by events that it waits for."""


class CaptureError(Exception):
    """The step does something that a CUDA graph cannot record, such as waiting for the device."""


class CapturedStep:
    """One step, the same launches at the same addresses each time."""

    def __init__(
        self,
        step: Callable[[Iterable[Tensor]], Tensor],
        batches: list[Tensor],
        *,
        device: torch.device,
        before_capture: Callable[[], None],
        ddp_stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Warm up, then record; the recording itself computes nothing.

        Args:
            step: Takes the batches of one step, on the device, and returns a scalar there. It
                must do the same work whenever it is called.
            batches: Batches for the warm-up, on the host; later ones have the same shapes.
            before_capture: Called between warm-up and capture, to undo what the warm-up changed.
            ddp_stream: The stream on which DDP was built, if the step averages gradients over
                ranks; all of them then capture and replay the same steps.

        Raises:
            CaptureError: The step ran but cannot be captured.
        """
        self._batches = [torch.empty_like(batch, device=device) for batch in batches]
        self._load(batches)
        self._graph = torch.cuda.CUDAGraph()
        # Gradients accumulate on the stream where a parameter was first used, and DDP uses each
        # when it is built: one stream for all.
        stream = ddp_stream or torch.cuda.Stream(device)
        with beside(stream):
            for _ in range(DDP_WARM_UPS if ddp_stream else WARM_UPS):
                step(self._batches)
            before_capture()
        # NCCL's watchdog, another thread, queries events at any time; "global" forbids it that.
        mode = "thread_local" if ddp_stream else "global"
        try:
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode=mode):
                self._out = step(self._batches)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # torch's one class for what CUDA refuses
            raise CaptureError(str(error).splitlines()[0]) from error

    def __call__(self, batches: list[Tensor]) -> Tensor:
        """Take a step on these batches, from the host; does not wait for the device."""
        self._load(batches)
        self._graph.replay()
        return self._out.clone()  # the next replay writes to the same place

    def _load(self, batches: list[Tensor]) -> None:
        for here, batch in zip(self._batches, batches, strict=True):
            here.copy_(batch.pin_memory(), non_blocking=True)


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run on another stream, between what the current one did and does next; on None, here."""
    if stream is None:
        yield
        return
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)
