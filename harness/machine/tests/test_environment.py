"""The environment record and the checks of the doctor."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import ProbeError
from harness.git.repository import Repository, read_git
from harness.machine import doctor, environment, nvml
from harness.machine.facts import RIGHT
from harness.machine.gpu_idle import GpuUse
from harness.measure import facts as worker_facts
from harness.records import VARIABLE_PREFIXES, Check, Environment, Git, Grade
from harness.tests import fake_runs
from harness.tests.fake_runs import H200
from harness.tests.gate_repositories import commit, git, write

GPU = H200
HEALTHY = fake_runs.environment(
    versions={"python": "3.12.3", "torch": "2.11.0+cu130", "numpy": "2.1.3", "flash-attn": None},
    torch_settings={name: right.value for name, right in RIGHT.items()},
    variables={},
)
AT_REST: dict[str, Any] = {"load": 0.5, "disk_free_bytes": 10**11}
FREE = GpuUse(used_bytes=0.0, processes={}, throttle_mask=0x1)
CPU_ONLY = replace(HEALTHY, gpu=None, gpu_unavailable="torch was built without CUDA")
CPU_FACTS: dict[str, Any] = {
    "versions": {"torch": "2.13.0", "triton": None, "cuda": None, "cudnn": None},
    "torch_settings": {"device": "cpu", "num_threads": 2},
    "gpu_uuids": [],
    "gpu": None,
    "cuda_unavailable": "torch 2.13.0 was built without CUDA",
}
GPU_FACTS = CPU_FACTS | {
    "gpu_uuids": [GPU.uuid],
    "gpu": {"name": GPU.name, "memory_bytes": 7, "compute_capability": "9.0"},
}


def no_nvml(*_: object) -> Any:
    raise ProbeError("NVML: NVML Shared Library Not Found")


def capture(facts: dict[str, Any], repository: Path | None = None) -> Environment:
    return environment.capture(facts, command=("harness", "run"), repository=repository)


# --- facts from a worker -----------------------------------------------------------------


def test_facts_survive_json_and_fill_the_record() -> None:
    facts = worker_facts.describe()

    captured = capture(json.loads(json.dumps(facts)))

    assert captured.versions["torch"] == facts["versions"]["torch"]
    assert captured.versions.keys() >= {"python", "harness", "numpy", "torch", "triton"}
    assert (captured.cpu_count >= 1, captured.memory_bytes > 2**28) == (True, True)
    assert captured.cpu
    assert "kernel" in captured.os
    assert (captured.command, captured.git) == (("harness", "run"), None)
    assert bool(facts["gpu_uuids"]) != bool(facts["cuda_unavailable"])


def test_facts_follow_the_current_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = worker_facts.describe()["torch_settings"]
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        torch.set_float32_matmul_precision("high")
        during = worker_facts.describe()["torch_settings"]
        torch.set_float32_matmul_precision("highest")

    of_matmul = {"allow_tf32_matmul", "float32_matmul_precision"}
    changed = {name for name in before if before[name] != during[name]}
    assert changed == {"anomaly_mode", "launch_blocking", *of_matmul}


# --- capture -----------------------------------------------------------------------------


def test_the_record_has_the_interpreter_and_the_variables_that_can_change_a_number(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "gpus", no_nvml)
    set_here = {"PYTHONPATH": "/a:/b", "HF_TOKEN": "secret", "MY_FLAG": "1", "NSA_USE_FA2": "1"}
    for name, value in set_here.items():
        monkeypatch.setenv(name, value)

    captured = capture(CPU_FACTS | {"interpreter": "/p"}, repository / "package")

    seen = captured.variables
    assert (captured.interpreter, seen["PYTHONPATH"], seen["NSA_USE_FA2"]) == ("/p", "/a:/b", "1")
    assert all(name.startswith(VARIABLE_PREFIXES) for name in seen)


def test_the_gpu_is_the_worker_s_even_without_nvml_or_the_record_has_the_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml, "gpus", no_nvml)
    blind = capture(CPU_FACTS)
    monkeypatch.setattr(nvml, "gpus", lambda: (GPU,))
    unusable = capture(CPU_FACTS)

    assert (blind.gpu, blind.device_name) == (None, "cpu")
    for why in (CPU_FACTS["cuda_unavailable"], "NVML Shared Library Not Found"):
        assert why in blind.gpu_unavailable
    assert GPU.name in unusable.gpu_unavailable

    monkeypatch.setattr(nvml, "find", {GPU.uuid: GPU}.__getitem__)
    assert capture(GPU_FACTS).gpu == GPU

    monkeypatch.setattr(nvml, "find", no_nvml)
    captured = capture(GPU_FACTS).gpu
    assert captured
    assert (captured.name, captured.driver) == ("NVIDIA H200", environment.NOT_REPORTED)


# --- git ---------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch=trunk")
    (tmp_path / "package").mkdir()
    commit(tmp_path, {".gitignore": "ignored\n", "code.py": "x = 1\n"})
    return tmp_path


def dirty(repository: Path) -> str:
    found = read_git(repository)
    assert found is not None
    return found.dirty_sha256


def test_the_repository_is_the_one_with_the_factory(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(repository)
    (repository / "own_of_mine.py").touch()

    ours = environment.home_of("harness.tests.fake_workloads:good")
    assert ours == Path(environment.__file__).parents[1]
    assert environment.home_of("own_of_mine:good") == repository


def test_commit_and_branch_are_those_around_the_folder(repository: Path) -> None:
    expected = Git(commit=git(repository, "rev-parse", "HEAD").strip(), branch="trunk")
    assert read_git(repository) == read_git(repository / "package") == expected

    (repository / "ignored").mkdir()
    assert read_git(repository / "ignored") is None

    git(repository, "checkout", "--quiet", "--detach")
    assert read_git(repository) == replace(expected, branch="(detached)")


RUN = "20261122-184540-s-cpu-6de7"


@pytest.mark.parametrize("store", ["a b/reports/runs", "measured/runs", "ignored/x"])
def test_what_the_harness_writes_is_not_a_change(store: str, repository: Path) -> None:
    pages = ("a b/reports/day.md", "a b/reports/figures/x.png", "ci/baselines/counters.json")
    written = (f"{store}/{RUN}/run.jsonl", f"{store}/{RUN}/logs/x.log", *pages)
    write(repository, dict.fromkeys(written, "x"))

    assert dirty(repository) == ""
    assert not Repository(repository).dirty()
    assert store not in git(repository, "ls-tree", "-r", Repository(repository).snapshot())
    (repository / "new.py").touch()
    assert dirty(repository)


def test_each_other_change_has_its_own_hash(repository: Path) -> None:
    hashes = {""}
    code, link = repository / "code.py", repository / "link"
    for name, content in (("code.py", "x = 2"), ("new", "a"), ("new", "b"), ("new b", "")):
        (repository / name).write_text(content)
        hashes.add(dirty(repository))
        if name == code.name:
            git(repository, "add", ".")
            assert dirty(repository) in hashes, "staged or not"
            git(repository, "checkout", "--quiet", "HEAD", name)
        else:
            (repository / name).unlink()
    for target in ("nowhere", "elsewhere"):
        link.symlink_to(target)
        hashes.add(dirty(repository))
        link.unlink()
    assert dirty(repository) == ""
    write(repository, {"within/file": "x"})
    git(repository / "within", "init", "--quiet")
    hashes.add(dirty(repository))

    assert len(hashes) == 1 + 4 + 2 + 1


def test_without_a_repository_a_commit_or_git_the_record_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert read_git(tmp_path) is None

    git(tmp_path, "init", "--quiet")
    assert read_git(tmp_path) is None, "no commit yet"

    monkeypatch.setenv("PATH", "")
    assert read_git(tmp_path) is None, "no git"


# --- the doctor --------------------------------------------------------------------------


def test_without_a_gpu_the_doctor_warns_and_skips_the_checks_of_the_gpu(tmp_path: Path) -> None:
    """The folder of the runs need not exist."""
    first, *others = doctor.examined(CPU_ONLY, store=tmp_path / "a" / "b").checks

    assert (first.name, first.grade) == ("device", Grade.WARN)
    assert "built without CUDA" in first.fact
    of_gpu = {"TF32", "GPU idle", "clocks", "expandable segments"}
    assert {c.name for c in others} & {*of_gpu, "disk", "CPU load"} == {"disk", "CPU load"}


def torch(**settings: Any) -> Environment:
    return replace(HEALTHY, torch_settings={**HEALTHY.torch_settings, **settings})


@pytest.mark.parametrize(
    ("changed", "name", "grade"),
    [
        (torch(allow_tf32_matmul=False), "TF32", Grade.WARN),
        (torch(expandable_segments=False), "expandable segments", Grade.WARN),
        (torch(flash_attention_in_torch=False), "FlashAttention-2", Grade.WARN),
        (torch(anomaly_mode=True), "anomaly mode", Grade.FAIL),
        (torch(debug_build=True), "debug build", Grade.FAIL),
        (torch(deterministic=True), "deterministic kernels", Grade.WARN),
        (replace(HEALTHY, variables={"CUDA_LAUNCH_BLOCKING": "1"}), "variables", Grade.FAIL),
        (replace(HEALTHY, variables={"TRITON_INTERPRET": "1"}), "variables", Grade.FAIL),
        (replace(HEALTHY, git=None), "git", Grade.WARN),
        (replace(HEALTHY, git=Git(commit="3", branch="m", dirty_sha256="a")), "git", Grade.WARN),
        (replace(HEALTHY, cpu_count=1), "CPU load", Grade.WARN),
        (replace(HEALTHY, gpu=replace(GPU, power_limit_w=600.0)), "power limit", Grade.WARN),
        (replace(HEALTHY, gpu=replace(GPU, power_limit_w=None)), "power limit", Grade.WARN),
        (replace(FREE, processes={7: "process 7"}), "GPU idle", Grade.FAIL),
        (replace(FREE, used_bytes=5e8), "GPU idle", Grade.FAIL),
        (replace(FREE, processes=None), "GPU idle", Grade.OK),  # but no memory in use
        (replace(FREE, processes=None, used_bytes=None), "GPU idle", Grade.UNKNOWN),
        (replace(FREE, throttle_mask=0x40), "clocks", Grade.FAIL),
        (replace(FREE, throttle_mask=0x2), "clocks", Grade.WARN),
        (replace(FREE, throttle_mask=0x42), "clocks", Grade.FAIL),
        (replace(FREE, throttle_mask=0x0), "clocks", Grade.OK),
        (replace(FREE, throttle_mask=None), "clocks", Grade.UNKNOWN),
        ({"disk_free_bytes": 10**10}, "disk", Grade.OK),
        ({"disk_free_bytes": 5 * 10**8}, "disk", Grade.WARN),
        ({"disk_free_bytes": 10**7}, "disk", Grade.FAIL),
    ],
)
def test_a_fault_is_found_with_its_remedy(
    changed: Environment | GpuUse | dict[str, int], name: str, grade: Grade
) -> None:
    env = changed if isinstance(changed, Environment) else HEALTHY
    state = AT_REST | (changed if isinstance(changed, dict) else {})
    use = changed if isinstance(changed, GpuUse) else FREE

    found = {c.name: c for c in doctor.checks(env, use, **state)}

    assert found[name].grade is grade
    assert bool(found[name].remedy) is (grade in (Grade.WARN, Grade.FAIL))
    assert all(c.grade is Grade.OK for c in found.values() if c.name != name)


def test_a_gpu_that_cannot_be_read_is_unknown() -> None:
    silent = replace(HEALTHY, torch_settings={})

    found = [*doctor.checks(silent, "NVML: not found", **AT_REST)]

    unknown = {c.name: c.fact for c in found if c.grade is Grade.UNKNOWN}
    assert unknown.keys() == {*(right.label for right in RIGHT.values()), "GPU idle", "clocks"}
    assert "NVML: not found" in unknown["clocks"]


@pytest.mark.parametrize(
    ("grades", "shown", "status"),
    [
        ([Grade.OK, Grade.OK], "fit to measure on", 0),
        ([Grade.OK, Grade.WARN, Grade.WARN], "with 2 warnings", 0),
        ([Grade.WARN, Grade.UNKNOWN], "unknown: 1 check ", 3),
        ([Grade.UNKNOWN, Grade.FAIL], "not fit to measure on: 1 check ", 3),
        ([], "unknown: ", 3),
    ],
)
def test_the_worst_check_decides(grades: list[Grade], shown: str, status: int) -> None:
    found = [Check("x", grade, "") for grade in grades]

    assert shown in doctor.verdict(found)
    assert doctor.exit_status(found) == status
