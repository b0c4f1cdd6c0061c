"""Baselines and counters on disk."""

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.main import app
from harness.errors import StoreError
from harness.gate import baselines, decide, files, session
from harness.gate.compare import PLAIN
from harness.gate.plan import Request
from harness.gate.records import Mode
from harness.records import (
    Accuracy,
    Decision,
    Environment,
    Git,
    Measurement,
    Outcome,
    Run,
    TensorError,
    Thresholds,
)
from harness.runner.interleave import Task, pairs
from harness.tests import fake_runs, indexed
from harness.tests.gate_repositories import git
from reports.studies.noise import recorded as recorded_noise

SUITE = "suites/gate.yaml"
CASE = fake_runs.case({"seq_len": 512})
HERE = fake_runs.environment()
AN_A100 = fake_runs.environment(gpu=replace(fake_runs.H200, name="NVIDIA A100", uuid="GPU-a"))
OTHER = fake_runs.environment(gpu=replace(fake_runs.H200, uuid="GPU-other"))


def days_ago(days: float) -> str:
    return (datetime.now(UTC) - timedelta(days=days)).isoformat(timespec="seconds")


def against_stored(folder: Path, here: Environment, **more: Any) -> session._Answers:
    """Of a gate on this card, with the baselines of a folder and these fields of its plan."""
    task = Task(suite=SUITE, case=CASE)
    plan: Any = SimpleNamespace(here=here, tasks=[task], policy=PLAIN, say=print, **more)
    request = Request(mode=Mode.BASELINE, baselines=folder, store=folder / "runs")
    return session._against_stored(request, plan)


@pytest.mark.parametrize(
    ("ratio", "card", "decision"),
    [
        (1.07, HERE, Decision.NO_GO),
        (1.07, OTHER, Decision.INCONCLUSIVE),
        (1.20, OTHER, Decision.NO_GO),
    ],
)
def test_a_baseline_of_one_card_is_used_on_another_with_a_wider_interval(
    ratio: float, card: Environment, decision: Decision, tmp_path: Path
) -> None:
    def timed(step_s: float) -> list[Measurement]:
        return fake_runs.timed(CASE, step_s, processes=6, cv=0.001)

    made = baselines.of_run(recorded(timed(0.1)))
    files.write(files.path_of(tmp_path, "NVIDIA H200", SUITE), made)
    side = SimpleNamespace(of=lambda _: timed(0.1 * ratio), broken=lambda _: False)

    answers = against_stored(tmp_path, card, sides=[side], thresholds=Thresholds)

    found = answers.comparisons[SUITE, CASE.case_id]
    assert decide._OF_CHANGE[found.change] is decision, found
    notes = " ".join(f.reason for f in answers.findings)
    if card is HERE:
        assert (found.card, "vary" in notes) == (None, False)
    else:
        assert found.card == pytest.approx(0.0756, abs=1e-4), "2.58 x 1.41 x 2 %, as a ratio"
        assert "of its interval the other card is ±7.56 %" in found.reason
        assert (
            "of card GPU-5d1e0f4c, not GPU-other; cards of one model are assumed to vary by 2 %"
            in notes
        )


# --- baselines ---------------------------------------------------------------------------


def recorded(measured: list[Measurement] | None = None, **changes: Any) -> Run:
    measured = fake_runs.timed(CASE, 0.1) if measured is None else measured
    run = fake_runs.run([CASE], lambda _: measured, env=HERE)
    suite = replace(run.suite, path=SUITE)
    return replace(run, suite=suite, started_at=days_ago(1), **changes)


