"""What other stored runs add to a page: a next step of another suite, and times of peers.

They are named with their run, and never part of the verdict.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import units
from harness.analysis.statistics import times_better
from harness.analysis.summary import summarise
from harness.records import CaseSummary, Estimate, Outcome, Run, SeeAlso, gpu_matches
from harness.report.text import case_names, listed
from harness.store import index, reader

GAIN = 1.05
"""Least factor, for certain, by which a case of another suite must be faster than those here."""


def find(run: Run, say: Callable[[str], None]) -> tuple[Run, ...]:
    """The stored runs of this GPU model that a page cites: the newest of each suite that the suite
    names, and the newest earlier ones that timed a peer which this run could not."""
    summaries, root = summarise(run), Path(run.folder).parent
    lacking = _lacking(run, summaries)
    if not run.suite.see_also and not lacking:
        return ()
    headers = index.ask(root, lambda known: known.runs(), say)
    alike = [h for h in headers if h.device == run.environment.device_name and not h.problem]
    alike.sort(key=lambda h: (h.started_at, h.run_id), reverse=True)
    cited = {}
    for also in run.suite.see_also:
        for h in (h for h in alike if h.suite == also.suite):
            other = reader.load(root, h.folder)
            if _best(also, summarise(other)):
                cited[h.run_id] = other
                break
    for h in alike:
        own = h.suite == run.suite.name and (h.started_at, h.run_id) < (run.started_at, run.run_id)
        if own and lacking and (found := {*_timed(lacking, other := reader.load(root, h.folder))}):
            cited[h.run_id] = other
            lacking = [s for s in lacking if s.case.case_id not in found]
    return tuple(cited.values())


def judged(run: Run, summaries: Sequence[CaseSummary]) -> list[CaseSummary]:
    """The cases that a rule of the suite asks on this GPU."""
    rules = [r for r in run.suite.rules if gpu_matches(r.gpu, run.environment.device_name)]
    return [s for s in summaries if any(r.match.accepts(s.case) for r in rules)]


# --- a step that another suite supports --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Supported:
    """A step that a run of another suite supports."""

    command: str
    run_id: str
    speed: Estimate
    """In tokens/s."""
    instead: str
    cases: tuple[str, ...]
    """Ids of the judged cases here that it is for."""

    def __str__(self) -> str:
        """`Try `...`: 204,000 tokens/s instead of 6,280 tokens/s (NSA_USE_TRITON=0), run `...`."""
        fast = units.quantity("tokens_per_s", self.speed.value)
        return f"Try `{self.command}`: {fast} instead of {self.instead}, run `{self.run_id}`"


def steps(run: Run, summaries: Sequence[CaseSummary], cited: Sequence[Run]) -> Iterator[Supported]:
    """The steps of `see_also` that gain in every case here."""
    for also in run.suite.see_also:
        for other in (r for r in cited if r.suite.name == also.suite):
            if pair := _best(also, summarise(other)):
                best, worse = pair
                here = [s for s in judged(run, summaries) if _equal(also, s, best)]
                if here and all(_gains(best, s) for s in here if "tokens_per_s" in s.metrics):
                    yield Supported(
                        command=also.command,
                        run_id=other.run_id,
                        speed=_speed(best),
                        instead=_instead(also, worse),
                        cases=tuple(s.case.case_id for s in here),
                    )


def _best(also: SeeAlso, theirs: Sequence[CaseSummary]) -> tuple[CaseSummary, CaseSummary] | None:
    """The fastest case to which the step leads, and the slowest that it leaves, if that gains."""
    timed = [s for s in theirs if s.outcome is Outcome.OK and "tokens_per_s" in s.metrics]
    better, than = ([s for s in timed if m.accepts(s.case)] for m in (also.better, also.than))
    pairs = [(a, b) for a in better for b in than if _equal(also, a, b) and _gains(a, b)]
    return max(pairs, key=lambda p: _speed(p[0]).value / _speed(p[1]).value, default=None)


def _equal(also: SeeAlso, a: CaseSummary, b: CaseSummary) -> bool:
    return all(a.case.get(x) == b.case.get(x) is not None for x in also.same)


def _gains(a: CaseSummary, b: CaseSummary) -> bool:
    low = times_better(_speed(a), _speed(b), higher_is_better=True).low
    return low is not None and low > GAIN


def _speed(s: CaseSummary) -> Estimate:
    return s.metrics["tokens_per_s"]


def _instead(also: SeeAlso, worse: CaseSummary) -> str:
    left = [
        f"{a}={units.scalar(v[0])}"
        for a, v in also.than.criteria.items()
        if v != also.better.criteria.get(a)
    ]
    return f"{units.quantity('tokens_per_s', _speed(worse).value)} ({', '.join(left)})"


# --- peers that another run timed --------------------------------------------------------


def _lacking(run: Run, summaries: Sequence[CaseSummary]) -> list[CaseSummary]:
    """Cases of peers that this run gives no time."""
    ours = (s for s in summaries if s.case.provider in run.suite.peers)
    return [s for s in ours if s.outcome is not Outcome.OK or "step_s" not in s.metrics]


def _timed(lacking: Sequence[CaseSummary], other: Run) -> dict[str, Estimate]:
    """Case id -> the step time in another run, if the case is the same."""
    axes = {s.case.case_id: s.case.axes for s in lacking}
    return {
        s.case.case_id: s.metrics["step_s"]
        for s in summarise(other)
        if s.outcome is Outcome.OK
        and "step_s" in s.metrics
        and axes.get(s.case.case_id) == s.case.axes
    }


def peers(run: Run, summaries: Sequence[CaseSummary], cited: Sequence[Run]) -> Iterator[str]:
    """The times of peers that this run lacks, one sentence for each run that has some."""
    names, lacking = case_names(run.suite), _lacking(run, summaries)
    of = {s.case.case_id: f"{s.case.workload}: " for s in lacking}
    for other in (r for r in cited if r.suite.name == run.suite.name):
        if times := _timed(lacking, other):
            said = [
                f"{names[i].removeprefix(of[i])} {units.measured('step_s', e)}"
                for i, e in times.items()
            ]
            lacking = [s for s in lacking if s.case.case_id not in times]
            git = other.environment.git
            at = f" at commit `{git.commit[:10]}`" if git else ""
            yield f"Timed before, and not judged: {listed(said)} (run `{other.run_id}`{at})."
