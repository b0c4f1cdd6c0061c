"""Where training runs: the device of a process, and how several ranks train as one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from nsa.errors import TrainError
from nsa.flags import Flags, Launch

_COMPRESS_HOOKS = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}


@contextmanager
def process_group(launch: Launch, device: str) -> Iterator[None]:
    """Join the other ranks of a launch, over NCCL on GPUs and gloo on CPUs."""
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
            f"the {launch.world_size} ranks cannot connect to each other: {error}",
            "Start with --world-size or torchrun.",
        ) from error
    yield
    dist.destroy_process_group()  # not after an error: the others may never answer


def training_device(device: str, launch: Launch) -> torch.device:
    """The device of this process: among several, `cuda` is the GPU numbered local_rank.

    Raises:
        TrainError: The device does not exist.
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
            f"device {device!r}: GPU {number} does not exist; torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} GPUs",
            "Use --device cpu, or a torch build and driver that see the GPU.",
        )
    return torch.device("cuda", number)


def distribute(
    model: nn.Module, device: torch.device, flags: Flags, *, accum: int, unused: bool
) -> DistributedDataParallel:
    """Average gradients over the ranks, as the flags say, at the last of a step's `accum` forwards;
    of parameters that get no gradient, only if `unused` says that there are some."""
    if flags.ddp_static_graph and accum > 1:  # pytorch/pytorch, pull request 187732
        raise TrainError(
            f"DDP with a static graph cannot accumulate {accum} forwards: torch then fails, or "
            "averages no gradient",
            "Use one forward per step, or leave out --static-graph (NSA_DDP_STATIC_GRAPH).",
        )
    ddp = DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=flags.ddp_bucket_mb,
        gradient_as_bucket_view=True,
        find_unused_parameters=unused and not flags.ddp_static_graph,
        static_graph=flags.ddp_static_graph,
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


def ddp_settings(ddp: DistributedDataParallel | None) -> dict[str, int | str]:
    """How gradients are averaged over ranks, as DDP itself states it; nothing in one process."""
    own = {} if ddp is None else ddp._get_ddp_logging_data()
    return own and {
        "ddp_compress": own.get("comm_hook", "off").removesuffix("_compress_hook"),
        "ddp_bucket_mb": own["bucket_cap_bytes"] // 2**20,
        "ddp_static_graph": "on" if own.get("static_graph") else "off",
    }


def of_ranks(values: Tensor, launch: Launch) -> Tensor:
    """The values of every rank, on each of them: [ranks, ...]."""
    if launch.world_size == 1:
        return values.unsqueeze(0)
    values = values.contiguous()
    found = [torch.empty_like(values) for _ in range(launch.world_size)]
    dist.all_gather(found, values)
    return torch.stack(found)
