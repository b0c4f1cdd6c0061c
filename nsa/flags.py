"""The environment, read once and nowhere else in `nsa`.

`Flags` holds the NSA_* switches; `Launch` the rank of a process from torchrun. Both are frozen and
passed down; `rank_environ` is what torchrun sets, and `c_compiler` names the compiler. A field has
the name of its variable: `sel_ranges_v2` is NSA_SEL_RANGES_V2. An unknown NSA_* name, a value that
is not accepted, and flags that contradict each other raise FlagError; there is no fallback to a
default.

A Flags record notes which of its fields were read, so that a variable that was set but never read
can be reported (`Flags.asked_for`). Comparing or printing a record reads all fields.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, get_args

from nsa.config import BRANCHES, OFF, Routes

PREFIX = "NSA_"

Fa2 = Literal["off", "torch", "flash-attn"]
DdpCompress = Literal["off", "bf16", "fp16"]
Prefill = Literal["batched", "token"]

T = TypeVar("T")


class FlagError(ValueError):
    """A variable is unknown, has a value that is not accepted, or contradicts another."""


def _choose(words: Mapping[str, T]) -> Callable[[str], T]:
    """A parser that accepts exactly these words, in either case."""

    def parse(text: str) -> T:
        if (word := text.strip().lower()) not in words:
            raise ValueError(f"accepted values are {', '.join(words)}")
        return words[word]

    return parse


def _branches(text: str) -> tuple[str, ...]:
    named = {word.strip() for word in text.lower().replace("+", ",").split(",")}
    if not named <= set(BRANCHES):
        raise ValueError(f"accepted values are {', '.join(BRANCHES)}, joined by , or +")
    return tuple(b for b in BRANCHES if b in named)


def _positive(text: str) -> int:
    if not (text.strip().isdecimal() and int(text) > 0):
        raise ValueError("must be a whole number of at least 1")
    return int(text)


_NO = ("0", "false", "off", "no")
_YES = ("1", "true", "on", "yes")
_FA2: dict[str, Fa2] = {
    **dict.fromkeys(_NO, "off"),
    **dict.fromkeys(_YES, "torch"),
    "torch": "torch",
    "flash-attn": "flash-attn",
}
_FA2_ROUTES: dict[Fa2, str] = {"off": "eager", "torch": "fa2-torch", "flash-attn": "fa2-package"}

# How the variable of a field is parsed, as the field's metadata.
SWITCH = {"parse": _choose({**dict.fromkeys(_NO, False), **dict.fromkeys(_YES, True)})}
POSITIVE = {"parse": _positive}
SOME_BRANCHES = {"parse": _branches}
FA2 = {"parse": _choose(_FA2)}
DDP_COMPRESS = {"parse": _choose({word: word for word in get_args(DdpCompress)})}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """Every NSA_* variable. None means unset, where that differs from any value."""

    prefill_batched: bool = field(default=True, metadata=SWITCH)
    """Whether attention takes all queries of a forward at once; 0 takes them one by one."""
    use_fa2: Fa2 | None = field(default=None, metadata=FA2)
    """FA2 in the window and compress branches: torch's own (1, torch) or the package's
    (flash-attn). 0 forbids it; unset leaves the choice to the two flags below."""
    use_fa2_win: bool | None = field(default=None, metadata=SWITCH)
    """Overrides use_fa2 for the window branch only."""
    use_fa2_cmp: bool | None = field(default=None, metadata=SWITCH)
    """Overrides use_fa2 for the compress branch only."""
    sel_ranges_v2: bool = field(default=True, metadata=SWITCH)
    """Selected attention by vectorised `gather`; 0 by `loop`. The next five take precedence."""
    use_sel_pack: bool = field(default=False, metadata=SWITCH)
    """Selected attention by `packed`."""
    force_sel_mask: bool = field(default=False, metadata=SWITCH)
    """Selected attention by `masked`."""
    use_sel_varlen: bool = field(default=False, metadata=SWITCH)
    """Selected attention by `varlen`."""
    use_triton: bool = field(default=False, metadata=SWITCH)
    """Every branch, and the scores, by its Triton kernels."""
    use_triton_sel: bool | None = field(default=None, metadata=SWITCH)
    """Overrides use_triton for the select branch only."""
    force_parity: bool = field(default=False, metadata=SWITCH)
    """Everything by the reference; takes precedence over every other route."""
    branches: tuple[str, ...] = field(default=BRANCHES, metadata=SOME_BRANCHES)
    """The branches that run, by whichever route; the others are off."""
    disable_aux_stats: bool = field(default=False, metadata=SWITCH)
    """Do not keep the gate means and block counts of a forward."""
    ddp_compress: DdpCompress = field(default="off", metadata=DDP_COMPRESS)
    """Number format of gradients sent between processes; off keeps their dtype."""
    ddp_bucket_mb: int | None = field(default=None, metadata=POSITIVE)
    """Size of a gradient bucket in MiB (DDP's bucket_cap_mb); unset leaves it to torch."""
    ddp_static_graph: bool = field(default=False, metadata=SWITCH)
    """Let DDP take the parameters with a gradient, and their order, from the first step."""
    seq_len: int | None = field(default=None, metadata=POSITIVE)
    """Tokens per sequence."""
    batch_size: int | None = field(default=None, metadata=POSITIVE)
    """Sequences per forward."""
    accum: int | None = field(default=None, metadata=POSITIVE)
    """Forwards whose gradients make one optimiser step."""
    no_gc: bool = field(default=False, metadata=SWITCH)
    """Turn gradient checkpointing off for every preset."""
    tb_disable: bool = field(default=True, metadata=SWITCH)
    """Write no TensorBoard logs."""
    disable_csv_logs: bool = field(default=False, metadata=SWITCH)
    """Write no CSV logs."""
    fwe_doc_batch: int = field(default=64, metadata=POSITIVE)
    """FineWeb-Edu: documents per fetch."""
    fwe_prefetch: bool = field(default=True, metadata=SWITCH)
    """FineWeb-Edu: fetch in a thread while the model trains."""
    fwe_q: int = field(default=4, metadata=POSITIVE)
    """FineWeb-Edu: fetches kept ready."""
    set_names: frozenset[str] = frozenset()
    """Variables that were set, also those set to their default."""
    _asked: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    """Fields that were read."""

    if not TYPE_CHECKING:  # where a misspelt field must stay an error

        def __getattribute__(self, name: str) -> Any:
            if name in _FLAGS:
                object.__getattribute__(self, "_asked").add(name)
            return object.__getattribute__(self, name)

    def __post_init__(self) -> None:
        if len(chosen := self._chosen_selections()) > 1:
            raise FlagError(
                f"{' and '.join(f'{_variable(name)}=1' for name in chosen)} contradict each other: "
                "they choose different routes for selected attention\n  Set only one of them."
            )
        if self.use_triton and (fa2 := self._chosen_fa2()):
            raise FlagError(
                f"NSA_USE_TRITON=1 and {_variable(fa2)} contradict each other: they choose "
                "different routes for the window or compress branch\n  Set only one of them."
            )
        for name in ("use_fa2_win", "use_fa2_cmp"):
            if self.use_fa2 == "off" and getattr(self, name):
                raise FlagError(
                    f"NSA_USE_FA2=0 and {_variable(name)}=1 contradict each other: the first "
                    "forbids FA2 in every branch\n  Unset NSA_USE_FA2 to use it in one branch only."
                )
        self._asked.clear()  # the checks above are not a use

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the NSA_* variables of `environ`, by default those of this process.

        Raises:
            FlagError: A name is not a flag (the message gives the nearest one), a value is not
                accepted (it lists those that are), or flags contradict each other.
        """
        environ = os.environ if environ is None else environ
        given = {name: text for name, text in environ.items() if name.startswith(PREFIX)}
        parsers = {_variable(f.name): f.metadata["parse"] for f in fields(cls) if f.metadata}
        values = {}
        for name, text in sorted(given.items()):
            if name not in parsers:
                near = get_close_matches(name, parsers, n=1, cutoff=0.0)[0]
                raise FlagError(f"{name} is not a flag\n  Did you mean {near}?")
            try:
                values[_field(name)] = parsers[name](text)
            except ValueError as error:
                raise FlagError(f"{name}={text!r}: {error}") from None
        return cls(**values, set_names=frozenset(given))

    @property
    def prefill(self) -> Prefill:
        """How attention takes the queries of a forward: all at once or one by one."""
        return "batched" if self.prefill_batched else "token"

    def routes(self, **given: str) -> Routes:
        """The routes that these flags choose; flags about the parts in `given` are not read."""
        others = (f.name for f in fields(Routes) if f.name not in given)
        return Routes(**given, **{part: self.route(part) for part in others})

    def route(self, part: str) -> str:
        """The route of one part of the operator: compress, scores, select or window."""
        if part in BRANCHES and part not in self.branches:
            return OFF
        if self.force_parity:
            return "reference"
        if part == "select":
            default = "gather" if self.sel_ranges_v2 else "loop"
            return next(iter(self._chosen_selections().values()), default)
        if self.use_triton:
            return "triton"
        if part == "scores":
            return "eager"
        return self._fa2_route(self.use_fa2_win if part == "window" else self.use_fa2_cmp)

    def asked_for(self) -> dict[str, bool]:
        """Every variable that was set, and whether its field has been read since."""
        return {name: _field(name) in self._asked for name in sorted(self.set_names)}

    def asks_nothing_of_branches(self, variable: str) -> bool:
        """Whether a variable has no effect on any branch. Reads its field."""
        alone = type(self)(**{_field(variable): getattr(self, _field(variable))})
        return not alone.disable_aux_stats and alone.routes() == Routes()

    def _chosen_selections(self) -> dict[str, str]:
        """Flags that are on and choose a route for selected attention, with that route."""
        routes = {"use_sel_pack": "packed", "force_sel_mask": "masked", "use_sel_varlen": "varlen"}
        chosen = {name: route for name, route in routes.items() if getattr(self, name)}
        if self.use_triton_sel:
            chosen["use_triton_sel"] = "triton"
        elif self.use_triton and self.use_triton_sel is None:
            chosen["use_triton"] = "triton"
        return chosen

    def _chosen_fa2(self) -> str | None:
        """A flag that requests FA2 in some branch."""
        if self.use_fa2 not in (None, "off"):
            return "use_fa2"
        return next((name for name in ("use_fa2_win", "use_fa2_cmp") if getattr(self, name)), None)

    def _fa2_route(self, branch: bool | None) -> str:
        if branch is False:
            return "eager"
        return _FA2_ROUTES[self.use_fa2 or ("torch" if branch else "off")]


def _variable(name: str) -> str:
    """The environment variable of a field."""
    return PREFIX + name.upper()


def _field(variable: str) -> str:
    """The field of an environment variable."""
    return variable.removeprefix(PREFIX).lower()


_FLAGS = frozenset(f.name for f in fields(Flags) if f.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The rank of this process in a training of several, as torchrun numbers them."""

    rank: int = 0
    """Number of this process, from 0."""
    world_size: int = 1
    """How many processes train together."""
    local_rank: int = 0
    """Number of this process on its host, and of its GPU."""

    def __post_init__(self) -> None:
        if not 0 <= self.local_rank <= self.rank < self.world_size:
            raise FlagError(
                f"RANK={self.rank}, LOCAL_RANK={self.local_rank}, WORLD_SIZE={self.world_size}: "
                "must satisfy 0 <= LOCAL_RANK <= RANK < WORLD_SIZE\n  Start with torchrun."
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read RANK, WORLD_SIZE and LOCAL_RANK; one process alone when none is set.

        Raises:
            FlagError: Only some are set, one is not a whole number, or they contradict.
        """
        environ = os.environ if environ is None else environ
        names = {"rank": "RANK", "world_size": "WORLD_SIZE", "local_rank": "LOCAL_RANK"}
        given = {key: environ[name] for key, name in names.items() if name in environ}
        if not given:
            return cls()
        if missing := [names[key] for key in names if key not in given]:
            raise FlagError(
                f"{', '.join(names[key] for key in given)} set without {', '.join(missing)}\n"
                "  Start with torchrun, or unset them."
            )
        for key, text in given.items():
            if not text.isdecimal():
                raise FlagError(f"{names[key]}={text!r}: must be a whole number")
        return cls(**{key: int(text) for key, text in given.items()})


def rank_environ(launch: Launch, port: int, folder: Path) -> dict[str, str]:
    """The environment of a rank of this node, as torchrun sets it: rank 0 listens at `port`, and
    `folder` is error_folder() of all."""
    return {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // launch.world_size)),
        **os.environ,
        "RANK": str(launch.rank),
        "LOCAL_RANK": str(launch.local_rank),
        "WORLD_SIZE": str(launch.world_size),
        "LOCAL_WORLD_SIZE": str(launch.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_ERROR_FILE": str(folder / str(launch.local_rank) / "error.json"),
    }


def error_folder() -> Path | None:
    """The folder that the ranks of a launch share on this node; None if it gave them none."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parents[1] if file else None


def c_compiler() -> str:
    """The C compiler that Triton and torch.compile use: CC, or one on PATH; empty without one."""
    return os.environ.get("CC") or next(filter(shutil.which, ("gcc", "cc", "clang")), "")
