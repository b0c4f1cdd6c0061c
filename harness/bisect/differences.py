"""A suite that finds which difference between two runs made a case slower.

It measures the case of the faster run, the same with one difference at a time, the case of the
slower run without one at a time, and as it was. Suspects of the suite judge each difference.
"""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from harness.analysis.summary import summarise
from harness.bisect.criteria import one_case
from harness.errors import HarnessError
from harness.machine import drift
from harness.records import CHOOSE_GPU, MeasureSettings, Run
from harness.suite.positions import dumped, read

SWEEP = ("name", "providers", "axes", "zip", "exclude", "env", "measure")
CHECKS = ("allow", "kernels", "operators")
LIMITS = ("processes", "most_processes", "timeout_s", "stall_s", "profile")
LEFT_OUT = {"workload": SWEEP + CHECKS, "setting": LIMITS}
"""Keys and settings that do not change the time of a step."""

Configuration = Mapping[tuple[str, str], Any]
"""(kind, name) of everything that may move the step time of a case -> its value."""


def suite_of(runs: Sequence[Run], pattern: str, path: str) -> str:
    """The text of the suite for two stored runs, to be written to `path`; a HarnessError if a run
    has no step time of the case, or if nothing that differs can be varied."""
    timed = sorted((_step_s(run, pattern), i) for i, run in enumerate(runs))
    (expected_s, _), (seen_s, _) = timed
    first, second = (runs[i] for _, i in timed)
    case = one_case(second.suite, pattern, second.run_id)
    one, other = (_configuration(run, pattern, runs) for run in (first, second))
    varied = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    listed = drift.differences(first.environment, second.environment)
    fixed = [d for d in listed if ("variable", d.name) not in varied]
    if not varied:
        raise HarnessError(
            f"{first.run_id} and {second.run_id} do not differ in anything that a case can set",
            "\n  ".join(["They differ in:", *map(str, fixed)]) if fixed else "",
        )
    sides = {"first": one, "second": other}
    for key in varied if len(varied) > 1 else ():
        sides[f"with-{_name(key)}"] = _taken(one, other, key)
        sides[f"without-{_name(key)}"] = _taken(other, one, key)
    gap = {"metric": "step_s", "expected": expected_s, "seen": seen_s}
    source, untested = f"{first.run_id} and {second.run_id}", [d.name for d in fixed]
    question = f"What makes {case.case_id} slower in {second.run_id} than in {first.run_id}?"
    return dumped(
        "\n# ".join([question, _how(first, second, path), *(f"Not varied: {d}" for d in fixed)]),
        schema=1,
        title=f"Differences of {source}",
        subject="Differences",
        question=question,
        device=second.suite.device,
        measure={"processes": 5},
        workloads=[_workload(name, found) for name, found in sides.items()],
        suspects={
            "gap": {**gap, "source": source},
            "tested": [*_suspects(varied, one, other)],
            **({"not_tested": untested} if untested else {}),
        },
    )


def _step_s(run: Run, pattern: str) -> float:
    case = one_case(run.suite, pattern, run.run_id)
    (found,) = (s for s in summarise(run) if s.case.case_id == case.case_id)
    if "step_s" not in found.metrics:
        ended = found.outcome or "not measured"
        raise HarnessError(f"{run.run_id} has no step time of {case.case_id}: {ended}")
    return found.metrics["step_s"].value


def _configuration(run: Run, pattern: str, runs: Sequence[Run]) -> Configuration:
    """What the case of a run is, as its suite states it and as its environment was."""
    case = one_case(run.suite, pattern, run.run_id)
    written = read(run.suite.text, run.suite.path).data["workloads"]
    around = [r.environment.variables for r in runs]
    seen = run.environment.variables.items()
    of_run = {n: v for n, v in seen if around[0].get(n) != around[1].get(n) and n not in CHOOSE_GPU}
    parts = {
        "workload": next(w for w in written if w["name"] == case.workload),
        "provider": {"": case.provider},
        "axis": case.axes,
        "variable": {n: v for n, v in {**of_run, **case.env}.items() if n not in case.axes},
        "setting": dict(asdict(case.settings).items() - asdict(MeasureSettings()).items()),
    }
    return {
        (kind, name): value
        for kind, part in parts.items()
        for name, value in part.items()
        if name not in LEFT_OUT.get(kind, ())
    }


def _taken(into: Configuration, source: Configuration, key: tuple[str, str]) -> Configuration:
    """A configuration with one value, or its absence, of another."""
    rest = {k: v for k, v in into.items() if k != key}
    return {**rest, key: source[key]} if key in source else rest


def _name(key: tuple[str, str]) -> str:
    return "-".join(filter(None, key))


def _workload(name: str, found: Configuration) -> dict[str, Any]:
    kinds = ("workload", "axis", "variable", "setting")
    form, *rest = ({n: v for (k, n), v in found.items() if k == kind} for kind in kinds)
    own = zip(("axes", "env", "measure"), rest, strict=True)
    given = {key: value for key, value in own if value}
    return {"name": name, **form, "providers": [found["provider", ""]], **given}


def _suspects(
    varied: Sequence[tuple[str, str]], one: Configuration, other: Configuration
) -> Iterator[dict[str, Any]]:
    """Each difference alone, each beside all others, and all together."""

    def side(workload: str, found: Configuration, keys: Sequence[tuple[str, str]]) -> Any:
        # The cases of a pair are equal in every axis that neither side names.
        named = [k for k in keys if k[0] in ("axis", "provider") and k in found]
        return {"workload": workload, **{k[1] or k[0]: found[k] for k in named}}

    pairs = [("all differences together", "first", "second", varied)]
    for key in varied if len(varied) > 1 else ():
        name, what = " ".join(filter(None, key)), _name(key)
        pairs.append((f"{name} alone", "first", f"with-{what}", [key]))
        pairs.append((f"{name} beside all others", f"without-{what}", "second", [key]))
    for name, without, with_, keys in pairs:
        yield {"name": name, "without": side(without, one, keys), "with": side(with_, other, keys)}


def _how(first: Run, second: Run, path: str) -> str:
    """How the suite is run, with the variables of both runs in place of those of this shell."""
    one, other = (run.environment for run in (first, second))
    alike = dict(one.variables.items() & other.variables.items())
    own = [n for n in os.environ if n.startswith(one.prefixes) and n not in {*alike, *CHOOSE_GPU}]
    words = [f"-u {n}" for n in own]
    words += [f"{n}={shlex.quote(v)}" for n, v in sorted(alike.items()) if n not in CHOOSE_GPU]
    at = f"at {one.git.commit[:10]}" if one.git else "with the code of both"
    return f"Run {at}: {' '.join(['env', *words, '']) if words else ''}harness run {path}"
