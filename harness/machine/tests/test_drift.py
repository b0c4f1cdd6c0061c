"""What differs from a recorded run, in order of suspicion."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from harness.cli import console
from harness.errors import StoreError
from harness.machine import drift, environment
from harness.records import Case, Environment, Git, Gpu, MeasureSettings, Program
from harness.tests.fake_runs import H200
from harness.tests.fake_runs import environment as fake_environment
from harness.tests.fake_runs import run as fake_run
from harness.tests.small_run import SUITE

GIT = Git(commit="406312f8" + "0" * 32, branch="main")
THEN = fake_environment(git=GIT)
RUN = fake_run([], lambda _: [], env=THEN)


def names(now: Environment) -> list[str]:
    return [d.name for d in drift.differences(THEN, now)]


def gpu(**changes: object) -> Environment:
    return replace(THEN, gpu=replace(H200, **changes))  # type: ignore[arg-type]


def test_the_same_place_has_not_drifted() -> None:
    later = replace(THEN, captured_at="later", command=("harness", "run", "--resume", "x"))

    assert drift.differences(THEN, later) == ()
    assert "no difference from r" in str(console.drift("r", ()))


def test_code_outside_git_is_not_known_to_be_the_same() -> None:
    outside = replace(THEN, git=None)

    (said,) = drift.differences(outside, outside)

    assert str(said) == "commit: not known then, not known now"


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (replace(THEN, gpu=None), "is of NVIDIA H200, and this machine would go on with cpu"),
        (gpu(driver="1"), "was begun with driver 570.124.06, and here is 1"),
        (replace(THEN, git=replace(GIT, commit="f" * 40)), "at commit .*, and here is ffffffffff"),
        (replace(THEN, git=replace(GIT, dirty_sha256="a")), "with other uncommitted changes"),
    ],
)
def test_one_run_is_of_one_thing(now: Environment, said: str) -> None:
    with pytest.raises(StoreError, match=said):
        drift.require_alike(RUN, now)


def test_a_run_goes_on_where_nothing_or_nothing_known_differs() -> None:
    drift.require_alike(RUN, replace(THEN, captured_at="later"))
    drift.require_alike(RUN, replace(THEN, git=None))


def test_everything_at_once_comes_in_order_of_suspicion() -> None:
    now = replace(
        THEN,
        hostname="node-8",
        cpu="AMD EPYC",
        cpu_count=8,
        memory_bytes=2**30,
        os="Linux 7",
        gpu=Gpu(
            name="NVIDIA A100",
            uuid="GPU-other",
            index=0,
            memory_bytes=80 * 10**9,
            driver="580.1",
            cuda_driver="13.0",
            compute_capability="8.0",
            power_limit_w=400.0,
            max_sm_clock_hz=1.41e9,
        ),
        versions={**THEN.versions, "torch": "2.12.0", "triton": "3.7", "sentencepiece": "1"},
        torch_settings={**THEN.torch_settings, "allow_tf32_matmul": False},
        variables={"NSA_PREFILL_BATCHED": "0", "CUDA_LAUNCH_BLOCKING": "1"},
        git=Git(commit="3f2a" * 10, branch="main", dirty_sha256="ab" * 32),
        data={"/data/corpus": "1 bytes, 00"},
    )

    assert names(now) == [
        *("GPU", "GPU UUID", "GPU memory", "driver", "CUDA of the driver"),
        *("power limit (W)", "highest SM clock (Hz)"),
        *("torch", "triton", "sentencepiece"),
        *("allow_tf32_matmul", "CUDA_LAUNCH_BLOCKING", "NSA_PREFILL_BATCHED"),
        *("commit", "uncommitted changes", "data /data/corpus"),
        *("CPU", "CPU count", "host memory", "operating system", "host"),
    ]
    assert all(d.how and d.then != d.now for d in drift.differences(THEN, now))


def test_each_difference_says_then_and_now() -> None:
    (uuid,) = drift.differences(THEN, gpu(uuid="GPU-other"))

    assert str(uuid) == f"GPU UUID: {H200.uuid} then, GPU-other now"
    assert "per cent" in uuid.how


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        pytest.param(gpu(power_limit_w=500.0), ["power limit (W)"], id="power limit"),
        pytest.param(gpu(driver="580.1"), ["driver"], id="driver"),
        pytest.param(replace(THEN, gpu=None), ["GPU"], id="no GPU is one difference, not seven"),
        pytest.param(
            replace(THEN, git=Git(commit=THEN.git.commit, branch="x", dirty_sha256="cd" * 32)),  # type: ignore[union-attr]
            ["uncommitted changes"],
            id="dirty",
        ),
        pytest.param(replace(THEN, git=None), ["commit"], id="no repository"),
        pytest.param(replace(THEN, variables={}), ["NSA_PREFILL_BATCHED"], id="a flag gone"),
    ],
)
def test_one_change_is_one_difference(now: Environment, expected: list[str]) -> None:
    assert names(now) == expected


def test_no_field_of_an_environment_is_forgotten() -> None:
    """A field added later must be compared, or be said here to move nothing."""
    moves_nothing = {"captured_at", "command", "gpu_unavailable"}
    compared = {
        *("hostname", "os", "cpu", "cpu_count", "memory_bytes", "gpu", "versions"),
        *("torch_settings", "variables", "git", "data"),
    }

    assert {f.name for f in fields(Environment)} == moves_nothing | compared
    gpu_compared = {"name", "uuid", "memory_bytes", "driver", "cuda_driver"}
    gpu_compared |= {"power_limit_w", "max_sm_clock_hz"}
    follows = {"index", "compute_capability"}
    assert {f.name for f in fields(Gpu)} == gpu_compared | follows


# --- the configuration -------------------------------------------------------------------


def test_the_same_suite_has_not_drifted() -> None:
    assert drift.configuration(SUITE, SUITE) == ()


def test_a_setting_that_changed_in_all_cases_is_one_difference() -> None:
    longer = MeasureSettings(sample_s=5.0)
    now = replace(SUITE, cases=tuple(replace(c, settings=longer) for c in SUITE.cases))

    (found,) = drift.configuration(SUITE, now)

    assert (found.name, found.then, found.now) == ("measure.sample_s of all cases", "2.0", "5.0")


def test_how_a_program_is_read_is_part_of_what_is_measured() -> None:
    program = Program(argv=("python", "train.py"), tokens=512)
    then, now = (
        replace(SUITE, cases=tuple(replace(c, factory="", program=p) for c in SUITE.cases))
        for p in (program, replace(program, tokens=1024, cwd="src"))
    )

    assert [(d.name, d.then, d.now) for d in drift.configuration(then, now)] == [
        ("program.cwd of all cases", ".", "src"),
        ("program.tokens of all cases", "512", "1024"),
    ]


def test_cases_and_axes_that_changed_are_named() -> None:
    first, second = SUITE.cases
    other: Case = replace(second, case_id="train/nsa/seq_len=512")
    now = replace(SUITE, cases=(replace(first, axes={**first.axes, "lr": 2.0}), other))

    assert [(d.name, d.then, d.now) for d in drift.configuration(SUITE, now)] == [
        ("cases", second.case_id, "none"),
        ("cases", "none", other.case_id),
        (f"axis lr of {first.case_id}", "1.0", "2.0"),
    ]


# --- the data ----------------------------------------------------------------------------


def test_data_that_a_case_names_is_known_by_its_contents(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.txt").write_text("one")
    case = replace(
        SUITE.cases[0],
        axes={"data": f"fineweb_edu:{corpus}", "preset": "125m", "other": "no/such/path"},
    )

    before = environment.data_files([case])
    (corpus / "a.txt").write_text("two")
    after = environment.data_files([case])

    assert before.keys() == after.keys() == {str(corpus)}
    assert before != after
    assert environment.data_files([case]) == after
    (found,) = drift.differences(replace(THEN, data=before), replace(THEN, data=after))
    assert found.name == f"data {corpus}"
