"""The workflows and templates under .github/ and ci/: valid, and safe for changes from forks."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from harness.tests.test_pages import known_options

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
GITLAB = ROOT / "ci/gitlab.yml"
README = ROOT / "ci/README.md"

if not WORKFLOWS:
    pytest.skip("not a checkout: the workflows are not installed", allow_module_level=True)

PRIVILEGED = "gate-comment.yml"
"""May write comments; it runs no code of a change."""
NIGHTLY = ".github/workflows/nightly.yml"
MAY_WRITE = {
    (PRIVILEGED, "comment"): {"pull-requests"},
    ("nightly.yml", "publish"): {"pull-requests", "contents"},
}

each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)


def load(path: Path) -> dict[str, Any]:
    yaml = YAML(typ="safe", pure=True)
    yaml.constructor.add_constructor("!reference", lambda loader, node: node.value[-1].value)
    data: dict[str, Any] = yaml.load(path.read_text())
    return data


def jobs(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(path)["jobs"]
    return found


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in jobs(path).values():
        yield from job.get("steps", ())


def scripts(path: Path) -> list[str]:
    return [step["run"] for step in steps(path) if "run" in step]


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", WORKFLOWS),
        (
            "vendor.gitlab-ci",
            ["--data-transform", "gitlab-ci", GITLAB, ROOT / "ci/nightly.gitlab.yml"],
        ),
    ],
)
def test_the_files_match_the_schemas_of_github_and_gitlab(
    schema: str, files: list[str | Path]
) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_gpu_script_names_existing_suites() -> None:
    suites = re.findall(r"harness run (\S+)", (ROOT / "ci/gpu.sh").read_text())

    assert suites
    assert all((ROOT / "suites" / f"{suite}.yaml").exists() for suite in suites)


@each_workflow
def test_every_action_is_pinned_to_the_commit_of_a_release(path: Path) -> None:
    used = re.findall(r"uses:\s*(.*)", path.read_text())
    local = [name for name in used if name.startswith("./.github/workflows/")]

    assert all((ROOT / name).is_file() for name in local)
    assert [
        name
        for name in used
        if name not in local and not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}\s+# v[\d.]+", name)
    ] == []


@each_workflow
def test_only_jobs_without_code_of_a_change_may_write(path: Path) -> None:
    assert load(path)["permissions"] in ({}, {"contents": "read"})
    for name, job in jobs(path).items():
        granted = job["permissions"]
        writes = {scope for scope, level in granted.items() if level != "read"}
        assert writes == MAY_WRITE.get((path.name, name), set()), name


@each_workflow
def test_no_script_contains_an_expression(path: Path) -> None:
    """A branch named `$(curl …)` would run there; scripts read environment variables instead."""
    assert [script for script in scripts(path) if "${{" in script] == []


@each_workflow
def test_scripts_parse_and_stop_at_the_first_error(path: Path) -> None:
    for script in scripts(path):
        subprocess.run(["bash", "-n", "-c", script], check=True)
        assert "|| true" not in script
    # Unlike the default shell, `shell: bash` sets pipefail.
    for job in jobs(path).values():
        piped = any("|" in s.get("run", "").replace("||", "") for s in job.get("steps", ()))
        assert not piped or job["defaults"]["run"]["shell"] == "bash"


def triggers(path: Path) -> dict[str, Any]:
    on = load(path)["on"]  # as YAML 1.2; 1.1 reads the key as true
    return on if isinstance(on, dict) else dict.fromkeys(on)


@each_workflow
def test_code_of_a_fork_never_sees_a_secret(path: Path) -> None:
    text = path.read_text()
    assert "pull_request_target" not in triggers(path)
    assert "secrets." not in text
    assert "secrets: inherit" not in text
    tokens = re.findall(r"github\.token", text)
    assert len(tokens) == sum(path.name == name for name, _ in MAY_WRITE)
    checkouts = [s for s in steps(path) if s.get("uses", "").startswith("actions/checkout@")]
    assert all(s["with"]["persist-credentials"] is False for s in checkouts)


def test_the_privileged_workflow_uses_nothing_from_the_change() -> None:
    path = ROOT / ".github/workflows" / PRIVILEGED
    (job,) = jobs(path).values()
    checkout, post = job["steps"]

    assert set(triggers(path)) == {"workflow_run"}
    assert triggers(path)["workflow_run"]["workflows"] == [load(path.with_name("gate.yml"))["name"]]
    assert "ref" not in checkout["with"], "without it, the default branch"
    assert "repository" not in checkout["with"]
    assert checkout["with"]["sparse-checkout"] == "ci/post_comment.sh"
    assert post["run"] == "bash ci/post_comment.sh"


def test_code_of_a_fork_never_runs_on_a_self_hosted_runner() -> None:
    for path in WORKFLOWS:
        for name, job in jobs(path).items():
            own = "runs-on" in job and job["runs-on"] != "ubuntu-24.04"
            assert not own or "pull_request" not in triggers(path), f"{path.name}: {name}"
    rules = load(GITLAB)["gate-gpu"]["rules"]
    assert all("$CI_MERGE_REQUEST_SOURCE_PROJECT_ID == $CI_PROJECT_ID" in r["if"] for r in rules)


def test_every_command_and_option_exists() -> None:
    """Of the workflows and the template; harness/tests/test_pages.py checks those of the guide."""
    texts = [s for path in WORKFLOWS for s in scripts(path)]
    for job in load(GITLAB).values():
        for key in ("script", "after_script"):
            texts += job.get(key, []) if isinstance(job, dict) else []
    joined = "\n".join(texts).replace("\\\n", " ")
    found = re.findall(r"^\s*harness ([^|>;&\n]*)", joined, re.MULTILINE)

    assert {words.split()[0] for words in found} >= {"gate", "export", "doctor"}
    for words in found:
        known, rest = known_options(words.split())
        assert {word.partition("=")[0] for word in rest if word.startswith("-")} <= known, words


@pytest.mark.parametrize(
    ("fork", "has_runner", "forks_need_gpu", "gpu", "good"),
    [
        pytest.param("false", "true", "true", "success", True, id="ours"),
        pytest.param("false", "true", "true", "failure", False, id="ours, no-go"),
        pytest.param("false", "true", "true", "skipped", False, id="skipped"),
        pytest.param("false", "false", "true", "skipped", True, id="no runner yet"),
        # GitHub passes no variable to the run of a fork, whatever the repository has.
        pytest.param("true", "false", "true", "skipped", False, id="fork"),
        pytest.param("true", "false", "false", "skipped", True, id="fork, no runner"),
        pytest.param("true", "true", "false", "skipped", False, id="fork, both"),
    ],
)
@pytest.mark.parametrize("hosted", ["success", "failure"])
def test_a_job_that_did_not_run_is_not_a_pass(
    fork: str, has_runner: str, forks_need_gpu: str, gpu: str, good: bool, hosted: str
) -> None:
    (step,) = jobs(ROOT / ".github/workflows/gate.yml")["verdict"]["steps"]
    env = {"FORK": fork, "HAS_RUNNER": has_runner, "FORKS_NEED_GPU": forks_need_gpu, "GPU": gpu}
    env |= {"HOSTED": "counters", "HOSTED_RESULT": hosted}

    ran = subprocess.run(["bash", "-e", "-c", step["run"]], env=env, capture_output=True, text=True)

    assert (ran.returncode == 0) is (good and hosted == "success"), ran.stdout + ran.stderr


def test_the_verdict_of_a_pull_request_needs_every_job() -> None:
    workflow = load(ROOT / ".github/workflows/gate.yml")
    calling, job = workflow["jobs"]["gpu"], workflow["jobs"]["verdict"]
    ours = "github.event.pull_request.head.repo.full_name {} github.repository"

    assert set(job["needs"]) == set(workflow["jobs"]) - {"verdict"}
    assert job["if"] == "${{ always() }}"
    assert workflow["env"]["FORKS_NEED_GPU"] is True
    assert {name: " ".join(text.split()) for name, text in job["env"].items()} == {
        "HOSTED_RESULT": "${{ needs.hosted.result }}",
        "GPU": "${{ needs.gpu.result }}",
        "FORK": f"${{{{ github.event_name == 'pull_request' && {ours.format('!=')} }}}}",
        "HAS_RUNNER": "${{ vars.GPU_RUNNER != '' }}",
    }
    assert " ".join(calling["if"].split()) == (
        "vars.GPU_RUNNER != '' && (github.event_name == 'workflow_dispatch' "
        f"|| {ours.format('==')})"
    )
