"""The nightly workflows: what `ci/nightly.sh` measures, and when its jobs run."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from ci.tests.test_files import GITLAB, NIGHTLY, ROOT, jobs, load, triggers
from harness.tests.gate_repositories import commit, git

ENV = load(ROOT / NIGHTLY)["env"]
WEEK, *SUITES = " ".join(re.findall(r"'([a-z].*?)'", ENV["SUITES"])).split()
SUBJECT = re.findall(r"'([A-Z].*?)'", ENV["SUBJECT"])[-1]
REPORT = {"reports/2026-11-23 Gate.md": "GO"}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with the script."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    script = (ROOT / "ci/nightly.sh").read_text()
    commit(folder, {"nsa/ops.py": "", "ci/nightly.sh": script})
    return folder


def nightly(clone: Path, *words: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "ci/nightly.sh", *words],
        cwd=clone,
        env={"PATH": f"{clone.parent}:/usr/bin:/bin", "HOME": os.devnull, **env},
        capture_output=True,
        text=True,
    )


def test_only_code_without_nightly_reports_is_new(clone: Path) -> None:
    def code() -> str:
        return nightly(clone, "code", SUBJECT).stdout.strip()

    first = git(clone, "rev-parse", "HEAD")
    assert code() == first
    commit(clone, {"README.md": "A page.", **REPORT})
    assert code() == first, "a page or a report is no code"
    git(clone, "checkout", "--quiet", "-b", "nightly/1")
    git(clone, "commit", "--quiet", "--allow-empty", "--message", f"{SUBJECT} {first}")
    git(clone, "checkout", "--quiet", "main")
    assert code() == "", "its request is open"
    newest = commit(clone, {"nsa/ops.py": "faster = True"})
    assert code() == newest


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (3, False), (2, True)])
def test_a_verdict_does_not_stop_the_night_but_a_failure_does(
    clone: Path, status: int, fails: bool
) -> None:
    harness = clone.parent / "harness"
    harness.write_text(
        f'#!/bin/sh\necho "$*" >> ../log\n[ "$1 $2" != "run {SUITES[1]}" ] || exit {status}\n'
    )
    harness.chmod(0o755)

    assert (nightly(clone, "measure", *SUITES).returncode != 0) is fails

    calls = (clone.parent / "log").read_text().splitlines()
    measured = [call.split()[1] for call in calls if call.startswith("run ")]
    assert measured == (SUITES[:2] if fails else SUITES)
    assert ("report --all" in calls) is not fails
    assert all((ROOT / "suites" / f"{name}.yaml").is_file() for name in SUITES)


def test_by_week_the_operators_are_installed_and_measured_within_a_budget(clone: Path) -> None:
    harness, install = clone.parent / "harness", clone / "suites/operators/install.sh"
    harness.write_text('#!/bin/sh\necho "$PYTHONPATH $*" >> ../log\n')
    install.parent.mkdir(parents=True)
    install.write_text("#!/bin/sh\necho /peers\n")
    for script in (harness, install):
        script.chmod(0o755)
    budget = re.findall(r"'(\d+)'", ENV["BUDGET"])[-1]

    assert nightly(clone, "measure", WEEK, BUDGET=budget).returncode == 0

    assert WEEK == "operators"
    first = (clone.parent / "log").read_text().splitlines()[0]
    assert first == "/peers run operators --wait-for-gpu=3600 --budget=160"


@pytest.mark.parametrize(
    ("tagged", "budget", "status", "ended"),
    [(True, "", 0, 0), (True, "", 1, 10), (False, "", 1, 0), (True, "160", 1, 0)],
)
def test_by_night_the_last_tag_is_compared_with_the_newest_code(
    clone: Path, tagged: bool, budget: str, status: int, ended: int
) -> None:
    harness = clone.parent / "harness"
    harness.write_text(f'#!/bin/sh\necho "$*" > ../log\nexit {status}\n')
    harness.chmod(0o755)
    git(clone, *(("tag", "v1") if tagged else ("status",)))
    commit(clone, {"nsa/ops.py": "slower = True"})

    assert nightly(clone, "creep", BUDGET=budget).returncode == ended

    log = clone.parent / "log"
    asked = log.read_text() if log.exists() else ""
    gated = "gate --base v1 --head HEAD --measure --ci" if tagged and not budget else ""
    assert asked.partition(" --wait")[0] == gated


def test_it_runs_by_schedule_and_later_steps_need_new_code() -> None:
    measure, publish = (jobs(ROOT / NIGHTLY)[name] for name in ("measure", "publish"))
    conditions = [step.get("if") for step in measure["steps"]]

    assert set(triggers(ROOT / NIGHTLY)) == {"schedule", "workflow_dispatch"}
    assert conditions == [None, None, *["${{ steps.code.outputs.code != '' }}"] * 4]
    kept = "${{ !cancelled() && needs.measure.outputs.code != '' }}"
    assert (publish["if"], publish["needs"]) == (kept, "measure")
    assert "steps.keep.outcome == 'success'" in measure["outputs"]["code"], "also if creep is red"
    assert [s["run"] for s in measure["steps"] if "run" in s][-1] == "ci/nightly.sh creep"


def test_gitlab_measures_the_same_and_its_token_is_not_for_the_gpu_runner() -> None:
    file = load(ROOT / "ci/nightly.gitlab.yml")

    assert file["variables"]["NIGHTLY_SUITES"].split() == SUITES
    assert file["nightly-measure"]["variables"]["NIGHTLY_TOKEN"] == ""
    assert file["nightly-measure"]["script"][-1].startswith("ci/nightly.sh creep")
    assert file["nightly-measure"]["allow_failure"] == {"exit_codes": 10}
    assert "GATE_RUNNER_TAG" in load(GITLAB)["variables"]
