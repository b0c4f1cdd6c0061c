"""The gate by counters per step, compared exactly; it needs no GPU.

Counters have no noise: one process of each side is enough, and any difference comes from the code.
Of one that varies from step to step, more processes of both sides are compared.
A change that intends a difference renews ci/baselines/counters.json. On a CPU the counts depend on
the version of torch and on nothing else about the machine.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, median
from typing import TypeVar

from harness.analysis.comparison import holm
from harness.analysis.recorded import by_step, exact_counters
from harness.errors import StoreError
from harness.gate.records import CounterChange, parse
from harness.records import (
    COUNTERS,
    WORST_FIRST,
    Case,
    Decision,
    Environment,
    Finding,
    Measurement,
    Outcome,
)

FILE = Path("ci/baselines/counters.json")
SCHEMA_VERSION = 1
CHECK = "counters per step"
RENEW = "harness gate --counters --record"
PROCESSES = 1
AROUND: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
"""Nothing is timed, and waiting threads would only load the machine."""
ERROR = 0.01
"""Chance that a gate calls any counter different that varies and has not moved."""
UNITS = 8
"""Processes a side of a case with such a counter: with fewer, the test could reject none of 60."""
SAMPLES = 3
"""Steps before the counted ones: the first is cold, and its length says nothing about theirs."""

Key = TypeVar("Key")
Counts = Mapping[str, int]
Steps = Sequence[Sequence[int]]
"""A counter of each step of each process."""
Compared = tuple[tuple[CounterChange, ...], Finding]
"""The counters that differ, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterBaseline:
    """The counters per step of every case."""

    device: str
    """`cpu`, or a GPU's name."""
    torch: str
    """Version without its build: 2.13.0."""
    cases: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """Suite -> case -> counter -> count."""

    def counts(self, suite: str, case_id: str) -> Counts | None:
        return self.cases.get(suite, {}).get(case_id)


def without_times(case: Case) -> Case:
    """The case with the shortest timing; accuracy is checked as before."""
    short = replace(
        case.settings,
        processes=PROCESSES,
        min_samples=SAMPLES,
        max_samples=SAMPLES,
        sample_s=1e-3,
        warmup_s=0.0,
    )
    return replace(case, settings=short)


def load() -> CounterBaseline | None:
    """The recorded counters of the current folder, or None.

    Raises:
        StoreError: The file is damaged.
    """
    if not FILE.exists():
        return None
    try:
        return parse(FILE.read_bytes(), CounterBaseline, SCHEMA_VERSION)
    except (OSError, ValueError) as error:
        raise StoreError(f"{FILE}: {error}", f"Replace it: {RENEW}") from None


def of_text(text: str | None) -> CounterBaseline | None:
    """The file's text as another commit has it; None if it is absent or damaged."""
    with suppress(ValueError):
        return parse(text or "", CounterBaseline, SCHEMA_VERSION)
    return None


def store(environment: Environment, counted: Mapping[str, Mapping[str, Counts]]) -> CounterBaseline:
    """Record counts in the current folder.

    Raises:
        StoreError: The file cannot be written.
    """
    made = CounterBaseline(
        device=environment.device_name,
        torch=torch_of(environment),
        cases={s: {c: dict(n) for c, n in cases.items()} for s, cases in counted.items()},
    )
    text = json.dumps({"schema": SCHEMA_VERSION, **asdict(made)}, indent=1)
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {FILE}: {error.strerror}") from error
    return made


def torch_of(environment: Environment) -> str:
    """The version of torch without its build, such as +cu130, which does not change counts."""
    return (environment.versions.get("torch") or "").partition("+")[0]


def unfit(baseline: CounterBaseline | None, here: Environment) -> str:
    """Why the recorded counters cannot be compared with counts made here, or an empty string."""
    if baseline is None:
        return f"{FILE} not found; record counters: {RENEW}"
    if baseline.device != here.device_name:
        return f"{FILE} was counted on {baseline.device}, but this is {here.device_name}"
    if baseline.torch != torch_of(here):
        return f"{FILE} was counted with torch {baseline.torch}, but this is {torch_of(here)}"
    return ""


