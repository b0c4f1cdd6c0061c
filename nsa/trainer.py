"""One optimiser step after another: what is trained, how, and what was seen to run.

`TrainConfig` says what is asked for, `Trainer.step` does it, `Trainer.effective` tells what ran,
from the tensors and calls that went by. Nothing here reads the environment, prints or exits.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from nsa.config import ModelConfig
from nsa.data import Loader, check_dataset, open_stream
from nsa.flags import Flags, Launch, Prefill
from nsa.lm import ByteLM, cross_entropy, parse_checkpointing
from nsa.module import DenseAttention
from nsa.ops import Routes

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST: dict[Precision, torch.dtype | None] = {
    "fp32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_COMPRESS_HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


class TrainError(Exception):
    """Training cannot go as asked: the fact, then the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """What to train and how. Optimiser defaults are those of Llama (arXiv:2302.13971, 2.3)."""

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
    precision: Precision = "fp32"
    """Parameters are float32 always; bf16 and fp16 compute under autocast, fp16 scales the loss."""
    dataset: str = "text"
    """See nsa.data."""
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
    """How the branches of NSA are computed; as the flags say when None."""
    prefill: Prefill | None = None
    """`batched` or `token`; as the flags say when None."""
    loader_timeout_s: float = 60.0
    """Longest wait for data before it is a DataError."""

    def __post_init__(self) -> None:
        whole = ("seq_len", "batch_size", "accum", "steps")
        for name in (*whole, "lr", "clip", "initial_scale", "loader_timeout_s"):
            if not (value := getattr(self, name)) > 0:  # which NaN is not, either
                raise ValueError(f"{name}={value} must be positive")
        for name in ("warmup_steps", "seed", "weight_decay"):
            if not (value := getattr(self, name)) >= 0:
                raise ValueError(f"{name}={value} must be 0 or more")
        if self.seed >= 2**63:
            raise ValueError(
                f"seed={self.seed} must be under 2**63: torch's generator takes no more"
            )
        if self.precision not in AUTOCAST:
            raise ValueError(f"precision={self.precision!r} is none of {', '.join(AUTOCAST)}")
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


@dataclass(slots=True)
class _Seen:
    """What went by during one step."""

    calls: list[int]
    """Of each layer; one more per forward where it was recomputed."""
    forwards: int = 0
    batch: torch.Size | None = None
    logits: torch.dtype | None = None
    autocast: torch.dtype | None = None
    routes: Routes | str = ""
    """Of NSA the routes it was handed, of dense attention its backend."""
    prefill: str = ""


