"""The training loop's body: one optimiser step, and a record of what it ran.

`TrainConfig` is the request, `Trainer.step` carries it out, and `Trainer.effective` reports what
ran, from the tensors and calls of the step. This module neither reads the environment nor prints.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa import roofline
from nsa.config import OFF, Routes
from nsa.errors import TrainError
from nsa.flags import Flags, Launch
from nsa.model.attention import DenseAttention
from nsa.model.compiled import compiled, runs
from nsa.model.language_model import ByteLM, cross_entropy, parse_checkpointing
from nsa.model.rotary import Rotation
from nsa.profiling import named_range
from nsa.roofline import peak_flops
from nsa.train.config import AUTOCAST, TrainConfig
from nsa.train.data import Loader, fetches, open_stream
from nsa.train.devices import ddp_settings, distribute, training_device
from nsa.train.graph import CapturedStep, CaptureError, beside

_launched = torch.optim.Optimizer.profile_hook_step(lambda optimiser: None)
"""Calls the hooks of an optimiser's step, which a replayed graph takes without a call of it."""


@dataclass(slots=True)
class _Seen:
    """What one step ran."""

    calls: list[int]
    """Calls of each layer; a recomputed layer counts twice per forward."""
    forwards: int = 0
    batch: torch.Size | None = None
    logits: torch.dtype | None = None
    autocast: torch.dtype | None = None
    routes: Routes | str = ""
    """The routes that NSA was given, or the backend of dense attention."""
    prefill: str = ""
    compiled: int = 0
    """Runs of compiled graphs in the forward passes."""
    replayed: bool = False
    """Whether the step replayed a CUDA graph; the rest was recorded at its capture."""


