"""Several nodes with pretended GPUs on this machine: what is measured where, and what is lost."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.errors import HarnessError
from harness.executor import driver
from harness.executor.task import UnitCommand
from harness.executor.tests import fake_harness
from harness.records import Match, Outcome, Program, Rule, Stop
from harness.store import reader, writer
from harness.tests.command_line import harness
from harness.tests.processes import wait_until

MEMORY = 80 * 2**20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node that places tasks, and one with two GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        start: Any = import_module("ray.cluster_utils").Cluster
        head = {"num_cpus": 0, "num_gpus": 0, "object_store_memory": MEMORY}
        made = start(initialize_head=True, head_node_args={**head, "include_dashboard": False})
        made.add_node(num_cpus=1, num_gpus=2, object_store_memory=MEMORY)
        yield made
        made.shutdown()


@pytest.fixture
def begun(tmp_path: Path) -> Callable[..., Path]:
    """Starts a run of these workloads; its folder."""

    def begin(workloads: str, **changes: Any) -> Path:
        suite = replace(fake_harness.suite(workloads), **changes)
        how = UnitCommand(suite="s", folder=str(tmp_path), module=fake_harness.__name__)
        with driver.begin(suite, how, tmp_path / "runs", ["harness", "run", "s"]) as writing:
            return writing.folder

    return begin


def go_on(folder: Path, cluster: Any) -> Stop | None:
    how: Any = driver.command_of(reader.read(folder))
    writing, _ = writer.resume(folder.parent, folder)
    with writing, driver.connected(cluster.address) as ray:
        return driver.measure(ray, writing, how, True, lambda _: None)


def complete(folder: Path) -> None:
    """Every process was measured once, and each unit on one GPU."""
    lines = [json.loads(line) for line in (folder / reader.RUN_FILE).read_bytes().splitlines()]
    found = [(m["case_id"], m["process"]) for m in lines if m["kind"] == "measurement"]
    run = reader.read(folder)
    expected = [(c.case_id, n) for c in run.suite.cases for n in range(fake_harness.PROCESSES)]
    assert sorted(found) == sorted(expected)
    assert run.ended_at
    assert all(m.outcome is Outcome.OK for m in run.measurements)
    cards = {(m.case_id[0], m.card) for m in run.measurements}
    assert len(cards) == len({name for name, _ in cards})
    assert all((folder / m.log).read_text() == m.card for m in run.measurements)


def test_a_task_that_dies_is_tried_again_and_given_up_at_last(
    cluster: Any, begun: Any, tmp_path: Path
) -> None:
    folder = begun("abc")
    (tmp_path / "kill-b").write_text("1")
    (tmp_path / "kill-c").write_text(str(driver.RETRIES + 1))
    go_on(folder, cluster)
    wait_until(lambda: not fakes(tmp_path))  # a killed worker leaves nothing that keeps its GPU
    run = reader.read(folder)
    lost = [m for m in run.measurements if m.outcome is Outcome.INVALID_ENVIRONMENT]
    assert ([m.case_id for m in lost], bool(run.environment.gpu)) == (["c/nsa", "c/dense"], True)
    assert "WorkerCrashedError" in lost[0].detail
    assert Counter((tmp_path / "started").read_text()) == {"a": 1, "b": 2, "c": 3}
    assert len(run.measurements) == len(lost) + 4 * fake_harness.PROCESSES


def test_units_of_a_killed_node_are_measured_on_another(
    cluster: Any, begun: Any, tmp_path: Path
) -> None:
    folder = begun("abcd")
    for name in "abcd":
        (tmp_path / f"hold-{name}").touch()
    doomed = cluster.add_node(num_cpus=0, num_gpus=2, object_store_memory=MEMORY)
    (measuring := threading.Thread(target=go_on, args=(folder, cluster))).start()
    wait_until(lambda: len([*tmp_path.glob("running-*")]) == 4)
    cluster.remove_node(doomed, allow_graceful=False)
    wait_until(lambda: len(fakes(tmp_path)) == 2)
    for name in "abcd":
        (tmp_path / f"hold-{name}").unlink()
    measuring.join()
    complete(folder)
    assert len((tmp_path / "started").read_text()) == 6


def test_a_killed_driver_is_resumed_and_one_that_ends_ends_what_it_started(
    cluster: Any, begun: Any, tmp_path: Path
) -> None:
    folder = begun("abc")
    (tmp_path / "hold-c").touch()
    words = ["run", "--resume", str(folder), "--no-report", "--address", cluster.address]
    resume = [sys.executable, "-m", "harness", *words]
    for end, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 3)):
        command = subprocess.Popen(resume, stderr=subprocess.PIPE)
        wait_until((tmp_path / "running-c").exists)
        wait_until(lambda: len(reader.read(folder).measurements) == 4 * fake_harness.PROCESSES)
        command.send_signal(end)
        _, said = command.communicate()
        assert command.returncode == status, said
        wait_until(lambda: not fakes(tmp_path))
        (tmp_path / "running-c").unlink()
    assert b"--resume" in said
    (tmp_path / "hold-c").unlink()
    go_on(folder, cluster)
    complete(folder)
    assert Counter((tmp_path / "started").read_text()) == {"a": 1, "b": 1, "c": 3}


def fakes(folder: Path) -> list[psutil.Process]:
    """The commands that measure a unit in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if fake_harness.__name__ in process.cmdline() and process.cwd() == str(folder):
                found.append(process)
    return found


@pytest.mark.parametrize("fault", ["no such suite", "driver"])
def test_a_node_that_refuses_or_differs_ends_the_run_with_all_before_kept(
    cluster: Any, begun: Any, tmp_path: Path, fault: str
) -> None:
    folder = begun("ab")
    (tmp_path / fault).touch()
    with pytest.raises(HarnessError, match=fault):
        go_on(folder, cluster)
    (tmp_path / fault).unlink()
    go_on(folder, cluster)
    complete(folder)


def test_a_case_that_fits_on_no_node_is_refused(cluster: Any, begun: Any) -> None:
    large = replace(fake_harness.suite("a").cases[0], program=Program(argv=("x",), gpus=4))
    with pytest.raises(HarnessError, match="the largest node has 2"):
        go_on(begun("a", cases=(large,)), cluster)


def test_a_rule_with_abort_early_ends_the_run_and_its_units(
    cluster: Any, begun: Any, tmp_path: Path
) -> None:
    of_a = Match(criteria={"workload": ("a",)})
    rule = Rule(name="floor", metric="tokens_per_s", match=of_a, go=1e9, abort_early=True)
    folder = begun("ab", rules=(rule,))
    (tmp_path / "hold-b").touch()
    assert go_on(folder, cluster) == Stop(rule="floor")
    wait_until(lambda: not fakes(tmp_path))  # unit b was not waited for
    assert {m.case_id[0] for m in reader.read(folder).measurements} == {"a"}


def test_the_command_measures_on_this_node_by_an_ordinary_run(tmp_path: Path) -> None:
    options = ("--filter", "attention/packed", "--no-self-test", "--no-report", "--store", "runs")
    done = harness("run", "smoke", "--executor", "ray", *options, cwd=tmp_path)
    assert done.returncode == 3, done.stderr  # one case decides nothing
    run = reader.load(tmp_path / "runs", "latest")
    assert [m.case_id for m in run.measurements] == ["attention/packed"]
    assert run.environment.command[1:3] == ("run", "smoke")
    assert "OMP_NUM_THREADS" not in {*run.environment.variables} - {*os.environ}
