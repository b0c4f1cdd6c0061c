"""Joins the runs of blocks to one run.

A unit enters whole, from one attempt, so from one GPU. Nothing enters twice, so that merging the
same folders again, after a crash, changes nothing.
"""

import shutil
from collections.abc import Sequence
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


class Merge:
    """What is measured by now, and what the attempts on the disk add to it."""

    def __init__(self, writer: RunWriter, agenda: Agenda, recorded: Run) -> None:
        """
        Args:
            agenda: Of the whole run; it learns every measurement that enters.
            recorded: The run as it is stored now.
        """
        self.groups = units(agenda.suite)
        self._writer, self._agenda, self._recorded = writer, agenda, recorded
        self._cards = {e.card for e in recorded.environments}
        self._first = recorded.environments[0] if recorded.environments else None

    @property
    def begun(self) -> bool:
        """Whether anything was measured."""
        return self._first is not None

    def waits(self, group: Sequence[Case]) -> bool:
        return any(self._agenda.left_of(c.case_id) for c in group)

    def left(self, case_ids: Sequence[str]) -> list[tuple[Case, ...]]:
        """The units of a block that are not measured."""
        return [g for g in self.groups if g[0].case_id in {*case_ids} and self.waits(g)]

    def take(self, folder: Path) -> str:
        """Join the units that an attempt has finished, and remove its folder if nothing else is in
        it. Why it cannot be used; empty if it can.
        """
        run = run_in(folder)
        if run is None:
            return ""
        if self._first is not None:
            try:
                drift.require_alike(
                    replace(self._recorded, environment=self._first), run.environment
                )
            except StoreError as error:
                return str(error).splitlines()[0]
        within = Agenda(run.suite, recorded=run.measurements)
        measured = {c.case_id for c in run.suite.cases}
        for group in self.left([*measured]):
            if not any(within.left_of(c.case_id) for c in group if c.case_id in measured):
                self._enter(run, group)
        if run.ended_at and not self.left([*measured]):
            shutil.rmtree(folder)
        return ""

    def give_up(self, group: Sequence[Case], folders: Sequence[Path], why: str) -> None:
        """Join what the best attempt has of a unit, and record the rest as lost."""
        runs = [run for folder in folders if (run := run_in(folder))]
        count = {r.run_id: sum(len(r.of(c.case_id)) for c in group) for r in runs}
        best = max(runs, key=lambda r: count[r.run_id], default=None)  # of equals the first
        if best is not None and count[best.run_id]:
            self._enter(best, group)
        for case in group:
            if left := self._agenda.left_of(case.case_id):
                lost = Measurement(
                    case_id=case.case_id,
                    process=left[0],
                    outcome=Outcome.INVALID_ENVIRONMENT,
                    detail=why,
                    card=best.environment.card if best else "",
                )
                self._append(lost)

    def _enter(self, run: Run, group: Sequence[Case]) -> None:
        here = run.environment
        if here.card not in self._cards:
            # The command of the whole run: it says which cases were asked for.
            command = self._recorded.environment.command
            self._writer.append(MeasuredIn(environment=replace(here, command=command)))
            if run.self_test:
                self._writer.append(run.self_test)
            self._cards.add(here.card)
            self._first = self._first or here
        for m in (m for c in group for m in run.of(c.case_id)):
            if m.process in self._agenda.left_of(m.case_id):
                self._copy(Path(run.folder), m)
                self._append(replace(m, card=here.card))

    def _append(self, measurement: Measurement) -> None:
        self._writer.append(measurement)
        self._agenda.ended(measurement)

    def _copy(self, folder: Path, m: Measurement) -> None:
        """Bring the files that a measurement names, and those beside its log."""
        named = [f.path for f in m.evidence.files] if m.evidence else []
        beside = (folder / m.log).parent.glob(f"{Path(m.log).stem}.*") if m.log else ()
        for file in {*beside, *(folder / name for name in named if name)}:
            if file.is_file():
                target = self._writer.folder / file.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(file, target)


def run_in(folder: Path) -> Run | None:
    """The run of an attempt; None if it stored nothing."""
    for path in sorted(folder.glob(f"*/{reader.RUN_FILE}"), reverse=True):
        if b"\n" in path.read_bytes():
            return reader.read(path.parent)[0]
    return None
