"""Blocks on the GPUs of this node, and on hosts that plain ssh reaches.

Both run the same shell script. It ends its job when its standard input closes: so nothing goes on
after Ctrl-C, a killed coordinator or a lost connection. By ssh it answers with a tar of the store.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.errors import HarnessError, ProbeError
from harness.executor.jobs import Attempt, JobEnd
from harness.machine import nvml

SCRIPT = """exec 3<&0
cd {folder} || exit 2
env {variables} {harness} {arguments} </dev/null >&2 & job=$!
{{ cat <&3; kill -TERM $job; sleep {grace_s}; kill -KILL $job; }} >/dev/null 2>&1 & watch=$!
wait $job; status=$?
kill $watch
{answer}
exit $status"""
SSH = (
    *("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)
NO_CONNECTION = 255
"""Exit status of ssh that is not the one of its command."""
GRACE_S = 20
"""From the request to end until a job is killed."""
END = """'"kind": "end"'"""
TAIL_BYTES = 600
COPY_BYTES = 2**14
REMOTE = "/tmp"
"""Where the run folder of a block is on a host of ssh, until it comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSlot:
    """A GPU of a host."""

    host: str = ""
    """As ssh knows it; empty for this node."""
    gpu: str = ""
    """UUID or index; empty on a host without a GPU."""
    folder: str = "."
    """The folder that the suite is relative to."""
    harness: str = f"{shlex.quote(sys.executable)} -m harness"
    """The command that starts it there."""

    @property
    def name(self) -> str:
        if not self.host:
            return self.gpu or "cpu"
        return f"{self.host} GPU {self.gpu}" if self.gpu else self.host