class Trainer:
    """A model, its optimiser and its data, on one device of one process.

    With `launch.world_size` above 1 the gradients are averaged over all processes (DDP), each of
    which reads data of its own; a process group must exist (see `process_group`).
    """

    def __init__(
        self, config: TrainConfig, flags: Flags | None = None, launch: Launch | None = None
    ) -> None:
        """Build the model from the seed, alike on every device, and open the data.

        Args:
            flags: Routes, prefill, loader and DDP settings; Flags() when None, which does not
                read the environment.

        Raises:
            DataError: The dataset is absent.
            TrainError: The device is absent.
        """
        flags = Flags() if flags is None else flags
        launch = Launch() if launch is None else launch
        self.config = config
        self.launch = launch
        self.device = training_device(config.device, launch)
        with torch.random.fork_rng(devices=[]):  # layers draw once more, from the global one
            self.model = ByteLM(
                config.model,
                dense_backend=config.dense_backend,
                aux_stats=not flags.disable_aux_stats,
                generator=torch.Generator().manual_seed(config.seed),
            ).to(self.device)
        self.steps_done = 0
        self.routes = flags.routes() if config.routes is None else config.routes
        self.prefill = flags.prefill if config.prefill is None else config.prefill
        self._layers = parse_checkpointing(config.checkpointing, config.model.n_layers)
        self._seen = self._nothing_seen()
        for layer, block in enumerate(self.model.blocks):
            self._watch(layer, block)
        self._ddp = _distribute(self.model, self.device, flags) if launch.world_size > 1 else None
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self._optimiser = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            fused=True,
        )
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=config.initial_scale,
            enabled=config.precision == "fp16",
        )
        self._loader = Loader(
            doc_batch=flags.fwe_doc_batch,
            prefetch=flags.fwe_prefetch,
            queue_depth=flags.fwe_q,
            timeout_s=config.loader_timeout_s,
        )
        self.stream = open_stream(
            config.dataset,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            seed=config.seed,
            rank=launch.rank,
            world_size=launch.world_size,
            loader=self._loader,
        )
        self._held_out: list[Tensor] = []

    @property
    def tokens_per_step(self) -> int:
        """Targets that one step of all processes learns from."""
        c = self.config
        return c.batch_size * c.seq_len * c.accum * self.launch.world_size

    def step(self) -> Tensor:
        """Take one optimiser step: forward, backward, accumulation, clipping, AdamW.

        Does not wait for the device.

        Returns:
            The mean loss in nats per byte of this process's batches, a scalar on the device,
            before the step changed the weights.

        Raises:
            DataError: The data ended, stalled or is malformed.
            nsa.ops.Unsupported: A route cannot run here.
        """
        self._seen = self._nothing_seen()
        accum = self.config.accum
        losses = []
        for i in range(accum):
            batch = self._to_device(next(self.stream))
            with self._no_reduction() if i < accum - 1 else nullcontext():
                loss = self._loss(batch, self._ddp or self.model)
                self._scaler.scale(loss / accum).backward()
            losses.append(loss.detach())
        self._update()
        return torch.stack(losses).mean()

    @torch.no_grad()
    def held_out_loss(self, batches: int) -> Tensor:
        """Mean loss in nats per byte over the held-out split's first batches, a scalar."""
        if len(self._held_out) != batches:
            with open_stream(
                self.config.dataset,
                batch_size=self.config.batch_size,
                seq_len=self.config.seq_len,
                split="held_out",
                loader=self._loader,
            ) as stream:
                self._held_out = [next(stream) for _ in range(batches)]
        seen = self._seen
        self._seen = self._nothing_seen()
        losses = [self._loss(self._to_device(batch), self.model) for batch in self._held_out]
        self._seen = seen
        return torch.stack(losses).mean()

    def effective(self) -> dict[str, bool | int | float | str]:
        """The configuration as the last step showed it, not as it was asked for.

        Shapes are those of the last batch; `gc` names the layers that ran again in the backward
        pass; routes and prefill are what the layers were handed (a route never gives way to
        another); dtypes are those of the tensors.

        Raises:
            RuntimeError: Before the first step.
        """
        seen = self._seen
        if seen.batch is None:
            raise RuntimeError("nothing has run yet; call step() first")
        routes = seen.routes if isinstance(seen.routes, str) else describe_routes(seen.routes)
        recomputed = {i for i, calls in enumerate(seen.calls) if calls == 2 * seen.forwards}
        return {
            "attention": self.config.model.attention,
            "seq_len": seen.batch[1] - 1,
            "batch": seen.batch[0],
            "accum": seen.forwards,
            "gc": describe_layers(recomputed, len(seen.calls)),
            "parameter_dtype": _names(p.dtype for p in self.model.parameters()),
            "autocast_dtype": _name(seen.autocast) if seen.autocast else "off",
            "logits_dtype": _name(seen.logits),
            "loss_scale": self._scaler.get_scale() if self._scaler.is_enabled() else 1.0,
            "routes": routes,
            "fa2": _fa2_providers(routes),
            "prefill": seen.prefill,
            "data": self.stream.description,
            "device": str(next(self.model.parameters()).device),
            "world_size": dist.get_world_size() if self._ddp is not None else 1,
            "parameters": self.model.num_parameters,
        }

    def close(self) -> None:
        """Stop the data loader."""
        self.stream.close()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_device(self, batch: Tensor) -> Tensor:
        if self.device.type == "cuda":
            return batch.pin_memory().to(self.device, non_blocking=True)
        return batch.to(self.device)

    def _loss(self, batch: Tensor, model: nn.Module) -> Tensor:
        dtype = AUTOCAST[self.config.precision]
        kind = self.device.type
        with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
            logits = model(
                batch[:, :-1],
                routes=self.routes,
                prefill=self.prefill,
                checkpointing=self._layers,
            )
            if torch.is_autocast_enabled(kind):
                self._seen.autocast = torch.get_autocast_dtype(kind)
        self._seen.batch, self._seen.logits = batch.shape, logits.dtype
        self._seen.forwards += 1
        return cross_entropy(logits, batch[:, 1:])

    def _update(self) -> None:
        for group in self._optimiser.param_groups:
            group["lr"] = self.config.learning_rate(self.steps_done)
        self._scaler.unscale_(self._optimiser)
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        self._scaler.step(self._optimiser)
        self._scaler.update()
        self._optimiser.zero_grad(set_to_none=True)
        self.steps_done += 1

    def _no_reduction(self) -> AbstractContextManager[object]:
        """Where gradients are only added up, not yet averaged over the processes."""
        return nullcontext() if self._ddp is None else self._ddp.no_sync()

    def _nothing_seen(self) -> _Seen:
        return _Seen(calls=[0] * self.config.model.n_layers)

    def _watch(self, layer: int, block: nn.Module) -> None:
        attention = block.get_submodule("attention")

        def note(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
            dense = isinstance(attention, DenseAttention)
            self._seen.calls[layer] += 1
            self._seen.routes = f"dense:{attention.backend}" if dense else given["routes"]
            self._seen.prefill = given["prefill"]

        block.register_forward_pre_hook(note, with_kwargs=True)


@contextmanager
def process_group(launch: Launch, device: str) -> Iterator[None]:
    """Join the other processes of a torchrun launch, over NCCL on GPUs and gloo on CPUs."""
    if launch.world_size == 1:
        yield
        return
    chosen = training_device(device, launch)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size)
    except (ValueError, dist.DistError) as error:
        raise TrainError(
            f"{launch.world_size} processes were announced, and cannot meet: {error}",
            "Start with torchrun.",
        ) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def training_device(device: str, launch: Launch) -> torch.device:
    """The device of this process: among several, `cuda` is the GPU numbered local_rank.

    Raises:
        TrainError: torch knows no such device, or it is not here.
    """
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise TrainError(f"device {device!r}: {error}", "Use cpu, cuda or cuda:N.") from error
    if chosen.type not in ("cpu", "cuda"):
        raise TrainError(f"device {device!r} is neither a CPU nor CUDA", "Use cpu, cuda or cuda:N.")
    if chosen.type == "cpu":
        return chosen
    number = launch.local_rank if chosen.index is None else chosen.index
    if number >= torch.cuda.device_count():
        raise TrainError(
            f"device {device!r}: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs, number {number} is not among them",
            "Use --device cpu, or a torch build and driver that see the GPU.",
        )
    return torch.device("cuda", number)


