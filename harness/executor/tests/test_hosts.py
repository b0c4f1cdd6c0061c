"""Jobs on this node and by ssh: real shells, with an ssh and a harness that only pretend."""

import io
import os
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.errors import HarnessError, ProbeError
from harness.executor import hosts
from harness.executor.hosts import HostExecutor, HostJob, HostSlot
from harness.executor.jobs import Attempt, CaseBlock, JobEnd
from harness.machine import nvml
from harness.tests import fake_runs

# Says where it runs and stores a line; `hang` goes on until it is ended, and stores that.
HARNESS = f"""#!{sys.executable} -IS
import os, signal, sys, time
store = sys.argv[sys.argv.index("--store") + 1] + "/one"
os.makedirs(store)
def line(text):
    with open(store + "/run.jsonl", "a") as file:
        file.write(text + "\\n")
def ended(*_):
    line("ended"); sys.exit(3)
signal.signal(signal.SIGTERM, ended)
line(os.environ.get("CUDA_VISIBLE_DEVICES", "none") + " in " + os.getcwd())
if "hang" in sys.argv:
    time.sleep(60)
line('{{"kind": "end"}}')
print("error: no GPU", file=sys.stderr)
sys.exit(2 if "refuse" in sys.argv else 0)
"""
# Drops its options; hosts called dead and lost never answer, or not any more.
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
host=$1; shift
case $host in
  dead*) echo "no route to $host" >&2; exit 255;;
  lost*) sh -c "$*" >/dev/null & sleep 0.3; kill $!; exit 255;;
  *) exec sh -c "$*";;
