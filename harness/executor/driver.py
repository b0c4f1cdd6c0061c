"""Asks Ray for the units of a suite, and appends each to the run as it comes.

A unit enters whole, with one write, so that all of it is from one GPU. The record alone says which
units are left, so a killed driver is resumed without loss.
"""

import json
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.errors import HarnessError, StoreError
from harness.executor import task
from harness.executor.task import UnitCommand
from harness.executor.unit import joined, units
from harness.machine import drift, environment
from harness.records import Case, Measurement, Outcome, Run, SelfTest, Stop, Suite
from harness.runner.run import Agenda, terminating_like_ctrl_c
from harness.runner.telemetry import gpus_of
from harness.store import reader, writer
from harness.store.lines import MeasuredIn

RAY_FILE = "ray.json"  # how the units of a run are measured, in its folder
RETRIES = 2  # of a task that died, or its node


def command_of(run: Run) -> UnitCommand | None:
    """How the units of a stored run are measured; None if it was started without Ray."""
    path = Path(run.folder, RAY_FILE)
    return UnitCommand(**json.loads(path.read_text())) if path.is_file() else None


def begin(suite: Suite, how: UnitCommand, store: Path, command: Sequence[str]) -> writer.RunWriter:
    """A new run. Its environments come with its units."""
    unknown = {"gpu_uuids": [], "cuda_unavailable": "", "versions": {}, "torch_settings": {}}
    here = environment.capture(unknown, command=command, repository=None)
    made = writer.create(store, suite, here, where="ray")
    (made.folder / RAY_FILE).write_text(json.dumps(asdict(how)))
    return made


def measure(
    ray: Any, writing: writer.RunWriter, how: UnitCommand, abort: bool, say: Callable[[str], None]
) -> Stop | None:
    """Measure what is left by Ray, and finish the run; why units are left, if any are. `abort`:
    whether a rule with `abort_early` ends the run. At Ctrl-C or SIGTERM the units that were not
    finished are lost."""
    stop = None
    with terminating_like_ctrl_c():  # Ray would exit
        tasks = _submitted(ray, reader.read(writing.folder), how)
        say(f"{writing.run_id}: tasks: {len(tasks)}")
        while tasks and not (stop := _stop(writing.folder, abort)):
            (done,), _ = ray.wait([*tasks])
            unit = tasks.pop(done)
            try:
                said = _enter(writing, unit, ray.get(done))
            except ray.exceptions.RayError as error:
                said = _lose(writing, unit, getattr(error, "cause", None) or error)
            say(f"{said}; tasks left: {len(tasks)}")
    writing.finish(stopped=stop)
    return stop


def _submitted(ray: Any, run: Run, how: UnitCommand) -> dict[Any, Sequence[Case]]:
    """The units that the record leaves, by their tasks."""
    nodes = [n["Resources"] for n in ray.nodes() if n["Alive"]]
    largest = max(int(n.get("GPU", 0)) for n in nodes)
    on_gpus = run.suite.device == "cuda" or (run.suite.device != "cpu" and largest)
    remote = ray.remote(max_retries=RETRIES, retry_exceptions=[ChildProcessError])(task.measure)
    left, tasks = Agenda(run.suite, recorded=run.measurements), dict[Any, Sequence[Case]]()
    slots = int(sum(n.get("GPU" if on_gpus else "CPU", 0) for n in nodes)) or 1
    for unit in joined([u for u in units(run.suite) if any(map(left.left_of, u))], slots):
        gpus = max(map(gpus_of, unit)) if on_gpus else 0
        if gpus > largest:
            problem = f"{unit[0].case_id} needs {gpus} GPUs a node; the largest node has {largest}"
            remedy = "Add a larger node to the cluster, or exclude the case with --filter."
            raise HarnessError(problem, remedy)
        place = remote.options(num_gpus=gpus, num_cpus=0 if gpus else 1)
        tasks[place.remote(how, [case.case_id for case in unit])] = unit
    return tasks


def _stop(folder: Path, abort: bool) -> Stop | None:
    """Why the rest is not measured, by what is recorded, if a rule says so."""
    run = reader.read(folder)
    device = run.environments[0].device_name if run.environments else ""  # until a unit names it
    due = Agenda(run.suite, recorded=run.measurements, device=device, read=lambda: run, abort=abort)
    due.next()
    return due.stop


def _enter(writing: writer.RunWriter, unit: Sequence[Case], files: Mapping[str, bytes]) -> str:
    """Append what a node measured, unless it differs from the nodes before; what to say of it."""
    folder = writing.folder
    before = reader.read(folder)
    run = reader.parse(files[reader.RUN_FILE], folder, folder / reader.RUN_FILE)
    try:
        theirs, ours = ({c.case_id: c for c in cases} for cases in (run.suite.cases, unit))
        if theirs != ours:
            raise StoreError("its suite file has other cases")
        for first in before.environments[:1]:
            drift.require_alike(replace(before, environment=first), run.environment)
    except StoreError as error:
        problem = f"{run.environment.hostname} differs from the nodes before: {error.problem}"
        remedy = f"Repair it, or end it there by ray stop. Then: harness run --resume {folder}"
        raise HarnessError(problem, remedy) from None
    for name in files.keys() - {reader.RUN_FILE, reader.SUITE_FILE}:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name])
    # The command of the run says which cases were asked for.
    here = replace(run.environment, command=before.environment.command)
    card: list[MeasuredIn | SelfTest] = []
    if here.card not in [e.card for e in before.environments]:
        card = [MeasuredIn(environment=here), *run.self_tests]
    writing.append(*card, *run.measurements)
    return f"{here.hostname}, {here.card}: processes measured: {len(run.measurements)}"


def _lose(writing: writer.RunWriter, unit: Sequence[Case], error: BaseException) -> str:
    """Record that Ray gave a unit up, unless its node refused it; what to say of it."""
    if isinstance(error, HarnessError):
        raise error
    first = str(error).strip().partition("\n")[0]
    why = f"lost after {RETRIES + 1} tries: {type(error).__name__}: {first}"
    lost, ids = Outcome.INVALID_ENVIRONMENT, [c.case_id for c in unit]
    writing.append(*(Measurement(case_id=i, process=0, outcome=lost, detail=why) for i in ids))
    return f"cases {', '.join(ids)}: {why}"


@contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Ray, connected to the cluster at an address, or to one of this command with this node's GPUs.
    At the end Ray ends the tasks that are left."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else Ray warns of a change
    try:
        import ray

        # One CPU: cases that need no GPU would disturb each other.
        alone = {"num_cpus": 1, "object_store_memory": 256 * 2**20, "include_dashboard": False}
        given = {"address": address} if address else {"address": "local", **alone}
        host, colon, port = (address or "").rpartition(":")
        if colon:  # Ray tries a wrong address for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(**given, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError as error:
        install = "Install it: pip install 'nsa-harness[ray]'"
        raise HarnessError(f"--executor ray needs Ray: {error}", install) from None
    except (OSError, RuntimeError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        remedy = "Start it with `ray start --head`, or remove --address to use this node alone."
        raise HarnessError(f"no Ray at {address or 'this node'}: {first}", remedy) from None
    try:
        yield ray
    finally:
        ray.shutdown()
