"""What the shipped suites name as `factory:`; this package alone knows both houses."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

from harness.records import Scalar
from harness.workload import Factory, Unsupported, Workload
from nsa import errors
from nsa.flags import Flags
from suites import attention as _attention
from suites import decoding as _decoding
from suites import language_model as _language_model

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["attention", "decode", "decode_attention", "forward", "preflight", "train"]

_PLANS: Mapping[str, Callable[[str, Mapping[str, Scalar], Flags], object]] = {
    "attention": _attention.Plan.read,
    "decode": _language_model.decode_plan,
    "decode_attention": _decoding.Plan.read,
    "forward": _language_model.forward_plan,
    "train": _language_model.train_config,
}


def _declining(call: Callable[P, T]) -> Callable[P, T]:
    """The same call; a route of nsa that cannot run here declines in the harness's word."""

    @wraps(call)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except errors.Unsupported as error:
            raise Unsupported(str(error)) from error

    return wrapped


def _at_the_seam(factory: Factory) -> Factory:
    """The factory; it, and the first calls of its workload, may decline the case."""

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
train = _at_the_seam(_language_model.train)


def preflight(
    function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str]
) -> None:
    """Check one case without building it, before anything of a suite runs.

    Raises:
        ValueError: For an axis, a provider or an NSA_* flag that the workload cannot read, with
            the nearest that it can.
    """
    _PLANS[function](provider, axes, Flags.from_env(env))
