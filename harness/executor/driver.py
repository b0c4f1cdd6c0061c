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
from harness.executor.unit import units
from harness.machine import drift, environment
from harness.records import Case, Measurement, Outcome, Run, SelfTest, Stop, Suite
from harness.runner.run import Agenda, terminating_like_ctrl_c
from harness.runner.telemetry import gpus_of
from harness.store import reader, writer
from harness.store.lines import MeasuredIn

RAY_FILE = "ray.json"
"""How the units of a run are measured, in its folder."""
RETRIES = 2
"""Of a unit whose task or node died."""
OF_THE_SLOT = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables that may differ between runs that are compared."""


def command_of(run: Run) -> UnitCommand | None:
    """How the units of a stored run are measured; None if it was started without Ray."""
    path = Path(run.folder, RAY_FILE)
    return UnitCommand(**json.loads(path.read_text())) if path.is_file() else None


def begin(suite: Suite, how: UnitCommand, store: Path, command: Sequence[str]) -> writer.RunWriter:
    """A new run. Its environments come with its units."""
    here = environment.capture(
        {"gpu_uuids": [], "cuda_unavailable": "", "versions": {}, "torch_settings": {}},
        command=command,
        repository=None,
    )
    made = writer.create(store, suite, here, where="ray")
    (made.folder / RAY_FILE).write_text(json.dumps(asdict(how)))
    return made


class RayRun:
    """A run whose units Ray places: what is left of it, and how a unit enters."""

    def __init__(
        self, writing: writer.RunWriter, *, abort: bool, say: Callable[[str], None]
    ) -> None:
        """`abort`: whether a rule with `abort_early` ends the run."""
        self._writing, self._abort, self._say = writing, abort, say

    def measure(self, how: UnitCommand, address: str | None) -> Stop | None:
        """Measure what is left, and finish the run; why units are left, if any are. Without the
        address of a cluster, a Ray of this command has this node's GPUs. At Ctrl-C or SIGTERM the
        units that were not finished are lost."""
        before, stop, tasks = self._recorded(), None, dict[Any, Sequence[Case]]()
        with _connected(address) as ray, terminating_like_ctrl_c():
            try:
                submit = _submitter(ray, before.suite, how)
                left = Agenda(before.suite, recorded=before.measurements)
                for members in units(before.suite):
                    if any(left.left_of(case) for case in members):
                        tasks[submit(members)] = members
                self._say(f"{self._writing.run_id}: units to measure: {len(tasks)}")
                while tasks and not (stop := self._stop()):
                    (done,), _ = ray.wait([*tasks])
                    unit = tasks.pop(done)
                    try:
                        self._enter(unit, ray.get(done))
                    except ray.exceptions.RayError as error:
                        self._lose(unit, getattr(error, "cause", None) or error)
                    self._say(f"units left: {len(tasks)}")
            finally:
                for one in tasks:
                    ray.cancel(one)
                if tasks:
                    ray.wait([*tasks], num_returns=len(tasks), timeout=2 * task.GRACE_S)
        self._writing.finish(stopped=stop)
        return stop

    def _recorded(self) -> Run:
        return reader.read(self._writing.folder)[0]

    def _stop(self) -> Stop | None:
        """Why the rest is not measured, by what is recorded, if a rule says so."""
        run = self._recorded()
        if not (self._abort and run.environments):  # a rule may be for a GPU, which a unit names
            return None
        device = run.environments[0].device_name
        agenda = Agenda(run.suite, recorded=run.measurements, device=device, read=lambda: run)
        agenda.next()
        return agenda.stop

    def _enter(self, unit: Sequence[Case], files: Mapping[str, bytes]) -> None:
        """Append what a node measured, unless it differs from the nodes before."""
        folder, before = self._writing.folder, self._recorded()
        run, _ = reader.parse(files[reader.RUN_FILE], folder, folder / reader.RUN_FILE)
        try:
            if run.suite.cases != tuple(unit):
                raise StoreError("its suite file has other cases")
            for first in before.environments[:1]:
                drift.require_alike(replace(before, environment=first), run.environment)
        except StoreError as error:
            raise HarnessError(
                f"{run.environment.hostname} differs from the nodes before: {error.problem}",
                "Repair it, or remove it from the cluster (there: ray stop). Then: "
                f"harness run --resume {folder}",
            ) from None
        for name in files.keys() - {reader.RUN_FILE, reader.SUITE_FILE}:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(files[name])
        variables = run.environment.variables.items()
        here = replace(
            run.environment,
            variables={name: value for name, value in variables if name not in OF_THE_SLOT},
            command=before.environment.command,  # it says which cases were asked for
        )
        card: list[MeasuredIn | SelfTest] = []
        if here.card not in [e.card for e in before.environments]:
            card = [MeasuredIn(environment=here), *run.self_tests]
        known = {(m.case_id, m.process) for m in before.measurements}
        new = [m for m in run.measurements if (m.case_id, m.process) not in known]
        # At once, so that all of a unit is in the record, or nothing.
        self._writing.append(*card, *(replace(m, card=here.card) for m in new))
        self._say(f"{here.hostname}, {here.card}: processes measured: {len(run.measurements)}")

    def _lose(self, unit: Sequence[Case], error: BaseException) -> None:
        """Record that Ray gave a unit up, unless its node refused it."""
        if isinstance(error, HarnessError):
            raise error
        first = str(error).strip().partition("\n")[0]
        why = f"lost after {RETRIES + 1} tries: {type(error).__name__}: {first}"
        lost, ids = Outcome.INVALID_ENVIRONMENT, [c.case_id for c in unit]
        made = (Measurement(case_id=i, process=0, outcome=lost, detail=why) for i in ids)
        self._writing.append(*made)
        self._say(f"cases {', '.join(ids)}: {why}")


@contextmanager
def _connected(address: str | None) -> Iterator[Any]:
    """The module of Ray, connected to a cluster; one of this command ends with it."""
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
        raise HarnessError(
            f"no Ray at {address or 'this node'}: {first}",
            "Start it with `ray start --head`, or remove --address to use this node alone.",
        ) from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _submitter(ray: Any, suite: Suite, how: UnitCommand) -> Callable[[Sequence[Case]], Any]:
    """A function that submits a unit; it returns the task."""
    most = max(int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["Alive"])
    on_gpus = suite.device == "cuda" or (suite.device != "cpu" and most)

    def run_unit(case_ids: Sequence[str]) -> dict[str, bytes]:
        given = ray.get_runtime_context().get_accelerator_ids()["GPU"]
        return task.measure(how, case_ids, given)

    again = {"max_retries": RETRIES, "retry_exceptions": [ChildProcessError]}
    remote = ray.remote(**again)(run_unit)

    def submit(unit: Sequence[Case]) -> Any:
        gpus = max(map(gpus_of, unit)) if on_gpus else 0
        if gpus > most:
            raise HarnessError(
                f"{unit[0].case_id} needs GPUs of one node: {gpus}; the largest node has {most}",
                "Add a larger node to the cluster, or exclude the case with --filter.",
            )
        place = remote.options(num_gpus=gpus, num_cpus=0 if gpus else 1)
        return place.remote([case.case_id for case in unit])

    return submit
