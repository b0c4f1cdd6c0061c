"""The environment becomes one frozen record, or one message."""

import re
from dataclasses import fields, replace

import pytest

from nsa.config import Routes
from nsa.flags import FlagError, Flags, Launch

DEFAULT = Routes()
TRITON = Routes.triton()
USERS_NAMES = {
    "NSA_PREFILL_BATCHED",
    "NSA_USE_FA2",
    "NSA_USE_FA2_WIN",
    "NSA_USE_FA2_CMP",
    "NSA_SEL_RANGES_V2",
    "NSA_USE_SEL_PACK",
    "NSA_FORCE_SEL_MASK",
    "NSA_USE_SEL_VARLEN",
    "NSA_USE_TRITON",
    "NSA_USE_TRITON_SEL",
    "NSA_FORCE_PARITY",
    "NSA_BRANCHES",
    "NSA_DISABLE_AUX_STATS",
    "NSA_DDP_COMPRESS",
    "NSA_DDP_BUCKET_MB",
    "NSA_DDP_STATIC_GRAPH",
    "NSA_SEQ_LEN",
    "NSA_BATCH_SIZE",
    "NSA_ACCUM",
    "NSA_NO_GC",
    "NSA_TB_DISABLE",
    "NSA_DISABLE_CSV_LOGS",
    "NSA_FWE_DOC_BATCH",
    "NSA_FWE_PREFETCH",
    "NSA_FWE_Q",
}


def read(**environ: str) -> Flags:
    return Flags.from_env(environ)


def test_every_name_the_users_sweep_is_a_flag_and_no_other() -> None:
    assert {f"NSA_{f.name.upper()}" for f in fields(Flags) if f.metadata} == USERS_NAMES


def test_nothing_set_is_the_vectorised_default() -> None:
    flags = read(PATH="/bin", NSACC="1")

    assert flags == Flags()
    assert flags.routes() == DEFAULT
    assert flags.prefill == "batched"


def test_the_process_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_SEQ_LEN", "512")

    assert Flags.from_env().seq_len == 512


@pytest.mark.parametrize("word", ["0", "false", "OFF", " no "])
def test_a_switch_turns_off_by_any_of_its_words(word: str) -> None:
    assert read(NSA_PREFILL_BATCHED=word).prefill == "token"


def test_what_was_set_is_known_even_where_it_is_the_default() -> None:
    flags = read(NSA_PREFILL_BATCHED="1", NSA_SEQ_LEN="64")

    assert flags.set_names == {"NSA_PREFILL_BATCHED", "NSA_SEQ_LEN"}


@pytest.mark.parametrize(
    ("environ", "routes"),
    [
        ({"NSA_SEL_RANGES_V2": "0"}, Routes(select="loop")),
        ({"NSA_USE_SEL_PACK": "1"}, Routes(select="packed")),
        ({"NSA_FORCE_SEL_MASK": "1"}, Routes(select="masked")),
        ({"NSA_USE_SEL_VARLEN": "1"}, Routes(select="varlen")),
        ({"NSA_USE_SEL_VARLEN": "1", "NSA_SEL_RANGES_V2": "0"}, Routes(select="varlen")),
        ({"NSA_USE_TRITON": "1"}, TRITON),
        ({"NSA_USE_TRITON": "1", "NSA_SEL_RANGES_V2": "0"}, TRITON),
        ({"NSA_USE_TRITON": "1", "NSA_USE_FA2": "0"}, TRITON),
        ({"NSA_USE_TRITON": "1", "NSA_USE_TRITON_SEL": "1"}, TRITON),
        ({"NSA_USE_TRITON_SEL": "1"}, Routes(select="triton")),
        ({"NSA_USE_TRITON": "1", "NSA_USE_TRITON_SEL": "0"}, replace(TRITON, select="gather")),
        (
            {"NSA_USE_TRITON": "1", "NSA_USE_TRITON_SEL": "0", "NSA_USE_SEL_PACK": "1"},
            replace(TRITON, select="packed"),
        ),
        ({"NSA_FORCE_PARITY": "1", "NSA_USE_TRITON": "1"}, Routes.reference()),
        ({"NSA_USE_SEL_PACK": "0", "NSA_USE_TRITON_SEL": "0", "NSA_FORCE_PARITY": "0"}, DEFAULT),
        ({"NSA_FORCE_PARITY": "1", "NSA_USE_SEL_PACK": "1"}, Routes.reference()),
        ({"NSA_FORCE_PARITY": "1", "NSA_USE_FA2": "1"}, Routes.reference()),
        ({"NSA_BRANCHES": "window,Select, compress"}, DEFAULT),
        ({"NSA_BRANCHES": "select+window"}, Routes(compress="off")),
        ({"NSA_BRANCHES": "window", "NSA_USE_TRITON": "1"}, Routes.triton(["window"])),
        ({"NSA_BRANCHES": "compress", "NSA_FORCE_PARITY": "1"}, Routes.reference(["compress"])),
    ],
)
def test_selection_flags_choose_the_route(environ: dict[str, str], routes: Routes) -> None:
    assert read(**environ).routes() == routes


