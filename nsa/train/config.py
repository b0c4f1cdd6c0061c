"""What to train, and how: one frozen record, checked before anything is built."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from nsa.config import ModelConfig, Routes
from nsa.flags import Prefill
from nsa.model.language_model import parse_checkpointing
from nsa.train.data import check_dataset

Compile = Literal["off", "on"]
COMPILE: tuple[Compile, ...] = get_args(Compile)
Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST: dict[Precision, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train, and how. Optimiser defaults are those of Llama (arXiv:2302.13971, 2.3)."""

    model: ModelConfig
    dense_backend: str = "sdpa"
    """Route of nsa.ops.dense_attention, where the model's attention is dense."""
    seq_len: int
    """Tokens per row (T)."""
    batch_size: int = 1
    """Rows per forward (B)."""
    accum: int = 1
    """Forwards whose gradients are averaged into one optimiser step."""
    checkpointing: str = "off"
    """Layers recomputed in the backward pass: `off`, `on`, or a range such as `2-7`."""
    compile: Compile = "off"
    """Whether everything but the attention itself runs compiled (torch.compile)."""
    cuda_graph: bool = False
    """Whether a step is recorded as a CUDA graph and replayed. Only on a GPU, and not with fp16,
    where the loss scale decides at every step whether to apply it."""
    precision: Precision = "fp32"
    """Parameters are always float32; bf16 and fp16 compute under autocast, fp16 scales the loss."""
    dataset: str = "text"
    """See nsa.train.data."""
    steps: int = 100
    """Length of the learning-rate schedule; stepping on past it keeps the last rate."""
    lr: float = 1e-3
    """Peak learning rate: reached linearly, then a cosine down to min_lr_ratio of it."""
    warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    """On matrices only, not on norms and biases."""
    clip: float = 1.0
    """Largest norm of the whole gradient."""
    seed: int = 0
    """Decides weights and data."""
    initial_scale: float = 2.0**16
    """First loss scale of fp16."""
    device: str = "cpu"
    """`cpu`, `cuda`, or one GPU such as `cuda:1`."""
    routes: Routes | None = None
    """Routes of the NSA branches; None leaves the choice to the flags."""
    prefill: Prefill | None = None
    """`batched` or `token`; None leaves the choice to the flags."""
    loader_timeout_s: float = 60.0
    """Longest wait for data before it is a DataError."""

    def __post_init__(self) -> None:
        whole = ("seq_len", "batch_size", "accum", "steps")
        for name in (*whole, "lr", "clip", "initial_scale", "loader_timeout_s"):
            if not (value := getattr(self, name)) > 0:  # NaN is not
                raise ValueError(f"{name}={value} must be positive")
        if self.lr == math.inf:
            raise ValueError("lr=inf must be finite")
        for name in ("warmup_steps", "seed", "weight_decay"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name}={value} must be 0 or more")
        if self.seed >= 2**63:
            raise ValueError(
                f"seed={self.seed} must be under 2**63, the limit of torch's generator"
            )
        if self.compile not in COMPILE:
            raise ValueError(f"compile={self.compile!r} is neither 'off' nor 'on'")
        if self.precision not in AUTOCAST:
            raise ValueError(f"precision={self.precision!r} is not one of {', '.join(AUTOCAST)}")
        check_dataset(self.dataset)
        parse_checkpointing(self.checkpointing, self.model.n_layers)

    def learning_rate(self, step: int) -> float:
        """Rate of a step, counted from 0: linear warm-up, then a cosine.

        Source: Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, without restarts.
        """
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        done = min(1.0, (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps))
        low = self.lr * self.min_lr_ratio
        return low + (self.lr - low) * (1 + math.cos(math.pi * done)) / 2