def test_a_baseline_round_trips(tmp_path: Path) -> None:
    run = recorded()
    made = baselines.of_run(run)
    files.write(files.path_of(tmp_path, made.environment.device_name, made.suite), made)

    found = baselines.load(tmp_path, HERE, SUITE)

    assert found == made
    assert (made.run_id, made.device) == (run.run_id, fake_runs.H200.uuid)
    assert [(p.samples_s, p.wall_s) for p in made.cases[CASE.case_id]] == [
        (m.kept_s, m.wall_s) for m in run.of(CASE.case_id)
    ]
    assert baselines.unfit(found, SUITE, HERE, 30) == ""
    path = files.path_of(tmp_path, made.environment.device_name, made.suite)
    later = {"author", "correct"}
    path.write_text(
        json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k not in later})
    )
    assert baselines.load(tmp_path, HERE, SUITE) == replace(made, author="", correct=None)
    utc = replace(made, measured_at=days_ago(2)[:19])
    assert baselines.unfit(utc, SUITE, HERE, 30) == "", "a time without an offset is UTC"


def test_a_baseline_leaves_out_discarded_samples() -> None:
    measured = [replace(m, discarded={"throttled": (0, 1)}) for m in fake_runs.timed(CASE, 0.1)]
    made = baselines.of_run(recorded(measured))
    assert [len(p.samples_s) for p in made.cases[CASE.case_id]] == [18, 18, 18]


def test_a_case_is_left_out_only_if_the_suite_allows_all_its_outcomes() -> None:
    allowed = replace(CASE, allow={Outcome.UNSUPPORTED: "the package is not installed here"})
    declined = fake_runs.ended(allowed, Outcome.UNSUPPORTED)
    crashed = [declined[0], *fake_runs.ended(allowed, Outcome.CRASH)]

    made = baselines.of_run(fake_runs.run([allowed], lambda _: declined))

    assert (made.left_out, made.cases) == ({CASE.case_id: "unsupported"}, {})
    with pytest.raises(StoreError, match="ended crash"):
        baselines.of_run(fake_runs.run([allowed], lambda _: crashed))


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
        ({"measured_at": days_ago(-9)}, HERE, "is dated .*, in the future"),
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


CHECKED = [
    replace(m, accuracy=Accuracy(tensors=(TensorError(name="o", error=0.0, bound=1.0),)))
    for m in fake_runs.timed(CASE, 0.1)
]


def doubted(
    folder: Path, later: Sequence[float] = (), card: Environment = HERE, **changes: Any
) -> list[str]:
    """What `harness doctor` says of a baseline with these changes, after runs with these times."""
    made = replace(baselines.of_run(recorded(CHECKED)), **changes)
    files.write(files.path_of(folder / "baselines", made.environment.device_name, made.suite), made)
    for step_s in later:
        run = recorded(fake_runs.timed(CASE, step_s), environment=card)
        indexed.store(folder / "runs", replace(run, suite=replace(run.suite, name="gate")))
    options = ("--baselines", str(folder / "baselines"), "--store", str(folder / "runs"))
    answer = CliRunner().invoke(app, ["doctor", "--json", *options])
    found = [c for c in json.loads(answer.stdout)["checks"] if c["name"] == "baseline"]
    assert all("harness baseline set" in c["remedy"] for c in found)
    return [c["fact"] for c in found]


def test_a_baseline_in_doubt_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = nullcontext(SimpleNamespace(describe=dict))
    monkeypatch.setattr("harness.cli.doctor.Launcher", lambda **_: started)
    monkeypatch.setattr("harness.machine.environment.capture", lambda *_, **__: HERE)
    monkeypatch.setattr("harness.machine.doctor.examined", lambda here, **_: here)
    other = replace(HERE, gpu=replace(fake_runs.H200, driver="560.1"))

    def of(*later: float, **changes: Any) -> list[str]:
        return doubted(tmp_path / str(len(list(tmp_path.iterdir()))), later, **changes)

    assert of() == of(0.12, 0.12) == of(0.12, 0.12, 0.104) == []
    assert of(0.12, 0.12, 0.108, card=OTHER) == [], "the card may be slower"
    assert "no later run met" in of(0.12, 0.12, 0.12, card=OTHER)[0]
    files.path_of(tmp_path / "0" / "baselines", HERE.device_name, "a.yaml").write_text("{}")
    (damaged, driver) = doubted(tmp_path / "0", environment=other)
    assert "__a.json is not a valid Baseline" in damaged
    (old,) = of(correct=None)
    (unchecked,) = of(correct={CASE.case_id: 0})
    (unmet,) = of(0.12, 0.13, 0.12)

    assert "driver 560.1" in driver
    assert old != unchecked
    assert "1 of 1 cases" in old
    assert "no later run met" in unmet
    assert f"since {days_ago(1)[:10]}" in unmet, "the day it was measured"
    none = [replace(m, accuracy=Accuracy(skipped="no reference")) for m in CHECKED]
    assert of(correct=baselines.of_run(recorded(none)).correct) == []
    for changes in (
        {"card": replace(HERE, git=DIRTY)},
        {"card": replace(HERE, gpu=replace(fake_runs.H200, power_limit_w=500.0))},
        {"asked": {CASE.case_id: replace(CASE, provider="another")}},
    ):
        assert of(0.12, 0.13, 0.12, **changes) == [], "of another kind"


