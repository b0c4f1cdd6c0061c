"""Checkpoints: a resumed run continues bit for bit, and a save that fails loses nothing."""

import json
import re
import resource
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import Routes
from nsa.errors import TrainError
from nsa.train import checkpoint
from nsa.train.__main__ import main
from nsa.train.config import TrainConfig
from nsa.train.loop import Trainer
from nsa.train.tests.training import (
    MASKED,
    QUICK,
    TORCH_LOOKS_AT_GRAD,
    apart,
    graphs_without_a_gpu,
    needs_gpu,
    tiny,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")

RUN = [*QUICK, "--steps=6", "--log-every=1"]


def halves(folder: Path, config: TrainConfig) -> tuple[list[list[Tensor]], list[Trainer]]:
    """Six steps at once; and three, saved, and three more in a trainer that resumed."""
    whole, first, second = (Trainer(config, MASKED) for _ in range(3))
    expected = [whole.step() for _ in range(6)]
    losses = [first.step() for _ in range(3)]
    checkpoint.save(first, folder, keep=1)
    drawn = torch.rand(3)
    checkpoint.resume(second, folder)
    assert torch.equal(torch.rand(3), drawn), "the random states are those of the save"
    losses += [second.step() for _ in range(3)]
    for trainer in (whole, first, second):
        trainer.close()
    return [losses, expected], [second, whole]


@pytest.mark.parametrize(
    "settings",
    [
        {"dataset": "synthetic"},
        {"dataset": "text", "accum": 2},
        {"dataset": "fineweb_edu"},
        # Steps 1 to 4 overflow: the scale halves, and the optimiser has no state yet when saved.
        {"precision": "fp16", "initial_scale": 2.0**26},
        {"cuda_graph": True, "accum": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_resumed_run_continues_bit_for_bit(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("cuda_graph"):
        graphs_without_a_gpu(monkeypatch)
    if settings.get("dataset") == "fineweb_edu":
        lines = (json.dumps({"text": f"document {n} " * (n % 7 + 1)}) + "\n" for n in range(40))
        (tmp_path / "a.jsonl").write_text("".join(lines))
        settings = {"dataset": f"fineweb_edu:{tmp_path}"}
    config = tiny(steps=6, warmup_steps=4, **settings)

    losses, (resumed, whole) = halves(tmp_path / "saved", config)

    assert losses[0] == losses[1]
    assert resumed.position() == whole.position()
    mine, theirs = resumed.tensors(), whole.tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.gpu
@needs_gpu
@TORCH_LOOKS_AT_GRAD
@pytest.mark.parametrize("compile_", ["off", "on"])
def test_a_resumed_run_of_a_graph_continues(compile_: Any, tmp_path: Path) -> None:
    """The state of the optimiser survives the warm-up of the capture."""
    config = tiny(steps=6, lr=1e-2, device="cuda", cuda_graph=True, compile=compile_)

    losses, (resumed, whole) = halves(tmp_path, config)

    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)
    assert apart(resumed, whole) < 1e-5
    assert resumed.effective() == {**whole.effective(), "graph": "on"}


def killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ("torch.distributed.checkpoint.FileSystemWriter.finish", "step-000001"),
        ("nsa.train.checkpoint.os.fsync", "step-000001"),
        ("nsa.train.checkpoint.shutil.rmtree", "step-000002"),
    ],
    ids=["between files", "before the last file", "while the old one is deleted"],
)
def test_a_run_killed_while_it_saves_leaves_the_last_whole_checkpoint(
    place: str, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Trainer(tiny()) as trainer, Trainer(tiny()) as resumed:
        trainer.step()
        checkpoint.save(trainer, tmp_path, keep=1)
        trainer.step()
        with monkeypatch.context() as planted:
            planted.setattr(place, killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoint.save(trainer, tmp_path, keep=1)

        assert [path.name for path in tmp_path.glob("step-??????")] == [left]
        assert checkpoint.resume(resumed, tmp_path).startswith(str(tmp_path / left))
        while resumed.steps_done < 3:
            resumed.step()
        trainer.step()
        assert torch.equal(weights(resumed), weights(trainer))
        checkpoint.save(resumed, tmp_path, keep=1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_what_computes_a_step_may_differ_and_is_named(tmp_path: Path) -> None:
    config = tiny()
    other = replace(config, checkpointing="on", routes=Routes(select="masked"))
    with Trainer(config) as saved, Trainer(other) as resumed:
        checkpoint.save(saved, tmp_path, keep=1)
        line = checkpoint.resume(resumed, tmp_path)
        assert "checkpointing: off there, on here; routes: compress" in line
    other = replace(config, routes=Routes(window="off"))
    message = r"settings:\n  branches: .*select\+window there, .*select here\n"
    with Trainer(other) as without, pytest.raises(TrainError, match=message):
        checkpoint.resume(without, tmp_path)


@pytest.fixture
def saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main([*RUN, "--save", str(tmp_path), "--save-every=2", "--out", str(tmp_path)]) == 0
    assert f"saved: {tmp_path / 'step-000006'} in " in capsys.readouterr().out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000004", "step-000006", "train.csv"]
    return tmp_path


def test_a_run_goes_on_in_its_log(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = saved / "train.csv"
    before = [line.split(",")[:3] for line in log.read_text().splitlines()]

    assert main([*RUN, "--resume", str(saved / "step-000004"), "--out", str(saved)]) == 0

    assert [line.split(",")[:3] for line in log.read_text().splitlines()] == before
    out = capsys.readouterr().out
    assert f"resumed from {saved / 'step-000004'}, 4 steps done\n[step 5] observed" in out


def test_what_cannot_resume_is_one_message(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fourth = saved / "step-000004"
    for options, message in (
        (
            [f"--resume={fourth}", "--lr=1", "--seq-len=8"],
            "lr: 0.003 there, 1.0 here\n  seq_len: 16",
        ),
        ([f"--resume={fourth}", "--attention=dense"], "  attention: nsa there, dense here"),
        ([f"--resume={saved}"], "step-000006: all 6 steps are done"),
        ([f"--resume={saved / 'none'}"], "none: no checkpoint"),
        ([f"--save={saved}"], "has a later checkpoint, step-000006"),
        ([f"--save={saved / 'train.csv'}"], "cannot be written: "),
        (["--save-every=2"], "Add --save DIR"),
    ):
        assert main([*RUN, *options]) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""
    for file, content in (("__0_0.distcp", b"PK"), (".metadata", None), ("state.json", b"{}")):
        (fourth / file).unlink() if content is None else (fourth / file).write_bytes(content)
        assert main([*RUN, f"--resume={fourth}"]) == 2
        assert "step-000004: cannot be read: " in capsys.readouterr().err


def test_a_full_disk_is_one_message_that_keeps_the_others(tmp_path: Path) -> None:
    """A file may not grow beyond a kilobyte."""
    with Trainer(tiny()) as trainer:
        checkpoint.save(trainer, tmp_path, keep=1)
        trainer.step()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(
                TrainError, match="step-000001: cannot be written: File too large\n"
            ):
                checkpoint.save(trainer, tmp_path, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "step-000000").exists()


def test_the_time_of_a_save_is_not_in_the_throughput(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that only steps and saves turn: 1 s and 50 s."""
    clock, taken = [0.0], count()

    def turn(seconds: float) -> Any:
        clock[0] += seconds
        return torch.tensor(1.0) if seconds == 1 else tmp_path / str(next(taken))

    monkeypatch.setattr("nsa.train.__main__.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(Trainer, "step", lambda _: turn(1))
    monkeypatch.setattr(Trainer, "effective", lambda _: {})
    monkeypatch.setattr(checkpoint, "save", lambda *_, **__: turn(50))

    assert main([*RUN, "--log-every=9", "--save", str(tmp_path), "--save-every=3"]) == 0

    out = capsys.readouterr().out
    assert out.count("in 50.00 s") == 2
    assert re.findall(r"tokens/s (\S+)", out) == ["-", "32", "32"]
