"""The gate by counters per step, compared exactly; it needs no GPU.

Counters have no noise: one process of each side is enough, and any difference comes from the code.
One that varies from step to step is compared step by step.
A change that intends a difference renews ci/baselines/counters.json. On a CPU the counts depend on
the version of torch and on nothing else about the machine.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from harness.analysis.recorded import by_step, exact_counters
from harness.errors import StoreError
from harness.gate.records import CounterChange, parse
from harness.records import COUNTERS, Decision, Environment, Facts, Finding, Measurement, Outcome

FILE = Path("ci/baselines/counters.json")
CHECK = "counters per step"
RENEW = "harness gate --counters --record"
AROUND: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
"""Nothing is timed, and waiting threads would only load the machine."""
SAMPLES = 3
"""Steps before the counted ones: the first is cold, and its length says nothing about theirs."""

Counts = Mapping[str, int]
Compared = tuple[tuple[CounterChange, ...], Finding]
"""The counters that differ, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterBaseline:
    """The counters per step of every case."""

    schema: Literal[1] = 1
    device: str
    """`cpu`, or a GPU's name."""
    torch: str
    """Version without its build: 2.13.0."""
    cases: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """Suite -> case -> counter -> count."""


def load() -> CounterBaseline | None:
    """The recorded counters of the current folder, or None; a StoreError if the file is damaged."""
    if not FILE.exists():
        return None
    try:
        return parse(FILE.read_bytes(), CounterBaseline)
    except (OSError, ValueError) as error:
        raise StoreError(f"{FILE}: {error}", f"Replace it: {RENEW}") from None


def store(environment: Environment, counted: Mapping[str, Mapping[str, Counts]]) -> CounterBaseline:
    """Record counts in the current folder; a StoreError if the file cannot be written."""
    made = CounterBaseline(
        device=environment.device_name,
        torch=torch_of(environment),
        cases={s: {c: dict(n) for c, n in cases.items()} for s, cases in counted.items()},
    )
    text = json.dumps(asdict(made), indent=1)
    try:
        FILE.parent.mkdir(parents=True, exist_ok=True)
        FILE.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StoreError(f"cannot write {FILE}: {error.strerror}") from error
    return made


def torch_of(environment: Environment) -> str:
    """The version of torch without its build, such as +cu130, which does not change counts."""
    return (environment.versions.get("torch") or "").partition("+")[0]


def unfit(baseline: CounterBaseline | None, here: Environment) -> Facts:
    """Why the recorded counters cannot be compared with counts made here; empty if they can."""
    if baseline is None:
        return {"no_file": str(FILE), "record": RENEW}
    if baseline.device != here.device_name:
        return {"file": str(FILE), "device": baseline.device, "here": here.device_name}
    if baseline.torch != torch_of(here):
        return {"file": str(FILE), "torch": baseline.torch, "here": torch_of(here)}
    return {}


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


def compare(
    baseline: Sequence[Measurement],
    candidate: Sequence[Measurement],
    recorded: Counts | None = None,
) -> Compared:
    """Compare a case of two sides; a candidate that counts as `recorded` is GO.

    A counter that varies from step to step is GO if each step counts the same on both sides, and
    undecided otherwise: whether it moved or varies by chance is not known.
    """
    sides = (baseline, candidate)
    exact = [exact_counters(side) for side in sides]
    varying = {
        name: (by_step(baseline, name), by_step(candidate, name))
        for name in dict.fromkeys(chain(*(e.disagreeing for e in exact)))
    }
    if not varying or not all(map(all, varying.values())):
        (before, no_a), (after, no_b) = map(counts_of, sides)
        whys = (("baseline", no_a), ("candidate", no_b))
        why = {"lacking": [{"side": side, "lacks": no} for side, no in whys if no]}
        return judge(before, after, source="the baseline", why=why, accepted=recorded)
    kept = [{n: c for n, c in e.counts.items() if n not in varying} for e in exact]
    answer = judge(kept[0], kept[1], source="the baseline")
    other = {
        name: (before, after)
        for name, (before, after) in varying.items()
        if len({tuple(process) for process in (*before, *after)}) > 1
    }
    if answer[1].decision is Decision.NO_GO or not other:
        return answer
    ranges = []
    for name, steps in other.items():
        counts = [[*chain(*processes)] for processes in steps]
        ends = [{"least": min(n), "largest": max(n), "steps": len(n)} for n in counts]
        ranges.append({"counter": name, "ranges": ends})
    return answer[0], _finding(Decision.INCONCLUSIVE, varying=ranges)


def judge(
    baseline: Counts | None,
    candidate: Counts | None,
    *,
    source: str,
    why: Facts | None = None,
    accepted: Counts | None = None,
) -> Compared:
    """Compare two sides exactly; `source` names that of the baseline in words, `why` says why a
    side is None, and `accepted` is what the candidate may count instead."""
    if baseline is None or candidate is None:
        return (), _finding(Decision.INCONCLUSIVE, **(why or {}))
    changes = tuple(
        CounterChange(name=n, before=baseline.get(n), after=candidate.get(n))
        for n in COUNTERS
        if baseline.get(n) != candidate.get(n)
    )
    if not changes:
        return (), _finding(Decision.GO, equal=len(candidate), source=source)
    texts = [*map(str, changes)]
    if accepted == candidate:
        return changes, _finding(Decision.GO, changes=texts, recorded_in=str(FILE))
    unknown = [c.name for c in changes if c.before is None or c.after is None]
    if len(unknown) == len(changes):
        return changes, _finding(Decision.INCONCLUSIVE, one_side=unknown, differing=texts)
    return changes, _finding(Decision.NO_GO, changes=texts, differs_from=source)


def _finding(decision: Decision, **facts: Any) -> Finding:
    return Finding(check=CHECK, decision=decision, facts=facts)
