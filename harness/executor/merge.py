"""Joins the runs of blocks to one run.

A unit enters whole, from one attempt, so from one GPU. Nothing enters twice, so that the same
folders can be merged again after a crash.
"""

import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from harness.errors import StoreError
from harness.executor.blocks import units
from harness.machine import drift
from harness.records import Case, Measurement, Outcome, Run
from harness.runner.run import Agenda
from harness.store import reader
from harness.store.lines import MeasuredIn
from harness.store.writer import RunWriter

CHOOSE_A_GPU = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables of a slot: another run of the suite need not have them to be like it."""


class Merge:
    """What is measured by now, and what the attempts on the disk add to it."""

    def __init__(self, writer: RunWriter, agenda: Agenda, recorded: Run) -> None:
        """
        Args:
            agenda: Of the whole run; it learns every measurement that enters.
            recorded: The run as it is stored now.
        """
        self._writer, self._agenda, self._recorded = writer, agenda, recorded
        self._units = units(agenda.suite)
        self._known = {e.card: e for e in recorded.environments}

    @property
    def begun(self) -> bool:
        """Whether anything was measured."""
        return bool(self._known)

    def left(self, case_ids: Collection[str] | None = None) -> list[tuple[Case, ...]]:
        """The units of these cases, or of all, that are not measured."""
        asked = [u for u in self._units if case_ids is None or u[0].case_id in case_ids]
        return [u for u in asked if any(self._agenda.left_of(c.case_id) for c in u)]

    def take(self, folder: Path) -> str:
        """Join the units that an attempt has finished, and remove it if it has finished all. Why
        it cannot be used; empty if it can."""
        if (run := run_in(folder)) is None:
            return ""
        if why := self._unlike(run):
            return why
        within = Agenda(run.suite, recorded=run.measurements)
        ids = {c.case_id for c in run.suite.cases}
        for unit in self.left(ids):
            if not any(within.left_of(c.case_id) for c in unit):
                self._enter(run, unit)
        if run.ended_at and not self.left(ids):
            shutil.rmtree(folder)
        return ""

    def _unlike(self, run: Run) -> str:
        """How a run differs in device, driver or code from what has entered; empty if not."""
        for first in [*self._known.values()][:1]:
            try:
                drift.require_alike(replace(self._recorded, environment=first), run.environment)
            except StoreError as error:
                return str(error).splitlines()[0]
        return ""

    def give_up(self, lost: Sequence[Sequence[Case]], folders: Sequence[Path], why: str) -> None:
        """Join what the best attempt has of each unit, and record the rest as lost."""
        runs = [run for folder in folders if (run := run_in(folder)) and not self._unlike(run)]
        for unit in lost:
            of = [sum(len(run.of(c.case_id)) for c in unit) for run in runs]
            if any(of):
                self._enter(runs[of.index(max(of))], unit)
            for case in unit:
                for process in self._agenda.left_of(case.case_id)[:1]:
                    self._append(
                        Measurement(
                            case_id=case.case_id,
                            process=process,
                            outcome=Outcome.INVALID_ENVIRONMENT,
                            detail=why,
                        )
                    )

    def _enter(self, run: Run, unit: Sequence[Case]) -> None:
        # The command of the whole run says which cases were asked for, that of a block does not.
        here = replace(run.environment, command=self._recorded.environment.command)
        if here.card not in self._known:
            self._writer.append(MeasuredIn(environment=here))
            if run.self_test:
                self._writer.append(run.self_test)
            self._known[here.card] = here
        for m in (m for c in unit for m in run.of(c.case_id)):
            if m.process in self._agenda.left_of(m.case_id):
                self._copy(Path(run.folder), m)
                self._append(replace(m, card=here.card))

    def _append(self, measurement: Measurement) -> None:
        self._writer.append(measurement)
        self._agenda.ended(measurement)

    def _copy(self, folder: Path, m: Measurement) -> None:
        """Bring the files that a measurement names, and those beside its log."""
        named = [f.path for f in m.evidence.files if f.path] if m.evidence else []
        beside = (folder / m.log).parent.glob(f"{Path(m.log).stem}.*") if m.log else ()
        for file in {*beside, *(folder / name for name in named)}:
            target = self._writer.folder / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target)


def run_in(folder: Path) -> Run | None:
    """The run of an attempt, without what chose its GPU; None if it stored nothing."""
    for path in sorted(folder.glob(f"*/{reader.RUN_FILE}"), reverse=True):
        if b"\n" in path.read_bytes():
            run, _ = reader.read(path.parent)
            set_ = {n: v for n, v in run.environment.variables.items() if n not in CHOOSE_A_GPU}
            return replace(run, environment=replace(run.environment, variables=set_))
    return None
