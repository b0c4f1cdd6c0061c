"""How far to trust the numbers of a run, and how its training runs went over their steps."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness import units
from harness.analysis.over_steps import LEAKS_BYTES, course
from harness.analysis.recorded import largest_error
from harness.analysis.scaling import by_workload
from harness.analysis.study import Study
from harness.machine import requirements
from harness.records import Grade, Measurement, Outcome, Peaks, Run, Weight, gpu_matches
from harness.report.tables import NONE, Table
from harness.report.text import listed

MAX_STEPS = 3
"""Slow steps that a row names."""
LOOSE = 1.3
"""Slowest process of a case over its fastest from which its number is not repeatable."""
_RESULTS = {True: "ok", False: "FAILED", None: "unknown"}


def over_steps(run: Run, names: Mapping[str, str]) -> Table | None:
    """One row a training run, or several that went alike; None without one."""
    found = [(c, went) for c in run.suite.cases if (went := course(run.of(c.case_id)))]
    if not found:
        return None
    rows: dict[tuple[str, ...], list[str]] = {}
    for case, went in found:
        tokens = [units.plain("tokens_per_s", v, 3) for v in went.speed or ()]
        growth = NONE
        if went.growth:
            flat = abs(went.growth.value) * went.steps < LEAKS_BYTES
            growth = "flat" if flat else f"{units.size(went.growth.value)} a step"
        slow = [*went.slow.items()][:MAX_STEPS]
        loss = went.last.get("loss")
        cells = (
            f"{went.steps:,}",
            NONE if loss is None else f"{went.first['loss']:.3f} → {loss:.3f}",
            f"{' → '.join(tokens)} ({went.trend})" if tokens else NONE,
            f"leak: {growth}" if went.leaked else growth,
            ", ".join(f"{n} ({units.factor(x)})" for n, x in slow) or NONE,
            ", ".join(f"{what} at {n}" for what, n in went.not_finite.items()) or NONE,
        )
        rows.setdefault(cells, []).append(names[case.case_id])
    heads = ("case", ">steps", ">loss", ">tokens/s", ">memory", ">slow steps", "first NaN or Inf")
    shown = [(listed(of, 1), *cells) for cells, of in rows.items()]
    return Table(columns=heads, rows=tuple(shown))


def self_test_sentence(run: Run) -> str:
    """How the self-test ended, and which peaks it measured."""
    found = run.self_test
    if found is None:
        return "Not recorded: the run predates the self-test, or is unfinished."
    if found.skipped:
        return f"Skipped ({found.skipped}), so no roofline bound is known."
    ended = "Failed, so nothing was measured" if found.refuted else "Passed"
    text = f"{ended}: {units.utc(found.at)}, {found.device}, {units.duration(found.wall_s)}."
    if peaks := _peaks(found.peaks):
        text += f" Measured peaks, on which roofline bounds rest: {peaks}."
    return text


def self_test_checks(run: Run) -> Table | None:
    """Each check with its result; None without a self-test."""
    if run.self_test is None or not run.self_test.checks:
        return None
    rows = [(c.name.replace("_", " "), _RESULTS[c.holds], c.fact) for c in run.self_test.checks]
    return Table(columns=("check", "result", "measured"), rows=tuple(rows))


def _peaks(peaks: Peaks) -> str:
    rates = [(f / 1e9, f"GFLOP/s {precision}") for precision, f in peaks.flops_per_s.items()]
    rates += [(peaks.bytes_per_s / 1e9, "GB/s")] if peaks.bytes_per_s is not None else []
    times = ((peaks.launch_s, "a launch"), (peaks.sync_s, "a host sync"))
    parts = [f"{units.number(rate)} {unit}" for rate, unit in rates]
    parts += [f"{units.duration(s)} {what}" for s, what in times if s is not None]
    return ", ".join(parts)


# --- one line for the first screen, and what was compared ---


def trust(of: Study) -> Iterator[str]:
    """One line: processes, correctness, and what disturbed the numbers."""
    run, summaries = of.run, of.summaries
    ok = [s for s in summaries if s.outcome is Outcome.OK]
    counts = sorted({e.n for s in ok if (e := s.metrics.get("step_s"))})
    if counts:
        most = units.plural("process", counts[-1])
        yield f"{most if len(counts) == 1 else f'{counts[0]} to {most}'} per case"
    ends = [(s.outcome, s.outcome in s.case.allow) for s in summaries if s.outcome != Outcome.OK]
    ended = Counter("allowed" if allowed else units.outcome_name(o) for o, allowed in ends)
    ran = f"{len(ok)} of {units.plural('case', len(summaries))} ran"
    ran += f" ({', '.join(f'{how}: {n}' for how, n in ended.items())})" if ended else ""
    cards = len({t.device for t in run.self_tests})
    yield f"{ran}, over {cards} cards" if cards > 1 else ran
    required = requirements.checks(run.suite, run.environment)
    if lacking := [c.name for c in required if c.grade is not Grade.OK]:
        yield f"not as the suite requires: {listed(lacking, 2)}"
    rules = [r.stated for r in of.verdict.rules if r.stated and r.applies]
    here = [e for e in run.suite.expectations if gpu_matches(e.gpu, run.environment.device_name)]
    rules += [e for e in here if e.asks or e.counts is not Weight.NOTE]
    judged = {c.case_id for rule in rules for c in rule.needs(run.suite.cases)}
    judged &= {s.case.case_id for s in ok}
    done = [m for m in run.measurements if m.accuracy is not None and m.accuracy.tensors]
    checked = {m.case_id for m in done}
    programs = {c.case_id for c in run.suite.cases if c.program}
    if all(c.program for c in run.suite.cases):
        yield "a program has no reference: outputs are not checked"
    elif run.measurements:
        there = sum(m.outcome is Outcome.OK or m in done for m in run.measurements)
        right = ", all correct" if done else ""  # a wrong one is a failure
        yield f"{len(done):,} of {units.plural('output', there)} checked{right}"
    gpu = run.environment.gpu
    limited = {s.case.case_id for s in ok} & {i for i, b in of.bottlenecks.items() if b.clock}
    apart = {s.case.case_id for s in summaries if "step_s" in s.apart}
    loose = {s.case.case_id for s in ok if s.spread > LOOSE} - apart
    few = {s.case.case_id: s.case.settings.min_samples for s in ok}
    moved = [m for m in run.measurements if m.steady is False and m.case_id in few]
    unsteady = {m.case_id for m in moved if m.is_evidence(few[m.case_id])}
    disturbed = {
        "without reference": judged & programs if done else set(),
        "without a checked output": judged - checked - programs if done else set(),
        "not repeatable, so without a speed": apart,
        f"with processes ≥ {LOOSE:g}x apart": loose,
        "without steady state": unsteady,
        "clock limited": limited,
    }
    touched = {what: len(ids & judged if judged else ids) for what, ids in disturbed.items()}
    if seen := [f"{n} {what}" for what, n in touched.items() if n]:
        answers = " behind the answers" if judged else ""
        cases = units.plural("case", len(judged or summaries)) + answers
        yield f"of {cases}: {', '.join(seen)}"
    if gpu and (gpu.power_limit_share or 1) != 1:
        yield f"power limit {units.percent(gpu.power_limit_share or 1)} of its default"


def correctness(of: Study) -> Table | None:
    """By workload: how many processes were compared, how closely, and why not all."""
    if all(s.case.program for s in of.summaries):
        return None
    rows = []
    for workload, members in by_workload(of.summaries).items():
        measured = [m for s in members for m in of.run.of(s.case.case_id)]
        if measured and all(m.outcome is Outcome.UNSUPPORTED for m in measured):
            continue
        done = [m for m in measured if m.accuracy and m.accuracy.tensors]
        share, tensor = max(map(largest_error, done), default=(0.0, ""))
        why = Counter(
            (m.accuracy.skipped or "not asked")
            if m.accuracy
            else f"no answer ({units.outcome_name(m.outcome)})"
            for m in measured
            if m not in done
        )
        length = sorted({int(n) for m in done if (n := m.effective.get("checked_tokens"))})
        on = f", {' or '.join(f'{n:,}' for n in length)} tokens" if length else ""
        rows.append(
            (
                workload,
                f"{len(done)} of {len(measured)}{on}{_sampled(done)}",
                f"{units.number(share)} ({tensor or 'the output'})" if done else NONE,
                "; ".join(f"{reason}: {n}" for reason, n in why.items()) or NONE,
            )
        )
    columns = ("workload", ">processes compared", ">largest error / bound", "not compared")
    return Table(columns=columns, rows=tuple(rows)) if rows else None


def _sampled(compared: Sequence[Measurement]) -> str:
    """`; 6 by 90 of 8,192 to 92 of 65,536 rows`, if not all compared every row."""
    rows = [m.accuracy.sampled for m in compared if m.accuracy and m.accuracy.sampled]
    said = [f"{few:,} of {every:,}" for few, every in sorted(rows, key=lambda r: r[1])]
    ends = " to ".join(dict.fromkeys((said[0], said[-1]))) if said else ""
    return f"; {len(said)} by {ends} rows" if said else ""
