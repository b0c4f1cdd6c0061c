"""How often the gate errs: its decision, simulated whole, on modelled and on recorded noise.

    python -m reports.studies.gate_errors --gates 10000 --seed 1 --until RUN
    python -m reports.studies.gate_errors --others --gates 3000 --seed 1
    python -m reports.studies.gate_errors --clean --gates 20000 --seed 1

The second command simulates noise of other kinds than ours; the third counts what gates of one
commit call slower and faster. Every simulated gate draws the processes of all its cases, screens,
looks at the rest, widens the tolerance of a case whose pairs scatter far, and is judged by the
functions that judge a real one. Each rate has a 95 % Clopper-Pearson interval, and a
target is met when that whole interval is on its good side. README.md here has the tables.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from harness import units
from harness.analysis import comparison
from harness.analysis.comparison import student_bounds
from harness.analysis.statistics import Floats, exact_bounds, hodges_lehmann
from harness.gate.policy import NOISY_CV, by_scatter
from harness.records import Change, Thresholds
from harness.store import reader
from reports.studies.noise import (
    NOISY,
    OTHERS,
    QUIET,
    TYPICAL,
    BuildNoise,
    Draw,
    Noise,
    RecordedNoise,
    recorded,
)

CASES_AT_ONCE = 6000
"""Cases drawn together: about 200 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One kind of gate to simulate."""

    noise: Noise
    cases: int
    planted: float | None = None
    """Slowdown of the first case, as a fraction; None for a clean change."""
    planted_noise: Noise | None = None
    """Noise of the first case, where it is not that of the others."""
    practical: float = Thresholds().practical
    """Changes below this are not called; 0 counts what the tests alone reject."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What became of the simulated gates of one setting."""

    setting: Setting
    gates: int
    blocked: int
    """Gates with a case called slower: NO-GO."""
    passed: int
    """Gates all of whose cases passed: GO."""
    found: int
    """Gates whose planted case was called slower."""
    missed: int
    """Gates whose planted case passed, independent of the other cases."""
    pairs: int
    """Pairs of processes that all gates ran together."""
    exact_low: int
    """Gates whose first case has a lower bound above the truth, by the exact interval of as many
    pairs as confirm a typical case. Every first case has one, independent of its screen."""
    exact_high: int
    """The same for an upper bound below the truth."""
    student_high: int
    """The same of Student's upper bound, which lets a case pass the screen."""
    slower: int
    """Cases called slower."""
    faster: int
    either: int
    """Pairs of gates of which one or both called some case slower or faster."""
    both: int
    """Pairs of gates that called the same case so."""


