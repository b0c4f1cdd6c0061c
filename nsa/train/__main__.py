"""Train the byte-level LM: `python -m nsa.train --preset small --dataset text --steps 300`.

With --world-size N, or under torchrun, each of N ranks reads its own share of the data, and the
gradients are averaged. An option takes precedence over its NSA_* variable, and the variable over
the preset; on a GPU the rest is what is fast there (nsa.train.fast). The boot line names the source
of each setting.
Exit status: 0 trained; 1 the loss or its gradient became NaN or infinite; 2 the request cannot be
carried out; 130 interrupted. With --world-size, also 128 and the signal that ended a rank.
"""

import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nsa.config import PRESETS
from nsa.errors import TrainError, Unsupported
from nsa.flags import FlagError, Flags, Launch
from nsa.train import checkpoint
from nsa.train.config import Precision, TrainConfig
from nsa.train.data import DataError, bits_per_byte, open_stream, unigram_entropy
from nsa.train.devices import ddp_settings, of_ranks, process_group
from nsa.train.fast import ROUTE_FLAGS, fast_settings
from nsa.train.loop import Trainer, describe_routes
from nsa.train.options import UsageError, parse
from nsa.train.progress import (
    Progress,
    Sink,
    check_writable,
    csv_sink,
    draw_curve,
    tensorboard_sink,
)
from nsa.train.ranks import first_failure, leave, start_ranks

__all__ = ["Progress", "TrainConfig", "TrainError", "Trainer", "configure", "main", "train"]

PRESET_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "125m": {
        "seq_len": 2048,
        "batch_size": 1,
        "precision": "bf16",
        "lr": 3e-4,
    },
    "small": {"seq_len": 256, "batch_size": 8, "lr": 4e-3},
    "tiny": {"seq_len": 64, "batch_size": 8, "lr": 3e-3},
}
"""Settings of each preset in nsa.config that differ from TrainConfig's defaults."""

_REMEDIES: Mapping[Precision, str] = {
    "fp32": "Lower --lr.",
    "bf16": "Lower --lr, or use --precision fp32.",
    "fp16": "Lower --lr, or use --precision bf16 or fp32.",
}
"""What to do when the loss or the gradient is not finite."""
_ENTROPY_SAMPLE_BYTES = 2**20


class NonFiniteError(Exception):
    """The loss, or the norm of its gradient, became NaN or infinite."""


def train(
    trainer: Trainer, *, log_every: int, held_out_batches: int = 0, save_every: int | None = None
) -> Iterator[Progress]:
    """Take the steps that are left; yield after the first, the last, and as often as each says.

    The host waits for the device only at a yield. Neither evaluating the held-out split nor what
    the caller does at a yield, such as saving, counts in tokens_per_s.

    Raises:
        NonFiniteError: A loss or, but in fp16, a gradient norm since the last Progress is not a
            finite number.
    """
    steps = trainer.config.steps
    peak = trainer.peak_flops
    logged = trainer.steps_done
    first = logged + 1
    taken: list[Tensor] = []  # loss and gradient norm of each step, on the device
    began = mark = time.perf_counter()
    for step in range(first, steps + 1):
        taken.append(torch.stack((trainer.step(), trainer.gradient_norm)))
        saves = save_every is not None and step % save_every == 0
        if step not in (first, steps) and step % log_every and not saves:
            continue
        seen = of_ranks(torch.stack(taken).T, trainer.launch).cpu()  # [ranks, 2, steps]
        now = time.perf_counter()  # the loss was read, so the device is done
        losses, norms = seen.mean(0).tolist()
        scaled = trainer.config.precision == "fp16"  # then a step without a finite norm is left out
        for i, (loss, norm) in enumerate(zip(losses, norms, strict=True), logged + 1):
            what, value = (
                ("loss", loss) if scaled or not math.isfinite(loss) else ("gradient norm", norm)
            )
            if not math.isfinite(value):
                if what == "loss" and len(seen) > 1:  # else averaged over the ranks, or only one
                    what += _where(seen[:, 0, i - logged - 1])
                raise NonFiniteError(
                    f"the {what} is {value} at step {i}; it was finite up to step {i - 1}\n"
                    f"  {_REMEDIES[trainer.config.precision]}"
                )
        loss = math.fsum(losses) / len(losses)
        held_out = None
        if held_out_batches:
            held_out = bits_per_byte(trainer.held_out_loss(held_out_batches).item())
        rate = None if step == first else (step - logged) / (now - mark)  # steps a second
        yield Progress(
            step=step,
            loss=loss,
            bits_per_byte=bits_per_byte(loss),
            gradient_norm=norms[-1],
            held_out_bits_per_byte=held_out,
            tokens_per_s=rate and rate * trainer.tokens_per_step,
            mfu=rate and peak and rate * trainer.flops_per_step / peak,
            elapsed_s=now - began,
            losses=tuple(losses),
            gradient_norms=tuple(norms),
        )
        taken.clear()
        logged, mark = step, time.perf_counter()


