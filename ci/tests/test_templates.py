"""The steps of ci/README.md, applied to another repository, and the result in CI."""

import re
import shlex
from pathlib import Path
from textwrap import dedent

import pytest

from ci.tests.test_files import README, ROOT, bash, load
from harness.gate.records import State, decode
from harness.records import Decision
from harness.tests.command_line import harness
from harness.tests.gate_repositories import commit, git

WORKFLOWS = ROOT / ".github/workflows"


def section() -> str:
    text = README.read_text(encoding="utf-8").partition("\n## Into your own repository\n")[2]
    return text.partition("\n## ")[0]


def copied() -> dict[str, str]:
    """Files to copy in step 1, by path."""
    step = section().partition("1. **Copy")[2].partition("\n2. ")[0]
    files = {}
    for name in re.findall(r"`([\w./-]+\.\w+)`", step):
        path = ROOT / name if (ROOT / name).is_file() else WORKFLOWS / name
        files[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    return files


def written() -> dict[str, str]:
    """Files to write in later steps, by path: "in `PATH`" precedes each block."""
    files = dict.fromkeys(re.findall(r"empty `([^`]+)`", section()), "")
    parts = re.split(r"^ *```(\w+)\n(.*?)^ *```$", section(), flags=re.MULTILINE | re.DOTALL)
    for before, language, block in zip(parts[::3], parts[1::3], parts[2::3], strict=False):
        if language != "bash":
            files[re.findall(r"\b[Ii]n `([^`]+)`", before)[-1]] = dedent(block)
    return files


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """Another repository, with a branch to which the steps were applied."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, {"README.md": "Theirs."})
    commit(folder, copied() | written(), branch="gate")
    return folder


def test_the_steps_create_every_file_that_a_template_names(theirs: Path) -> None:
    templates = [name for name in copied() if name.endswith(".yml")] + ["ci/gate.yaml"]
    assert len(templates) == 5
    for template in templates:
        text = (theirs / template).read_text()
        named = re.findall(
            r"(?:ci|suites|\.github/workflows)/[\w.-]+\.(?:ya?ml|txt|py|json)\b", text
        )
        assert [name for name in named if not (theirs / name).is_file()] == [], template
        assert not re.search(r"\bconstraints\.txt|install.* -e", text), template
    schema = (theirs / "ci/gate.yaml").read_text().partition("$schema=")[2].split()[0]
    assert (theirs / "ci" / schema).is_file()


def test_the_gitlab_job_judges_a_change_of_the_new_files(theirs: Path) -> None:
    made = git(theirs, "rev-parse", "HEAD")
    workloads = (theirs / "benchmarks/workloads.py").read_text()
    more = workloads.replace("return torch.softmax(x, -1)  #", "return torch.softmax(x, -1) + 0  #")
    assert more != workloads
    commit(theirs, {"benchmarks/workloads.py": more})

    for arguments in commands_of_the_job(theirs, base=made):
        ran = harness(*arguments, cwd=theirs, env={"CUDA_VISIBLE_DEVICES": ""})
        assert ran.returncode == 0, ran.stdout + ran.stderr

    judged = decode((theirs / "gate/verdict.json").read_text(), "verdict.json")
    assert judged.decision is Decision.NO_GO, judged.reason
    assert {case.state for case in judged.cases} == {State.COMPARED}
    assert not judged.blocks, "the policy's stage is warn"
    written = {path.name for path in (theirs / "gate").iterdir()}
    assert written == {"verdict.json", "gate.xml", "gate.md"}
    assert git(theirs, "status", "--porcelain") == ""


def commands_of_the_job(folder: Path, *, base: str) -> list[list[str]]:
    """The arguments of `harness` in the script of the template's job, without an installation."""
    template = load(folder / "ci/gitlab.yml")
    shared, job = template[".gate"], template["gate-counters"]
    before = [line for line in job["before_script"] if line != "before_script"]
    lines = [*before, *shared["before_script"], *job["script"], *shared["after_script"]]
    noted, programs = folder.parent / "noted", folder.parent / "programs"
    programs.mkdir()
    for name, text in {
        "apt-get": "",
        "python3": "",
        "python": '[ "$1 $2 $3" = "-m pip install" ]; for last; do :; done; cat "$last"',
        "harness": f'printf "%s\\n" "$*" >> {noted}; echo gate > gate/verdict.json',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\nset -e\n{text}\n")
        (programs / name).chmod(0o755)
    ran = bash(
        "\n".join(lines),
        cwd=folder,
        env={
            **{name: given["value"] for name, given in template["variables"].items()},
            "PATH": f"{programs}:/usr/bin:/bin",
            "CI_PROJECT_DIR": str(folder),
            "CI_MERGE_REQUEST_DIFF_BASE_SHA": base,
        },
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return [shlex.split(line) for line in noted.read_text().splitlines()]
