"""The scripts of the nightly workflow, line by line, in a repository with a remote."""

from pathlib import Path

import pytest

from ci.tests.test_files import NIGHTLY, ROOT, bash, jobs, load, triggers
from harness.tests.gate_repositories import commit, git, write

WORKFLOW = load(ROOT / NIGHTLY)
REPORT = "reports/2026-11-23 Gate.md"


class Night:
    """A clone in which the jobs are carried out, and the branches and requests that they leave."""

    def __init__(self, folder: Path, status: int = 0) -> None:
        self.clone, self.programs = folder / "clone", folder / "programs"
        self.log = folder / "log"
        self.clone.mkdir()
        git(self.clone, "init", "--quiet", "--initial-branch=main")
        commit(self.clone, {"nsa/ops.py": "", "reports/README.md": "none\n"})
        git(folder, "clone", "--quiet", "--bare", "clone", "remote.git")
        git(self.clone, "remote", "add", "origin", "../remote.git")
        self.programs.mkdir()
        harness = f'[ "$1" != run ] || [ "$2" != decode ] || exit {status}'
        for name in ("harness", "gh"):
            program = self.programs / name
            text = harness if name == "harness" else ""
            program.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.log}\n{text}\n')
            program.chmod(0o755)

    def carry_out(self, job: str, step: int = -1, **env: str) -> int:
        """Run one step of a job, counted among those with a script."""
        script = [s["run"] for s in jobs(ROOT / NIGHTLY)[job]["steps"] if "run" in s][step]
        home = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(self.clone.parent)}
        given = {name: str(value) for name, value in WORKFLOW["env"].items()}
        variables = {"GITHUB_REF_NAME": "main", "GITHUB_OUTPUT": str(self.clone.parent / "out")}
        ran = bash(script, cwd=self.clone, env=home | given | variables | env)
        return ran.returncode

    def code(self) -> str:
        """What the first step of `measure` says: a commit, or nothing to measure."""
        out = self.clone.parent / "out"
        out.write_text("")
        assert self.carry_out("measure", 0) == 0
        return out.read_text().strip().removeprefix("code=")

    def publish(self, code: str) -> None:
        assert self.carry_out("publish", CODE=code) == 0

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def branches(self) -> list[str]:
        return git(self.clone, "ls-remote", "--heads", "origin").splitlines()


def test_new_reports_become_one_pull_request(tmp_path: Path) -> None:
    night = Night(tmp_path)
    code = night.code()
    write(night.clone, {REPORT: "GO"})

    night.publish(code)

    assert code == git(night.clone, "rev-parse", "HEAD~1")
    assert any(line.endswith(f"refs/heads/nightly/{code}") for line in night.branches)
    assert sum(call.startswith("gh pr create --base main") for call in night.calls) == 1
    assert git(night.clone, "show", "--name-only", "--format=%s").splitlines()[0].endswith(code)


def test_without_new_code_nothing_is_measured(tmp_path: Path) -> None:
    """Also while the pull request is open; a page or a report is no code."""
    night = Night(tmp_path)
    code = night.code()
    write(night.clone, {REPORT: "GO"})
    night.publish(code)
    git(night.clone, "reset", "--quiet", "--hard", "HEAD~1")

    assert night.code() == ""
    commit(night.clone, {"README.md": "A page.", "reports/x.md": "A report."})
    assert night.code() == ""
    commit(night.clone, {"nsa/ops.py": "faster = True"})
    assert night.code() == git(night.clone, "rev-parse", "HEAD")


def test_unchanged_reports_open_nothing(tmp_path: Path) -> None:
    night = Night(tmp_path)

    night.publish(night.code())

    assert len(night.branches) == 1
    assert night.calls == []


@pytest.mark.parametrize(("status", "fails"), [(0, False), (1, False), (3, False), (2, True)])
def test_a_verdict_is_published_but_a_failure_is_not(
    tmp_path: Path, status: int, fails: bool
) -> None:
    night = Night(tmp_path, status)

    assert (night.carry_out("measure") != 0) is fails

    suites = [call.split()[2] for call in night.calls if call.startswith("harness run")]
    listed = str(WORKFLOW["env"]["SUITES"]).split()
    assert suites == (listed[: listed.index("decode") + 1] if fails else listed)
    assert ("harness index reports" in night.calls) is not fails
    assert all((ROOT / "suites" / f"{name}.yaml").is_file() for name in listed)


def test_it_runs_by_schedule_and_later_steps_need_new_code() -> None:
    measure, publish = (jobs(ROOT / NIGHTLY)[name] for name in ("measure", "publish"))
    found = measure["steps"].index(next(s for s in measure["steps"] if s.get("id") == "code"))

    assert set(triggers(ROOT / NIGHTLY)) == {"schedule", "workflow_dispatch"}
    assert {step["if"] for step in measure["steps"][found + 1 :]} == {
        "${{ steps.code.outputs.code != '' }}"
    }
    assert publish["if"] == "needs.measure.outputs.code != ''"
    assert publish["needs"] == "measure"
