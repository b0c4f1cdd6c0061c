"""The fast settings that training has by default on a GPU, and why one of them is left out."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from nsa.config import OFF, Routes
from nsa.flags import Flags, Launch, c_compiler
from nsa.train.devices import training_device

ROUTE_FLAGS = frozenset(
    {
        "NSA_FORCE_PARITY",
        "NSA_FORCE_SEL_MASK",
        "NSA_SEL_RANGES_V2",
        "NSA_USE_FA2",
        "NSA_USE_FA2_CMP",
        "NSA_USE_FA2_WIN",
        "NSA_USE_SEL_PACK",
        "NSA_USE_SEL_VARLEN",
        "NSA_USE_TRITON",
        "NSA_USE_TRITON_SEL",
    }
)
"""Variables that choose routes; if one is set, the variables choose all of them."""
WAITING = frozenset({"loop", "packed", "varlen"})
"""Routes of the selected branch that wait for the device, which a CUDA graph cannot record."""
FAST = "the default on a GPU"
Setting = tuple[Any, str]
"""A value, and its reason as the boot line states it."""


def fast_settings(
    settings: Mapping[str, Any], attention: str, flags: Flags, launch: Launch
) -> dict[str, Setting]:
    """Values of `routes`, `compile` and `cuda_graph` of TrainConfig for a CUDA device.

    Args:
        settings: All that was decided before: by option, variable or preset. What is there of the
            three stays as it is.
        attention: `nsa` or `dense`.

    Raises:
        TrainError: The device does not exist.
    """
    found: dict[str, Setting] = {}
    device, precision = training_device(settings["device"], launch), settings.get("precision")
    if device.type != "cuda":
        return found
    compiler = c_compiler()
    by_flags = bool(ROUTE_FLAGS & flags.set_names)
    routes = settings.get("routes")
    if attention == "nsa" and routes is None and not by_flags:
        why = ""
        if precision in (None, "fp32"):
            why = "triton computes in bf16 or fp16 only"
        elif torch.cuda.get_device_capability(device) < (8, 0):
            why = "triton needs compute capability 8.0"
        elif find_spec("triton") is None:
            why = "triton is not installed"
        elif not compiler:
            why = "triton finds no C compiler"
        routes = None if why else Routes.triton(flags.branches)
        found["routes"] = (routes, why or FAST)
    if "compile" not in settings:
        found["compile"] = ("on", FAST) if compiler else ("off", "no C compiler is found")
    if "cuda_graph" not in settings:
        chosen, why = routes or flags.routes(), ""
        if precision == "fp16":
            why = "not in fp16, whose loss scale decides about each step"
        elif attention == "nsa" and flags.prefill == "token":
            why = "not token by token"
        elif attention == "nsa" and chosen.select in WAITING:
            why = f"route {chosen.select} waits for the device"
        elif attention == "nsa" and launch.world_size > 1 and chosen.compress == OFF:
            why = "not without the compress branch on several ranks"
        elif launch.world_size > 1 and settings.get("accum", 1) > 1:
            why = "not measured with several forwards a step on several ranks"
        found["cuda_graph"] = (not why, why or FAST)
    return found
