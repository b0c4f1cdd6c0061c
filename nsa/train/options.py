"""The command line of `python -m nsa.train`: its options, and what is wrong with one."""

import argparse
import difflib
import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NoReturn, get_args

from nsa.config import PRESETS
from nsa.train.config import COMPILE, Precision

Attention = Literal["nsa", "dense"]


class UsageError(Exception):
    """The command line is wrong."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}\n  For the options, run python -m nsa.train --help.")


class _Set(argparse.Action):
    """Stores a value, and in `origins` the option that it came from."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const if self.nargs == 0 else values)
        namespace.origins[self.dest] = option_string


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options by name; in `origins`, the option that each setting of TrainConfig came from.

    Raises:
        UsageError: An option is unknown, or its value is not accepted.
    """
    parser = _parser()
    options, unknown = parser.parse_known_args(argv, argparse.Namespace(origins={}))
    if unknown:
        name = unknown[0].partition("=")[0]
        known = [option for action in parser._actions for option in action.option_strings]
        suggestion = _suggestion(name, known)
        parser.error(f"unknown {'option' if name[:1] == '-' else 'argument'} {name}{suggestion}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m nsa.train",
        description="Train the byte-level LM with NSA or dense attention. On a GPU it runs by "
        "Triton kernels, compiled and as a CUDA graph, as far as the settings allow.",
        epilog="NSA_* environment variables choose routes and defaults: see nsa/README.md.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--preset",
        type=_one_of(PRESETS),
        default="small",
        help=f"model and its settings: {', '.join(PRESETS)} (default: small)",
    )
    add("--log-every", type=_at_least(1), default=10, help="steps per line (default: 10)")
    add("--held-out", type=_at_least(0), default=0, metavar="N", help="held-out batches per line")
    add("--out", type=Path, metavar="DIR", help="write train.csv and TensorBoard events to DIR")
    add("--curve", type=_png, metavar="PNG", help="draw the learning curve to this file")
    add("--save", type=Path, metavar="DIR", help="save a checkpoint to DIR after the last step")
    add("--save-every", type=_at_least(1), metavar="STEPS", help="and every STEPS steps")
    add("--keep", type=_at_least(1), default=2, metavar="K", help="checkpoints kept (default: 2)")
    add("--resume", type=Path, metavar="DIR", help="continue from the newest checkpoint in DIR")
    add("--world-size", type=_at_least(1), metavar="N", help="start N ranks on this node")

    add = partial(parser.add_argument, action=_Set, default=argparse.SUPPRESS)
    add("--attention", type=_one_of(get_args(Attention)), help="nsa or dense attention")
    add("--seq-len", type=_at_least(1), metavar="T", help="tokens per row")
    add("--batch-size", type=_at_least(1), metavar="B", help="rows per forward of a rank")
    forwards = parser.add_mutually_exclusive_group()
    repeat = partial(forwards.add_argument, action=_Set, default=argparse.SUPPRESS)
    repeat("--accum-batches", type=_at_least(1), dest="accum", help="forwards per optimiser step")
    repeat("--global-batch", type=_at_least(1), metavar="ROWS", help="rows per step of all ranks")
    gc = parser.add_mutually_exclusive_group()
    recompute = partial(gc.add_argument, action=_Set, default=argparse.SUPPRESS)
    recompute(
        "--gc",
        dest="checkpointing",
        metavar="off|on|A-B",
        help="layers recomputed in the backward pass",
    )
    recompute("--no-gc", dest="checkpointing", nargs=0, const="off", help="same as --gc off")
    add("--compile", type=_one_of(COMPILE), help="compile all but attention: off or on")
    graph = parser.add_mutually_exclusive_group()
    replay = partial(graph.add_argument, action=_Set, default=argparse.SUPPRESS, nargs=0)
    replay("--cuda-graph", const=True, help="replay every step as one CUDA graph")
    replay("--no-cuda-graph", dest="cuda_graph", const=False, help="launch kernel by kernel")
    add("--steps", type=_at_least(1), help="optimiser steps, and length of the schedule")
    add("--warmup-steps", type=_at_least(0), help="steps of linear warm-up")
    add("--dataset", metavar="NAME", help="synthetic, text, fineweb_edu or fineweb_edu:PATH")
    add(
        "--loader-timeout",
        type=_above_0,
        dest="loader_timeout_s",
        metavar="SECONDS",
        help="longest wait for data",
    )
    add("--static-graph", dest="ddp_static_graph", nargs=0, const=True, help="DDP's static_graph")
    add("--precision", type=_one_of(get_args(Precision)), help="fp32, bf16 or fp16")
    add("--lr", type=_above_0, help="peak learning rate")
    add("--weight-decay", type=_from_0, help="weight decay of matrices")
    add("--clip", type=_above_0, help="largest gradient norm")
    add("--seed", type=_at_least(0), help="seed of weights and data")
    add("--device", help="cpu, cuda or cuda:N (default: a GPU if present)")
    return parser


def _at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {low}")
        return int(text)

    return parse


def _above_0(text: str) -> float:
    return _number(text, lambda value: value > 0, "above 0")


def _from_0(text: str) -> float:
    return _number(text, lambda value: value >= 0, "of at least 0")


def _number(text: str, fits: Callable[[float], bool], form: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not fits(value):  # NaN never fits
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {form}")
    return value


def _png(text: str) -> Path:
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png")
    return Path(text)


def _one_of(words: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            known = ", ".join(words)
            raise argparse.ArgumentTypeError(
                f"{text!r} is not one of {known}{_suggestion(text, words)}"
            )
        return text

    return parse


def _suggestion(word: str, words: Collection[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"\n  Did you mean {near[0]}?" if near else ""
