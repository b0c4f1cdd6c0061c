"""What the shipped suites name as `factory:`; only this package imports both harness and nsa."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from harness.records import Scalar
from harness.workload import Factory, Unsupported, Workload
from nsa import errors
from nsa.flags import Flags
from nsa.train.data import DataError
from suites import attention as _attention
from suites import decoding as _decoding
from suites import language_model as _language_model
from suites import training as _training
from suites.attention_plan import AttentionPlan

P = ParamSpec("P")
T = TypeVar("T")

PRELOAD = ("nsa.kernels.routes", "nsa.kernels.decode.attend", "torch.profiler")
"""Modules that the factories import; imported once for all workers."""

_PLANS: Mapping[str, Callable[[str, Mapping[str, Scalar], Flags], object]] = {
    "attention": AttentionPlan.read,
    "decode": _language_model.decode_plan,
    "decode_attention": _decoding.DecodePlan.read,
    "forward": _language_model.forward_plan,
    "layer": partial(_language_model.forward_plan, workload="layer"),
    "train": _training.train_config,
    "training_run": partial(_training.train_config, run=True),
}


def _declining(call: Callable[P, T]) -> Callable[P, T]:
    """The same call; what nsa does not support, or data that cannot be read, declines the case."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except (errors.Unsupported, DataError) as error:
            raise Unsupported(str(error)) from error

    return wrapped


def _at_the_seam(factory: Factory) -> Factory:
    """The factory; it and its workload may decline the case."""

    @wraps(factory)
    def build(provider: str, axes: Mapping[str, Scalar]) -> Workload:
        workload = _declining(factory)(provider, axes)
        check = workload.check and _declining(workload.check)
        return replace(workload, run=_declining(workload.run), check=check)

    return build


attention = _at_the_seam(_attention.attention)
decode = _at_the_seam(_language_model.decode)
decode_attention = _at_the_seam(_decoding.decode_attention)
forward = _at_the_seam(_language_model.forward)
layer = _at_the_seam(_language_model.layer)
train = _at_the_seam(_training.train)
training_run = _at_the_seam(_training.training_run)


def preflight(
    function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str]
) -> tuple[int, int] | None:
    """Check one case without building it, before anything of a suite runs.

    Returns:
        FLOPs and bytes of a step, of attention.

    Raises:
        ValueError: For an axis, a provider or an NSA_* flag that the workload cannot read, with
            the nearest that it can.
    """
    plan = _PLANS[function](provider, axes, Flags.from_env(env))
    match plan:
        case AttentionPlan():
            cost = _attention.cost_of(plan)
        case _decoding.DecodePlan():
            cost = _decoding.cost_of(plan)
        case _:
            return None
    return cost.flops, cost.bytes
