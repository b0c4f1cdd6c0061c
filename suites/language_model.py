"""The byte-level language model: a training step, a forward pass, decoding."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from harness.records import Scalar
from harness.workload import Workload
from nsa import roofline
from nsa.config import PRESETS, ModelConfig, Routes
from nsa.flags import Flags, Prefill
from nsa.model.cache import DenseCache, LayerCache
from nsa.model.language_model import ByteLM, cross_entropy
from nsa.routes import fa2
from nsa.train.__main__ import PRESET_SETTINGS
from nsa.train.config import AUTOCAST, COMPILE, TrainConfig
from nsa.train.data import DataError, bits_per_byte, check_dataset
from nsa.train.loop import Trainer, describe_routes
from suites.axes import DENSE, DTYPES, Axes, AxisError, word_of

SEED = 0
PROVIDERS = ("nsa", *DENSE)
TRAINED_BY: Mapping[str, Routes] = {
    "reference": Routes.reference(),
    "eager": Routes(),
    "triton": Routes.triton(),
    **{p: Routes(compress=p, window=p) for p in fa2.PROVIDERS},
}
"""More providers of `train`: NSA by these routes, in place of those of the flags."""
CHECKED_TOKENS: Mapping[Prefill, int] = {"batched": 1024, "token": 96}
"""First tokens, on which accuracy is compared: the reference holds a [T, T] mask per head and
layer, and taking queries one by one costs hundreds of launches each."""


FAULTS = ("none", "hang", "slow", "nan")
"""What can be planted in one step of a training run."""
SLOW_S = 1.0
"""Delay of a planted slow step."""


def train_config(
    provider: str, axes: Mapping[str, Scalar], flags: Flags, *, run: bool = False
) -> TrainConfig:
    """Check the axes of one case of `train`, or of `training_run`."""
    given = Axes("training_run" if run else "train", axes, flags)
    whole: dict[str, Any] = {}
    if run:
        whole["steps"] = given.integer("steps")
        settings = PRESET_SETTINGS[given.word("preset", PRESETS)]
        whole |= {name: value for name, value in settings.items() if name == "lr"}
        given.word("fault", FAULTS, "none")
        given.integer("fault_at", 5)
    if provider in TRAINED_BY:
        given.unrouted(f"{provider} sets every route")
    dataset = given.text("dataset", "synthetic")
    try:
        check_dataset(dataset)
    except DataError as error:
        raise AxisError(f"dataset: {error}") from error
    config = TrainConfig(
        **whole,
        model=_model_config(provider, given, (*PROVIDERS, *TRAINED_BY)),
        routes=TRAINED_BY.get(provider),
        dense_backend=DENSE.get(provider, "sdpa"),
        seq_len=given.integer("seq_len"),
        batch_size=given.integer("batch", 1),
        accum=given.integer("accum", 1),
        checkpointing=given.text("gc", "off"),
        compile=given.word("compile", COMPILE, "off"),
        cuda_graph=given.word("graph", ("off", "on"), "off") == "on",
        precision=given.word("precision", AUTOCAST),
        dataset=dataset,
        seed=SEED,
        device=_device(),
    )
    given.finish()
    return config


def train(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """One optimiser step: data, forward, backward, clipping, AdamW.

    Axes: preset, seq_len, batch, accum, gc, compile, graph, dataset, precision. The provider, or if
    it is `nsa` the NSA_* flags, choose the routes. Accuracy is compared before the first step,
    compiled if the case is: every token's loss, and the gradient that reaches the embedding.
    """
    flags = Flags.from_env()
    return _training(train_config(provider, axes, flags), flags)[1]


def _training(config: TrainConfig, flags: Flags) -> tuple[Trainer, Workload]:
    trainer = Trainer(config, flags)
    model, autocast = trainer.model, AUTOCAST[config.precision]
    length = min(config.seq_len, CHECKED_TOKENS[trainer.prefill])
    tokens = _random_bytes(1, length + 1, trainer.device)
    exact, compiled = Routes.reference(trainer.routes.running()), config.compile == "on"

    def check() -> dict[str, Tensor]:
        with _autocast(trainer.device, autocast):
            return _learned(model, tokens, trainer.routes, trainer.prefill, compile_parts=compiled)

    def eager() -> dict[str, Tensor]:
        with _autocast(trainer.device, autocast):
            return _learned(_definition(model, torch.float32), tokens, exact)

    workload = Workload(
        run=trainer.step,
        check=check,
        reference=lambda: _learned(_definition(model, torch.float64), tokens, exact),
        eager=eager,
        tokens=trainer.tokens_per_step,
        flops=trainer.flops_per_step,
        effective=lambda: {**trainer.effective(), **_sizes(model), "checked_tokens": length},
        flags=flags.asked_for,
        stateful=True,
        unreplayed=partial(trainer.step, replay=False) if config.cuda_graph else None,
    )
    return trainer, workload


def training_run(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """So many steps of one training, each with its loss, gradient norm and memory on record.

    Axes: those of `train`; steps; fault and fault_at, which plant a hang, a slow step or NaN in the
    weights (FAULTS) in that step, to see what the harness says of it. The learning rate is that of
    the preset.
    """
    flags = Flags.from_env()
    trainer, workload = _training(train_config(provider, axes, flags, run=True), flags)
    fault, at = axes.get("fault", "none"), axes.get("fault_at", 5)
    loss = torch.zeros(())

    def run() -> dict[str, Tensor]:
        nonlocal loss
        if trainer.steps_done + 1 == at:
            _plant(str(fault), trainer.model)
        loss = trainer.step()
        return {"loss": loss}

    def recorded() -> dict[str, float | Tensor]:
        nats = loss.item()
        values = {"loss": nats, "bits_per_byte": bits_per_byte(nats)}
        if trainer.device.type == "cuda":
            values["memory_bytes"] = torch.cuda.memory_allocated(trainer.device)
        return {**values, "grad_norm": trainer.gradient_norm}

    return replace(workload, run=run, recorded=recorded, steps=trainer.config.steps)


def _plant(fault: str, model: ByteLM) -> None:
    while fault == "hang":
        time.sleep(3600)
    if fault == "slow":
        time.sleep(SLOW_S)
    if fault == "nan":
        with torch.no_grad():
            model.embedding.weight.fill_(math.nan)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePlan:
    """One case of `forward`, or of `decode` with new tokens after the first T."""

    model: ModelConfig
    backend: str
    dtype: torch.dtype
    B: int
    T: int
    new_tokens: int = 0


def forward_plan(
    provider: str, axes: Mapping[str, Scalar], flags: Flags, workload: str = "forward"
) -> InferencePlan:
    """Check the axes of one case of `forward`, or of `layer`, the first one of this model."""
    given = Axes(workload, axes, flags)
    return _inference_plan(provider, given, T=given.integer("seq_len"))


def decode_plan(provider: str, axes: Mapping[str, Scalar], flags: Flags) -> InferencePlan:
    """Check the axes of one case of `decode`."""
    given = Axes("decode", axes, flags)
    new_tokens = given.integer("new_tokens", 1)
    return _inference_plan(provider, given, T=given.integer("context"), new_tokens=new_tokens)


def forward(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """The logits of every position, without gradients.

    Axes: preset, seq_len, batch, precision (of the weights). The NSA_* flags choose routes and
    prefill.
    """
    flags = Flags.from_env()
    plan = forward_plan(provider, axes, flags)
    model = _inference_model(plan, flags)
    tokens = _random_bytes(plan.B, plan.T, _device())
    length = min(plan.T, CHECKED_TOKENS[flags.prefill])
    handed, seen = _watch(model), dict[str, Scalar]()

    @torch.no_grad()
    def logits(count: int) -> Tensor:
        out: Tensor = model(
            tokens[:, :count], routes=_routes(plan.model, flags), prefill=flags.prefill
        )
        return out

    def run() -> Tensor:
        out = logits(plan.T)
        seen.update(_observed(model, out, handed), seq_len=out.shape[1])
        return out

    return Workload(
        run=run,
        check=lambda: {"logits": logits(length)},
        reference=partial(_defined_logits, model, tokens[:, :length], torch.float64),
        eager=partial(_defined_logits, model, tokens[:, :length], plan.dtype),
        tokens=plan.B * plan.T,
        flops=roofline.forward_flops(plan.model, batch=plan.B, tokens=plan.T),
        effective=lambda: {**seen, "checked_tokens": length},
        flags=flags.asked_for,
        stateful=False,
        capturable=True,
    )


def layer(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """One attention layer, called as a model of another project would, without gradients. (ByteLM
    calls its parts, to compile them.)

    Axes and flags are those of `forward`.
    """
    flags = Flags.from_env()
    plan = forward_plan(provider, axes, flags, "layer")
    model = _inference_model(plan, flags)
    rng = torch.Generator().manual_seed(SEED)
    x = torch.randn(plan.B, plan.T, plan.model.dim, generator=rng).to(_device(), plan.dtype)
    seen = dict[str, Scalar]()

    @torch.no_grad()
    def attended(model: ByteLM, x: Tensor, routes: Routes, prefill: Prefill) -> Tensor:
        attention = model.blocks[0].get_submodule("attention")
        out: Tensor = attention(x, routes=routes, prefill=prefill)
        return out

    def run() -> Tensor:
        routes = _routes(plan.model, flags)
        out = attended(model, x, routes, flags.prefill)
        handed = {"routes": routes, "prefill": flags.prefill}
        seen.update(_observed(model, out, handed), seq_len=out.shape[1])
        return out

    def defined(dtype: torch.dtype) -> dict[str, Tensor]:
        exact = _definition(model, dtype)
        return {"o": attended(exact, x.to(dtype), Routes.reference(), "batched")}

    return Workload(
        run=run,
        check=lambda: {"o": run()},
        reference=partial(defined, torch.float64),
        eager=partial(defined, plan.dtype),
        tokens=plan.B * plan.T,
        effective=lambda: seen,
        flags=flags.asked_for,
        stateful=False,
        capturable=True,
    )


def decode(provider: str, axes: Mapping[str, Scalar]) -> Workload:
    """new_tokens more tokens after a context, one by one through the cache.

    Axes: preset, context, batch, new_tokens, precision. The tokens are given, not drawn, and
    every step continues from the same context, so that all steps do the same work. The NSA_*
    flags choose routes, and how the context is prefilled, which is not timed.
    """
    flags = Flags.from_env()
    plan = decode_plan(provider, axes, flags)
    model = _inference_model(plan, flags)
    tokens = _random_bytes(plan.B, plan.T + plan.new_tokens, _device())
    handed, seen = _watch(model), dict[str, Scalar]()

    @torch.no_grad()
    def prefilled(context: int) -> list[LayerCache] | list[DenseCache]:
        caches = model.new_caches(context + plan.new_tokens)
        routes = _routes(plan.model, flags)
        model(tokens[:, :context], routes=routes, prefill=flags.prefill, caches=caches)
        return caches

    @torch.no_grad()
    def continued(caches: list[LayerCache] | list[DenseCache], context: int) -> Tensor:
        """Logits [B, new_tokens, V] of the tokens after the context; restores the caches."""
        rewinds = [cache.mark() for cache in caches]
        routes = _routes(plan.model, flags)
        steps = [
            model(tokens[:, t : t + 1], routes=routes, caches=caches)
            for t in range(context, context + plan.new_tokens)
        ]
        for rewind in rewinds:
            rewind()
        return torch.cat(steps, 1)

    caches = prefilled(plan.T)
    prefill = handed["prefill"]
    checked = min(plan.T, CHECKED_TOKENS[flags.prefill])

    def run() -> Tensor:
        out = continued(caches, plan.T)
        seen.update(_observed(model, out, handed), new_tokens=out.shape[1])
        seen.update(context=caches[0].length, prefill=prefill)
        return out

    defined = partial(_defined_logits, model, tokens[:, : checked + plan.new_tokens])
    return Workload(
        run=run,
        check=lambda: {"logits": continued(prefilled(checked), checked)},
        reference=lambda: {"logits": defined(torch.float64)["logits"][:, checked:]},
        eager=lambda: {"logits": defined(plan.dtype)["logits"][:, checked:]},
        tokens=plan.B * plan.new_tokens,
        flops=roofline.forward_flops(
            plan.model, batch=plan.B, tokens=plan.new_tokens, q_start=plan.T
        ),
        effective=lambda: {**seen, "checked_context": checked},
        flags=flags.asked_for,
        stateful=False,
    )


def _model_config(provider: str, given: Axes, providers: Iterable[str] = PROVIDERS) -> ModelConfig:
    given.provider(provider, providers)
    if provider in DENSE:
        given.unrouted("dense attention has no branches")
    preset = PRESETS[given.word("preset", PRESETS)]
    return replace(preset, attention="dense" if provider in DENSE else "nsa")


def _inference_plan(provider: str, given: Axes, *, T: int, new_tokens: int = 0) -> InferencePlan:
    if provider not in DENSE:
        given.every_branch()
    plan = InferencePlan(
        model=_model_config(provider, given),
        backend=DENSE.get(provider, "sdpa"),
        dtype=DTYPES[given.word("precision", DTYPES, "fp32")],
        B=given.integer("batch", 1),
        T=T,
        new_tokens=new_tokens,
    )
    given.finish()
    return plan


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _random_bytes(B: int, T: int, device: torch.device | str) -> Tensor:
    rng = torch.Generator().manual_seed(SEED)
    return torch.randint(256, (B, T), generator=rng).to(device)


def _inference_model(plan: InferencePlan, flags: Flags) -> ByteLM:
    model = ByteLM(
        plan.model,
        dense_backend=plan.backend,
        aux_stats=plan.model.attention == "dense" or not flags.disable_aux_stats,
        generator=torch.Generator().manual_seed(SEED),
    )
    return model.to(_device(), plan.dtype).eval()


def _routes(model: ModelConfig, flags: Flags) -> Routes:
    """The routes that the flags choose; dense attention reads none."""
    return Routes() if model.attention == "dense" else flags.routes()


def _sizes(model: ByteLM) -> dict[str, Scalar]:
    """The preset whose sizes the parameters have, and the sizes in words for a page."""
    sizes = (len(model.blocks), *model.embedding.weight.shape)
    presets = {(c.n_layers, c.vocab_size, c.dim): name for name, c in PRESETS.items()}
    preset = presets.get(sizes, f"{sizes[0]} layers of {sizes[2]}")
    of, sparse = model.config, model.config.nsa
    words = (
        f"{preset}: {sizes[0]} layers of {sizes[2]}, {of.n_heads} query and {of.n_kv_heads} key "
        f"heads of {of.head_dim_qk}, feed forward {of.ffn_dim}"
    )
    if of.attention == "nsa":
        words += (
            f"; NSA l={sparse.compress_block_size}, d={sparse.compress_stride}, "
            f"l'={sparse.select_block_size}, n={sparse.num_blocks}, w={sparse.window_size}"
        )
    return {"preset": preset, "model": f"{words}; {model.num_parameters / 1e6:.1f} M parameters"}


def _definition(model: ByteLM, dtype: torch.dtype) -> ByteLM:
    """The same weights in a model that computes every branch as defined, by reference routes."""
    with torch.device("meta"):  # to draw the weights of 125m takes a second
        copy = ByteLM(model.config, dense_backend="reference", aux_stats=False)
    weights = {name: x.to(dtype, copy=True) for name, x in model.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return copy


def _learned(
    model: ByteLM,
    tokens: Tensor,
    routes: Routes,
    prefill: Prefill = "batched",
    *,
    compile_parts: bool = False,
) -> dict[str, Tensor]:
    """Loss of every token, [1, T], and the gradient of their mean for the embedding."""
    logits = model(tokens[:, :-1], routes=routes, prefill=prefill, compile_parts=compile_parts)
    losses = cross_entropy(logits, tokens[:, 1:], reduction="none")
    (gradient,) = torch.autograd.grad(losses.mean(), [model.embedding.weight])
    return {"loss": losses.detach(), "d_embedding": gradient}


@torch.no_grad()
def _defined_logits(model: ByteLM, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"logits": _definition(model, dtype)(tokens, routes=Routes.reference())}


def _watch(model: ByteLM) -> dict[str, Any]:
    """The routes and prefill that the last layer received, updated at each forward."""
    handed: dict[str, Any] = {}

    def note(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
        handed.update(routes=given["routes"], prefill=given["prefill"])

    model.blocks[-1].register_forward_pre_hook(note, with_kwargs=True)
    return handed


def _observed(model: ByteLM, out: Tensor, handed: Mapping[str, Any]) -> dict[str, Scalar]:
    """The configuration that one forward ran with."""
    dense = model.config.attention == "dense"
    attention = model.blocks[-1].get_submodule("attention")
    return {
        "attention": model.config.attention,
        **_sizes(model),
        "batch": out.shape[0],
        "precision": word_of(next(model.parameters()).dtype),
        "dtype": str(out.dtype).removeprefix("torch."),
        "routes": f"dense:{attention.backend}" if dense else describe_routes(handed["routes"]),
        "prefill": handed["prefill"],
        "device": str(out.device),
        "parameters": model.num_parameters,
    }


@contextmanager
def _autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        yield
