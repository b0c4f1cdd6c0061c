"""The scripts of the nightly workflows, line by line, in a repository with a remote."""

from pathlib import Path

import pytest

from ci.tests.test_files import GITLAB, NIGHTLY, ROOT, bash, jobs, load, triggers
from harness.tests.gate_repositories import commit, git, write

ENV = {name: str(value) for name, value in load(ROOT / NIGHTLY)["env"].items()}
SUITES = ENV["SUITES"].split()
REPORT = {"reports/2026-11-23 Gate.md": "GO"}


class Night:
    """A clone in which steps of the jobs are carried out."""

    def __init__(self, folder: Path, status: int = 0) -> None:
        self.folder, self.clone = folder, folder / "clone"
        self.clone.mkdir()
        git(self.clone, "init", "--quiet", "--initial-branch=main")
        script = (ROOT / "ci/nightly.sh").read_text()
        commit(
            self.clone, {"nsa/ops.py": "", "reports/README.md": "none\n", "ci/nightly.sh": script}
        )
        git(self.clone, "update-index", "--chmod=+x", "ci/nightly.sh")
        git(self.clone, "commit", "--quiet", "--message", "It can be executed")
        git(self.clone, "reset", "--quiet", "--hard")
        git(folder, "clone", "--quiet", "--bare", "clone", "remote.git")
        git(folder / "remote.git", "config", "receive.advertisePushOptions", "true")
        git(self.clone, "remote", "add", "origin", "../remote.git")
        for name in ("harness", "gh"):
            end = f'[ "$1 $2" != "run {SUITES[1]}" ] || exit {status}\n' * (name == "harness")
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {folder}/log\n{end}')
            (folder / name).chmod(0o755)

    def carry_out(self, job: str, step: int = -1, **given: str) -> int:
        """Run one step of a job, of those with a script."""
        script = [s["run"] for s in jobs(ROOT / NIGHTLY)[job]["steps"] if "run" in s][step]
        env = ENV | {"PATH": f"{self.folder}:/usr/bin:/bin", "HOME": str(self.folder)} | given
        env |= {"GITHUB_REF_NAME": "main", "GITHUB_OUTPUT": str(self.folder / "out")}
        return bash(script, cwd=self.clone, env=env).returncode

    def carry_out_on_gitlab(self, job: str, **given: str) -> int:
        """Run the whole script of a job; its first steps if it would install."""
        file = load(ROOT / "ci/nightly.gitlab.yml")
        script = [line for line in file[job]["script"] if "venv" not in line and "pip" not in line]
        env = file["variables"] | {"NIGHTLY_REMOTE": str(self.folder / "remote.git")} | given
        env |= {"PATH": f"{self.folder}:/usr/bin:/bin", "CI_DEFAULT_BRANCH": "main"}
        return bash("\n".join(script), cwd=self.clone, env=env).returncode

    def code(self) -> str:
        """The commit to measure, or nothing."""
        (self.folder / "out").write_text("")
        assert self.carry_out("measure", 0) == 0
        return (self.folder / "out").read_text().strip().removeprefix("code=")

    def calls(self, program: str) -> list[str]:
        log = (self.folder / "log").read_text()
        return [call for call in log.splitlines() if call.startswith(program)]


def test_reports_of_new_code_become_one_pull_request(tmp_path: Path) -> None:
    """While it is open nothing is measured again; a page or a report is no code."""
    night = Night(tmp_path)
    code = night.code()
    assert code == git(night.clone, "rev-parse", "HEAD")
    write(night.clone, REPORT)

    assert night.carry_out("publish", CODE=code) == 0

    (created,) = night.calls("gh pr create")
    assert f"--base main --head nightly/{code}" in created
    assert f"refs/heads/nightly/{code}" in git(night.clone, "ls-remote", "origin")
    git(night.clone, "reset", "--quiet", "--hard", "HEAD~1")
    assert night.code() == ""
    commit(night.clone, {"README.md": "A page.", **REPORT})
    assert night.code() == ""
    commit(night.clone, {"nsa/ops.py": "faster = True"})
    assert night.code() == git(night.clone, "rev-parse", "HEAD")


def test_unchanged_reports_open_nothing(tmp_path: Path) -> None:
    night = Night(tmp_path)

    assert night.carry_out("publish", CODE=night.code()) == 0

    assert not (tmp_path / "log").exists()
    assert "nightly" not in git(night.clone, "ls-remote", "origin")


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (3, False), (2, True)])
def test_a_verdict_does_not_stop_the_night_but_a_failure_does(
    tmp_path: Path, status: int, fails: bool
) -> None:
    night = Night(tmp_path, status)

    assert (night.carry_out("measure") != 0) is fails

    measured = [call.split()[2] for call in night.calls("harness run")]
    assert measured == (SUITES[:2] if fails else SUITES)
    assert len(night.calls("harness index reports")) == (not fails)
    assert all((ROOT / "suites" / f"{name}.yaml").is_file() for name in SUITES)


def test_it_runs_by_schedule_and_later_steps_need_new_code() -> None:
    measure, publish = (jobs(ROOT / NIGHTLY)[name] for name in ("measure", "publish"))
    conditions = [step.get("if") for step in measure["steps"]]

    assert set(triggers(ROOT / NIGHTLY)) == {"schedule", "workflow_dispatch"}
    assert conditions == [None, None, *["${{ steps.code.outputs.code != '' }}"] * 3]
    assert (publish["if"], publish["needs"]) == ("needs.measure.outputs.code != ''", "measure")


def test_gitlab_measures_new_code_once_and_opens_a_merge_request(tmp_path: Path) -> None:
    night = Night(tmp_path)
    code = git(night.clone, "rev-parse", "HEAD")

    assert night.carry_out_on_gitlab("nightly-measure") == 0
    assert (night.clone / "nightly.env").read_text() == f"CODE={code}\n"
    assert [call.split()[2] for call in night.calls("harness run")] == SUITES
    assert night.carry_out_on_gitlab("nightly-publish", CODE=code) == 0
    assert "nightly" not in git(night.clone, "ls-remote", "origin"), "no report changed"
    write(night.clone, REPORT)
    assert night.carry_out_on_gitlab("nightly-publish", CODE=code) == 0
    assert f"refs/heads/nightly/{code}" in git(night.clone, "ls-remote", "origin")
    assert night.carry_out_on_gitlab("nightly-measure") == 0
    assert (night.clone / "nightly.env").read_text() == "CODE=\n"
    assert len(night.calls("harness run")) == len(SUITES), "not a second time"


def test_gitlab_measures_the_same_and_its_token_is_not_for_the_gpu_runner() -> None:
    file = load(ROOT / "ci/nightly.gitlab.yml")

    assert file["variables"]["NIGHTLY_SUITES"].split() == SUITES
    assert file["nightly-measure"]["variables"]["NIGHTLY_TOKEN"] == ""
    assert "GATE_RUNNER_TAG" in load(GITLAB)["variables"]
