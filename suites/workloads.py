"""What the shipped suites name as `factory:`; this package alone knows both houses."""

from collections.abc import Callable, Mapping

from nsa.flags import Flags
from suites import attention as _attention
from suites import language_model as _language_model
from suites.attention import attention
from suites.axes import Scalar
from suites.language_model import decode, forward, train

__all__ = ["attention", "decode", "forward", "preflight", "train"]

_PLANS: Mapping[str, Callable[[str, Mapping[str, Scalar], Flags], object]] = {
    "attention": _attention.Plan.read,
    "decode": _language_model.decode_plan,
    "forward": _language_model.forward_plan,
    "train": _language_model.train_config,
}


def preflight(
    function: str, provider: str, axes: Mapping[str, Scalar], env: Mapping[str, str]
) -> None:
    """Check one case without building it, before anything of a suite runs.

    Raises:
        ValueError: For an axis, a provider or an NSA_* flag that the workload cannot read, with
            the nearest that it can.
    """
    _PLANS[function](provider, axes, Flags.from_env(env))
