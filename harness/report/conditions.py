"""Under what conditions a run was measured, and what its time and its steps cost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from harness import units
from harness.analysis.study import Study
from harness.machine import requirements
from harness.records import CaseSummary, CostPlan, Environment, Estimate, Grade, Outcome, Run
from harness.report.tables import NONE, Table, settings_text, unknown
from harness.report.text import quoted

WORK = ("accuracy", "profile", "counters", "warmup", "sampling", "repeat")
"""Phases in which a worker does what the suite asks for: compare, count, warm up, sample, and
compare again."""
_OPERATOR = ("version", "licence", "definition", "differs", "install")
"""What an operator of another project says of itself."""


def environment_line(e: Environment) -> str:
    """`NVIDIA H200 (GPU-9ba9c8ba), driver 580.1, CUDA 13.0; torch 2.11, flash-attn absent; ...`."""
    parts = [f"CPU only: {e.cpu} ({e.gpu_unavailable})"]
    if e.gpu:
        cards = ", ".join(card[:12] for card in e.gpu.uuid.split(", "))
        parts = [f"{e.gpu.name} ({cards}), driver {e.gpu.driver}"]
    named = [n for n in ("torch", "cuda", "triton", "flash-attn", "python") if n in e.versions]
    parts.append(", ".join(f"{n} {e.versions[n] or 'absent'}" for n in named))
    return "; ".join([*filter(None, parts), f"{e.cpu_count} cores"])


def environment(run: Run) -> Table:
    rows = (
        *environment_rows(run.environment),
        ("suite", f"{run.suite.path}, sha256 {run.suite.sha256[:12]}"),
        ("captured", units.utc(run.environment.captured_at)),
    )
    return Table(columns=("what", "value"), rows=rows)


def environment_rows(e: Environment) -> list[tuple[str, str]]:
    """What each part of a machine is, or why that is not known."""
    rows: list[tuple[str, str]] = []
    if e.gpu:
        g = e.gpu
        facts = [units.size(g.memory_bytes), f"compute capability {g.compute_capability}"]
        if g.power_limit_w is not None:
            of = "its default not recorded"
            if g.power_limit_share is not None:
                of = f"{units.percent(g.power_limit_share)} of its default"
            facts.append(f"power limit {units.number(g.power_limit_w)} W, {of}")
        if g.max_sm_clock_hz is not None:
            facts.append(f"SM clock up to {g.max_sm_clock_hz / 1e6:,.0f} MHz")
        rows += [
            ("GPU", f"{g.name} ({', '.join(facts)}), {g.uuid}"),
            ("driver", f"{g.driver}, CUDA {g.cuda_driver}"),
        ]
    else:
        rows.append(("GPU", unknown(e.gpu_unavailable)))
    rows += [
        ("host", e.hostname),
        ("CPU", f"{e.cpu}, {e.cpu_count} cores"),
        ("memory", units.size(e.memory_bytes)),
        ("system", e.os),
        *((name, version or "absent") for name, version in e.versions.items()),
        ("torch settings", settings_text(e.torch_settings) or unknown("no worker reported them")),
        ("variables", settings_text(e.variables) or "none set"),
    ]
    if e.interpreter:
        rows.append(("interpreter", e.interpreter))
    if e.git is None:
        rows.append(("git", unknown("not a git repository")))
    else:
        dirty = e.git.dirty_sha256
        state = f"with uncommitted changes (hash {dirty[:12]})" if dirty else "clean"
        rows.append(("git", f"{e.git.commit[:12]} on {e.git.branch}, {state}"))
    return rows


def doctor_bullets(environment: Environment) -> Iterable[str]:
    """What the doctor found before the run: the good in one line, all else in a line each."""
    found = environment.checks
    for c in (c for c in found if c.grade is not Grade.OK):
        yield f"**{c.grade}** {c.name}: {c.fact}. {c.remedy}".strip()
    if good := [f"{c.name} ({c.fact})" for c in found if c.grade is Grade.OK]:
        yield f"**ok** before the run: {', '.join(good)}."


def requirement_bullets(run: Run) -> Iterable[str]:
    """What the suite requires: all met, or what is not."""
    found = requirements.checks(run.suite, run.environment)
    for c in (c for c in found if c.grade is not Grade.OK):
        yield f"**Not met**: {c.name}: {c.fact}. {c.remedy}"
    if found and all(c.grade is Grade.OK for c in found):
        yield f"**Requirements**: all met ({', '.join(c.name for c in found)})."


def flag_sentences(run: Run) -> Iterable[str]:
    """Variables that are set, and options that carry axes: which the program was seen to read."""
    cases = {c.case_id: c for c in run.suite.cases}
    read, known, unclear, around, passed = (set[str]() for _ in range(5))
    for m in run.measurements:
        own = cases[m.case_id].env if m.case_id in cases else {}
        read |= {name for name, was_read in m.flags_read.items() if was_read}
        known |= own.keys() & m.flags_read.keys()
        if m.samples_s:
            unclear |= own.keys() - m.flags_read.keys()
            passed |= {name for name in m.flags_read if name.startswith("-")}
            around |= m.flags_read.keys() - own.keys()
    for what, names in (
        ("Set by cases and read by the program", known & read),
        ("Set or passed by cases and never read up to the counted steps", (known | passed) - read),
        ("Set by cases; not known whether the program read them", unclear),
        ("Set in the environment but read by no case", around - read - passed),
    ):
        if names:
            yield f"{what}: {quoted(sorted(names))}."


# --- time and money ----------------------------------------------------------------------


def time_use(run: Run) -> tuple[float, float, float] | None:
    """Seconds of a run (or of all its processes), of its work, and of what else a process does on
    average: it builds the workload, imports and compiles. None without a time or phases."""
    lives_s = sum(m.wall_s for m in run.measurements)
    phases = (p for m in run.measurements for p in m.phases if p.name in WORK)
    work_s = sum(p.end_s - p.start_s for p in phases)
    if min(lives_s, work_s) <= 0:
        return None
    return run.wall_s or lives_s, work_s, (lives_s - work_s) / len(run.measurements)


def time_use_sentence(run: Run) -> str:
    """How the wall time of a run was spent."""
    if (used := time_use(run)) is None:
        return "not available"
    wall_s, work_s, overhead_s = used
    work = units.percent(work_s / wall_s)
    return (
        f"{units.duration(wall_s)}: {work} work (accuracy, warm-up, sampling, counting, profile); "
        f"overhead {units.duration(overhead_s)} per process"
    )


def operators(of: Study) -> Table | None:
    """Of each provider that says how it is installed: what was measured, and its largest error."""
    rows: dict[tuple[str, ...], float] = {}
    for s in of.summaries:
        seen = {name: str(s.effective.get(name, NONE)) for name in _OPERATOR}
        if "install" in s.effective:
            error = s.metrics.get("error_of_bound")
            row = (of.run.suite.provider(s.case.workload, s.case.provider), *seen.values())
            rows[row] = max(rows.get(row, 0.0), error.value if error else 0.0)
    columns = ("operator", *_OPERATOR, ">largest error / bound")
    made = tuple((*row, units.number(error, 3) if error else NONE) for row, error in rows.items())
    return Table(columns=columns, rows=made) if made else None


def effective(summaries: Sequence[CaseSummary]) -> tuple[str, Table]:
    """The configuration observed in every ok case of a workload, and what differs by case."""
    observed = [s.effective for s in summaries if s.outcome is Outcome.OK]
    common = {
        k: v
        for k, v in (observed[0] if observed else {}).items()
        if all(k in o and o[k] == v for o in observed)
    }
    rows = []
    for s in summaries:
        own = settings_text({k: v for k, v in s.effective.items() if common.get(k) != v})
        if s.outcome is Outcome.OK:
            seen = own or "as above"
        else:
            seen = "; ".join(filter(None, (unknown(units.outcome_name(s.outcome)), own)))
        env = f"; environment: {settings_text(s.case.env)}" if s.case.env else ""
        rows.append((f"`{s.case.case_id}`", seen + env))
    return settings_text(common), Table(columns=("case", "observed"), rows=tuple(rows))


def price_sentence(run: Run) -> str:
    """`The verdict took 7.2 GPU minutes, $0.24.`: its processes; empty on a CPU."""
    if run.environment.gpu is None:
        return ""
    gpus = {c.case_id: c.program.needs_gpus("cuda") if c.program else 1 for c in run.suite.cases}
    hours = sum(m.wall_s * max(1, gpus.get(m.case_id, 1)) for m in run.measurements) / units.HOUR_S
    price = run.suite.cost.usd_per_gpu_hour if run.suite.cost else None
    money = f", ${hours * price:,.2f}" if price is not None else ""
    return f"The verdict took {units.number(60 * hours)} GPU minutes{money}."


def cost(of: Study) -> Table | None:
    """Time, and money if the suite names a price, for the steps of the suite's `cost`."""
    plan = of.run.suite.cost
    if plan is None:
        return None
    asked = [s for s in of.summaries if plan.match.accepts(s.case)]
    rows = tuple((of.names[s.case.case_id], _extrapolated(s, plan)) for s in asked)
    price = plan.usd_per_gpu_hour
    at = f", at ${price:,.2f} a GPU hour" if price is not None else ""
    sure = " [95 %]" if any("…" in took for _, took in rows) else ""
    return Table(columns=("case", f">{plan.steps:,} steps take{at}{sure}"), rows=rows)


