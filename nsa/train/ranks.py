"""The ranks of one node: how they start and end together, and which of them says why."""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from tempfile import TemporaryDirectory

import torch.distributed as dist

from nsa.flags import Launch, error_folder, rank_environ

POLL_S = 0.05
END_S = 10.0
"""How long a rank has to end before it is killed."""
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def start_ranks(command: Sequence[str], world_size: int) -> int:
    """Run a command as every rank, with the variables of torchrun; one that fails ends the others,
    and so does the death of this process.

    Returns:
        The status of the rank that failed: 128 and its number if a signal ended it. 0 if none did.
    """
    die = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
    with TemporaryDirectory(prefix="nsa-ranks-") as folder:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        ranks: list[Popen[bytes]] = []
        try:
            for rank in range(world_size):
                launch = Launch(rank=rank, world_size=world_size, local_rank=rank)
                environ = rank_environ(launch, port, Path(folder))
                ranks.append(Popen(command, env=environ, preexec_fn=die))
            return _status(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            if not any(Path(folder).glob("failed-*")):
                raise
            return 128 + signal.SIGINT
        finally:
            _end(ranks)
            signal.signal(signal.SIGTERM, before)


def first_failure(status: int) -> int | None:
    """The status of the rank on this node that failed before and said why; None if this is first.

    One cause ends all ranks: each is refused for the same reason, or a collective fails because
    another rank ended. Known only where a launcher gives its ranks a folder.
    """
    folder = error_folder()
    if folder is None or not folder.is_dir():
        return None
    first = folder / f"failed-{os.getppid()}"  # the ranks of a launch have one parent
    try:
        first.symlink_to(str(status))  # made whole, or not at all
    except FileExistsError:
        return int(first.readlink().name)
    return None


def leave(status: int) -> int:
    """Break the connections of a rank that failed: at its exit, NCCL would wait for the others."""
    if status and dist.is_initialized() and dist.group.WORLD is not None:
        dist.group.WORLD.abort()
    return status


def _status(ranks: Sequence[Popen[bytes]]) -> int:
    while None in (statuses := [rank.poll() for rank in ranks]) and not any(statuses):
        time.sleep(POLL_S)
    for rank, status in enumerate(statuses):
        if status is not None and status < 0:  # it said nothing itself
            name = signal.Signals(-status).name
            sys.stderr.write(
                f"error: rank {rank} was ended by {name}\n  See dmesg for the cause.\n"
            )
            return 128 - status
    return next(filter(None, statuses), 0)


def _end(ranks: Sequence[Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        try:
            rank.wait(END_S)
        except TimeoutExpired:
            rank.kill()
            rank.wait()