def _where(losses: Tensor) -> str:
    """The ranks with a loss that is not finite, of one step's: [ranks]."""
    ranks = (~losses.isfinite()).nonzero().flatten().tolist()
    return f" of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except NonFiniteError as error:
        return _fail(str(error), 1)
    except (UsageError, FlagError, DataError, TrainError, Unsupported) as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            if (status := first_failure(1)) is not None:
                return status  # a collective, without the rank that failed
            raise
        rank = f"rank {dist.get_rank()}: " if dist.is_initialized() else ""
        reason = str(error).splitlines()[0]
        return _fail(f"{rank}{reason}\n  Use --gc on, or lower --batch-size or --seq-len.", 2)


def _out_of_memory(error: Exception) -> bool:
    """Whether the device or the host is out of memory; torch has no exception type for the host."""
    kinds = (MemoryError, torch.OutOfMemoryError)
    return isinstance(error, kinds) or "DefaultCPUAllocator" in str(error)


def configure(
    preset: str, options: Mapping[str, Any], flags: Flags, launch: Launch | None = None
) -> tuple[TrainConfig, dict[str, str]]:
    """Decide every setting: option, then NSA_* variable, then preset, then what is fast there.

    Args:
        preset: A name in nsa.config.PRESETS.
        options: Settings given on the command line, by their names in TrainConfig; also
            `attention`, of the model, and `global_batch`, the rows of all ranks in one optimiser
            step, from which `accum` follows.

    Returns:
        The configuration; and by the name of a setting its variable, or the reason of a fast one.

    Raises:
        ValueError: A setting is out of range, or two settings contradict each other.
        DataError: The dataset does not exist.
    """
    variables = {"seq_len": flags.seq_len, "batch_size": flags.batch_size, "accum": flags.accum}
    from_env: dict[str, Any] = {k: v for k, v in variables.items() if v is not None}
    origins = {name: f"NSA_{name.upper()}" for name in from_env}
    if flags.no_gc:
        from_env["checkpointing"], origins["checkpointing"] = "off", "NSA_NO_GC"
    settings = {
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        **PRESET_SETTINGS[preset],
        **from_env,
        **options,
    }
    model = PRESETS[preset]
    if attention := settings.pop("attention", None):
        model = replace(model, attention=attention)
    origins = {name: origin for name, origin in origins.items() if name not in options}
    if rows := settings.pop("global_batch", None):
        ranks, batch = (launch or Launch()).world_size, settings["batch_size"]
        if rows % (once := ranks * batch):
            near = [n for n in (rows - rows % once, rows - rows % once + once) if n]
            raise ValueError(
                f"--global-batch {rows} does not divide over world size {ranks} x batch size "
                f"{batch} = {once} rows\n"
                f"  Use --global-batch {' or '.join(map(str, near))}, or another --batch-size."
            )
        settings["accum"], origins["accum"] = rows // once, "--global-batch"
    for name, (value, why) in fast_settings(
        settings, model.attention, flags, launch or Launch()
    ).items():
        settings[name], origins[name] = value, why
    return TrainConfig(model=model, **settings), origins


def _run(argv: Sequence[str]) -> int:
    options = parse(argv)
    flags, launch = Flags.from_env(), Launch.from_env()
    ranks = options.world_size or launch.world_size
    if ranks != launch.world_size > 1:
        raise UsageError(
            f"--world-size {ranks} contradicts WORLD_SIZE={launch.world_size}\n"
            "  Under torchrun, leave out --world-size."
        )
    starts = ranks > launch.world_size
    if starts:  # and first sees whether the last rank can have these settings
        launch = Launch(rank=ranks - 1, world_size=ranks, local_rank=ranks - 1)
    if "ddp_static_graph" in options:
        flags = replace(flags, ddp_static_graph=True)
    if options.save_every and options.save is None:
        raise UsageError("--save-every needs a folder\n  Add --save DIR.")
    names = {f.name for f in fields(TrainConfig)} | {"attention", "global_batch"}
    given = {name: value for name, value in vars(options).items() if name in names}
    try:
        config, origins = configure(options.preset, given, flags, launch)
    except ValueError as error:
        raise UsageError(str(error)) from error
    origins |= options.origins
    if starts:
        return start_ranks([sys.executable, "-m", "nsa.train", *argv], ranks)
    if launch.rank > 0:  # only the first rank writes
        options.out = options.curve = None
    with ExitStack() as stack:
        stack.enter_context(process_group(launch, config.device))
        trainer = stack.enter_context(Trainer(config, flags, launch))
        resumed = checkpoint.resume(trainer, options.resume) if options.resume else ""
        if options.save is not None:
            checkpoint.check_no_later(options.save, trainer.steps_done)
        sinks = _open_sinks(stack, options.out, flags, trainer)
        for path in filter(None, (options.curve, options.save and options.save / "step")):
            check_writable(path)
        _say(launch, _boot_line(options.preset, trainer, origins, flags))
        if resumed:
            _say(launch, "[boot] resumed from " + resumed)
        curve: list[Progress] = []
        for progress in train(
            trainer,
            log_every=options.log_every,
            held_out_batches=options.held_out,
            save_every=options.save_every,
        ):
            if not curve:
                observed = (f"{name}={value}" for name, value in trainer.effective().items())
                _say(launch, f"[step {progress.step}] observed: " + " ".join(observed))
            _say(launch, str(progress))
            for sink in sinks:
                sink(progress)
            curve.append(progress)
            due = progress.step % (options.save_every or config.steps) == 0
            if options.save is not None and (due or progress.step == config.steps):
                began = time.perf_counter()
                saved = checkpoint.save(trainer, options.save, keep=options.keep)
                _say(launch, f"saved: {saved} in {time.perf_counter() - began:.2f} s")
        if options.curve is not None:
            _draw(options.curve, options.preset, config, curve)
            _say(launch, f"curve: {options.curve}")
    return 0


