"""What a file of this folder says of an operator, and what such files share.

A file has one OPERATOR. It imports the operator's package only when it is called, so that an absent
one is a refusal. Before timing, the harness compares the operator with its Definition in float64.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import subprocess
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa import reference
from nsa.config import NSAConfig, Positions
from nsa.errors import Unsupported
from nsa.routes import fa2
from suites.inputs import AttentionInputs

Forward = Callable[[AttentionInputs], Any]
"""The part under test: its output, a tensor [B, T, HQ, Dv]."""
Prepare = Callable[[AttentionInputs, Tensor, NSAConfig], Forward]
"""Called once, untimed, with the inputs, the given blocks [B, T, HKV, n] and the sizes."""
_REFUSALS = {"AssertionError", "ImportError", "NotImplementedError", "TritonError", "ValueError"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What an operator claims to compute: that of nsa.reference, and what differs."""

    name: str
    differs: str = ""
    """What differs from the paper's, in words."""
    config: Callable[[NSAConfig], NSAConfig] = lambda config: config
    """The sizes that it has for these."""
    tie: Callable[[AttentionInputs, NSAConfig], AttentionInputs] = lambda x, _: x
    """The inputs, with those that it derives from others."""
    reads: tuple[str, ...] = ()
    """Inputs of the whole operator that have gradients; empty: all."""
    scores_by: Callable[[AttentionInputs], AttentionInputs] | None = None
    """The inputs that score blocks, where they are not all of them."""
    choose: Callable[[AttentionInputs, NSAConfig], Tensor] | None = None
    """The blocks, where another rule than the paper's chooses them."""
    compute: Callable[[AttentionInputs, Tensor, Positions], Tensor] | None = None
    """The output for the chosen blocks, where it is not the paper's."""


PAPER = Definition(name="paper")
DENSE = Definition(name="dense", differs="attends to every key up to the query")


def _means(x: AttentionInputs, config: NSAConfig) -> AttentionInputs:
    k_cmp, v_cmp = (
        reference.compress_blocks(t, lambda blocks: blocks.mean(2), config=config)
        for t in (x.k_sel, x.v_sel)
    )
    return replace(x, k_cmp=k_cmp, v_cmp=v_cmp, k_win=x.k_sel, v_win=x.v_sel)