def describe_routes(routes: Routes) -> str:
    """`compress:eager,scores:eager,select:gather,window:eager`."""
    return ",".join(f"{f.name}:{getattr(routes, f.name)}" for f in fields(routes))


def describe_layers(layers: Collection[int], n_layers: int) -> str:
    """Checkpointed layers as parse_checkpointing reads them: `off`, `on`, `2-7`."""
    if not layers:
        return "off"
    if len(layers) == n_layers:
        return "on"
    first, last = min(layers), max(layers)
    if len(layers) == last - first + 1:
        return f"{first}-{last}"
    return ",".join(map(str, sorted(layers)))


def _distribute(model: ByteLM, device: torch.device, flags: Flags) -> DistributedDataParallel:
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=flags.ddp_bucket_mb,
        gradient_as_bucket_view=True,
    )
    if flags.ddp_compress != "off":
        try:
            ddp.register_comm_hook(None, _COMPRESS_HOOKS[flags.ddp_compress])
        except TypeError as error:  # bf16 over gloo
            raise TrainError(
                f"NSA_DDP_COMPRESS={flags.ddp_compress} over {dist.get_backend()}: {error}",
                "Use NSA_DDP_COMPRESS=fp16, or train on GPUs.",
            ) from error
    return ddp


def _fa2_providers(routes: str) -> str:
    """Who computed the branches that took a route through FlashAttention-2."""
    providers = []
    if "fa2-torch" in routes:
        providers.append(f"torch {torch.__version__}")
    if "fa2-package" in routes:
        providers.append(f"flash-attn {version('flash-attn')}")
    return ", ".join(providers) or "off"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _names(dtypes: Iterator[torch.dtype]) -> str:
    return ",".join(sorted({_name(dtype) for dtype in dtypes}))
