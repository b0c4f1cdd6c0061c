"""Baselines and calibrations on disk."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import HarnessError, StoreError
from harness.gate import baselines, calibration, counters, files
from harness.gate.calibration import DAY_CV
from harness.records import Environment, Git, Measurement, Outcome, Pair, Run, Thresholds
from harness.runner.interleave import Task, pairs
from harness.tests import fake_runs
from reports.studies.noise import recorded as recorded_noise

SUITE = "suites/gate.yaml"
CASE = fake_runs.case({"seq_len": 512})
HERE = fake_runs.environment()
OTHER = fake_runs.environment(gpu=replace(fake_runs.H200, uuid="GPU-other"))
A_A = [Pair(baseline_s=0.1, candidate_s=0.1 * (1 + 0.002 * (-1) ** i)) for i in range(12)]


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


# --- calibrations ------------------------------------------------------------------------


def kept(folder: Path, pairs: Sequence[Pair] = A_A, **changes: Any) -> calibration.Stored:
    """A calibration of HERE, written as it is or changed."""
    stored = calibration.store(folder, HERE, SUITE, "a b", {CASE.case_id: pairs})
    changed = replace(stored, **changes)
    files.write(files.path_of(folder, files.device_id(HERE), SUITE, calibration.KIND), changed)
    return changed


def loaded(folder: Path, here: Environment = HERE, *, required: bool = True) -> Any:
    return calibration.load(folder, here, SUITE, max_age_days=30, required=required)


def test_the_calibration_of_this_gpu_sets_the_thresholds(tmp_path: Path) -> None:
    stored = kept(tmp_path)

    assert loaded(tmp_path) == stored
    assert (stored.device, stored.answer.noise) == (fake_runs.H200.uuid, "quiet")
    found = calibration.thresholds(stored, CASE.case_id, Thresholds(), {"tolerance": 0.04})
    assert found.tolerance == 0.04, "what the policy sets stays"
    assert found == replace(stored.answer.thresholds(CASE.case_id), tolerance=0.04)


def day(at: str, level_s: float) -> calibration.Day:
    assert HERE.git
    return calibration.Day(at=at, commit=HERE.git.commit, levels={CASE.case_id: level_s})


def test_variation_between_days_needs_several_days_of_one_commit(tmp_path: Path) -> None:
    apart = [day(f"2026-11-{n}T09:00", 0.1 * n) for n in (10, 11, 12)]
    again = [day(f"2026-11-10T{h}:00", 1.0) for h in (10, 11, 12)]
    stored = kept(tmp_path)
    assumed = DAY_CV[stored.answer.noise]

    def cv(days: Sequence[calibration.Day], **changes: Any) -> float:
        return replace(stored, days=tuple(days), **changes).day_cv

    assert cv(apart) == cv([*again, *apart[1:]]) == pytest.approx(0.0912, abs=1e-4)
    assert cv(again) == cv([*again, *apart[2:]]) == assumed, "an hour is no day"
    assert cv([replace(d, commit="other") for d in apart]) == assumed
    assert cv([replace(d, uncommitted=True) for d in apart]) == assumed
    assert cv(apart, uncommitted=True) == assumed
    assert cv([replace(d, commit="") for d in apart], commit="") == assumed


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"at": days_ago(31)}, "is 31 days old; the policy allows 30"),
        ({"device": "GPU-other"}, "is for NVIDIA H200 \\(GPU-other\\), but this is"),
    ],
)
def test_a_stale_or_foreign_calibration_is_refused_with_the_remedy(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    kept(tmp_path, **changes)

    with pytest.raises(HarnessError, match=said) as raised:
        loaded(tmp_path)
    assert f"harness calibrate {SUITE}" in str(raised.value)


def test_a_calibration_whose_aa_pairs_differ_is_refused(tmp_path: Path) -> None:
    kept(tmp_path, [replace(p, candidate_s=0.12) for p in A_A])

    with pytest.raises(HarnessError, match="too noisy"):
        loaded(tmp_path)


def test_a_required_calibration_must_exist(
    tmp_path: Path,
) -> None:
    kept(tmp_path)

    with pytest.raises(HarnessError, match=r"requires a calibration of .*GPU-other"):
        loaded(tmp_path, OTHER)
    assert loaded(tmp_path, OTHER, required=False) is None


# --- baselines ---------------------------------------------------------------------------


def recorded(measured: list[Measurement] | None = None, **changes: Any) -> Run:
    measured = fake_runs.timed(CASE, 0.1) if measured is None else measured
    run = fake_runs.run([CASE], lambda _: measured, env=HERE)
    suite = replace(run.suite, path=SUITE)
    return replace(run, suite=suite, started_at=days_ago(1), **changes)


def test_a_baseline_round_trips(tmp_path: Path) -> None:
    run = recorded()
    made = baselines.of_run(run)
    files.write(files.path_of(tmp_path, made.device, made.suite), made)

    found = baselines.load(tmp_path, fake_runs.H200.uuid, SUITE)

    assert found == made
    assert (made.commit, made.run_id, made.device) == (
        "406312f8" + "0" * 32,
        run.run_id,
        fake_runs.H200.uuid,
    )
    assert [p.samples_s for p in made.cases[CASE.case_id]] == [
        m.kept_s for m in run.of(CASE.case_id)
    ]
    assert baselines.unfit(found, SUITE, HERE, 30) == ""


def test_a_baseline_leaves_out_discarded_samples() -> None:
    measured = [replace(m, discarded={"throttled": (0, 1)}) for m in fake_runs.timed(CASE, 0.1)]
    made = baselines.of_run(recorded(measured))
    assert [len(p.samples_s) for p in made.cases[CASE.case_id]] == [18, 18, 18]

    spoilt = [replace(m, discarded={"throttled": tuple(range(19))}) for m in measured]
    with pytest.raises(StoreError, match="was not steady, or was disturbed, in process 0"):
        baselines.of_run(recorded(spoilt))


def test_two_processes_are_enough_for_a_baseline() -> None:
    made = baselines.of_run(recorded(fake_runs.timed(CASE, 0.1, processes=2)))

    assert len(made.processes(CASE.case_id)) == 2


def test_a_run_is_compared_with_its_baseline_case_by_case() -> None:
    made = baselines.of_run(recorded())
    gone = replace(made, cases={"gone": made.cases[CASE.case_id]})

    (both,) = baselines.compared(made, recorded(fake_runs.timed(CASE, 0.2)))
    missing, new = baselines.compared(gone, recorded())

    assert (both.baseline_s, both.run_s) == pytest.approx((0.1, 0.2), rel=0.05)
    assert (missing.case_id, missing.run_s) == ("gone", None)
    assert (new.case_id, new.baseline_s) == (CASE.case_id, None)


DIRTY = Git(commit="c" * 40, branch="main", dirty_sha256="d" * 64)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (recorded(fake_runs.ended(CASE, Outcome.INCORRECT)), "ended incorrect"),
        (recorded([]), "has 0 processes"),
        (recorded(fake_runs.timed(CASE, 0.1, processes=1)), "has 1 processes; 2 are needed"),
        (recorded(fake_runs.timed(CASE, 0.1, steady=False)), "was not steady"),
        (recorded(ended_at=""), "it is unfinished"),
        (recorded(environment=replace(HERE, git=None)), "not in a git repository"),
        (recorded(environment=replace(HERE, git=DIRTY)), "uncommitted changes"),
    ],
)
def test_an_unsuitable_run_is_refused_as_baseline(run: Run, said: str) -> None:
    with pytest.raises(StoreError, match=said) as raised:
        baselines.of_run(run)
    assert f"harness run {SUITE}" in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "here", "said"),
    [
        (None, HERE, "no baseline of suites/gate.yaml on NVIDIA H200"),
        ({}, OTHER, "the baseline was measured on another device"),
        ({"measured_at": days_ago(40)}, HERE, "is 40 days old; the policy allows 30"),
        (
            {},
            replace(HERE, versions={**HERE.versions, "torch": "2.12.0"}),
            "has another environment \\(.*torch.*2.12.0",
        ),
    ],
)
def test_a_missing_old_or_foreign_baseline_is_not_used(
    changes: dict[str, Any] | None, here: Environment, said: str
) -> None:
    stored = None if changes is None else replace(baselines.of_run(recorded()), **changes)

    why = baselines.unfit(stored, SUITE, here, 30)

    assert re.search(said, why), why
    assert "harness baseline set latest" in why


def test_no_name_leaves_the_folder() -> None:
    path = files.path_of(Path("ci/baselines"), "../../etc", "suites/../../passwd.yaml")

    assert path == Path("ci/baselines/______etc/________passwd.json")


def test_two_suites_share_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def name(suite: str) -> str:
        return files.path_of(tmp_path, "GPU-1", suite).name

    monkeypatch.chdir(tmp_path)

    assert name("suites/gate.yaml") == name(str(tmp_path / "suites/gate.yaml")) == "gate.json"
    assert (name("suites.yaml"), name("gate.yaml")) == ("__suites.json", "__gate.json")
    assert name("big/gate.yaml") == name(str(tmp_path / "big/gate.yaml")) == "big__gate.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured_at": "yesterday"}, "Invalid isoformat"),
        ({"samples_s": [0.1, float("nan")]}, "positive, finite times"),
        ({"samples_s": [0.1, -1.0]}, "positive, finite times"),
        ({"samples_s": []}, "positive, finite times"),
    ],
)
def test_a_damaged_baseline_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    made = baselines.of_run(recorded())
    path = files.path_of(tmp_path, made.device, made.suite)
    files.write(path, made)
    stored = json.loads(path.read_text())
    into = stored if "measured_at" in changes else stored["cases"][CASE.case_id][0]
    into.update(changes)
    path.write_text(json.dumps(stored))

    with pytest.raises(StoreError, match=f"is not a valid Baseline: .*{said}"):
        baselines.load(tmp_path, made.device, SUITE)


def test_a_time_without_an_offset_is_utc_and_a_future_one_is_refused(tmp_path: Path) -> None:
    then = replace(baselines.of_run(recorded()), measured_at=days_ago(2)[:19])
    to_come = replace(then, measured_at=days_ago(-9))
    kept(tmp_path, at=days_ago(-9))

    assert baselines.unfit(then, SUITE, HERE, 30) == ""
    assert "in the future" in baselines.unfit(to_come, SUITE, HERE, 30)
    with pytest.raises(HarnessError, match="in the future"):
        loaded(tmp_path)


def test_a_changed_case_has_no_baseline() -> None:
    made = baselines.of_run(recorded())
    longer = replace(CASE, axes={**CASE.axes, "seq_len": 1024})
    captured = replace(CASE, settings=replace(CASE.settings, graph=True))
    more = replace(CASE, settings=replace(CASE.settings, processes=9, timeout_s=1.0))

    assert "axis seq_len" in baselines.changed(made, longer)
    assert "measure.graph" in baselines.changed(made, captured)
    assert baselines.changed(replace(made, asked={}), CASE)
    assert baselines.changed(made, more) == baselines.changed(made, CASE) == ""


# --- pairs -------------------------------------------------------------------------------


def side(measured: list[Measurement]) -> Any:
    return SimpleNamespace(of=lambda _: measured)


@pytest.mark.parametrize(
    ("change", "left_out"),
    [
        ({}, 0),
        ({"steady": None}, 0),  # a program, of which nobody can tell
        ({"steady": False}, 1),
        ({"discarded": {"throttled": tuple(range(16))}}, 1),
        ({"outcome": Outcome.CRASH, "samples_s": ()}, 0),  # not a pair at all
    ],
)
def test_an_unsteady_or_failed_process_makes_no_pair(change: dict[str, Any], left_out: int) -> None:
    base = fake_runs.timed(CASE, 0.1)
    head = [replace(base[0], **change), *base[1:]]
    task = Task(suite=SUITE, case=CASE)

    found, disturbed = pairs(task, side(base), side(head), range(3))

    assert disturbed == left_out
    assert len(found) == 3 - (left_out or "outcome" in change)


def test_only_kept_samples_make_the_pair() -> None:
    """A throttled process is slow in half of its samples; the others are what counts."""
    base = fake_runs.timed(CASE, 0.1, processes=1)
    slow = tuple(s * 3 for s in base[0].samples_s[:12]) + base[0].samples_s[12:]
    head = [replace(base[0], samples_s=slow, discarded={"throttled": tuple(range(12))})]

    (pair,), _ = pairs(Task(suite=SUITE, case=CASE), side(base), side(head), range(1))

    assert pair.candidate_s == pytest.approx(pair.baseline_s, rel=0.02)
    noise = recorded_noise([recorded([*base, replace(head[0], process=1)])])
    assert max(map(abs, noise.residuals[0])) < 0.02


# --- what is listed ----------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "shown"), [("", False), ("9" * 64, True)])
def test_a_record_of_uncommitted_code_is_marked(tmp_path: Path, changes: str, shown: bool) -> None:
    git = HERE.git
    assert git is not None
    here = replace(HERE, git=replace(git, dirty_sha256=changes))
    counters.store(tmp_path, here, {SUITE: {CASE.case_id: {"host_syncs": 0}}})
    calibration.store(tmp_path, here, SUITE, "a b", {CASE.case_id: A_A})

    def show(*options: str) -> str:
        asked = ["baseline", "show", "--baselines", str(tmp_path), *options]
        return CliRunner().invoke(app, asked, env={"COLUMNS": "300"}).output

    assert [r["uncommitted"] for r in json.loads(show("--json"))] == [shown, shown]
    text = " ".join(show().split())
    assert text.count(f"{git.commit[:10]} with uncommitted changes") == 2 * shown
