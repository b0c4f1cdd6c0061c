"""Golden values: all that is computed from the stored runs.

Moving or rewording code does not change them. The file has numbers, ids, truth values and values of
enumerations, but no sentences and no names of classes or fields. Of a sentence it has only whether
there is one.

    python -m reports.tests.test_golden            list every value that differs
    python -m reports.tests.test_golden --write    write the file again
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.analysis import comparison, summary
from harness.analysis.comparison import screen, screened, statistics
from harness.analysis.dead_axes import dead_axes
from harness.analysis.effects import effects
from harness.analysis.recorded import unfit
from harness.analysis.scaling import fit
from harness.analysis.study import Study
from harness.analysis.verdict import by_case, judge
from harness.gate.compare import runs
from harness.gate.records import GateCase, GateRecord, Mode
from harness.gate.unpaired import FEWEST, compare_stored
from harness.machine.drift import changed, differences, measured
from harness.records import (
    COUNTERS,
    ByCase,
    Case,
    CaseSummary,
    Comparison,
    Estimate,
    Interval,
    Measurement,
    Outcome,
    Pair,
    Ratio,
    Run,
    Thresholds,
    Verdict,
)
from harness.report.conditions import time_use
from harness.report.series.gate_text import next_steps
from harness.report.text import SCALING, filled
from harness.report.verdict_text import distance
from harness.runner.interleave import clock, usable
from harness.store.reader import load

FILE = Path(__file__).with_name("golden.json")
STORE = Path(__file__).parents[1] / "runs"
DIGITS = 12
RELATIVE = 1e-9
"""Other library versions and CPUs round the last digits differently."""
OF_FITS = 1e-5
"""The interval of a fit with a timeout is found by a search with a tolerance."""

Values = Any
"""What JSON can hold."""


# --- one run -----------------------------------------------------------------------------


def of_one(run: Run) -> dict[str, Values]:
    """All that is computed from one run alone."""
    summaries = summary.summarise(run)
    fits = fit(summaries)
    return {
        "run": _run(run),
        "cases": {s.case.case_id: _summary(s) for s in summaries},
        "processes": _by_process(run),
        "verdict": _verdict(judge(run.suite, run.environment, summaries, fits), run),
        "fits": [
            [
                *(f.axis, f.group, f.workload, f.censored),
                [[p.case_id, p.x, p.lower_bound_s] for p in f.points],
                _estimate(f.exponent),
                *(bool(filled(SCALING[what], f.facts)) for what in ("no_fit", "note")),
            ]
            for f in fits
        ],
        "effects": [
            [
                *(e.workload, e.axis, e.base, e.value),
                *(e.ratio.value, e.ratio.low, e.ratio.high, min(e.by_pair), max(e.by_pair)),
                *(e.pairs, e.negligible, e.disagree),
                dict(e.within),
            ]
            for e in effects(summaries)
        ],
        "same": [
            [
                *(d.workload, d.provider, d.axes, d.values, d.pairs),
                *(d.without_kernels, d.time_differs),
            ]
            for d in dead_axes(run, summaries)
        ],
        "expectations": [
            [
                *(f.metric, f.subject, f.decision, f.likely),
                *(_estimate(f.estimate), f.bound, distance(f, e)),
            ]
            for e in run.suite.expectations
            for f in by_case(e, summaries)
        ],
        "stored": {
            case.case_id: [
                [median(m.kept_s), clock(m), m.wall_s or None]
                for m in run.of(case.case_id)
                if usable(m, case)
            ]
            for case in run.suite.cases
        },
    }


def _run(run: Run) -> list[Values]:
    peaks = run.self_test.peaks if run.self_test else None
    phases = [p for m in run.measurements for p in m.phases]
    names = dict.fromkeys(p.name for p in phases)
    return [
        [len(run.suite.cases), len(run.measurements), run.elapsed_s, run.wall_s],
        [sum(p.end_s - p.start_s for p in phases if p.name == name) for name in names],
        time_use(run),
        [check.holds for proof in run.self_tests for check in proof.checks],
        peaks and [peaks.flops_per_s, peaks.bytes_per_s, peaks.launch_s],
    ]


def _estimate(e: Interval | None) -> list[Values] | None:
    return [e.value, e.low, e.high, e.n, e.samples] if isinstance(e, Estimate) else None


def _summary(s: CaseSummary) -> list[Values]:
    return [
        s.outcome,
        {name: _estimate(e) for name, e in s.metrics.items()},
        [s.lower_bound_s, s.tokens, s.flops],
        s.roofline_by,
        [s.attested, bool(s.unattested), s.kernels_invisible],
        bool(s.detail or s.facts),
        {k: v for k, v in s.effective.items() if not isinstance(v, str)},
    ]


def _by_process(run: Run) -> dict[str, Values]:
    return {
        case.case_id: [_process(m) for m in run.of(case.case_id)]
        for case in run.suite.cases
        if run.of(case.case_id)
    }


def _process(m: Measurement) -> list[Values]:
    """Values of one process."""
    where = m.breakdown
    return [
        [m.process, m.outcome, m.clock, m.steady, clock(m)],
        [len(m.samples_s), len(m.kept_s), math.fsum(m.samples_s), math.fsum(m.warmup_s)],
        {reason: len(taken) for reason, taken in unfit(m, m.telemetry, m.phases).items()},
        m.counters
        and [
            *([getattr(m.counters, name) for name in COUNTERS], m.counters.steps, m.counters.exact),
        ],
        where and [where.step_s, where.device_busy_s, where.launch_gap],
        m.profile and [len(m.profile.kernels), len(m.profile.operators), m.profile.fingerprint],
    ]


def _verdict(verdict: Verdict, run: Run) -> list[Values]:
    names = [r.rule for r in verdict.rules]
    return [
        [verdict.decision, verdict.decision.exit_status],
        names.index(verdict.decided_by) if verdict.decided_by in names else None,
        [[r.decision, r.applies, sorted(r.evidence)] for r in verdict.rules],
        [[r.metric, r.axis, r.go, r.abort] for r in run.suite.rules],
    ]


# --- two runs ----------------------------------------------------------------------------


def of_two(a: Run, b: Run) -> dict[str, Values]:
    """Two runs compared: by time, by time across environments, by counters."""
    return {
        "times": _compared(runs(a, Study(b))),
        "across": _compared(runs(a, Study(b), across=True)),
        "counters": _compared(runs(a, Study(b), counters=True, across=True)),
        "noisier": _stored(a, b),
    }


def _compared(compared: GateRecord) -> dict[str, Values]:
    method = "stored" if compared.mode is Mode.BASELINE else compared.mode
    return {
        "whole": [
            *(compared.decision, method, compared.decision.exit_status, len(compared.differences)),
            *([[f.decision, f.counts] for f in compared.findings], len([*next_steps(compared)])),
        ],
        "cases": {case.case_id: _case(case) for case in compared.cases},
    }


def _case(c: GateCase) -> list[Values]:
    found = c.comparison
    times = _ratio(found.ratio) if found else ()
    open_ = (found.smallest_effect, found.pairs_needed, found.minutes_needed) if found else ()
    return [
        [c.decision, c.state, c.change or ""],
        [c.baseline_s, c.candidate_s, *(times or (None, None, None, None, 0))],
        [*(open_ or (None, None, None)), c.gpu_s],
        [[change.name, change.before, change.after] for change in c.counters],
        [[f.decision, f.counts] for f in c.findings],
    ]


def _stored(a: Run, b: Run) -> dict[str, Values]:
    """The cases that both runs timed, judged together as on a node whose days differ by 1 %."""
    before = {c.case_id: [m for m in a.of(c.case_id) if usable(m, c)] for c in a.suite.cases}
    after = {c.case_id: [m for m in b.of(c.case_id) if usable(m, c)] for c in b.suite.cases}
    both = [i for i in after if min(len(after[i]), len(before.get(i, ()))) >= FEWEST]
    found = compare_stored(
        {i: (before[i], after[i]) for i in both},
        Thresholds(tolerance=0.02, stored_tolerance=0.03),
        day_cv=0.01,
    )
    return {c.case_id: _comparison(c) for c in found}


def _ratio(r: Ratio) -> tuple[Values, ...]:
    return r.value, r.low, r.high, r.p, r.n


def _comparison(c: Comparison) -> list[Values]:
    return [
        *(c.change, *_ratio(c.ratio), c.clock_explained),
        *(c.smallest_effect, c.pairs_needed, c.minutes_needed),
    ]


def drifted(then: Run, now: Run) -> list[Values]:
    """Differences between two runs of one suite in environment and cases."""
    before = {c.case_id: c for c in then.suite.cases}
    return [
        sorted([d.baseline, d.candidate] for d in differences(then.environment, now.environment)),
        {c.case_id: _changes(before[c.case_id], c) for c in now.suite.cases if c.case_id in before},
    ]


def _changes(then: Case, now: Case) -> list[Values]:
    pairs = changed(then, now).values()
    numbers = [list(p) for p in pairs if all(isinstance(v, bool | int | float) for v in p)]
    return [len(pairs), len(measured(then, now)), sorted(numbers)]


def paired(run: Run) -> dict[str, Values]:
    """The processes of a run with and without telemetry, as pairs that ran in alternation."""
    pairs: dict[str, list[Pair]] = {}
    for case in run.suite.cases:
        if case.axes.get("telemetry") != "on":
            continue
        twin = case.case_id.removesuffix("sampled") + "unsampled"
        others = {m.process: m for m in run.of(twin) if m.outcome is Outcome.OK}
        pairs[case.case_id] = [
            _pair(others[m.process], m)
            for m in run.of(case.case_id)
            if m.outcome is Outcome.OK and m.process in others
        ]
    if not pairs:
        return {}
    first = Thresholds(build_cv=0.0)  # both sides are one build
    own = dict.fromkeys(pairs, first)
    few = {c: p[: first.screen_pairs] for c, p in pairs.items()}
    more = {c: p[first.screen_pairs :] for c, p in pairs.items()}
    return {
        "screen": {c: screen(p, first) for c, p in few.items()},
        "screened": {c: _comparison(screened(c, p, first)) for c, p in few.items()},
        "confirmed": _looked(pairs, own),
        "few": _looked(more, own),
    }


def _looked(pairs: Mapping[str, Sequence[Pair]], own: ByCase) -> dict[str, Values]:
    looked = {c: statistics(p, own[c]) for c, p in pairs.items()}
    return {c: _comparison(answer) for c, answer in comparison.judge(looked, own).items()}


def _pair(baseline: Measurement, candidate: Measurement) -> Pair:
    return Pair(
        baseline_s=median(baseline.kept_s),
        candidate_s=median(candidate.kept_s),
        baseline_hz=clock(baseline),
        candidate_hz=clock(candidate),
        wall_s=baseline.wall_s + candidate.wall_s,
        swapped=baseline.process % 2 == 0,  # such a round runs forwards: with telemetry first
    )


# --- the file ----------------------------------------------------------------------------


@cache
def golden() -> dict[str, dict[str, Values]]:
    """The values on file; empty if there is no file yet."""
    found: dict[str, dict[str, Values]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return found


@cache
def recorded(run_id: str) -> Run:
    return load(STORE, run_id)


def compute(run_ids: Sequence[str]) -> dict[str, dict[str, Values]]:
    """The content of the file, for these runs and their pairs."""
    return {
        "runs": {i: plain(of_one(recorded(i))) for i in run_ids},
        "pairs": {f"{a} {b}": plain(of_two(recorded(a), recorded(b))) for a, b in shared(run_ids)},
        "drift": {
            f"{a} {b}": plain(drifted(recorded(a), recorded(b))) for a, b in consecutive(run_ids)
        },
        "paired": {i: plain(found) for i in run_ids if (found := paired(recorded(i)))},
    }


def shared(run_ids: Sequence[str]) -> list[tuple[str, str]]:
    """Every two runs that have a case in common."""
    cases = {i: {c.case_id for c in recorded(i).suite.cases} for i in run_ids}
    return [(a, b) for a, b in combinations(run_ids, 2) if cases[a] & cases[b]]


def consecutive(run_ids: Sequence[str]) -> list[tuple[str, str]]:
    """Every run of a suite with the next one."""
    suites: dict[str, list[str]] = {}
    for run_id in run_ids:
        suites.setdefault(recorded(run_id).suite.name, []).append(run_id)
    return [pair for members in suites.values() for pair in pairwise(members)]


def plain(value: Values) -> Values:
    """The value as in JSON, with floats rounded to DIGITS."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, str):
        return str(value)
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def unlike(then: Values, now: Values, place: str = "") -> Iterator[str]:
    """Every value that differs, with its place."""
    if isinstance(then, dict) and isinstance(now, dict):
        for key in sorted({*then, *now}):
            yield from unlike(then.get(key), now.get(key), f"{place}/{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for i, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from unlike(a, b, f"{place}[{i}]")
    elif not _equal(then, now, OF_FITS if "/fits" in place else RELATIVE):
        yield f"{place}: {_short(then)} on file, {_short(now)} now"


def _equal(then: Values, now: Values, relative: float) -> bool:
    if isinstance(then, bool) or isinstance(now, bool):
        return then is now
    if isinstance(then, float) or isinstance(now, float):
        return (
            isinstance(then, int | float)
            and isinstance(now, int | float)
            and math.isclose(then, now, rel_tol=relative)
        )
    return bool(then == now)


def _short(value: Values) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def text_of(value: Values, depth: int = 6) -> str:
    """JSON with sorted keys; a line for each entry of the upper levels."""
    if depth == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))
    lines = (f"{json.dumps(k)}:{text_of(v, depth - 1)}" for k, v in sorted(value.items()))
    return "{\n" + ",\n".join(lines) + "\n}"