def simulate(setting: Setting, *, gates: int, rng: np.random.Generator) -> Tally:
    """Run this many gates."""
    names = [f.name for f in fields(Tally) if f.name not in ("setting", "gates")]
    counts = np.zeros(len(names), dtype=np.int64)
    at_once = max(1, CASES_AT_ONCE // setting.cases)
    for start in range(0, gates, at_once):
        counts += _chunk(setting, min(at_once, gates - start), rng)
    return Tally(setting=setting, gates=gates, **dict(zip(names, map(int, counts), strict=True)))


def _chunk(setting: Setting, gates: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The counts of a Tally, in its order."""
    n = setting.cases
    own = Thresholds(practical=setting.practical)
    draw = own.screen_pairs + own.most_pairs
    order = np.arange(draw) % 2 == 1
    logs, cycles = _logs(setting.noise.draw(rng, gates * n, draw))
    if setting.planted_noise is not None:
        logs[::n], cycles[::n] = _logs(setting.planted_noise.draw(rng, gates, draw))
    truth = np.zeros(gates * n)
    if setting.planted is not None:
        truth[::n] = math.log1p(setting.planted)
        logs, cycles = logs + truth[:, None], cycles + truth[:, None]

    slower, faster = np.zeros((2, gates * n), dtype=bool)
    good = np.ones(gates * n, dtype=bool)  # as the screen leaves it
    screen = slice(own.screen_pairs)
    again = ~comparison.screened_done(logs[:, screen], order[screen], own)
    answers, taken = _looked(setting, logs, cycles, own, again)
    for i, change in answers.items():
        slower[i], faster[i] = change is Change.SLOWER, change is Change.FASTER
        good[i] = change in (Change.SAME, Change.FASTER)
    pairs = own.screen_pairs * int((~again).sum()) + taken

    slower, good = slower.reshape(gates, n), good.reshape(gates, n)
    called = (slower | faster.reshape(gates, n))[: gates // 2 * 2].reshape(-1, 2, n)
    usual = Thresholds(build_cv=0.0)
    last_pairs, first_pairs = slice(-usual.confirm_pairs, None), slice(usual.screen_pairs)
    exact = exact_bounds(logs[::n, last_pairs], order[last_pairs], usual.alpha)
    assert exact is not None
    _, student = student_bounds(logs[::n, first_pairs], order[first_pairs], usual)
    return np.array(
        [
            slower.any(axis=1).sum(),
            good.all(axis=1).sum(),
            slower[:, 0].sum(),
            good[:, 0].sum(),
            pairs,
            (exact[0] > truth[::n]).sum(),
            (exact[1] < truth[::n]).sum(),
            (student < truth[::n]).sum(),
            slower.sum(),
            faster.sum(),
            called.any(axis=(1, 2)).sum(),
            called.all(axis=1).any(axis=1).sum(),
        ]
    )


def _looked(
    setting: Setting,
    logs: Floats,
    cycles: Floats,
    own: Thresholds,
    again: NDArray[np.bool_],
) -> tuple[dict[int, Change], int]:
    """What the looks find in cases that the screen leaves open, and the pairs of these cases."""
    n, order = setting.cases, np.arange(logs.shape[1]) % 2 == 1
    found: dict[int, Change] = {}
    looked = [int(i) for i in np.flatnonzero(again)]
    taken = {i: comparison.next_look(0, math.nan, n, own) for i in looked}
    spent = dict.fromkeys(looked, 0.0)
    while looked:
        alike: dict[tuple[int, float], list[int]] = {}
        after, limits, seen = {}, {}, {}
        for i in looked:
            sd = float(comparison.pair_sd(logs[i, : taken[i]], order[: taken[i]]))
            wider = by_scatter(own, {}, sd / math.sqrt(2))
            limits[str(i)] = wider
            after[i], share = comparison.look_after(taken[i], sd, n, spent[i], wider)
            spent[i] += share
            alike.setdefault((taken[i], share), []).append(i)
        for (end, share), of in alike.items():
            stats = comparison.array_statistics(logs[of, :end], order[:end], own, share)
            in_cycles = hodges_lehmann(cycles[of, :end], order[:end])
            for i, s, c in zip(of, stats, in_cycles, strict=True):
                seen[str(i)] = replace(s, cycles=float(c))
        open_ = []
        for _, of_gate in groupby(looked, lambda i: i // n):
            gate = {str(i): seen[str(i)] for i in of_gate}
            for key, answer in comparison.judge(gate, limits, beside=n - len(gate)).items():
                i = int(key)
                found[i] = answer.change
                if after[i] > taken[i] and not comparison.decided(answer, limits[key]):
                    open_.append(i)
        taken |= {i: after[i] for i in open_}
        looked = open_
    return found, sum(taken.values())


def _logs(draw: Draw) -> tuple[Floats, Floats]:
    """Log ratios of time and of cycles."""
    times = draw.candidate - draw.baseline
    return times, times + draw.candidate_clock - draw.baseline_clock


def clopper_pearson(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Exact interval of a rate."""
    found = binomtest(int(hits), int(trials)).proportion_ci(confidence, method="exact")
    return float(found.low), float(found.high)


def percent(hits: int, trials: int, places: int) -> str:
    """A rate with its interval: `2.00 [1.73, 2.29]`."""
    low, high = (f"{100 * x:.{places}f}" for x in clopper_pearson(hits, trials))
    return f"{100 * hits / trials:.{places}f} [{low}, {high}]"


# --- the table ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GateRate:
    """One figure of the table, with what it has to reach."""

    noise: str
    cases: int
    trials: int
    figure: str
    """The column: what was counted."""
    hits: int
    at_least: float | None = None
    at_most: float | None = None
    """Neither: stated, with nothing to reach."""

    @property
    def met(self) -> bool | None:
        """Whether the whole interval is on the good side; None without a target."""
        low, high = clopper_pearson(self.hits, self.trials)
        if self.at_least is not None:
            return low >= self.at_least
        return None if self.at_most is None else high <= self.at_most


def lines_of(tally: Tally, *, quiet_enough: bool) -> Iterator[GateRate]:
    """The figures of one setting. `quiet_enough`: a planted slowdown has to be found in it."""
    setting = tally.setting
    noise = setting.noise.name
    if setting.planted_noise is not None:
        noise += f", planted at {setting.planted_noise.name}"

    line = partial(GateRate, noise, setting.cases, tally.gates)
    if setting.planted is None:
        yield line("clean: NO-GO", tally.blocked, at_most=0.01)
        yield line("clean: GO", tally.passed)
        open_ = tally.gates - tally.passed - tally.blocked
        yield line("clean: INCONCLUSIVE", open_, at_most=0.25 if quiet_enough else None)
        yield line("confirmation, lower", tally.exact_low, at_most=0.01)
        yield line("confirmation, upper", tally.exact_high, at_most=0.01)
        yield line("screen, upper", tally.student_high, at_most=0.01)
        return
    wanted = {0.15: 0.99, 0.05: 0.95, 0.03: 0.90}[setting.planted] if quiet_enough else None
    most = 0.01 if setting.planted >= 0.05 else None
    yield line(f"+{units.percent(setting.planted)}: NO-GO", tally.found, at_least=wanted)
    yield line(f"+{units.percent(setting.planted)}: passes", tally.missed, at_most=most)


def settings(stored: RecordedNoise) -> Iterator[tuple[Setting, bool]]:
    """Every setting of the table, and whether planted slowdowns have to be found in it."""
    calm = stored.no_noisier_than(NOISY_CV)
    for cases in (12, 60):
        for noise in (QUIET, TYPICAL, NOISY, stored):
            yield Setting(noise=noise, cases=cases), True
            for planted in (0.05, 0.03):
                if noise is stored:
                    where = Setting(noise=noise, cases=cases, planted=planted, planted_noise=calm)
                    yield where, True
                anywhere = Setting(noise=noise, cases=cases, planted=planted)
                yield anywhere, noise in (QUIET, TYPICAL) or (noise is NOISY and planted > 0.03)
    for noise in (QUIET, TYPICAL, NOISY):
        yield Setting(noise=noise, cases=1, planted=0.15), True


def other_settings() -> Iterator[tuple[Setting, bool]]:
    """Noise of other kinds, in which every goal is to be met too."""
    for noise in (*OTHERS, TYPICAL):
        for cases in (12, 60):
            for planted in (None, 0.05):
                yield Setting(noise=noise, cases=cases, planted=planted), True
    for sd in (0.001, 0.0025, 0.01):
        lucky = BuildNoise(name=f"typical, builds {units.percent(sd)}", of=TYPICAL, sd=sd)
        for cases in (12, 60):
            for planted in (None, 0.05):
                yield Setting(noise=lucky, cases=cases, planted=planted), True


def clean_table(gates: int, seed: int) -> str:
    """What gates of one commit on both sides call slower and faster, of 12 cases at 0.8 %."""
    rows = [
        "| a case is called | NO-GO, % of gates | faster, cases | slower, cases | overlap |",
        "|:--|--:|--:|--:|--:|",
    ]
    for what, practical in (
        (f"from {units.percent(Thresholds().practical)} on, as in a gate", Thresholds().practical),
        ("however small the change", 0.0),
    ):
        setting = Setting(noise=TYPICAL, cases=12, practical=practical)
        seen = simulate(setting, gates=gates, rng=np.random.default_rng(seed))
        rows.append(
            f"| {what} | {percent(seen.blocked, gates, 2)} "
            f"| {seen.faster} | {seen.slower} | {seen.both} of {seen.either} |"
        )
    return "\n".join(rows)


DECISIONS = (
    "clean: NO-GO",
    "clean: GO",
    "+5 %: NO-GO",
    "+5 %: passes",
    "+3 %: NO-GO",
    "+3 %: passes",
    "+15 %: NO-GO",
)
OF_OTHERS = ("clean: NO-GO", "clean: INCONCLUSIVE", "+5 %: NO-GO", "+5 %: passes")
BOUNDS = ("confirmation, lower", "confirmation, upper", "screen, upper")


def markdown(lines: Sequence[GateRate], columns: Sequence[str]) -> str:
    """One of the tables of README.md here: a row for every noise and number of cases."""
    cells = {(x.noise, x.cases, x.figure): _cell(x) for x in lines if x.figure in columns}
    rows = dict.fromkeys((noise, cases) for noise, cases, _ in cells)
    table = [
        f"| noise | cases | {' | '.join(columns)} |",
        f"|:--|--:|{'--:|' * len(columns)}",
    ]
    for noise, cases in rows:
        found = " | ".join(cells.get((noise, cases, c), "") for c in columns)
        table.append(f"| {noise} | {cases} | {found} |")
    return "\n".join(table)


def _cell(line: GateRate) -> str:
    """Percent with its interval; a target that the interval does not show met says so."""
    text = percent(line.hits, line.trials, 2)
    return unshown(text, line.at_least, line.at_most) if line.met is False else text


def unshown(text: str, at_least: float | None = None, at_most: float | None = None) -> str:
    """A rate that is not shown to reach its target."""
    sign, end = ("≤", at_most) if at_least is None else ("≥", at_least)
    return f"**{text}, not shown: {sign} {units.percent(end or 0.0)}**"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Simulate the gate and state how often it errs.")
    parser.add_argument("--gates", type=int, default=10_000, help="simulated gates a setting")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("reports/runs"), help="recorded noise")
    parser.add_argument(
        "--until", default="~", metavar="RUN", help="the newest of these that counts"
    )
    parser.add_argument("--others", action="store_true", help="noise of other kinds than ours")
    parser.add_argument("--clean", action="store_true", help="only gates of one commit")
    options = parser.parse_args(arguments)
    if options.clean:
        sys.stdout.write(clean_table(options.gates, options.seed) + "\n")
        return
    ids = sorted(path.parent.name for path in options.runs.glob(f"*/{reader.RUN_FILE}"))
    ids = [run_id for run_id in ids if run_id <= options.until]
    loaded = (reader.load(options.runs, run_id) for run_id in ids)
    stored = None if options.others else recorded(loaded)
    began = time.monotonic()
    lines: list[GateRate] = []
    costs = []
    chosen = settings(stored) if stored else other_settings()
    for i, (setting, quiet_enough) in enumerate(chosen):
        rng = np.random.default_rng([options.seed, i])
        tally = simulate(setting, gates=options.gates, rng=rng)
        lines += lines_of(tally, quiet_enough=quiet_enough)
        if setting.planted is None or setting.cases == 1:
            per_case = tally.pairs / tally.gates / setting.cases
            name = next(lines_of(tally, quiet_enough=quiet_enough)).noise
            slower = f"{units.percent(setting.planted or 0)} slower"
            what = f"one case {slower}" if setting.planted else f"{setting.cases} cases"
            costs.append(f"{name}, {what}: {per_case:.1f}")
        sys.stderr.write(f"{i + 1}: {time.monotonic() - began:.0f} s\n")
    tables = (DECISIONS, BOUNDS) if stored else (OF_OTHERS,)
    missed = sum(x.met is False for x in lines if any(x.figure in table for table in tables))
    sys.stdout.write("\n\n".join(markdown(lines, table) for table in tables))
    cases = f"Recorded: {len(stored.residuals)} cases of {len(ids)} runs.\n" if stored else ""
    sys.stdout.write(
        f"\n\n{cases}"
        f"Pairs a case: {'; '.join(costs)}.\n"
        f"{options.gates} gates a setting, seed {options.seed}; "
        f"{missed} targets not shown to be met.\n"
    )


if __name__ == "__main__":
    main()