def _boot_line(preset: str, trainer: Trainer, origins: Mapping[str, str], flags: Flags) -> str:
    """What will run, with the source of every setting that does not come from the preset."""
    c = trainer.config
    dense = c.model.attention == "dense"  # the flags choose routes of NSA's branches only
    if not dense:
        chosen = sorted(ROUTE_FLAGS & flags.set_names) or [origins.get("routes", "")]
        chosen += {"NSA_BRANCHES"} & flags.set_names
        if reasons := ",".join(filter(None, chosen)):
            origins = {**origins, "routes": reasons}
    if "NSA_PREFILL_BATCHED" in flags.set_names:
        origins = {**origins, "prefill": "NSA_PREFILL_BATCHED"}
    routes = f"dense:{c.dense_backend}" if dense else describe_routes(trainer.routes)
    settings: tuple[tuple[str, str, object], ...] = (
        ("attention", "attention", c.model.attention),
        ("S", "seq_len", c.seq_len),
        ("B", "batch_size", c.batch_size),
        ("accum", "accum", c.accum),
        ("gc", "checkpointing", c.checkpointing),
        ("compile", "compile", c.compile),
        ("graph", "cuda_graph", "on" if c.cuda_graph else "off"),
        ("precision", "precision", c.precision),
        ("dataset", "dataset", c.dataset),
        ("steps", "steps", c.steps),
        ("lr", "lr", f"{c.lr:g}"),
        ("seed", "seed", c.seed),
        ("routes", "routes", routes),
        ("prefill", "prefill", trainer.prefill),
        ("device", "device", trainer.device),
        ("world_size", "world_size", trainer.launch.world_size),
    )
    ddp = ddp_settings(trainer.ddp)
    by_flags = {n: flag for n in ddp if (flag := f"NSA_{n.upper()}") in flags.set_names}
    origins = {**by_flags, **origins}
    settings += tuple((name, name, value) for name, value in ddp.items())
    parts = [f"preset={preset}"]
    for label, name, value in settings:
        parts.append(f"{label}={value}" + (f" ({origins[name]})" if name in origins else ""))
    parts.append(f"params={trainer.model.num_parameters / 1e6:.1f}M")
    return "[boot] effective config: " + " ".join(parts)


def _draw(path: Path, preset: str, config: TrainConfig, curve: Sequence[Progress]) -> None:
    rows = -(-_ENTROPY_SAMPLE_BYTES // config.seq_len)
    with open_stream(
        config.dataset, batch_size=rows, seq_len=config.seq_len, seed=config.seed
    ) as stream:
        unigram = unigram_entropy(next(stream).numpy())
    draw_curve(
        path,
        curve,
        unigram_bits=unigram,
        title=f"{preset} LM, {config.model.attention} attention, on {config.dataset}",
    )


def _open_sinks(stack: ExitStack, out: Path | None, flags: Flags, trainer: Trainer) -> list[Sink]:
    """The logs that --out and the flags request."""
    if out is None:
        if not flags.tb_disable and trainer.launch.rank == 0:
            raise UsageError("NSA_TB_DISABLE=0 requests TensorBoard logs\n  Add --out DIR.")
        return []
    sinks = []
    if not flags.disable_csv_logs:
        sinks.append(csv_sink(out / "train.csv", trainer.steps_done))
    if not flags.tb_disable:
        sinks.append(tensorboard_sink(stack, out, trainer.steps_done))
    return sinks


def _say(launch: Launch, line: str) -> None:
    if launch.rank == 0:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _fail(message: str, status: int) -> int:
    if (before := first_failure(status)) is not None:
        return before
    sys.stderr.write(f"error: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(leave(main()))