# The master flag, then the window's and the compress branch's -> the routes of these two.
@pytest.mark.parametrize(
    ("master", "win", "cmp", "expected"),
    [
        (None, None, None, ("eager", "eager")),
        (None, "1", None, ("fa2-torch", "eager")),
        (None, None, "1", ("eager", "fa2-torch")),
        (None, "0", "1", ("eager", "fa2-torch")),
        ("0", None, None, ("eager", "eager")),
        ("0", "0", None, ("eager", "eager")),
        ("1", None, None, ("fa2-torch", "fa2-torch")),
        ("torch", None, "1", ("fa2-torch", "fa2-torch")),
        ("1", "0", None, ("eager", "fa2-torch")),
        ("flash-attn", None, None, ("fa2-package", "fa2-package")),
        ("flash-attn", "1", "0", ("fa2-package", "eager")),
    ],
)
def test_branch_flags_refine_the_master_and_reach_no_other_branch(
    master: str | None, win: str | None, cmp: str | None, expected: tuple[str, str]
) -> None:
    words = {"NSA_USE_FA2": master, "NSA_USE_FA2_WIN": win, "NSA_USE_FA2_CMP": cmp}

    routes = read(**{name: word for name, word in words.items() if word is not None}).routes()

    assert (routes.window, routes.compress) == expected
    assert (routes.scores, routes.select) == (DEFAULT.scores, DEFAULT.select)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NSA_SEQLEN": "8"}, "NSA_SEQLEN is not a flag\n  Did you mean NSA_SEQ_LEN?"),
        ({"NSA_USE_FA3": "1"}, "NSA_USE_FA3 is not a flag\n  Did you mean NSA_USE_FA2?"),
        ({"NSA_NO_GC": "maybe"}, "NSA_NO_GC='maybe': accepted values are 0, false, off, no, 1"),
        ({"NSA_NO_GC": ""}, "NSA_NO_GC='': accepted values are"),
        ({"NSA_USE_FA2": "2"}, "yes, torch, flash-attn"),
        ({"NSA_BRANCHES": ""}, "NSA_BRANCHES='': accepted values are compress, select, window"),
        ({"NSA_BRANCHES": "select,all"}, "='select,all': accepted values are compress, select"),
        ({"NSA_DDP_COMPRESS": "int8"}, "='int8': accepted values are off, bf16, fp16"),
        ({"NSA_ACCUM": "0"}, "NSA_ACCUM='0': must be a whole number of at least 1"),
        ({"NSA_SEQ_LEN": "2k"}, "NSA_SEQ_LEN='2k': must be a whole number"),
        ({"NSA_BATCH_SIZE": "-1"}, "NSA_BATCH_SIZE='-1': must be a whole number"),
        ({"NSA_FWE_Q": "1.5"}, "NSA_FWE_Q='1.5': must be a whole number"),
        (
            {"NSA_USE_TRITON": "1", "NSA_USE_SEL_PACK": "1"},
            "NSA_USE_SEL_PACK=1 and NSA_USE_TRITON=1 contradict",
        ),
        (
            {"NSA_USE_TRITON_SEL": "1", "NSA_FORCE_SEL_MASK": "1"},
            "NSA_FORCE_SEL_MASK=1 and NSA_USE_TRITON_SEL=1 contradict",
        ),
        (
            {"NSA_USE_TRITON": "1", "NSA_USE_FA2": "torch"},
            "NSA_USE_TRITON=1 and NSA_USE_FA2 contradict",
        ),
        (
            {"NSA_USE_TRITON": "1", "NSA_USE_FA2_CMP": "1"},
            "NSA_USE_TRITON=1 and NSA_USE_FA2_CMP contradict",
        ),
        (
            {"NSA_USE_SEL_PACK": "1", "NSA_FORCE_SEL_MASK": "1"},
            "NSA_USE_SEL_PACK=1 and NSA_FORCE_SEL_MASK=1 contradict",
        ),
        (
            {"NSA_USE_FA2": "0", "NSA_USE_FA2_WIN": "1"},
            "NSA_USE_FA2=0 and NSA_USE_FA2_WIN=1 contradict",
        ),
        (
            {"NSA_USE_FA2": "off", "NSA_USE_FA2_CMP": "1"},
            "NSA_USE_FA2=0 and NSA_USE_FA2_CMP=1 contradict",
        ),
    ],
)
def test_a_wrong_flag_is_an_error_and_says_what_does(environ: dict[str, str], message: str) -> None:
    with pytest.raises(FlagError, match=re.escape(message)):
        read(**environ)