class HostJob:
    """One attempt on one slot; see harness.executor.jobs.Job."""

    def __init__(self, attempt: Attempt, place: HostSlot, gpus: str) -> None:
        self.attempt, self.place, self.slot = attempt, place, place.name
        self.ended, self.dead = False, ""
        """The second: the host that does not answer, or the slot whose job hung."""
        self._ends_at = time.monotonic() + attempt.block.limit_s
        store, answer, variables = str(attempt.folder.resolve()), "", f"CUDA_VISIBLE_DEVICES={gpus}"
        if place.host:
            # Flat, so that users of the host need not share a folder.
            store = f"{REMOTE}/harness-{attempt.folder.parents[1].name}-{attempt.folder.name}"
            # It stays while it is unfinished, for the next start on this host.
            answer = (
                f"tar -C {store} -cf - . && grep -qs {END} {store}/*/run.jsonl && rm -rf {store}"
            )
            variables += " CUDA_DEVICE_ORDER=PCI_BUS_ID"
        script = SCRIPT.format(
            folder=shlex.quote(place.folder),
            variables=variables if gpus else "",
            harness=place.harness,
            arguments=shlex.join(attempt.arguments(store)),
            grace_s=GRACE_S,
            answer=answer,
        )
        shell = ["sh", "-c", script]
        self._log, self._tar = (Path(f"{attempt.folder}.{end}") for end in ("log", "tar"))
        with self._log.open("ab") as log, self._tar.open("wb") as tar:
            self._process = subprocess.Popen(
                [*SSH, place.host, shlex.join(shell)] if place.host else shell,
                stdin=subprocess.PIPE,
                stdout=tar,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the coordinator, which then ends the job
            )

    def poll(self) -> JobEnd | None:
        status = self._process.poll()
        if status is None and time.monotonic() < self._ends_at:
            return None
        if status is None:
            self.dead = self.slot
        elif self.place.host and status == NO_CONNECTION:
            self.dead = self.place.host
        self.cancel()
        if status is None:
            what = f"no end after {self.attempt.block.limit_s / 60:.0f} min"
        else:
            what = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        detail = ": ".join([self.slot, what, *last_words(self._log)])
        return JobEnd(detail=detail, lost=bool(self.dead), status=status)

    def cancel(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._process.stdin:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(2 * GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        _unpack(self._tar)


def last_words(log: Path) -> list[str]:
    """The last error in a log, else its last line."""
    said = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace") if log.exists() else ""
    _, error, text = said.rpartition("error: ")
    lines = (error + text).strip().splitlines()
    return lines if error else lines[-1:]


class HostExecutor:
    """Starts jobs on GPUs of hosts; see harness.executor.jobs.Executor."""

    def __init__(self, places: Sequence[HostSlot]) -> None:
        self._places = places
        self._jobs: list[HostJob] = []

    def slots(self) -> Sequence[str]:
        return [place.name for place in self._alive()]

    def start(self, waiting: Sequence[Attempt]) -> Sequence[HostJob]:
        running, alive = [j for j in self._jobs if not j.ended], self._alive()
        used, nodes = {j.place for j in running}, {j.place.host for j in running}
        closed = {j.place.host for j in running if j.attempt.block.alone}
        free = [p for p in alive if p not in used and p.host not in closed]
        started = []
        for attempt in waiting:
            if not free:  # of a thousand slots, each with jobs that wait
                break
            alone = attempt.block.alone
            fit = [p for p in free if p.name != attempt.avoid or len(alive) == 1]
            fit = [p for p in free if p.name == attempt.slot] if attempt.slot else fit
            if place := next((p for p in fit if not (alone and p.host in nodes)), None):
                of_host = [p.gpu for p in self._places if p.host == place.host]
                gpus = ",".join(of_host) if alone else place.gpu
                started.append(HostJob(attempt, place, gpus))
                nodes.add(place.host)
                free = [p for p in free if p != place and not (alone and p.host == place.host)]
        self._jobs += started
        return started

    def recover(self, blocks: Path) -> None:
        """Jobs ended with the coordinator that started them; their answers are still packed."""
        for tar in blocks.glob("*.tar"):
            _unpack(tar)

    def _alive(self) -> list[HostSlot]:
        dead = {job.dead for job in self._jobs if job.dead}
        return [place for place in self._places if not dead & {place.host, place.name}]


def _unpack(path: Path) -> None:
    """Move an answer to the folder of its attempt. One that was cut short still has whole lines;
    that of this node is empty, for its job wrote to the folder."""
    folder = path.with_suffix("").resolve()
    with suppress(tarfile.ReadError), tarfile.open(path) as tar:
        for member in tar:  # Python 3.11.3 and older have no filter for unsafe names
            target = (folder / member.name).resolve()
            source = tar.extractfile(member) if member.isreg() else None
            if source and target.is_relative_to(folder):
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(source, file, COPY_BYTES)
    path.unlink()


def of(name: str, file: str, device: str) -> HostExecutor:
    """The executor of a name: the GPUs of this node by UUID, or those of the hosts in a file; see
    harness/executor/README.md.

    Raises:
        HarnessError: The file is absent, or has a wrong line or no host; or there is no ssh.
    """
    if name == "local":
        with suppress(ProbeError):
            gpus = [] if device == "cpu" else [gpu.uuid for gpu in nvml.gpus()]
            return HostExecutor([HostSlot(gpu=gpu) for gpu in gpus or [""]])
        return HostExecutor([HostSlot()])
    lines_such_as = "--hosts FILE with lines such as: node1 gpus=4 folder=/srv/bench"
    if not file:
        raise HarnessError("--executor ssh needs a hosts file", f"Give {lines_such_as}")
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
        places = [slot for line in lines for slot in _host(line)]
        if not places:
            raise ValueError("it names no host")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise HarnessError(
            f"cannot read the hosts file {file}: {why}", f"Give {lines_such_as}"
        ) from None
    if not shutil.which(SSH[0]):
        raise HarnessError("ssh was not found on PATH", "Install OpenSSH's client.")
    return HostExecutor(places)


def _host(line: str) -> list[HostSlot]:
    """The slots of one line; ValueError if it is wrong."""
    host, *options = shlex.split(line, comments=True) or [""]
    given = dict(option.partition("=")[::2] for option in options)
    if unknown := given.keys() - {"gpus", "folder", "harness"}:
        raise ValueError(f"{line!r} has {sorted(unknown)[0]!r}; known are gpus, folder and harness")
    if host.startswith("-") or "" in given.values():
        raise ValueError(f"{line!r} needs a host, and a value after each =")
    gpus = given.pop("gpus", "1")
    names = [*map(str, range(int(gpus)))] if gpus.isdecimal() else gpus.split(",")
    about = {"folder": str(Path.cwd()), "harness": "harness"} | given
    return [HostSlot(host=host, gpu=gpu, **about) for gpu in names or [""]] if host else []