def test_a_baseline_of_another_driver_is_named_once(tmp_path: Path) -> None:
    other = replace(HERE, gpu=replace(fake_runs.H200, driver="560.1"))
    made = baselines.of_run(recorded(CHECKED, environment=other))
    files.write(files.path_of(tmp_path, made.environment.device_name, SUITE), made)

    answers = against_stored(tmp_path, HERE)

    assert "560.1" in answers.remarks[SUITE, CASE.case_id]
    assert answers.findings == ()


def test_the_author_of_a_baseline_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "config", "user.name", "Ada")
    indexed.store(tmp_path / "runs", recorded(CHECKED))

    made = CliRunner().invoke(app, ["baseline", "set", "latest", "--store", "runs"])
    shown = CliRunner().invoke(app, ["baseline", "show", "--json"])

    assert made.exit_code == 0, made.output
    assert [record["author"] for record in json.loads(shown.stdout)] == ["Ada"]


def test_each_suite_has_a_file_inside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def name(suite: str, device: str = "GPU-1") -> str:
        return files.path_of(tmp_path, device, suite).relative_to(tmp_path).as_posix()

    monkeypatch.chdir(tmp_path)

    assert name("suites/gate.yaml") == name(str(tmp_path / "suites/gate.yaml")) == "GPU-1/gate.json"
    assert (name("suites.yaml"), name("gate.yaml")) == ("GPU-1/__suites.json", "GPU-1/__gate.json")
    assert name("big/gate.yaml") == name(str(tmp_path / "big/gate.yaml")) == "GPU-1/big__gate.json"
    outside = name("suites/../../passwd.yaml", "../../etc")
    assert outside == "______etc/________passwd.json"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"measured_at": "yesterday"}, "Invalid isoformat"),
        ({"cases": {"a": [{"samples_s": [0.1, float("nan")]}]}}, "positive, finite times"),
        ({"cases": {"a": [{"samples_s": []}]}}, "positive, finite times"),
    ],
)
def test_a_damaged_baseline_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    made = baselines.of_run(recorded())
    path = files.path_of(tmp_path, made.environment.device_name, made.suite)
    files.write(path, made)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(StoreError, match=f"is not a valid Baseline: .*{said}"):
        baselines.load(tmp_path, HERE, SUITE)


def test_a_baseline_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    made = baselines.of_run(recorded())
    files.path_of(tmp_path, made.environment.device_name, made.suite).mkdir(parents=True)

    with pytest.raises(StoreError, match=r"cannot read .*: Is a directory"):
        baselines.load(tmp_path, HERE, SUITE)


def test_a_changed_case_has_no_baseline() -> None:
    made = baselines.of_run(recorded())
    longer = replace(CASE, axes={**CASE.axes, "seq_len": 1024})
    captured = replace(CASE, settings=replace(CASE.settings, graph=True))
    more = replace(CASE, settings=replace(CASE.settings, processes=9, timeout_s=1.0))

    assert "axis seq_len is 512 in the baseline, 1024" in baselines.changed(made, longer)
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
