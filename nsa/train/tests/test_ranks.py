"""Ranks of one node start and end together, and one of them says why."""

import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from nsa.train.__main__ import main
from nsa.train.loop import Trainer
from nsa.train.ranks import first_failure, start_ranks
from nsa.train.tests.training import QUICK

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")


def program(body: str, *arguments: str) -> list[str]:
    """A rank in milliseconds, without torch; `env` is its environment."""
    return [sys.executable, "-ISc", f"import os, sys, time; env = os.environ\n{body}", *arguments]


@pytest.mark.parametrize(
    ("end", "status", "message"),
    [
        ("sys.exit(3)", 3, ""),
        ("os.kill(os.getpid(), 9)", 128 + 9, "error: rank 1 was ended by SIGKILL\n"),
        ("os.kill(os.getppid(), 15); time.sleep(60)", 128 + signal.SIGTERM, ""),
    ],
)
def test_what_ends_one_rank_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], end: str, status: int, message: str
) -> None:
    other = "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    wait = "while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read(): time.sleep(.01)"
    body = f"if env['RANK'] == '0': {other}\n{wait}\n{end}"
    began = time.monotonic()
    ended: object
    try:
        ended = start_ranks(program(body, str(tmp_path / "pid")), 2)
    except SystemExit as left:  # the launcher was ended
        ended = left.code

    assert ended == status
    assert time.monotonic() - began < 30
    assert capfd.readouterr().err.startswith(message)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_of_ranks_that_fail_together_one_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused for the same reason, the third misses the first in a collective."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0" / "error.json"))
    assert main([*QUICK, "--cuda-graph"]) == 2
    assert capsys.readouterr().err.count("error: ") == 1

    assert main([*QUICK, "--cuda-graph"]) == 2
    monkeypatch.setattr(Trainer, "step", lambda _: torch.ones(2) @ torch.ones(3))
    assert main(QUICK) == 2

    assert capsys.readouterr().err == ""
    assert [file.read_text() for file in tmp_path.iterdir()] == ["2"]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert first_failure(1) is None, "another launcher's folder"


def test_a_refusal_of_all_ranks_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--world-size", "2", "--cuda-graph"]) == 2

    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: a CUDA graph needs a GPU, not cpu\n  Use --device cuda, or use --no-cuda-graph.\n"
    )


@pytest.mark.parametrize(
    ("options", "environ", "message"),
    [
        (["--device", "cuda"], {}, "GPU 63 does not exist"),
        (["--seq-len", "0"], {}, "--seq-len"),
        (["--global-batch", "200"], {}, "world size 64 x batch size 2 = 128 rows"),
        (["--global-batch", "200"], {}, "Use --global-batch 128 or 256, or another --batch-size"),
        (["--global-batch", "9"], {}, "Use --global-batch 128, or"),
        ([], {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, "contradicts WORLD_SIZE=2"),
    ],
)
def test_what_no_rank_can_have_is_found_before_one_starts(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    environ: dict[str, str],
    message: str,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("nsa.train.__main__.start_ranks", lambda *_: pytest.fail("started"))

    assert main([*QUICK, "--world-size", "64", *options]) == 2

    assert message in capsys.readouterr().err


def test_the_boot_line_states_how_gradients_are_averaged_and_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"ddp_compress": "fp16", "ddp_bucket_mb": 25, "ddp_static_graph": "on"}
    for module in ("loop", "__main__"):
        monkeypatch.setattr(f"nsa.train.{module}.ddp_settings", lambda _: settings)
    monkeypatch.setenv("NSA_DDP_COMPRESS", "fp16")

    assert main([*QUICK, "--static-graph"]) == 0

    boot, observed, *_ = capsys.readouterr().out.splitlines()
    assert (
        " world_size=1 ddp_compress=fp16 (NSA_DDP_COMPRESS) ddp_bucket_mb=25 "
        "ddp_static_graph=on (--static-graph) params="
    ) in boot
    assert observed.endswith(" ddp_compress=fp16 ddp_bucket_mb=25 ddp_static_graph=on")