def test_a_flag_counts_as_read_once_its_field_is_read() -> None:
    flags = read(NSA_USE_FA2="1", NSA_FWE_Q="2", NSA_PREFILL_BATCHED="1")
    assert set(flags.asked_for().values()) == {False}  # not by having been checked

    flags.routes()
    assert flags.fwe_q == 2

    assert flags.asked_for() == {
        "NSA_FWE_Q": True,
        "NSA_PREFILL_BATCHED": False,
        "NSA_USE_FA2": True,
    }


@pytest.mark.parametrize(
    ("environ", "unasked"),
    [
        # A flag that wins leaves those it wins over unasked.
        ({"NSA_FORCE_PARITY": "1", "NSA_USE_FA2": "1"}, {"NSA_USE_FA2"}),
        ({"NSA_USE_TRITON": "1", "NSA_USE_FA2": "0"}, {"NSA_USE_FA2"}),
        ({"NSA_USE_FA2": "1", "NSA_USE_FA2_WIN": "0", "NSA_USE_FA2_CMP": "0"}, {"NSA_USE_FA2"}),
        ({"NSA_USE_FA2": "1", "NSA_USE_FA2_WIN": "0"}, set()),
        ({"NSA_USE_TRITON": "1", "NSA_USE_TRITON_SEL": "0"}, set()),
    ],
)
def test_routes_read_only_the_flags_that_decide_them(
    environ: dict[str, str], unasked: set[str]
) -> None:
    flags = read(**environ)

    flags.routes()

    assert {name for name, asked in flags.asked_for().items() if not asked} == unasked


def test_a_given_route_reads_no_flag() -> None:
    flags = read(NSA_USE_SEL_PACK="1", NSA_USE_FA2_WIN="1")

    routes = flags.routes(select="loop", window="eager")

    assert routes == Routes(select="loop")
    assert set(flags.asked_for().values()) == {False}


@pytest.mark.parametrize(
    ("variable", "text", "nothing"),
    [
        ("NSA_USE_FA2", "0", True),
        ("NSA_USE_FA2", "torch", False),
        ("NSA_SEL_RANGES_V2", "1", True),
        ("NSA_SEL_RANGES_V2", "0", False),
        ("NSA_FORCE_PARITY", "1", False),
        ("NSA_BRANCHES", "compress,select,window", True),
        ("NSA_BRANCHES", "select,window", False),
        ("NSA_DISABLE_AUX_STATS", "1", False),
    ],
)
def test_a_flag_may_have_no_effect_on_branches(variable: str, text: str, nothing: bool) -> None:
    flags = read(**{variable: text})

    assert flags.asks_nothing_of_branches(variable) is nothing
    assert flags.asked_for() == {variable: True}


def test_torchrun_numbers_the_process() -> None:
    launch = Launch.from_env({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})

    assert launch == Launch(rank=3, world_size=4, local_rank=1)
    assert Launch.from_env({}) == Launch(rank=0, world_size=1, local_rank=0)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK set without WORLD_SIZE, LOCAL_RANK"),
        ({"RANK": "x", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "RANK='x': must be a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "must satisfy 0 <= LOCAL_RANK"),
    ],
)
def test_half_a_launch_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(FlagError, match=re.escape(message)):
        Launch.from_env(environ)
