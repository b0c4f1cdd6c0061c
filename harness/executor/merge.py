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
from harness.records import Case, Measurement, Outcome, Run, SelfTest
from harness.runner.run import Agenda
from harness.store import reader
from harness.store.lines import MeasuredIn
from harness.store.writer import RunWriter

CHOOSE_A_GPU = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""Variables of a slot: another run of the suite need not have them to be like it."""
LOST = "lost after "
"""How the detail of a case begins that no job measured."""


class Merge:
    """What is measured by now, and what the attempts on the disk add to it."""

    def __init__(self, writer: RunWriter, agenda: Agenda, recorded: Run) -> None:
        """
        Args:
            agenda: Of the whole run; it learns every measurement that enters.
            recorded: The run as it is stored now.
        """
        self._writer, self._agenda, self._recorded = writer, agenda, recorded
        self._units = {unit[0].case_id: unit for unit in units(agenda.suite)}
        """By their first case."""
        self._cases = {c.case_id: c for c in agenda.suite.cases}
        self._known = {e.card: e for e in recorded.environments}
        self.lost = any(m.detail.startswith(LOST) for m in recorded.measurements)
        """Whether any case was given up."""

    @property
    def begun(self) -> bool:
        """Whether anything was measured."""
        return bool(self._known)

    def left(self, case_ids: Collection[str] | None = None) -> list[tuple[Case, ...]]:
        """The units of these cases, or of all, that are not measured."""
        ids = self._units if case_ids is None else case_ids
        asked = [self._units[i] for i in ids if i in self._units]
        return [u for u in asked if any(self._agenda.left_of(c.case_id) for c in u)]

    def take(self, folder: Path) -> str:
        """Join the units that an attempt has finished, and remove it if it has finished all. Why
        it cannot be used; empty if it can."""
        if (run := run_in(folder)) is None:
            return ""
        if why := self._unlike(run):
            return why
        within = Agenda(run.suite, recorded=run.measurements)
        ids = [c.case_id for c in run.suite.cases]
        left = (u for u in self.left(ids) if not any(within.left_of(c.case_id) for c in u))
        if done := [case for unit in left for case in unit]:
            self._enter(run, done)
        if run.ended_at and not self.left(ids):
            shutil.rmtree(folder, ignore_errors=True)
        return ""

    def _unlike(self, run: Run) -> str:
        """How a run differs in suite, device, driver or code from what has entered; empty if
        not."""
        if other := [c.case_id for c in run.suite.cases if c != self._cases.get(c.case_id)]:
            return f"the suite changed: {other[0]} is another case than in the run"
        for first in [*self._known.values()][:1]:
            try:
                drift.require_alike(replace(self._recorded, environment=first), run.environment)
            except StoreError as error:
                return str(error).splitlines()[0]
        return ""

    def give_up(self, lost: Sequence[Sequence[Case]], folders: Sequence[Path], why: str) -> None:
        """Join what the best attempt has of each unit, and record the rest as lost."""
        self.lost = True
        runs = [run for folder in folders if (run := run_in(folder)) and not self._unlike(run)]
        for unit in lost:
            of = [sum(len(run.of(c.case_id)) for c in unit) for run in runs]
            if any(of):
                self._enter(runs[of.index(max(of))], unit)
            for case in unit:
                for process in self._agenda.left_of(case.case_id)[:1]:
                    none = Measurement(
                        case_id=case.case_id,
                        process=process,
                        outcome=Outcome.INVALID_ENVIRONMENT,
                        detail=LOST + why,
                    )
                    self._writer.append(none)
                    self._agenda.ended(none)

    def _enter(self, run: Run, cases: Sequence[Case]) -> None:
        # The command of the whole run says which cases were asked for, that of a block does not.
        here = replace(run.environment, command=self._recorded.environment.command)
        first: list[MeasuredIn | SelfTest] = []
        if here.card not in self._known:
            first = [MeasuredIn(environment=here), *([run.self_test] if run.self_test else [])]
        new = [
            replace(m, card=here.card)
            for case in cases
            for m in run.of(case.case_id)
            if m.process in self._agenda.left_of(case.case_id)
        ]
        self._copy(Path(run.folder), new)
        # At once: a sync for each takes longer than all else.
        self._writer.append(*first, *new)
        self._known[here.card] = here
        for m in new:
            self._agenda.ended(m)

    def _copy(self, folder: Path, new: Sequence[Measurement]) -> None:
        """Bring the files that measurements name, and those beside their logs."""
        there = [*(folder / reader.LOG_FOLDER).glob("*")]  # once: listing is slow
        for m in new:
            log = f"{Path(m.log).stem}."
            named = [folder / f.path for f in m.evidence.files if f.path] if m.evidence else []
            for file in {*named, *(f for f in there if m.log and f.name.startswith(log))}:
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
