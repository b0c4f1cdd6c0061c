"""Ranks of one node start and end together, and one of them says why."""

import signal
import sys
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
import torch

from nsa.train.__main__ import main
from nsa.train.loop import Trainer
from nsa.train.ranks import first_failure, start_ranks
from nsa.train.tests.training import QUICK

pytestmark = pytest.mark.usefixtures("one_thread", "no_flags")


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
    """Ranks in milliseconds, without torch: one files its process number, and the other waits."""
    first = "open('p', 'w').write(str(os.getpid())); os.rename('p', 'pid'); time.sleep(60)"
    second = f"while not os.path.exists('pid'): time.sleep(0.01)\n{end}"
    begin = f"import os, sys, time; os.chdir({str(tmp_path)!r}); first = os.environ['RANK'] == '0'"
    ended: object
    try:
        ended = start_ranks([sys.executable, "-ISc", f"{begin}\nif first: {first}\n{second}"], 2)
    except SystemExit as left:  # the launcher was ended
        ended = left.code

    assert ended == status
    assert capfd.readouterr().err.startswith(message)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_ranks_end_with_a_launcher_that_is_killed() -> None:
    start = "from nsa.train.ranks import start_ranks; import sys"
    rank = "import time; print('up', flush=True); time.sleep(5); print('still there')"
    code = f"{start}; start_ranks([sys.executable, '-ISc', {rank!r}], 1)"
    with Popen([sys.executable, "-c", code], stdout=PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.kill()
        assert launcher.stdout.read() == ""


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
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "0" / "error.json"))
    assert first_failure(1) is None, "another launcher's folder"


def test_a_refusal_of_all_ranks_is_one_message(capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*QUICK, "--world-size", "2", "--cuda-graph"]) == 2

    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: a CUDA graph needs a GPU, not cpu\n  Use --device cuda, or use --no-cuda-graph.\n"
    )