MEANS = Definition(
    name="means",
    differs="compressed blocks are the means of select blocks, and the branches share keys and "
    "values",
    config=lambda config: replace(
        config,
        compress_block_size=config.select_block_size,
        compress_stride=config.select_block_size,
        phi="mean",
    ),
    tie=_means,
    reads=("q", "k_sel", "v_sel", "gates"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorPart:
    """A part of the operator that can be timed alone, or the whole."""

    prepare: Prepare
    definition: Definition = PAPER
    backward: bool = True
    """Whether it has a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator of another project."""

    name: str
    package: str
    """The module to import."""
    install: str
    """How to get it, with the version or commit for which the file is written."""
    licence: str
    parts: Mapping[str, OperatorPart]
    """By the value of the axis `branch`: whole, compress, scores, select, window."""
    blocks: Callable[[AttentionInputs, NSAConfig], Tensor] | None = None
    """The blocks that the whole operator selects, [B, T, HKV, n], ascending, -1 at the end."""
    scores: torch.dtype = torch.float32
    """Precision of the scores by which it selects."""
    fewest_heads: int = 1
    """Query heads of a KV head are padded, untimed, to a power of two from here on; 1: never."""
    refuses: Callable[[AttentionInputs, NSAConfig], str] = lambda _x, _config: ""
    """Why it does not take such inputs, where the operator itself would not say so."""

    def require(
        self, x: AttentionInputs, config: NSAConfig, *, branch: str, backward: bool
    ) -> None:
        """Raise Unsupported, with the reason, unless the operator can run on such inputs."""
        with self.refusals():
            reason = self._absence(x) or self.refuses(x, config)
        if backward and not self.parts[branch].backward:
            reason = reason or f"{branch} has no backward pass"
        if reason:
            raise Unsupported(f"{self.name}: {reason}")

    def _absence(self, x: AttentionInputs) -> str:
        if importlib.util.find_spec(self.package) is None:
            return f"not installed: {self.install}"
        if not x.q.is_cuda and not interpreted():
            where = f"these are on {x.q.device.type} (a Triton kernel runs with TRITON_INTERPRET=1)"
            return f"needs tensors on CUDA, but {where}"
        if x.q.dtype not in (torch.float16, torch.bfloat16):
            return f"is measured in float16 or bfloat16, but these are {_word(x.q.dtype)}"
        return ""

    @contextmanager
    def refusals(self) -> Iterator[None]:
        """What the operator itself refuses, as Unsupported in its own words."""
        try:
            yield
        except Exception as error:  # of any package; what is no refusal goes on
            if not _REFUSALS & {kind.__name__ for kind in type(error).__mro__}:
                raise
            words = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
            raise Unsupported(f"{self.name}: {type(error).__name__}: {words}") from error

    def record(self, branch: str) -> dict[str, str]:
        """What the record of a case says of the operator."""
        definition = self.parts[branch].definition
        said = {
            "definition": definition.name,
            "install": self.install,
            "version": version_of(self.package),
            "licence": self.licence,
        }
        if definition.differs:
            said["differs"] = definition.differs
        if branch == "whole" and self.scores != torch.float32:
            said["scores"] = f"kept in {_word(self.scores)}"
        return said


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the CPU."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def version_of(package: str) -> str:
    """The version of an installed package with the commit that pip knows; the commit of one that is
    a checkout on PYTHONPATH."""
    for name in importlib.metadata.packages_distributions().get(package, ()):
        said = importlib.metadata.distribution(name).read_text("direct_url.json") or "{}"
        commit = json.loads(said).get("vcs_info", {}).get("commit_id", "")
        return f"{importlib.metadata.version(name)} {commit[:12]}".rstrip()
    folder = next(iter(load(package).__path__))
    command = ["git", "-C", folder, "rev-parse", "--short=12", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"commit {found.stdout.strip()}" if found.returncode == 0 else "not stated"


def load(module: str) -> Any:
    """A module of the operator."""
    return importlib.import_module(module)


def ascending(blocks: Tensor, n: int, M: int) -> Tensor:
    """Chosen blocks [..., at most n] of M, in the form of nsa.ops: ascending, -1 at the end."""
    used = (blocks >= 0) & (blocks < M)
    ordered = blocks.masked_fill(~used, M).sort(-1).values
    ordered = F.pad(ordered, (0, n - blocks.shape[-1]), value=M)
    return ordered.masked_fill(ordered == M, -1).int()


def own_and_best(
    importance: Callable[[slice], Tensor], config: NSAConfig, T: int, chunk: int
) -> Tensor:
    """The query's own block and the n - 1 before it that are most important, [B, T, H, n].

    Args:
        importance: Of all M blocks to some queries, [B, queries, H, M].
        chunk: Queries that are computed at a time.
    """
    size, n, M = config.select_block_size, config.num_blocks, config.select_length(T)
    chosen = []
    for first in range(0, T, chunk):
        rank = importance(slice(first, first + chunk))
        block = torch.arange(M, device=rank.device)
        query = torch.arange(first, first + rank.shape[1], device=rank.device)
        own = (query // size)[:, None, None]
        rank = rank.masked_fill(block == own, torch.inf).masked_fill(block > own, -torch.inf)
        best = rank.topk(min(n, M), -1)
        chosen.append(ascending(best.indices.masked_fill(best.values == -torch.inf, -1), n, M))
    return torch.cat(chosen, 1)


def one_branch(
    name: str, differs: str, choose: Callable[[AttentionInputs, NSAConfig], Tensor]
) -> Definition:
    """Attention to chosen blocks alone, by KV head, or by query head if these choose."""

    def compute(x: AttentionInputs, blocks: Tensor, at: Positions) -> Tensor:
        k, v = (of_heads(t, blocks.shape[2]) for t in (x.k_sel, x.v_sel))
        return reference.selected_attention(x.q, k, v, blocks, at)

    differs = f"one branch, no gates; {differs}"
    reads = ("q", "k_sel", "v_sel")
    return Definition(name=name, differs=differs, reads=reads, choose=choose, compute=compute)


def of_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values repeated for so many heads, [B, S, heads, D]."""
    return x.repeat_interleave(heads // x.shape[2], 2)


def window(q: Tensor, k: Tensor, v: Tensor, config: NSAConfig) -> Tensor:
    """The window branch by FlashAttention-2."""
    return fa2.flash_attention(
        q, k, v, provider="fa2-torch", window_size=config.window_size, scale=q.shape[-1] ** -0.5
    )


def one_head_size(x: AttentionInputs, _config: NSAConfig) -> str:
    """Refuse values of another head size than keys, which some kernels read out of bounds."""
    Dk, Dv = x.k_sel.shape[-1], x.v_sel.shape[-1]
    return "" if Dk == Dv else f"takes keys and values of one head size, but these have {Dk}, {Dv}"


def pad_group(x: Tensor, heads: int, fewest: int) -> Tensor:
    """Zeros after the heads of each group, [B, T, HQ, ...], up to a power of two, at least fewest.

    Queries of zeros do not change the selection: they add the same to the scores of all blocks.
    """
    group = x.shape[2] // heads
    size = max(fewest, 1 << (group - 1).bit_length())
    if fewest == 1 or size == group:
        return x
    padding = [0, 0] * (x.dim() - 3) + [0, size - group]
    padded: Tensor = F.pad(x.unflatten(2, (heads, group)), padding).flatten(2, 3)
    return padded


def unpad_group(x: Tensor, heads: int, q_heads: int) -> Tensor:
    """Undo `pad_group`."""
    if x.shape[2] == q_heads:
        return x
    grouped: Tensor = x.unflatten(2, (heads, -1))
    return grouped[:, :, :, : q_heads // heads].flatten(2, 3)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
