"""What a suite requires is met, or ends the run before its first case; `else: note` goes on."""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import pytest

from harness.errors import SuiteError
from harness.machine import requirements
from harness.measure import facts as worker_facts
from harness.records import Environment, Grade, Scalar
from harness.report.conditions import requirement_bullets
from harness.runner import rig
from harness.tests.fake_runs import run
from harness.tests.small_run import ENVIRONMENT, GPU, SUITE

CONF, PRECISION = "PYTORCH_CUDA_ALLOC_CONF", "float32_matmul_precision"
FIT = replace(
    ENVIRONMENT,
    versions={"torch": "2.9.0a0+50eac811a6.nv25.09", "flash-attn": "2.8.3"},
    torch_settings={"allow_tf32_matmul": True, "float32_matmul_precision": "high"},
    variables={CONF: "backend:native,expandable_segments:True", "HF_TOKEN": "set"},
    gpu_count=2,
    gpu_free_bytes=100 * 10**9,
)
ALL: Mapping[str, Scalar] = {
    "gpu": "A100|H200",
    "gpus": 2,
    "driver": ">=570,<580",
    "gpu_free_bytes": 70e9,
    "packages.flash-attn": ">=2",
    "packages.torch": ">=2.9",
    "torch.float32_matmul_precision": "high",
    "variables.PYTORCH_CUDA_ALLOC_CONF": "*expandable_segments:True*",
    "variables.HF_TOKEN": "*",
}


changed = partial(replace, FIT)


def unmet(requires: Mapping[str, Scalar], here: Environment) -> list[str]:
    found = requirements.checks(replace(SUITE, requires=requires), here)
    assert all(bool(c.remedy) is (c.grade is not Grade.OK) for c in found)
    return [c.name for c in found if c.grade is not Grade.OK]


def test_a_machine_that_has_all_is_fit_and_a_secret_is_only_known_to_be_set() -> None:
    assert unmet(ALL, FIT) == []
    assert unmet({"variables.HF_TOKEN": "abc"}, FIT) == ["HF_TOKEN"]


@pytest.mark.parametrize(
    ("here", "name"),
    [
        (changed(gpu=replace(GPU, name="NVIDIA H100")), "gpu"),
        (changed(gpu_count=1), "gpus"),
        (changed(gpu_count=None), "gpus"),
        (changed(gpu=replace(GPU, driver="580.1")), "driver"),
        (changed(gpu=replace(GPU, driver="not available")), "driver"),
        (changed(gpu_free_bytes=69 * 10**9), "gpu_free_bytes"),
        (changed(versions={**FIT.versions, "flash-attn": "1.0.9"}), "flash-attn"),
        (changed(versions={**FIT.versions, "flash-attn": None}), "flash-attn"),
        (changed(versions={"torch": "2.11.0+cu130"}), "flash-attn"),
        (changed(torch_settings={PRECISION: "highest"}), PRECISION),
        (changed(torch_settings={}), PRECISION),
        (changed(variables={"HF_TOKEN": "set"}), CONF),
        (changed(variables={CONF: FIT.variables[CONF]}), "HF_TOKEN"),
    ],
)
def test_one_thing_that_the_machine_lacks_is_found(here: Environment, name: str) -> None:
    assert unmet(ALL, here) == [name]
    with pytest.raises(SuiteError, match=name):
        requirements.require(replace(SUITE, requires=ALL), here)
    wanted = requirements.checks(replace(SUITE, wants=ALL), here)
    assert [c.name for c in wanted if c.grade is Grade.WARN] == [name]


def test_everything_that_is_missing_is_in_one_message_with_its_command() -> None:
    poor = changed(
        gpu=None, versions={"flash-attn": None, "torch": "2.3"}, variables={"HF_TOKEN": "set"}
    )
    suite = replace(SUITE, device="cuda", requires=ALL, wants={"packages.flash-attn": ">=3"})

    with pytest.raises(SuiteError) as raised:
        requirements.require(suite, poor)

    head, *lines = str(raised.value).split("\n")
    named = ["GPU", "gpu", "gpus", "driver", "gpu_free_bytes", "flash-attn", "torch", CONF]
    assert head == f"{suite.path}: requirements that are not met: 8 of 11"
    assert [line.partition(":")[0].strip() for line in lines] == named
    assert lines[0].endswith(requirements.GPU_NODE)
    assert "pip install 'flash-attn>=2' --no-build-isolation" in lines[5]
    assert lines[-1].endswith("export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")


@pytest.mark.parametrize("lacks", [None, "1.0"])
def test_what_is_only_wanted_does_not_stop_and_is_reported(lacks: str | None) -> None:
    suite = replace(SUITE, requires={"gpu": "H200"}, wants={"packages.flash-attn": ">=2"})
    here = changed(versions={"flash-attn": lacks})
    recorded = replace(run([], lambda c: []), suite=suite, environment=here)

    requirements.require(suite, here)

    (said,) = requirement_bullets(recorded)
    assert "flash-attn" in said
    assert "pip install 'flash-attn>=2'" in said
    assert "all met" in next(iter(requirement_bullets(replace(recorded, environment=FIT))))


def test_a_run_is_refused_before_its_first_case(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Mock(describe=worker_facts.describe)
    monkeypatch.setattr("harness.runner.rig.Launcher.of", lambda _: nullcontext(launcher))
    for name in ("MINE", "MY_API_KEY"):
        monkeypatch.setenv(name, "yes")
    wanted = ("packages.no-such-package", "variables.MINE", "variables.MY_API_KEY")

    def taken(requires: Mapping[str, Scalar]) -> Environment:
        wants = dict.fromkeys(wanted, "*")
        suite = replace(SUITE, device="cpu", requires=requires, wants=wants)
        with ExitStack() as held:
            return rig.take(held, suite, command=(), wait_s=0.0, say=print)[1]

    here = taken({"packages.pytest": ">=8"})
    assert here.versions["no-such-package"] is None
    assert here.variables["MINE"] == "yes"
    assert here.variables["MY_API_KEY"] == "set", "a secret"
    with pytest.raises(SuiteError, match="pytest"):
        taken({"packages.pytest": ">=1000"})