esac
"""


@pytest.fixture(autouse=True)
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("harness", HARNESS), ("ssh", SSH)):
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(hosts, "GRACE_S", 1)
    monkeypatch.setattr(hosts, "REMOTE", str(tmp_path))


def attempt(
    tmp_path: Path, name: str, *options: str, limit_s: float = 60.0, **more: Any
) -> Attempt:
    folder = tmp_path / "run-1" / "blocks" / f"{name}-0"
    folder.mkdir(parents=True)
    ids, alone = ("a/nsa", "a/[x]"), more.pop("alone", False)
    block = CaseBlock(name=name, case_ids=ids, expected_s=1.0, limit_s=limit_s, alone=alone)
    return Attempt(block=block, folder=folder, suite="s.yaml", options=options, **more)


def slot(tmp_path: Path, host: str = "", gpu: str = "") -> HostSlot:
    return HostSlot(host=host, gpu=gpu, folder=str(tmp_path), harness="harness")


def end(job: HostJob) -> JobEnd:
    while (found := job.poll()) is None:
        time.sleep(0.01)
    return found


def begun(job: HostJob) -> None:
    """Wait until it has stored its first line."""
    name = job.attempt.folder.name
    while not any(f.stat().st_size for f in Path(hosts.REMOTE).rglob(f"*{name}/one/run.jsonl")):
        time.sleep(0.01)


def stored(job: HostJob) -> list[str]:
    return (job.attempt.folder / "one" / "run.jsonl").read_text().splitlines()


@pytest.mark.parametrize("host", ["", "node1"])
def test_a_job_brings_its_run_back(tmp_path: Path, host: str) -> None:
    place = slot(tmp_path, host, "GPU-7")
    (job,) = HostExecutor([place]).start([attempt(tmp_path, "b000", "refuse")])
    detail = f"{place.name}: exit status 2: error: no GPU"
    assert end(job) == JobEnd(detail=detail, status=2)
    assert stored(job)[0] == f"GPU-7 in {tmp_path}"
    assert not [*tmp_path.glob("harness-*")]


@pytest.mark.parametrize("host", ["", "node1"])
def test_a_cancelled_job_ends_and_keeps_what_it_stored(tmp_path: Path, host: str) -> None:
    (job,) = HostExecutor([slot(tmp_path, host)]).start([attempt(tmp_path, "b000", "hang")])
    begun(job)
    assert job.poll() is None
    job.cancel()
    job.cancel()
    assert stored(job) == [f"none in {tmp_path}", "ended"]
    # An unfinished run stays where it is, to go on with.
    assert len([*tmp_path.glob("harness-*/one")]) == bool(host)


@pytest.mark.parametrize("host", ["", "node1"])
def test_a_killed_coordinator_ends_its_jobs_and_the_next_one_has_their_answers(
    tmp_path: Path, host: str
) -> None:
    (job,) = HostExecutor([slot(tmp_path, host)]).start([attempt(tmp_path, "b000", "hang")])
    begun(job)
    assert job._process.stdin
    job._process.stdin.close()  # as the kernel does
    assert job._process.wait() == 3
    HostExecutor([slot(tmp_path, host)]).recover(job.attempt.folder.parent)
    assert stored(job)[-1] == "ended"
    assert job.attempt.arguments("/store")[1:3] == ("--resume", "latest")


@pytest.mark.parametrize("host", ["", "node1"])
def test_a_killed_job_can_go_on_where_it_was(tmp_path: Path, host: str) -> None:
    asked = attempt(tmp_path, "b000", "--set=lr=1", "--trace", "hang")
    (job,) = HostExecutor([slot(tmp_path, host)]).start([asked])
    begun(job)
    shell = psutil.Process(job._process.pid)
    next(p for p in shell.children(recursive=True) if "hang" in p.cmdline()).kill()
    found = end(job)
    assert (found.lost, found.status) == (False, 128 + signal.SIGKILL)
    assert stored(job) == [f"none in {tmp_path}"]
    again = job.attempt.arguments("/store")
    assert (again[1:3], again[-2:]) == (("--resume", "latest"), ("--trace", "hang"))
    assert "--set=lr=1" not in again  # the stored suite has it


@pytest.mark.parametrize("host", ["dead1", "lost1"])
def test_a_host_that_does_not_answer_gets_no_more_jobs(tmp_path: Path, host: str) -> None:
    nodes = HostExecutor(
        [slot(tmp_path, host, "0"), slot(tmp_path, host, "1"), slot(tmp_path, "b")]
    )
    (job,) = nodes.start([attempt(tmp_path, "b000", "hang")])
    found = end(job)
    assert found.lost
    assert f"{host} GPU 0: exit status 255" in found.detail
    assert nodes.slots() == ["b"]


def test_a_job_that_hangs_is_ended_at_its_limit(tmp_path: Path) -> None:
    nodes = HostExecutor([slot(tmp_path, gpu=gpu) for gpu in ("GPU-0", "GPU-1")])
    (job,) = nodes.start([attempt(tmp_path, "b000", "hang", limit_s=0.2)])
    found = end(job)
    assert found.lost
    assert found.status is None
    assert nodes.slots() == ["GPU-1"]  # of the same node


def busy(nodes: HostExecutor, waiting: Sequence[Attempt]) -> list[tuple[str, str]]:
    """Block and GPU of each job that starts."""
    started = nodes.start(waiting)
    return [(job.attempt.block.name, job.slot) for job in started]


def test_each_slot_has_one_job_and_a_job_alone_has_its_node(tmp_path: Path) -> None:
    nodes = HostExecutor([slot(tmp_path, gpu=gpu) for gpu in ("GPU-0", "GPU-1")])
    names = {n: attempt(tmp_path, n, "hang", alone=n == "b000") for n in ("b000", "b001", "b002")}
    alone, first, second = names.values()
    assert busy(nodes, [alone, first]) == [("b000", "GPU-0")]
    assert busy(nodes, [first]) == []
    begun(nodes._jobs[0])
    nodes._jobs[0].cancel()
    assert stored(nodes._jobs[0])[0] == f"GPU-0,GPU-1 in {tmp_path}"
    assert busy(nodes, [first, second]) == [("b001", "GPU-0"), ("b002", "GPU-1")]
    nodes._jobs[1].cancel()
    assert busy(nodes, [attempt(tmp_path, "b003", "hang", alone=True)]) == []  # b002 goes on
    for job in nodes._jobs:
        job.cancel()


def test_an_attempt_keeps_to_its_slot_and_avoids_another(tmp_path: Path) -> None:
    nodes = HostExecutor([slot(tmp_path, gpu=gpu) for gpu in ("GPU-0", "GPU-1")])
    kept = attempt(tmp_path, "b000", slot="GPU-1")
    moved = attempt(tmp_path, "b001", avoid="GPU-0")
    assert busy(nodes, [kept, moved]) == [("b000", "GPU-1")]
    end(nodes._jobs[0])
    assert busy(nodes, [moved]) == [("b001", "GPU-1")]
    end(nodes._jobs[1])
    alone = HostExecutor([slot(tmp_path, gpu="GPU-0")])
    again = attempt(tmp_path, "b002", avoid="GPU-0")
    assert busy(alone, [again]) == [("b002", "GPU-0")]  # there is no other
    end(alone._jobs[0])


def test_the_gpus_of_the_node_are_slots_by_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Any:
        raise ProbeError("no driver")

    monkeypatch.setattr(nvml, "gpus", lambda: [fake_runs.H200])
    assert hosts.of("local", "", "any").slots() == [fake_runs.H200.uuid]
    assert hosts.of("local", "", "cpu").slots() == ["cpu"]
    monkeypatch.setattr(nvml, "gpus", none)
    assert hosts.of("local", "", "any").slots() == ["cpu"]


def test_a_hosts_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hosts"
    file.write_text("# rented\na gpus=2\nb gpus=GPU-7 folder=/srv harness='x -m y'\nc gpus=0\nd\n")
    found = hosts.of("ssh", str(file), "any")
    assert found.slots() == ["a GPU 0", "a GPU 1", "b GPU GPU-7", "c", "d GPU 0"]
    assert (found._places[2].folder, found._places[2].harness) == ("/srv", "x -m y")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(HarnessError, match="ssh was not found"):
        hosts.of("ssh", str(file), "any")


@pytest.mark.parametrize("text", ["", "a gpu=1", "a folder=", "-oProxyCommand=x"])
def test_a_wrong_hosts_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(HarnessError, match="--hosts"):
        hosts.of("ssh", str(tmp_path / "hosts"), "any")


def test_a_pattern_selects_one_case_only(tmp_path: Path) -> None:
    from harness.suite.choice import passes

    words = attempt(tmp_path, "b000").arguments("/store")
    first, second = (words[i + 1] for i, word in enumerate(words) if word == "--filter")
    assert passes("a/nsa", [first])
    assert not passes("a/nsa/gc=on", [first])
    assert passes("a/[x]", [second])


def test_an_answer_writes_into_its_folder_only(tmp_path: Path) -> None:
    """The host that packed it may be anybody's."""
    all_of_it = tmp_path / "all"
    inside = all_of_it / "blocks/b000-0/r/run.jsonl"
    inside.parents[2].mkdir(parents=True)
    answer = inside.parents[2] / "b000-0.tar"
    with tarfile.open(answer, "w") as tar:
        for name in ("./r/run.jsonl", "../outside", str(all_of_it / "rooted")):
            found = tarfile.TarInfo(name)
            found.size = 4
            tar.addfile(found, io.BytesIO(b"line"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        tar.addfile(link)

    hosts._unpack(answer)

    assert inside.read_bytes() == b"line"
    files = sorted(p for p in all_of_it.rglob("*") if p.is_file() or p.is_symlink())
    assert files == [inside]


def test_an_answer_that_cannot_be_written_is_kept(tmp_path: Path) -> None:
    (tmp_path / "r").write_text("line")
    with tarfile.open(tmp_path / "b000-0.tar", "w") as tar:
        tar.add(tmp_path / "r", "r")
    (tmp_path / "b000-0").write_text("no folder")

    with pytest.raises(OSError, match="b000-0"):
        hosts._unpack(tmp_path / "b000-0.tar")
    assert (tmp_path / "b000-0.tar").exists()
