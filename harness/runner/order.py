"""Which process comes next, and whether a run ends before all of its processes.

Process 0 of every case comes first, then process 1 in reverse order, and so on. Every case gives a
result early, and no case always follows the same one or runs on the warmer GPU.

The cases of rules with `abort_early` come before all others, rule by rule. Such a rule is judged
once, when all its cases have all their processes: no later process of theirs can overturn it.

A budget takes cases in the order in which they decide: those of rules that may end the run, of
rules that answer the question, of other rules, then the rest. Only as many of them take turns as
fit into the time that is left, all processes counted.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from harness.records import (
    Case,
    Decision,
    Measurement,
    Outcome,
    Rule,
    Stop,
    Suite,
    Verdict,
    Weight,
    gpu_matches,
)

Block = tuple[Case, ...]
"""Cases that are of use only together: the two sides of a pair, the points of a fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The time of a run."""

    total_s: float
    ends_at: float
    """By `clock`."""
    expected_s: Mapping[str, float] = field(default_factory=dict)
    """Case id -> expected lifetime of one process."""
    clock: Callable[[], float] = time.monotonic


class Agenda:
    """The processes of a run that are left."""

    def __init__(
        self,
        suite: Suite,
        *,
        recorded: Iterable[Measurement] = (),
        device: str = "",
        decide: Callable[[], Verdict] | None = None,
        budget: Budget | None = None,
    ) -> None:
        """All processes but those that a resumed run skips.

        Args:
            recorded: What was measured before.
            device: The GPU's name; rules for other GPUs count as absent.
            decide: The verdict on what is recorded; None runs every case whatever rules say.
            budget: None for as long as it takes.
        """
        self.stop: Stop | None = None
        """Why processes are left; set when `next` returns None."""
        self._cases = {c.case_id: c for c in suite.cases}
        self._left = {c.case_id: [*range(c.settings.processes)] for c in suite.cases}
        self._wall_s: dict[str, float] = {}
        self._decide, self._budget = decide, budget
        rules = [r for r in suite.rules if gpu_matches(r.gpu, device) and r.needs(suite.cases)]
        first = [r for r in rules if decide and r.abort_early]
        self._rungs = {r.name: [c.case_id for c in r.needs(suite.cases)] for r in first}
        later = [r for r in rules if r not in first and r.counts is not Weight.NOTE]
        later.sort(key=lambda r: (not r.abort_early, not r.asks))
        stages = [[r] for r in first] + [later if budget else []]
        placed: set[str] = set()
        self._stages = [[*_blocks(rules, suite.cases, placed)] for rules in stages]
        self._stages[-1] += ((c,) for c in suite.cases if c.case_id not in placed)
        for measurement in recorded:
            self.ended(measurement)

    @property
    def left(self) -> int:
        """The number of processes."""
        return sum(map(len, self._left.values()))

    def ended(self, measurement: Measurement) -> None:
        """A process has ended. The first one that does not end OK is the last of its case."""
        name = measurement.case_id
        self._wall_s[name] = max(self._wall_s.get(name, 0.0), measurement.wall_s)
        failed = measurement.outcome is not Outcome.OK
        self._left[name] = [p for p in self._left[name] if not failed and p != measurement.process]

    def next(self) -> tuple[Case, int] | None:
        """The next process; None at the end of the run."""
        stage = next((s for s in self._stages if any(map(self._unfinished, s))), None)
        if stage is None:
            return None
        if rule := self._broken():
            self.stop = Stop(rule=rule)
            return None
        taking_turns = [case for block in self._affordable(stage) for case in block]
        step = next(_rounds(taking_turns, self._left), None)
        if step is None and self._budget:
            self.stop = Stop(budget_s=self._budget.total_s)
        return step

    def _unfinished(self, block: Block) -> bool:
        return any(self._left[c.case_id] for c in block)

    def _broken(self) -> str:
        """The first rule that ends the run; empty if none does by now."""
        complete = [n for n, ids in self._rungs.items() if not any(self._left[i] for i in ids)]
        for name in complete:
            del self._rungs[name]
        results = self._decide().rules if complete and self._decide else ()
        decided = {r.rule for r in results if r.applies and r.decision is Decision.NO_GO}
        return next((name for name in complete if name in decided), "")

    def _affordable(self, stage: Sequence[Block]) -> Iterator[Block]:
        """The blocks that have processes left, until one does not fit into the time."""
        left_s = self._budget.ends_at - self._budget.clock() if self._budget else 0.0
        for block in filter(self._unfinished, stage):
            if self._budget:
                left_s -= sum(map(self._expected_s, block))
                if left_s < 0:
                    return
            yield block

    def _expected_s(self, case: Case) -> float:
        """How long the processes that a case has left will take: by its own processes, those of an
        earlier run, or the slowest of its workload. Without any, one process at its time limit: it
        shows how long the others take."""
        assert self._budget is not None
        left = len(self._left[case.case_id])
        known = (self._wall_s, self._budget.expected_s)
        for times_s in known:
            if case.case_id in times_s:
                return left * times_s[case.case_id]
        alike = [s for i, s in self._wall_s.items() if self._cases[i].workload == case.workload]
        return left * max(alike) if alike else min(left, 1) * case.settings.timeout_s


def settled(suite: Suite, measurements: Iterable[Measurement]) -> frozenset[tuple[str, int]]:
    """The (case id, process) pairs that a resumed run skips: all measured ones, and all of a case
    that has failed."""
    left = Agenda(suite, recorded=measurements)._left
    return frozenset(
        (case.case_id, process)
        for case in suite.cases
        for process in range(case.settings.processes)
        if process not in left[case.case_id]
    )


def _blocks(rules: Sequence[Rule], cases: Sequence[Case], placed: set[str]) -> Iterator[Block]:
    """The cases of rules, in blocks, without those that are placed; they are then placed too."""
    for rule in rules:
        points: dict[object, list[Case]] = {}
        for case in rule.needs(cases):
            axes = tuple(case.axes[a] for a in case.axes if a != rule.axis)
            alone = case.case_id if rule.axis is None else (case.workload, case.provider, axes)
            points.setdefault(alone, []).append(case)
        for block in rule.pairs(cases) if rule.against else points.values():
            if new := tuple(c for c in block if c.case_id not in placed):
                placed.update(c.case_id for c in new)
                yield new


def _rounds(cases: Sequence[Case], left: Mapping[str, Sequence[int]]) -> Iterator[tuple[Case, int]]:
    """The processes that are left, in turns."""
    for process in range(max((case.settings.processes for case in cases), default=0)):
        for case in cases if process % 2 == 0 else reversed(cases):
            if process in left[case.case_id]:
                yield case, process
