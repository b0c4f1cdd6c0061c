"""The byte-level language model in training: an optimiser step, and a run of many."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from harness.records import Scalar
from harness.workload import Workload
from nsa.config import PRESETS, Routes
from nsa.flags import Flags, Prefill
from nsa.model.language_model import ByteLM, cross_entropy
from nsa.routes import fa2
from nsa.train.__main__ import PRESET_SETTINGS
from nsa.train.config import AUTOCAST, COMPILE, TrainConfig
from nsa.train.data import DataError, bits_per_byte, check_dataset
from nsa.train.loop import Trainer
from suites.axes import DENSE, Axes, AxisError, target_device
from suites.language_model import (
    CHECKED_TOKENS,
    PROVIDERS,
    SEED,
    definition,
    model_config,
    random_bytes,
    sizes_of,
)

TRAINED_BY: Mapping[str, Routes] = {
    "reference": Routes.reference(),
    "eager": Routes(),
    "triton": Routes.triton(),
    **{p: Routes(compress=p, window=p) for p in fa2.PROVIDERS},
}
"""More providers of `train`: NSA by these routes, in place of those of the flags."""
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
        model=model_config(provider, given, (*PROVIDERS, *TRAINED_BY)),
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
        device=target_device(),
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
    model, dtype = trainer.model, AUTOCAST[config.precision]
    cast = partial(torch.autocast, trainer.device.type, dtype=dtype, enabled=dtype is not None)
    length = min(config.seq_len, CHECKED_TOKENS[trainer.prefill])
    tokens = random_bytes(1, length + 1, trainer.device)
    exact, compiled = Routes.reference(trainer.routes.running()), config.compile == "on"

    def check() -> dict[str, Tensor]:
        with cast():
            return _learned(model, tokens, trainer.routes, trainer.prefill, compile_parts=compiled)

    def eager() -> dict[str, Tensor]:
        with cast():
            return _learned(definition(model, torch.float32), tokens, exact)

    workload = Workload(
        run=trainer.step,
        check=check,
        reference=lambda: _learned(definition(model, torch.float64), tokens, exact),
        eager=eager,
        tokens=trainer.tokens_per_step,
        flops=trainer.flops_per_step,
        effective=lambda: {**trainer.effective(), **sizes_of(model), "checked_tokens": length},
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