def counts_of(measured: Sequence[Measurement]) -> tuple[Counts | None, str]:
    """The exact counts of one side, or None and the reason. All counters must be exact."""
    if all(m.outcome is not Outcome.OK for m in measured):
        return None, "did not run"
    exact = exact_counters(measured)
    if exact.disagreeing:
        return None, f"two steps differ in {', '.join(exact.disagreeing)}"
    if not exact.counts:
        return None, f"no exact counters: {next(iter(exact.absent.values()))}"
    return exact.counts, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The measurements of a case on both sides."""

    baseline: Sequence[Measurement]
    candidate: Sequence[Measurement]
    accepted: Counts | None = None
    """Counts that the change itself records, if it does."""

    def varying(self) -> Mapping[str, tuple[Steps, Steps]]:
        """The counters of which a step differs from another, by step and process of each side."""
        sides = self.baseline, self.candidate
        names = dict.fromkeys(n for side in sides for n in exact_counters(side).disagreeing)
        found = {n: (by_step(sides[0], n), by_step(sides[1], n)) for n in names}
        return found if all(map(all, found.values())) else {}


def undecided(case: Counted) -> bool:
    """Whether more processes could show that a counter that varies has moved."""
    return any(not _alike(*steps) for steps in case.varying().values())


def compare(cases: Mapping[Key, Counted]) -> dict[Key, Compared]:
    """Compare all cases of a gate; of each case the worst finding counts.

    A counter that is the same in every step is compared exactly, without any error. One that varies
    is compared by a rank test of the processes' means, because the steps of one process depend on
    each other. The p-values are adjusted by Holm over all counters that vary, in all cases: the
    chance that a gate without a change calls any of them different is at most ERROR.
    """
    varying = {key: case.varying() for key, case in cases.items()}
    p_values = holm(
        {
            (key, name): _p_value(*steps)
            for key, of_case in varying.items()
            for name, steps in of_case.items()
            if not _alike(*steps)
        }
    )
    answers = {}
    for key, case in cases.items():
        found = [
            _of_varying(name, *steps, p_values.get((key, name)))
            for name, steps in varying[key].items()
        ]
        found.append(_of_exact(case, except_for=varying[key]))
        worst = min(found, key=lambda one: WORST_FIRST.index(one[1].decision))
        answers[key] = (*chain(*(changes for changes, _ in found)),), worst[1]
    return answers


def _of_exact(case: Counted, except_for: Collection[str]) -> Compared:
    if except_for:
        exact = [exact_counters(side).counts for side in (case.baseline, case.candidate)]
        kept = [{n: c for n, c in counts.items() if n not in except_for} for counts in exact]
        return judge(*kept, source="the baseline")
    (before, no_a), (after, no_b) = counts_of(case.baseline), counts_of(case.candidate)
    sides = (("baseline", no_a), ("candidate", no_b))
    why = "; ".join(f"{side}: {reason}" for side, reason in sides if reason)
    return judge(before, after, source="the baseline", why=why, accepted=case.accepted)


def _alike(before: Steps, after: Steps) -> bool:
    """Whether every process counted the same, step by step."""
    return len({tuple(process) for process in (*before, *after)}) == 1


def _p_value(before: Steps, after: Steps) -> float:
    from scipy.stats import mannwhitneyu  # slow to import

    means = [[fmean(process) for process in side] for side in (before, after)]
    return float(mannwhitneyu(*means, method="exact").pvalue)


def _of_varying(name: str, before: Steps, after: Steps, p_value: float | None) -> Compared:
    """What a counter that varies shows; without a p-value it is the same in each step."""
    sides = [[*chain(*processes)] for processes in (before, after)]
    ranges = [f"{min(n):,} to {max(n):,} in {len(n)} steps" for n in sides]
    text = f"{name} varies by step: {' → '.join(ranges)}"
    if p_value is None:
        return (), _finding(Decision.GO, f"{text}; the same in each step")
    one, other = (int(median(values)) for values in sides)
    changes = (CounterChange(name=name, before=one, after=other),)
    if p_value <= ERROR:
        detail = f"the processes' means differ (p = {p_value:.2g})"
        return changes, _finding(Decision.NO_GO, f"{text}; ", detail)
    count = min(len(before), len(after))
    reason = f"{text}; {count} processes a side show no shift (p = {p_value:.2g})"
    return changes, _finding(Decision.INCONCLUSIVE, reason)


def judge(
    baseline: Counts | None,
    candidate: Counts | None,
    *,
    source: str,
    why: str = "",
    accepted: Counts | None = None,
) -> Compared:
    """Compare two sides exactly.

    Args:
        baseline: Counts of the baseline, or the recorded ones.
        candidate: Counts of the candidate.
        source: Names the source of `baseline` in words.
        why: Why one of them is None.
        accepted: Counts of the case that the change itself records, if it does.
    """
    if baseline is None or candidate is None:
        return (), _finding(Decision.INCONCLUSIVE, why)
    changes = tuple(
        CounterChange(name=n, before=baseline.get(n), after=candidate.get(n))
        for n in COUNTERS
        if baseline.get(n) != candidate.get(n)
    )
    if not changes:
        return (), _finding(Decision.GO, f"all {len(candidate)} equal {source}")
    text = ", ".join(map(str, changes))
    if accepted == candidate:
        return changes, _finding(Decision.GO, f"{text}; ", "recorded by this change")
    unknown = [c.name for c in changes if c.before is None or c.after is None]
    if len(unknown) == len(changes):
        reason = f"only one side has {', '.join(unknown)}: {text}"
        return changes, _finding(Decision.INCONCLUSIVE, reason)
    return changes, _finding(Decision.NO_GO, f"{text}; ", f"differs from {source}")


def _finding(decision: Decision, reason: str, detail: str = "") -> Finding:
    """`detail` is what a page prints beside the counters that differ."""
    return Finding(check=CHECK, decision=decision, reason=reason + detail, detail=detail)
