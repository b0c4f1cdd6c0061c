"""Training from the command line: precedence of settings, output, and errors."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nsa.config import PRESETS, Routes
from nsa.errors import TrainError
from nsa.flags import Flags, Launch
from nsa.train import fast
from nsa.train.__main__ import configure, main
from nsa.train.data import DataError
from nsa.train.loop import Trainer
from nsa.train.progress import Progress
from nsa.train.tests.training import QUICK, tiny

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")


# --- configuration -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seq_len": 0}, "seq_len=0 must be positive"),
        ({"lr": math.nan}, "lr=nan must be positive"),
        ({"seed": -1}, "seed=-1 must be 0 or more"),
        ({"seed": 2**63}, "must be under 2"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be 0 or more"),
        ({"loader_timeout_s": 0}, "loader_timeout_s=0 must be positive"),
        ({"compile": "yes"}, "compile='yes' is neither 'off' nor 'on'"),
        ({"precision": "tf32"}, "precision='tf32' is not one of fp32, bf16, fp16"),
        ({"checkpointing": "1-2"}, "within '0-1'"),
    ],
)
def test_settings_that_cannot_be_trained_with(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny(**settings)


def test_an_unknown_dataset_is_found_before_anything_is_built() -> None:
    with pytest.raises(DataError, match="Did you mean 'synthetic'"):
        tiny(dataset="synthetics")


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "Use cpu, cuda or cuda:N"), ("meta", "neither"), ("cuda:99", "GPU 99 does not exist")],
)
def test_a_device_that_is_not_here(device: str, message: str) -> None:
    with pytest.raises(TrainError, match=message):
        Trainer(tiny(device=device))


def test_options_win_over_variables_and_these_over_the_preset() -> None:
    flags = Flags(seq_len=100, batch_size=3, no_gc=True)

    config, origins = configure("125m", {"seq_len": 50, "attention": "dense"}, flags)

    assert (config.seq_len, config.batch_size, config.accum) == (50, 3, 1)
    assert (config.checkpointing, config.precision) == ("off", "bf16")
    assert config.model == replace(PRESETS["125m"], attention="dense")
    assert origins == {"batch_size": "NSA_BATCH_SIZE", "checkpointing": "NSA_NO_GC"}


def test_a_global_batch_decides_how_often_a_step_accumulates() -> None:
    def accum(ranks: int) -> int:
        options = {"global_batch": 24, "batch_size": 2}
        config, origins = configure("tiny", options, Flags(accum=5), Launch(world_size=ranks))
        assert origins == {"accum": "--global-batch"}
        return config.accum

    assert [accum(ranks) for ranks in (1, 2, 4)] == [12, 6, 3]


TRITON, ALONE, FAST = Routes.triton(), Routes.triton(["select"]), fast.FAST


@pytest.mark.parametrize(
    ("preset", "options", "flags", "processes", "expected"),
    [
        ("125m", {}, {}, 1, (TRITON, FAST, "on", FAST, True, FAST)),
        ("125m", {"attention": "dense"}, {}, 1, (None, "", "on", FAST, True, FAST)),
        ("125m", {"compile": "off", "cuda_graph": False}, {}, 1, (TRITON, FAST, "off", "", 0, "")),
        ("125m", {}, {"NSA_USE_SEL_PACK": "1"}, 1, (None, "", "on", FAST, False, "packed waits")),
        ("125m", {}, {"NSA_FORCE_SEL_MASK": "1"}, 1, (None, "", "on", FAST, True, FAST)),
        ("125m", {}, {"NSA_PREFILL_BATCHED": "0"}, 1, (TRITON, FAST, "on", FAST, False, "token")),
        ("125m", {}, {"NSA_BRANCHES": "select"}, 1, (ALONE, FAST, "on", FAST, True, FAST)),
        ("125m", {"precision": "fp16"}, {}, 1, (TRITON, FAST, "on", FAST, False, "loss scale")),
        ("125m", {}, {}, 2, (TRITON, FAST, "on", FAST, True, FAST)),
        ("125m", {"accum": 2}, {}, 2, (TRITON, FAST, "on", FAST, False, "several forwards")),
        ("125m", {}, {"NSA_BRANCHES": "select"}, 2, (ALONE, FAST, "on", FAST, 0, "several ranks")),
        ("small", {}, {}, 1, (None, "bf16 or fp16", "on", FAST, True, FAST)),
    ],
)
def test_a_gpu_trains_by_the_fast_settings_that_the_others_allow(
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    options: dict[str, Any],
    flags: dict[str, str],
    processes: int,
    expected: tuple[Any, ...],
) -> None:
    _as_on_a_gpu(monkeypatch)

    config, why = configure(
        preset, {"device": "cuda", **options}, Flags.from_env(flags), Launch(world_size=processes)
    )

    assert (config.routes, config.compile, config.cuda_graph) == expected[::2]
    for name, said in zip(("routes", "compile", "cuda_graph"), expected[1::2], strict=True):
        assert said in why.get(name, "") if said else name not in why


@pytest.mark.parametrize(
    ("capability", "compiler", "routes", "compile_"),
    [
        ((7, 5), "gcc", "needs compute capability 8.0", FAST),
        ((8, 0), "gcc", FAST, FAST),
        ((8, 0), "", "triton finds no C compiler", "no C compiler is found"),
    ],
)
def test_a_gpu_or_a_host_that_lacks_something_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    compiler: str,
    routes: str,
    compile_: str,
) -> None:
    _as_on_a_gpu(monkeypatch, capability, compiler)

    config, why = configure("125m", {"device": "cuda"}, Flags())

    assert routes in why["routes"]
    assert (config.routes is not None) == (routes == FAST)
    assert (why["compile"], config.compile) == (compile_, "on" if compiler else "off")


def _as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0), compiler: str = "gcc"
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(fast, "training_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr("shutil.which", lambda name: name if name == compiler else None)


# --- command line ------------------------------------------------------------------------


def test_the_boot_line_names_the_source_of_each_setting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_ACCUM", "2")
    monkeypatch.setenv("NSA_SEQ_LEN", "99")
    monkeypatch.setenv("NSA_SEL_RANGES_V2", "0")
    monkeypatch.setenv("NSA_BRANCHES", "select,window")
    monkeypatch.setenv("NSA_PREFILL_BATCHED", "0")
    monkeypatch.setenv("NSA_DDP_BUCKET_MB", "9")
    ddp = {"ddp_bucket_mb": 9, "ddp_static_graph": "on"}
    monkeypatch.setattr("nsa.train.__main__.ddp_settings", lambda _: ddp)

    assert main([*QUICK, "--no-gc", "--dataset", "synthetic", "--static-graph"]) == 0

    boot, observed, first, last = capsys.readouterr().out.splitlines()
    assert boot == (
        "[boot] effective config: preset=tiny attention=nsa S=16 (--seq-len) B=2 (--batch-size) "
        "accum=2 (NSA_ACCUM) gc=off (--no-gc) compile=off graph=off precision=fp32 "
        "dataset=synthetic (--dataset) steps=2 (--steps) lr=0.003 seed=0 "
        "routes=compress:off,scores:eager,select:loop,window:eager "
        "(NSA_SEL_RANGES_V2,NSA_BRANCHES) "
        "prefill=token (NSA_PREFILL_BATCHED) device=cpu (--device) world_size=1 "
        "ddp_bucket_mb=9 (NSA_DDP_BUCKET_MB) ddp_static_graph=on (--static-graph) params=0.1M"
    )
    assert "compress:off,scores:eager,select:loop" in observed
    assert "prefill=token" in observed
    assert "step      1" in first
    assert "tokens/s -" in first
    assert "step      2" in last
    assert "tokens/s -" not in last


def test_the_boot_line_of_dense_attention_credits_no_flag_with_its_route(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_USE_FA2", "1")

    assert main([*QUICK, "--attention", "dense"]) == 0

    boot, observed, *_ = capsys.readouterr().out.splitlines()
    assert " routes=dense:sdpa prefill=" in boot
    assert " routes=dense:sdpa fa2=off " in observed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seqlen", "5"], "unknown option --seqlen\n  Did you mean --seq-len?"),
        (["--ddp", "0"], "unknown option --ddp\n  For the options, run python -m nsa.train --help"),
        (["resume"], "unknown argument resume\n"),
        (["--steps=5", "--no-cg"], "unknown option --no-cg\n  Did you mean --no-gc?"),
        (["--seq", "5"], "unknown option --seq\n"),
        (["--seq-len", "0"], "--seq-len: '0' is not a whole number of at least 1"),
        (["--preset", "smal"], "Did you mean small?"),
        (["--precision", "bf61"], "Did you mean bf16?"),
        (["--attention", "sparse"], "'sparse' is not one of nsa, dense"),
        (["--dataset", "txt"], "Did you mean 'text'?"),
        (["--world-size=64", "--device=cuda"], "GPU 63 does not exist"),
        (["--world-size=2", "--batch-size=2", "--global-batch=9"], "Use --global-batch 8 or 12,"),
        (["--world-size=2", "--batch-size=2", "--global-batch=3"], "2 x batch size 2 = 4 rows"),
        (["--gc", "3-9"], "'3-9' is neither 'off', 'on' nor a range"),
        (["--global-batch=8", "--accum-batches=2"], "not allowed with argument --global-batch"),
        (["--gc", "on", "--no-gc"], "--no-gc: not allowed with argument --gc"),
        (["--lr", "-1"], "argument --lr: '-1' is not a number above 0"),
        (["--lr", "inf"], "lr=inf must be finite"),
        (["--clip", "nan"], "argument --clip: 'nan' is not a number above 0"),
        (
            ["--weight-decay", "-0.1"],
            "argument --weight-decay: '-0.1' is not a number of at least 0",
        ),
        (["--curve", "curve.jpeg"], "--curve: 'curve.jpeg' does not end in .png"),
        (["--lr", "fast"], "argument --lr: 'fast' is not a number above 0"),
        (["--device", "cuda:99"], "cuda:99"),
        (["--dataset", "fineweb_edu:/nowhere"], "/nowhere: no such file or folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_are_one_message_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("nsa.train.__main__.start_ranks", lambda *_: pytest.fail("started"))
    assert main(options) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("error:") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("NSA_SEQLEN", "5", "Did you mean NSA_SEQ_LEN?"),
        ("NSA_BATCH_SIZE", "many", "NSA_BATCH_SIZE='many'"),
        ("NSA_TB_DISABLE", "0", "Add --out DIR"),
        ("RANK", "1", "WORLD_SIZE"),
    ],
)
def test_bad_variables_are_one_message_and_exit_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(name, value)

    assert main(QUICK) == 2

    assert message in capsys.readouterr().err


def test_a_route_that_cannot_run_here_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_USE_FA2_WIN", "1")

    assert main(QUICK) == 2

    assert "fa2-torch" in capsys.readouterr().err


def test_malformed_data_stops_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "alpha"}\n{"text": ')

    assert main([*QUICK, "--dataset", f"fineweb_edu:{file}"]) == 2

    assert f"error: {file}:2: not JSON" in capsys.readouterr().err


def test_a_diverging_loss_exits_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: torch.tensor(math.nan))

    assert main(QUICK) == 1

    assert "the loss is nan at step 1" in capsys.readouterr().err


def test_an_interrupt_keeps_what_was_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([torch.tensor(1.0)])

    def step(_: Trainer) -> Tensor:
        for loss in losses:
            return loss
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(Trainer, "effective", lambda _: {})

    assert main([*QUICK, "--out", str(tmp_path)]) == 130

    assert capsys.readouterr().err.startswith("error: interrupted")
    assert len((tmp_path / "train.csv").read_text().splitlines()) == 2


@pytest.mark.parametrize("empty", [np.empty, torch.empty])
def test_a_host_without_memory_is_one_message(
    empty: Callable[[int], object],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: empty(2**58))

    assert main(QUICK) == 2

    assert "lower --batch-size" in capsys.readouterr().err
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert main(QUICK) == 2
    assert capsys.readouterr().err.startswith("error: rank 3: ")


def test_another_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "step", lambda _: torch.ones(2) @ torch.ones(3))

    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        main(QUICK)


def test_csv_log_and_curve(tmp_path: Path) -> None:
    curve = tmp_path / "figures" / "curve.png"

    assert main([*QUICK, "--out", str(tmp_path), "--curve", str(curve), "--held-out", "1"]) == 0

    header, first, last = (tmp_path / "train.csv").read_text().splitlines()
    assert header.split(",") == list(Progress.__dataclass_fields__)[:-2]
    assert first.split(",")[0] == "1"
    assert first.split(",")[4] == "", "no throughput from a first call"
    assert float(last.split(",")[4]) > 0
    assert curve.read_bytes().startswith(b"\x89PNG")


def test_csv_log_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NSA_DISABLE_CSV_LOGS", "1")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")

    assert main([*QUICK, "--out", str(tmp_path / "file")]) == 2

    assert "cannot be written: " in capsys.readouterr().err


def test_a_curve_that_cannot_be_written_is_found_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")

    assert main([*QUICK, "--curve", str(tmp_path / "file" / "curve.png")]) == 2

    captured = capsys.readouterr()
    assert "cannot be written: " in captured.err
    assert captured.out == ""


def test_a_run_that_is_refused_leaves_the_log_of_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.csv").write_text("precious\n")
    monkeypatch.setenv("NSA_USE_TRITON", "1")

    assert main([*QUICK, "--out", str(tmp_path)]) == 2

    assert "triton: needs " in capsys.readouterr().err
    assert (tmp_path / "train.csv").read_text() == "precious\n"


def test_a_full_disk_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.csv").symlink_to("/dev/full")

    assert main([*QUICK, "--out", str(tmp_path)]) == 2

    assert "train.csv: cannot be written: No space left on device" in capsys.readouterr().err


def test_tensorboard_without_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NSA_TB_DISABLE", "0")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    assert main([*QUICK, "--out", str(tmp_path)]) == 2

    assert "pip install tensorboard" in capsys.readouterr().err


def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv("NSA_TB_DISABLE", "0")
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert list(tmp_path.glob("events.out.tfevents.*"))


def test_processes_that_cannot_meet_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    assert main(QUICK) == 2

    error = capsys.readouterr().err
    assert "MASTER_ADDR" in error
    assert "Start with --world-size or torchrun." in error
    assert main([*QUICK, "--world-size", "3"]) == 2
    assert "--world-size 3 contradicts WORLD_SIZE=2" in capsys.readouterr().err
