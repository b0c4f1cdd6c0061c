"""Checkpoints of training: one folder each, by torch.distributed.checkpoint.

    DIR/step-000500/state.json      step, loss scale and settings
                    .metadata, __0_0.distcp, ...      weights, AdamW's moments, random states

A folder with this name is whole: it is written as step-000500.partial and renamed at the end. The
data has no state here: a resumed run reads the batches of the steps done again. All ranks save
and resume together, in a folder that they share.
"""

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.errors import TrainError
from nsa.train.data import fetches
from nsa.train.devices import ddp_settings
from nsa.train.loop import Trainer, describe_routes

_STATE = "state.json"
_MAY_DIFFER = frozenset(
    {"checkpointing", "compile", "cuda_graph", "dense_backend", "loader_timeout_s"}
    | {"prefill", "routes"}
)
"""Settings of how a step is computed, and not of what."""
_FAILURES = (OSError, EOFError, KeyError, RuntimeError, ValueError, UnpicklingError)
"""What torch raises where a file cannot be written, or is damaged."""


def save(trainer: Trainer, folder: Path, *, keep: int) -> Path:
    """Write the newest checkpoint, and delete all but the newest `keep`; return its folder.

    Raises:
        TrainError: The folder cannot be written; the checkpoints before stay whole.
    """
    whole = folder / f"step-{trainer.steps_done:06d}"
    partial = whole.with_suffix(".partial")
    tensors = {**trainer.tensors(), **_generators(trainer)}
    state = json.dumps({**trainer.position(), "settings": _settings(trainer)}, indent=1)
    first = trainer.launch.rank == 0
    with _files(whole, "written", "Choose another folder, or free disk space.") as dcp:
        for left in folder.glob("step-*.partial") if first else ():  # by a run that was killed
            shutil.rmtree(left)
        dcp.save(tensors, checkpoint_id=partial)  # returns when the files of all ranks are here
        if first:
            with (partial / _STATE).open("w") as file:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(whole)
            for old in _checkpoints(folder)[:-keep]:  # while it is deleted, it is not whole
                shutil.rmtree(old.rename(old.with_suffix(".partial")))
    return whole


def resume(trainer: Trainer, folder: Path) -> str:
    """Continue from a checkpoint, or from the newest in a folder; before the first step.

    Returns:
        The checkpoint, the steps done, and the settings that differ, on one line.

    Raises:
        TrainError: There is no checkpoint, it cannot be read, it has other settings, or no step
            is left.
    """
    found = [folder] if (folder / _STATE).exists() else _checkpoints(folder)
    if not found:
        raise TrainError(f"{folder}: no checkpoint", "Name a folder that --save wrote.")
    chosen, remedy = (
        found[-1],
        f"Delete {found[-1]}, or resume in another folder: --resume, --save.",
    )
    with _files(chosen, "read", remedy):
        state = json.loads((chosen / _STATE).read_text())
        step, scaler, there = state["step"], state["scaler"], state["settings"]
        (chosen / ".metadata").stat()
    here = _settings(trainer)
    apart = {
        name: f"{name}: {there.get(name, 'not set')} there, {here.get(name, 'not set')} here"
        for name in sorted({*there, *here})
        if there.get(name) != here.get(name)
    }
    if wrong := [line for name, line in apart.items() if name not in _MAY_DIFFER]:
        raise TrainError(
            "\n  ".join([f"{chosen}: was saved with other settings:", *wrong]),
            "Use its settings, or train without --resume.",
        )
    if step >= trainer.config.steps:
        raise TrainError(f"{chosen}: all {step} steps are done", remedy)
    generators = _generators(trainer)
    tensors = {**trainer.tensors(), **generators}
    with _files(chosen, "read", remedy) as dcp:
        dcp.load(tensors, checkpoint_id=chosen)  # in place
    for name, generator in generators.items():
        if "cuda" in name:
            torch.cuda.set_rng_state(generator, trainer.device)
        else:
            torch.set_rng_state(generator)
    trainer.continue_after(step, scaler)
    return "; ".join([f"{chosen}, {step} steps done", *apart.values()])


def check_no_later(folder: Path, steps_done: int) -> None:
    """Raise TrainError if a folder has a checkpoint after this step."""
    for last in _checkpoints(folder)[-1:]:
        if _step(last) > steps_done:
            raise TrainError(
                f"{folder}: has a later checkpoint, {last.name}",
                f"Use --resume {folder}, delete {last.name}, or save to another folder.",
            )


def _checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints in a folder, the newest last."""
    named = (p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal())
    return sorted(named, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _settings(trainer: Trainer) -> dict[str, str]:
    """What the trainer was built from, by name; ranks of one run have the same."""
    config = trainer.config
    drawn = trainer.stream.description
    seen = {
        "data": f"{trainer.loader.doc_batch} a fetch" if fetches(config.dataset) else drawn,
        "device": trainer.device.type,
        "branches": "+".join(trainer.routes.running()),
        "prefill": trainer.prefill,
        "processes": trainer.launch.world_size,
        "ddp_compress": ddp_settings(trainer.ddp).get("ddp_compress", "off"),
        "routes": describe_routes(trainer.routes),
    }
    parts = {**asdict(config), **asdict(config.model), **asdict(config.model.nsa), **seen}
    return {name: str(value) for name, value in parts.items() if not isinstance(value, dict)}


def _generators(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the states of torch's generators, by names of this process."""
    states = {f"generator.cpu.{trainer.launch.rank}": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        states[f"generator.cuda.{trainer.launch.rank}"] = torch.cuda.get_rng_state(trainer.device)
    return states


@contextmanager
def _files(folder: Path, done: str, remedy: str) -> Iterator[Any]:
    """torch.distributed.checkpoint, with a TrainError where a folder cannot be written or read."""
    # Imported here: it takes most of a second, and most runs save nothing.
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            if not dist.is_initialized():  # one process needs no group
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield dcp
    except (CheckpointException, *_FAILURES) as error:
        failure = next(iter(getattr(error, "failures", {0: (error,)}).values()))[0]
        if not isinstance(failure, _FAILURES):
            raise failure from None
        while isinstance(failure.__context__, _FAILURES):  # torch closes the file in vain
            failure = failure.__context__
        reason = getattr(failure, "strerror", None) or f"{type(failure).__name__}: {failure}"
        raise TrainError(f"{folder}: cannot be {done}: {reason}", remedy) from error