def cost_sentence(of: Study) -> str:
    """` 50,000 steps: 8 min ($0.28) with NSA.`: the fastest case; of two processes only times."""
    plan = of.run.suite.cost
    asked = [s for s in of.summaries if plan and plan.match.accepts(s.case)]
    asked = [s for s in asked if "step_s" in s.metrics]
    if plan is None or not asked:
        return ""
    fastest = min(asked, key=lambda s: s.metrics["step_s"].value)
    size = f" of {fastest.tokens:,} tokens" if fastest.tokens else ""
    step, name = fastest.metrics["step_s"], of.names[fastest.case.case_id]
    plan = replace(plan, usd_per_gpu_hour=None) if step.both else plan
    return f" {plan.steps:,} steps{size}: {_took(step, plan)} with {name}."


def _extrapolated(s: CaseSummary, plan: CostPlan) -> str:
    """How long the steps of the plan take with a case."""
    e = s.metrics.get("step_s")
    if s.outcome is Outcome.OK and e is not None:
        ends = "" if e.both else f" (not bounded by {units.plural('process', e.n)})"
        if e.low is not None and e.high is not None and units.informs("step_s", e):
            ends = f" [{_time_and_money(e.low, plan)} … {_time_and_money(e.high, plan)}]"
        return f"{_took(e, plan)}{ends}"
    if s.outcome is Outcome.TIMEOUT and s.lower_bound_s is not None:
        return f"more than {_time_and_money(s.lower_bound_s, plan)}"
    return unknown("not repeatable" if "step_s" in s.apart else units.outcome_name(s.outcome))


def _took(step: Estimate, plan: CostPlan) -> str:
    """Of two processes each, else the mean."""
    each = (_time_and_money(x, plan) for x in step.both or [step.value])
    return " and ".join(dict.fromkeys(each))


def _time_and_money(step_s: float, plan: CostPlan) -> str:
    """`4.9 h ($9.80)`; shorter times in minutes."""
    hours = plan.steps * step_s / units.HOUR_S
    time = f"{units.number(hours)} h" if hours >= 1 else f"{units.number(60 * hours)} min"
    if plan.usd_per_gpu_hour is None:
        return time
    usd = hours * plan.usd_per_gpu_hour
    return f"{time} ({f'${usd:,.2f}' if usd < 10 else f'${units.number(usd, 3)}'})"
