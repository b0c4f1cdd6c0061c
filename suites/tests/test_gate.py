"""The suite of this project's merge gate and its limits, against the stored runs they come from."""

import re
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from harness.records import Case, Measurement, Rule, Run, gpu_matches
from harness.store import reader
from harness.suite import load as suites

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "reports/runs"
if not RUNS.is_dir():
    pytest.skip("not a checkout: the stored runs are not installed", allow_module_level=True)

SUITE = suites.load(str(ROOT / "suites/gate.yaml"))
LIMITS = [rule for rule in SUITE.rules if rule.gpu != "*"]
SOURCES = sorted({rule.name.partition(" (")[2].partition(":")[0] for rule in LIMITS})
BUDGET_S = 360
QUIET_PAIRS = 6.2
"""Of a clean case (reports/studies/README.md)."""


@cache
def stored(run_id: str) -> Run:
    return reader.load(RUNS, run_id)


def measured(run_id: str, case: Case) -> Sequence[Measurement]:
    """The processes of a stored run that did the work of a case."""
    run = stored(run_id)
    work = (case.factory, case.provider, case.axes)
    alike = {c.case_id for c in run.suite.cases if (c.factory, c.provider, c.axes) == work}
    return [m for m in run.measurements if m.case_id in alike]


def process_s(case: Case) -> float:
    """Median life of a process; one in six compiles."""
    return statistics.median(m.wall_s for run in SOURCES for m in measured(run, case))


def test_a_clean_change_takes_six_minutes_at_most() -> None:
    total_s = sum(process_s(case) for case in SUITE.cases)
    clean_s = 2 * QUIET_PAIRS * total_s
    head = SUITE.text.partition("schema:")[0].replace("\n#", "")

    assert clean_s <= BUDGET_S
    assert f"about {clean_s / 60:.1f} minutes of an H200" in head
    assert f"{total_s:.1f} s together" in head


def test_every_case_is_of_bf16_and_names_its_kernels() -> None:
    assert all(case.kernels.must for case in SUITE.cases)
    assert {case.axes.get("dtype", case.axes.get("precision")) for case in SUITE.cases} == {"bf16"}


@pytest.mark.parametrize("rule", LIMITS, ids=lambda rule: rule.name.partition(" (")[0])
def test_a_limit_follows_from_the_stored_run_that_it_names(rule: Rule) -> None:
    stated = re.search(
        r"\((\S+): slowest of (\d+) processes ([\d.,]+) (us|ms|tokens/s), 10 % margin", rule.name
    )
    assert stated, rule.name
    run_id, count, number, unit = stated.groups()
    (case,) = [c for c in SUITE.cases if rule.match.accepts(c)]
    found = measured(run_id, case)
    slowest_s = max(statistics.median(m.kept_s) for m in found)

    assert gpu_matches(rule.gpu, stored(run_id).environment.device_name)
    assert len(found) == int(count)
    times = rule.metric == "step_s"
    value = slowest_s if times else (found[0].tokens or 0) / slowest_s
    scale = {"us": 1e-6, "ms": 1e-3, "tokens/s": 1.0}[unit]
    assert float(number.replace(",", "")) * scale == pytest.approx(value, rel=2e-3)
    assert rule.go == pytest.approx(value * 1.1 if times else value / 1.1, rel=5e-3)