# --- tests -------------------------------------------------------------------------------

RUNS = tuple(golden().get("runs", ()))


@pytest.fixture(scope="module", autouse=True)
def summarised_once() -> Iterator[None]:
    """A run is part of many pairs, and its summaries depend on it alone."""
    summarise = summary.summarise
    known = cache(lambda run_id: summarise(recorded(run_id)))

    def of(run: Run) -> tuple[CaseSummary, ...]:
        return known(run.run_id) if run is recorded(run.run_id) else summarise(run)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(summary, "summarise", of)
        yield


@pytest.mark.parametrize("run_id", RUNS)
def test_a_stored_run_gives_its_golden_values(run_id: str) -> None:
    now = plain(of_one(recorded(run_id)))
    assert list(unlike(golden()["runs"][run_id], now)) == []


@pytest.mark.parametrize("pair", golden().get("pairs", ()))
def test_two_stored_runs_compare_as_before(pair: str) -> None:
    a, b = map(recorded, pair.split())
    assert list(unlike(golden()["pairs"][pair], plain(of_two(a, b)))) == []


@pytest.mark.parametrize("pair", golden().get("drift", ()))
def test_two_runs_differ_as_before(pair: str) -> None:
    a, b = map(recorded, pair.split())
    assert list(unlike(golden()["drift"][pair], plain(drifted(a, b)))) == []


@pytest.mark.parametrize("run_id", golden().get("paired", ()))
def test_paired_processes_are_judged_as_before(run_id: str) -> None:
    now = plain(paired(recorded(run_id)))
    assert list(unlike(golden()["paired"][run_id], now)) == []


def test_every_pair_of_the_runs_on_file_is_compared() -> None:
    assert RUNS
    assert {f"{a} {b}" for a, b in shared(RUNS)} == golden()["pairs"].keys()
    assert {f"{a} {b}" for a, b in consecutive(RUNS)} == golden()["drift"].keys()


if __name__ == "__main__":
    every = sorted(folder.parent.name for folder in STORE.glob("*/run.jsonl"))
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text_of(compute(every)) + "\n")
        print(f"{FILE}: {FILE.stat().st_size:,} bytes")
    elif sys.argv[1:]:
        sys.exit("usage: python -m reports.tests.test_golden [--write]")
    else:
        different = list(unlike(golden(), compute(every)))
        sys.stdout.writelines(f"{line}\n" for line in different)
        sys.exit(bool(different))
