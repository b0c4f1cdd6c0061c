"""The byte-level language model: a forward pass, one layer, decoding."""

from collections.abc import Iterable, Mapping
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
from nsa.model.language_model import ByteLM
from nsa.train.loop import describe_routes
from suites.axes import DENSE, DTYPES, Axes, target_device, word_of

SEED = 0
PROVIDERS = ("nsa", *DENSE)
CHECKED_TOKENS: Mapping[Prefill, int] = {"batched": 1024, "token": 96}
"""First tokens, on which accuracy is compared: the reference holds a [T, T] mask per head and
layer, and taking queries one by one costs hundreds of launches each."""


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
    tokens = random_bytes(plan.B, plan.T, target_device())
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
    x = torch.randn(plan.B, plan.T, plan.model.dim, generator=rng).to(target_device(), plan.dtype)
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
        exact = definition(model, dtype)
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
    tokens = random_bytes(plan.B, plan.T + plan.new_tokens, target_device())
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


def model_config(provider: str, given: Axes, providers: Iterable[str] = PROVIDERS) -> ModelConfig:
    given.provider(provider, providers)
    if provider in DENSE:
        given.unrouted("dense attention has no branches")
    preset = PRESETS[given.word("preset", PRESETS)]
    return replace(preset, attention="dense" if provider in DENSE else "nsa")


def _inference_plan(provider: str, given: Axes, *, T: int, new_tokens: int = 0) -> InferencePlan:
    if provider not in DENSE:
        given.every_branch()
    plan = InferencePlan(
        model=model_config(provider, given),
        backend=DENSE.get(provider, "sdpa"),
        dtype=DTYPES[given.word("precision", DTYPES, "fp32")],
        B=given.integer("batch", 1),
        T=T,
        new_tokens=new_tokens,
    )
    given.finish()
    return plan


def random_bytes(B: int, T: int, device: torch.device | str) -> Tensor:
    rng = torch.Generator().manual_seed(SEED)
    return torch.randint(256, (B, T), generator=rng).to(device)


def _inference_model(plan: InferencePlan, flags: Flags) -> ByteLM:
    model = ByteLM(
        plan.model,
        dense_backend=plan.backend,
        aux_stats=plan.model.attention == "dense" or not flags.disable_aux_stats,
        generator=torch.Generator().manual_seed(SEED),
    )
    return model.to(target_device(), plan.dtype).eval()


def _routes(model: ModelConfig, flags: Flags) -> Routes:
    """The routes that the flags choose; dense attention reads none."""
    return Routes() if model.attention == "dense" else flags.routes()


def sizes_of(model: ByteLM) -> dict[str, Scalar]:
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


def definition(model: ByteLM, dtype: torch.dtype) -> ByteLM:
    """The same weights in a model that computes every branch as defined, by reference routes."""
    with torch.device("meta"):  # to draw the weights of 125m takes a second
        copy = ByteLM(model.config, dense_backend="reference", aux_stats=False)
    weights = {name: x.to(dtype, copy=True) for name, x in model.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    return copy


@torch.no_grad()
def _defined_logits(model: ByteLM, tokens: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"logits": definition(model, dtype)(tokens, routes=Routes.reference())}


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
        **sizes_of(model),
        "batch": out.shape[0],
        "precision": word_of(next(model.parameters()).dtype),
        "dtype": str(out.dtype).removeprefix("torch."),
        "routes": f"dense:{attention.backend}" if dense else describe_routes(handed["routes"]),
        "prefill": handed["prefill"],
        "device": str(out.device),
        "parameters": model.num_parameters,
    }