class Trainer:
    """A model, its optimiser and its data, on one device of one process.

    With `launch.world_size` above 1 the gradients are averaged over all ranks (DDP), each of
    which reads its own share of the data; a process group must exist (see `process_group`).
    """

    def __init__(
        self, config: TrainConfig, flags: Flags | None = None, launch: Launch | None = None
    ) -> None:
        """Build the model from the seed, with the same weights on every device, and open the data.

        Args:
            flags: Routes, prefill, loader and DDP settings; Flags() when None, which does not
                read the environment.

        Raises:
            DataError: The dataset is absent.
            TrainError: The device is absent, or cannot carry out the configuration.
        """
        flags = Flags() if flags is None else flags
        launch = Launch() if launch is None else launch
        self.config = config
        self.launch = launch
        self.device = training_device(config.device, launch)
        # Read a flag only where it decides something: Flags.asked_for reports what was read.
        dense = config.model.attention == "dense"
        self.routes = config.routes or (Routes() if dense else flags.routes())
        unused = launch.world_size > 1 and self.routes.compress == OFF  # phi then has no gradient
        if config.cuda_graph:
            _check_graph(config, self.device, unused)
        with torch.random.fork_rng(devices=[]):  # layers draw once more, from the global one
            self.model = ByteLM(
                config.model,
                dense_backend=config.dense_backend,
                aux_stats=dense or not flags.disable_aux_stats,
                generator=torch.Generator().manual_seed(config.seed),
            ).to(self.device)
        self.steps_done = 0
        self.gradient_norm = torch.zeros((), device=self.device)
        """Of the whole gradient in the last step, before clipping: a scalar on the device. NaN or
        Inf where fp16 overflowed, whose step is left out."""
        self.prefill = flags.prefill if config.prefill is None else config.prefill
        self._graph: CapturedStep | None = None
        self._rotation: tuple[int, torch.dtype, Rotation] | None = None
        self._layers = parse_checkpointing(config.checkpointing, config.model.n_layers)
        self._seen = self._nothing_seen()
        for layer, block in enumerate(self.model.blocks):
            self._watch(layer, block)
        self.ddp = self._ddp_stream = None
        if launch.world_size > 1:
            if config.cuda_graph and self.device.type == "cuda":
                self._ddp_stream = torch.cuda.Stream(self.device)
            with beside(self._ddp_stream):
                self.ddp = distribute(
                    self.model, self.device, flags, accum=config.accum, unused=unused
                )
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        others = [p for p in self.model.parameters() if p.ndim < 2]
        self._optimiser = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            # A graph reads the rate from its address at the capture.
            lr=torch.tensor(config.lr, device=self.device) if config.cuda_graph else config.lr,
            betas=config.betas,
            fused=True,
        )
        self._scaler = torch.amp.GradScaler(
            self.device.type,
            init_scale=config.initial_scale,
            enabled=config.precision == "fp16",
        )
        self.loader = Loader(timeout_s=config.loader_timeout_s)
        if fetches(config.dataset):
            self.loader = replace(
                self.loader,
                doc_batch=flags.fwe_doc_batch,
                prefetch=flags.fwe_prefetch,
                queue_depth=flags.fwe_q,
            )
        self.stream = open_stream(
            config.dataset,
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            seed=config.seed,
            rank=launch.rank,
            world_size=launch.world_size,
            loader=self.loader,
        )
        self._held_out: list[Tensor] = []

    @property
    def tokens_per_step(self) -> int:
        """Targets that one step of all ranks learns from."""
        c = self.config
        return c.batch_size * c.seq_len * c.accum * self.launch.world_size

    @property
    def flops_per_step(self) -> int:
        """Floating-point operations that one step of this process needs; see nsa.roofline."""
        c = self.config
        parts = self.routes.running()
        return c.accum * roofline.training_flops(
            c.model, batch=c.batch_size, tokens=c.seq_len, parts=parts
        )

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of this process's device by its data sheet; None if it is not in the table."""
        if self.device.type != "cuda":
            return None
        name = torch.cuda.get_device_name(self.device)
        return peak_flops(name, AUTOCAST[self.config.precision])

    def step(self, *, replay: bool = True) -> Tensor:
        """Take one optimiser step: forward, backward, accumulation, clipping, AdamW.

        Does not wait for the device, and draws the next batches while the device computes.

        Args:
            replay: Replay the CUDA graph, if the configuration has one; else launch each kernel,
                except at the first step, which captures.

        Returns:
            The mean loss in nats per byte of this process's batches before the weights change, a
            scalar on the device.

        Raises:
            DataError: The data ended, stalled or is malformed.
            nsa.ops.Unsupported: A route cannot run here.
            TrainError: The step does not compile, or cannot be captured.
        """
        batches = (self._drawn() for _ in range(self.config.accum))
        rate = self.config.learning_rate(self.steps_done)
        if self.config.cuda_graph and (replay or self._graph is None):
            loss, norm = self._replay(list(batches), rate).unbind()
        else:
            self._set_rate(rate)
            loss, norm = self._learn(self._to_device(batch) for batch in batches)
        self.gradient_norm = norm
        if self.device.type == "cuda":
            with named_range("nsa.data"):
                self.stream.prepare(self.config.accum)
        self.steps_done += 1
        return loss

    def _learn(self, batches: Iterable[Tensor], *, counts: bool = True) -> tuple[Tensor, Tensor]:
        """One optimiser step on batches on the device, at the rate that is set: its loss and
        gradient norm. Hooks of the optimiser hear of it only if it counts."""
        self._seen = self._nothing_seen()
        accum = self.config.accum
        losses = []
        for i, batch in enumerate(batches):
            ddp = self.ddp if i < accum - 1 else None  # these sums are not averaged over ranks
            with nullcontext() if ddp is None else ddp.no_sync():
                loss = self._loss(batch, self.ddp or self.model)
                threads = self.config.cuda_graph  # in a launched step they cost the host
                with torch.autograd.set_multithreading_enabled(threads):
                    self._scaler.scale(loss / accum).backward()
            losses.append(loss.detach())
        with named_range("nsa.optimiser"):
            norm = self._update(counts)
        return torch.stack(losses).mean(), norm

    def _replay(self, batches: list[Tensor], rate: float) -> Tensor:
        """The same by a CUDA graph, which is captured at the first step; both in one tensor."""
        if self._graph is None:
            self._set_rate(0.0)  # the warm-up must not change the weights
            state = self._optimiser.state.items()
            kept = {p: {name: value.clone() for name, value in s.items()} for p, s in state}
            try:
                self._graph = CapturedStep(
                    self._recorded,
                    batches,
                    device=self.device,
                    before_capture=partial(self._forget, kept),
                    ddp_stream=self._ddp_stream,
                )
            except CaptureError as error:
                raise TrainError(
                    f"this step cannot be captured as a CUDA graph: {error}",
                    "Choose routes that do not wait for the device (nsa/README.md), or use "
                    "--no-cuda-graph.",
                ) from error
        self._seen.replayed = True
        self._set_rate(rate)
        out = self._graph(batches)
        _launched(self._optimiser)
        return out

    def _recorded(self, batches: Iterable[Tensor]) -> Tensor:
        return torch.stack(self._learn(batches, counts=False))

    def _forget(self, kept: dict[Tensor, dict[str, Tensor]]) -> None:
        """Give the optimiser the state from before the warm-up, and allow its capture."""
        for p, state in self._optimiser.state.items():
            for name, value in state.items():
                value.copy_(kept[p][name]) if p in kept else value.zero_()
        for group in self._optimiser.param_groups:
            group["capturable"] = True

    @torch.no_grad()
    def held_out_loss(self, batches: int) -> Tensor:
        """Mean loss in nats per byte over the held-out split's first batches, a scalar."""
        if len(self._held_out) != batches:
            with open_stream(
                self.config.dataset,
                batch_size=self.config.batch_size,
                seq_len=self.config.seq_len,
                split="held_out",
                loader=self.loader,
            ) as stream:
                self._held_out = [next(stream) for _ in range(batches)]
        seen = self._seen
        self._seen = self._nothing_seen()
        losses = [self._loss(self._to_device(batch), self.model) for batch in self._held_out]
        self._seen = seen
        return torch.stack(losses).mean()

    def effective(self) -> dict[str, bool | int | float | str]:
        """The configuration that the last step ran with, observed and not copied from the request.

        Shapes are those of the last batch; `gc` names the layers that ran again in the backward
        pass; routes and prefill are those that the layers received (a route never falls back to
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
            "compile": "on" if seen.compiled else "off",
            "graph": "on" if seen.replayed else "off",
            "parameter_dtype": _names(p.dtype for p in self.model.parameters()),
            "autocast_dtype": _name(seen.autocast) if seen.autocast else "off",
            "precision": _precision(seen.autocast, self.model),
            "logits_dtype": _name(seen.logits),
            "loss_scale": self._scaler.get_scale() if self._scaler.is_enabled() else 1.0,
            "routes": routes,
            "fa2": _fa2_providers(routes),
            "prefill": seen.prefill,
            "data": self.stream.description,
            "device": str(next(self.model.parameters()).device),
            "world_size": dist.get_world_size() if self.ddp is not None else 1,
            "parameters": self.model.num_parameters,
            **ddp_settings(self.ddp),
        }

    def close(self) -> None:
        """Stop the data loader, and free the CUDA graph, for whose end NCCL would wait."""
        self.stream.close()
        self._graph = None

    def tensors(self) -> dict[str, Tensor]:
        """The weights and the optimiser's state themselves, by name."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, p in self.model.named_parameters():
            state = self._optimiser.state[p]
            if not state:  # as AdamW begins, at a parameter's first gradient
                state["step"] = torch.zeros((), device=self.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            found |= {f"optimiser.{name}.{key}": value for key, value in state.items()}
        return found

    def position(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the tensors."""
        return {"step": self.steps_done, "scaler": self._scaler.state_dict()}

    def continue_after(self, steps_done: int, scaler: dict[str, Any]) -> None:
        """Go on from a checkpoint whose tensors are loaded: read the data of its steps again."""
        self._scaler.load_state_dict(scaler)
        self.steps_done = steps_done
        for _ in range(steps_done * self.config.accum):
            next(self.stream)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drawn(self) -> Tensor:
        with named_range("nsa.data"):
            return next(self.stream)

    def _to_device(self, batch: Tensor) -> Tensor:
        with named_range("nsa.data"):
            if self.device.type == "cuda":
                return batch.pin_memory().to(self.device, non_blocking=True)
            return batch.to(self.device)

    def _loss(self, batch: Tensor, model: nn.Module) -> Tensor:
        dtype = AUTOCAST[self.config.precision]
        kind = self.device.type
        compile_parts = self.config.compile == "on"
        before = runs()
        with _compiling() if compile_parts else nullcontext():
            with torch.autocast(kind, dtype=dtype, enabled=dtype is not None):
                logits = model(
                    batch[:, :-1],
                    routes=self.routes,
                    prefill=self.prefill,
                    checkpointing=self._layers,
                    rotation=self._turns(batch.shape[1] - 1),
                    compile_parts=compile_parts,
                )
                if torch.is_autocast_enabled(kind):
                    self._seen.autocast = torch.get_autocast_dtype(kind)
            measure = compiled(cross_entropy) if compile_parts else cross_entropy
            with named_range("nsa.loss"):
                loss = measure(logits, batch[:, 1:])
        self._seen.batch, self._seen.logits = batch.shape, logits.dtype
        self._seen.forwards += 1
        self._seen.compiled += runs() - before
        return loss

    def _turns(self, length: int) -> Rotation:
        """The rotary tables for this many tokens, kept from one step to the next."""
        weight = self.model.embedding.weight
        if self._rotation is None or self._rotation[:2] != (length, weight.dtype):
            turns = Rotation.of(self.config.model, length, like=weight)
            self._rotation = (length, weight.dtype, turns)
        return self._rotation[2]

    def _set_rate(self, rate: float) -> None:
        for group in self._optimiser.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _update(self, counts: bool) -> Tensor:
        self._scaler.unscale_(self._optimiser)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if counts:
            self._scaler.step(self._optimiser)
        else:  # not in fp16
            type(self._optimiser).step.__wrapped__(self._optimiser)  # type: ignore[attr-defined]
        self._scaler.update()
        self._optimiser.zero_grad(set_to_none=True)
        return norm

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


def _check_graph(config: TrainConfig, device: torch.device, unused: bool) -> None:
    """Raise TrainError where a step cannot be a CUDA graph."""
    without = "or use --no-cuda-graph."
    if device.type != "cuda":
        raise TrainError(f"a CUDA graph needs a GPU, not {device}", f"Use --device cuda, {without}")
    if unused:
        raise TrainError(
            "a CUDA graph cannot train without the compress branch on several ranks: DDP then "
            "waits at each step for the list of parameters without a gradient",
            f"Train with this branch, {without}",
        )
    if config.precision == "fp16":
        raise TrainError(
            "a CUDA graph cannot train in fp16: the loss scale decides whether to apply a step",
            f"Use --precision bf16, {without}",
        )


@contextmanager
def _compiling() -> Iterator[None]:
    """Turn a failure of the compiler into a TrainError; nothing runs uncompiled instead."""
    from torch._dynamo.exc import TorchDynamoException  # slow to import, and rarely needed

    try:
        yield
    except TorchDynamoException as error:
        reason = " ".join(str(error).strip().partition("\n\n")[0].split())
        raise TrainError(
            f"torch.compile failed: {reason}",
            "Install a C compiler (gcc) if none is found, or use --compile off.",
        ) from error


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


def _fa2_providers(routes: str) -> str:
    """The library behind each route through FlashAttention-2."""
    providers = []
    if "fa2-torch" in routes:
        providers.append(f"torch {torch.__version__}")
    if "fa2-package" in routes:
        providers.append(f"flash-attn {version('flash-attn')}")
    return ", ".join(providers) or "off"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _precision(autocast: torch.dtype | None, model: nn.Module) -> str:
    """The dtype of matrix products, by its name in TrainConfig.precision."""
    computed = autocast or next(model.parameters()).dtype
    names = {dtype or torch.float32: name for name, dtype in AUTOCAST.items()}
    return names.get(computed, _name(computed))


def _names(dtypes: Iterator[torch.dtype]) -> str:
    return ",".join(sorted({_name(dtype) for dtype in dtypes}))
