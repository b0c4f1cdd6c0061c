"""The gate without a clock: counters per step, compared exactly.

A counter has no noise, so one process of each side is enough, and any difference is one of the
code. What a change means to change it states, by renewing ci/baselines/counters.json with it. The
counts of a CPU depend on torch, which decides what an operator is made of, and on nothing else
about the machine; a file of another torch says nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.analysis.counters import exact_counters
from harness.gate import files
from harness.gate.records import CounterChange
from harness.records import COUNTERS, Case, Decision, Environment, Finding, Measurement, Outcome

FILE = "counters.json"
CHECK = "counters per step"
RENEW = "harness baseline counters"
PROCESSES = 1
AROUND: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}
"""Nothing is timed, and threads that wait for each other only make a busy machine wait."""
SAMPLES = 3
"""Steps before the counted ones: the first is cold, and its length would be taken for theirs."""

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterBaseline:
    """The counters per step of every case, and what they were counted with."""

    device: str
    """`cpu`, or a GPU's name."""
    torch: str
    """Version without its build: 2.13.0."""
    commit: str
    """Of the tree they were counted in."""
    set_at: str
    cases: Mapping[str, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)
    """Suite -> case -> counter -> count."""
    uncommitted: bool = False
    """The tree had uncommitted changes, as it has where they are accepted with their change."""

    def __post_init__(self) -> None:
        files.moment(self.set_at)

    def counts(self, suite: str, case_id: str) -> Counts | None:
        return self.cases.get(suite, {}).get(case_id)


def without_times(case: Case) -> Case:
    """The case with its times cut as short as they can be; one process, and right as ever."""
    short = replace(
        case.settings,
        processes=PROCESSES,
        min_samples=SAMPLES,
        max_samples=SAMPLES,
        sample_s=1e-3,
        warmup_s=0.0,
    )
    return replace(case, settings=short)


def path_of(folder: Path) -> Path:
    return folder / FILE


def load(folder: Path) -> CounterBaseline | None:
    """The counters on record; None where there are none.

    Raises:
        StoreError: The file is damaged.
    """
    return files.read(path_of(folder), CounterBaseline, f"Renew it: {RENEW}")


def parse(text: str) -> CounterBaseline | None:
    """The same from a text that another commit holds; None where that is damaged."""
    try:
        return files.parse(text, CounterBaseline)
    except ValueError:
        return None


def store(
    folder: Path,
    environment: Environment,
    counted: Mapping[str, Mapping[str, Counts]],
) -> CounterBaseline:
    """Keep what was counted.

    Raises:
        StoreError: It cannot be written.
    """
    made = CounterBaseline(
        device=environment.device_name,
        torch=torch_of(environment),
        commit=environment.git.commit if environment.git else "",
        uncommitted=environment.uncommitted,
        set_at=datetime.now(UTC).isoformat(timespec="seconds"),
        cases={s: {c: dict(n) for c, n in cases.items()} for s, cases in counted.items()},
    )
    files.write(path_of(folder), made)
    return made


def torch_of(environment: Environment) -> str:
    """The version whose operators were counted; a build such as +cu130 has the same."""
    return (environment.versions.get("torch") or "").partition("+")[0]


def unfit(baseline: CounterBaseline | None, folder: Path, here: Environment) -> str:
    """Why the counters on record say nothing of those counted here; empty where they do."""
    path = path_of(folder)
    if baseline is None:
        return f"no counters on record in {path}; {RENEW} makes them"
    if baseline.device != here.device_name:
        return f"{path} was counted on {baseline.device}, and this is {here.device_name}"
    if baseline.torch != torch_of(here):
        return f"{path} was counted with torch {baseline.torch}, and this is {torch_of(here)}"
    return ""


def counts_of(measured: Sequence[Measurement]) -> tuple[Counts | None, str]:
    """What a side counted, or why that is no answer. One counter that is not exact spoils all."""
    if all(m.outcome is not Outcome.OK for m in measured):
        return None, "it did not run"
    exact = exact_counters(measured)
    if exact.disagreeing:
        return None, f"two steps of it differ in {', '.join(exact.disagreeing)}"
    if not exact.counts:
        return None, f"no exact counters: {next(iter(exact.absent.values()))}"
    return exact.counts, ""


def judge(
    before: Counts | None,
    after: Counts | None,
    *,
    whose: str,
    why: str = "",
    accepted: Counts | None = None,
) -> tuple[tuple[CounterChange, ...], Finding]:
    """Compare two sides exactly.

    Args:
        before: Of the baseline, or on record.
        after: Of the candidate.
        whose: What `before` is of, in words.
        why: Why one of them is None.
        accepted: What the same change puts on record for the case, where it does.
    """
    if before is None or after is None:
        return (), _finding(Decision.INCONCLUSIVE, why or f"nothing is known of {whose}")
    changes = tuple(
        CounterChange(name=n, before=before.get(n), after=after.get(n))
        for n in COUNTERS
        if before.get(n) != after.get(n)
    )
    if not changes:
        return (), _finding(Decision.GO, f"all {len(after)} as in {whose}")
    text = ", ".join(f"{c.name} {_word(c.before)} → {_word(c.after)}" for c in changes)
    if accepted == after:
        return changes, _finding(Decision.GO, f"{text}; ", "on record with the same change")
    if unknown := [c.name for c in changes if c.before is None or c.after is None]:
        reason = f"{', '.join(unknown)} known of one side only: {text}"
        if len(unknown) == len(changes):
            return changes, _finding(Decision.INCONCLUSIVE, reason)
    fewer = all((c.after or 0) < (c.before or 0) for c in changes)
    hint = "fewer: a gain, or work that is not done" if fewer else "no noise: the code differs"
    return changes, _finding(Decision.NO_GO, f"{text} ", f"since {whose} ({hint})")


def _finding(decision: Decision, reason: str, detail: str = "") -> Finding:
    """`detail` is what a page says beside the counters that differ."""
    return Finding(check=CHECK, decision=decision, reason=reason + detail, detail=detail)


def _word(value: int | None) -> str:
    return "unknown" if value is None else f"{value:,}"
