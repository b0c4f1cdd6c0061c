"""Differences between two environments, or two forms of one case."""

from dataclasses import replace
from functools import partial

import pytest

from harness.errors import StoreError
from harness.machine import drift
from harness.records import VARIABLE_PREFIXES, Environment, Git, Program
from harness.tests.fake_runs import H200
from harness.tests.fake_runs import environment as fake_environment
from harness.tests.fake_runs import run as fake_run
from harness.tests.small_run import SUITE

GIT = Git(commit="406312f8" + "0" * 32, branch="main")
BASELINE = fake_environment(git=GIT)
RUN = fake_run([], lambda _: [], env=BASELINE)


def names(now: Environment, before: Environment = BASELINE) -> list[str]:
    return [d.name for d in drift.differences(before, now)]


def gpu(**changes: object) -> Environment:
    return replace(BASELINE, gpu=replace(H200, **changes))  # type: ignore[arg-type]


def test_code_outside_git_is_a_difference() -> None:
    outside = replace(BASELINE, git=None)

    (found,) = drift.differences(outside, outside)

    assert found.name == "commit"
    assert str(found) == f"commit: not known; {found.how}"


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (replace(BASELINE, gpu=None), ("NVIDIA H200", "none")),
        (gpu(driver="1"), ("570.124.06", "1")),
        (replace(BASELINE, git=replace(GIT, commit="f" * 40)), ("406312f800", "ffffffffff")),
        (replace(BASELINE, git=replace(GIT, dirty_sha256="a")), ("uncommitted", "git status")),
    ],
)
def test_a_run_is_not_resumed_on_another_device_driver_or_code(
    now: Environment, named: tuple[str, ...]
) -> None:
    with pytest.raises(StoreError) as refused:
        drift.require_alike(RUN, now)

    assert [name for name in named if name not in refused.value.problem] == []


def test_a_run_is_resumed_if_nothing_known_differs() -> None:
    drift.require_alike(RUN, replace(BASELINE, captured_at="later"))
    drift.require_alike(RUN, replace(BASELINE, git=None))


def test_the_most_suspect_difference_comes_first() -> None:
    now = replace(
        BASELINE,
        hostname="node-8",
        cpu="AMD EPYC",
        cpu_count=8,
        memory_bytes=2**30,
        os="Linux 7",
        gpu=replace(
            H200,
            name="NVIDIA A100",
            uuid="GPU-other",
            memory_bytes=80 * 10**9,
            driver="580.1",
            cuda_driver="13.0",
            power_limit_w=400.0,
            max_sm_clock_hz=1.41e9,
        ),
        versions={**BASELINE.versions, "torch": "2.12.0", "triton": "3.7"},
        torch_settings={**BASELINE.torch_settings, "allow_tf32_matmul": False},
        variables={"NSA_PREFILL_BATCHED": "0", "CUDA_LAUNCH_BLOCKING": "1"},
        git=Git(commit="3f2a" * 10, branch="main", dirty_sha256="ab" * 32),
    )

    assert names(now) == [
        *("GPU", "GPU UUID", "GPU memory", "driver", "CUDA of the driver"),
        *("power limit (W)", "highest SM clock (Hz)"),
        *("torch", "triton"),
        *("allow_tf32_matmul", "CUDA_LAUNCH_BLOCKING", "NSA_PREFILL_BATCHED"),
        *("commit", "uncommitted changes"),
        *("CPU", "CPU count", "host memory", "operating system", "host"),
    ]
    assert all(d.how and d.baseline != d.candidate for d in drift.differences(BASELINE, now))


HERE = replace(BASELINE, interpreter="/a/bin/python")
here = partial(replace, HERE)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (here(captured_at="later", command=("harness", "run", "--resume", "x")), []),
        (here(gpu=replace(H200, power_limit_w=500.0)), ["power limit (W)"]),
        (here(gpu=None), ["GPU"]),
        (here(git=replace(GIT, dirty_sha256="cd" * 32)), ["uncommitted changes"]),
        (here(git=None), ["commit"]),
        (here(variables={}), ["NSA_PREFILL_BATCHED"]),
        (here(variables={"NSA_PREFILL_BATCHED": "1", "TRITON_CACHE_DIR": "/elsewhere"}), []),
        (here(interpreter="/b/bin/python"), ["interpreter"]),
        (BASELINE, []),
    ],
)
def test_one_change_is_one_difference_where_both_recorded_it(
    now: Environment, expected: list[str]
) -> None:
    assert names(now, HERE) == expected


def test_a_variable_or_a_package_is_compared_if_both_runs_would_have_recorded_it() -> None:
    now = replace(HERE, prefixes=VARIABLE_PREFIXES)
    with_path = replace(now, variables={**now.variables, "PYTHONPATH": "/src"})

    assert names(with_path, now) == ["PYTHONPATH"]
    assert names(with_path, HERE) == []

    has, lacks = (replace(HERE, versions={**HERE.versions, "wheel": v}) for v in ("0.45", None))
    assert names(has, HERE) == [], "only one suite required it"
    assert names(has, lacks) == ["wheel"]


def test_what_changes_a_case_is_named_but_not_how_often_it_is_measured() -> None:
    program = Program(argv=("python", "train.py"), tokens=512)
    case = replace(SUITE.cases[0], factory="", program=program)
    now = replace(
        case,
        settings=replace(case.settings, sample_s=5.0, graph=True),
        program=replace(program, tokens=1024, cwd="src"),
        axes={**case.axes, "lr": 2.0},
    )

    assert drift.changed(case, case) == {}
    assert drift.changed(case, now).keys() - drift.measured(case, now).keys() == {
        "measure.sample_s"
    }
    assert drift.measured(case, now) == {
        "axis lr": (1.0, 2.0),
        "measure.graph": (False, True),
        "program.cwd": (".", "src"),
        "program.tokens": (512, 1024),
    }
