"""What tests of training share: a tiny model, and what a step of it did."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa.config import PRESETS
from nsa.flags import Flags
from nsa.train.config import TrainConfig
from nsa.train.data import ByteStream
from nsa.train.loop import Trainer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

QUICK_COMPILER = pytest.mark.usefixtures("quick_compiler")
TORCH_LOOKS_AT_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
"""The compiler reads .grad of every input; the warning shows only because it is an error here."""

TINY = PRESETS["tiny"]
DENSE = replace(TINY, attention="dense")
MASKED = Flags(force_sel_mask=True)
"""The quickest route on a CPU."""


def tiny(**settings) -> TrainConfig:
    """A step in milliseconds: the tiny model, 24 tokens."""
    return TrainConfig(**{"model": TINY, "seq_len": 24, "batch_size": 2, **settings})


def weights(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


def apart(one: Trainer, other: Trainer) -> float:
    """How far the weights of two are from each other, by norm."""
    return float((weights(one) - weights(other)).norm() / weights(other).norm())


def losses(config: TrainConfig, steps: int) -> list[float]:
    with Trainer(config) as trainer:
        return [trainer.step().item() for _ in range(steps)]


def planted(batches: Iterable[Tensor]) -> ByteStream:
    """A stream of these batches."""
    left = iter(batches)
    return ByteStream("planted", lambda: next(left).numpy())


class _Replayed:
    """A CapturedStep without a GPU: warms up in the same way, and then calls the step."""

    def __init__(self, step, batches, *, device, before_capture, ddp_stream) -> None:
        for _ in range(2):
            step(batches)
        before_capture()
        step(batches)  # what a capture records, but does not compute
        before_capture()
        self.step = step
        self.replays = 0

    def __call__(self, batches):
        self.replays += 1
        seen = self.step.__self__._seen
        loss = self.step(batches)
        self.step.__self__._seen = seen  # a replay shows Python nothing
        return loss


def graphs_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa.train.loop.CapturedStep", _Replayed)
    monkeypatch.setattr("nsa.train.loop._check_graph", lambda *_: None)


def step_on(trainer: Trainer, batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of a step on these batches, and the gradient that the optimiser was shown."""
    shown: list[Tensor] = []

    def spy(*_: object) -> None:
        shown.extend(p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None)

    trainer.stream = planted(batches)
    handle = trainer._optimiser.register_step_pre_hook(spy)
    loss = trainer.step()
    handle.remove()
    return loss, torch.cat(shown)


QUICK = ["--preset", "tiny", "--seq-len", "16", "--batch-size", "2", "--steps", "2", "--device=cpu"]
"""A run from the command line, in a second."""
