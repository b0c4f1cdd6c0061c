"""Writing runs: nothing recorded is lost, whatever the disk does."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.errors import StoreError
from harness.messages import Built
from harness.records import (
    Accuracy,
    Measurement,
    Outcome,
    Peaks,
    Phase,
    SelfTest,
    SelfTestCheck,
    Telemetry,
    TensorError,
)
from harness.store import lines, reader
from harness.store import writer as store_writer
from harness.store.writer import RunWriter
from harness.tests.small_run import CASES, ENVIRONMENT, SUITE, file_size_limit, measured, run_file

CHECKS = (SelfTestCheck(name="spin_kernel", holds=None, fact="NVML does not report the clock"),)
PEAKS = Peaks(flops_per_s={"bf16": 7.9e14}, bytes_per_s=4.1e12, launch_s=2e-6)
PROOF = SelfTest(at="2026-11-21T07:30:13+00:00", device="GPU-6f0c", checks=CHECKS, peaks=PEAKS)


# --- round trip --------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.booleans() | st.integers() | finite | st.text()
POWER = Telemetry(t_s=(0.0, 0.1))
FULL = replace(
    measured(0),
    accuracy=Accuracy(tensors=(TensorError(name="o", error=1e-3, bound=0.1),), sampled=(2, 64)),
    telemetry=replace(
        POWER, channels={"gpu_power_w": (1.0, None)}, unavailable={"rss_bytes": "no"}
    ),
    phases=(Phase(name="timing", start_s=-0.0, end_s=1.0),),
    steady=False,
    flops=2**62,
)


@settings(max_examples=60, deadline=None)
@given(
    detail=st.text(),
    warmup_s=st.lists(st.floats(0.0, 1e9), max_size=3).map(tuple),
    lower_bound_s=st.none() | st.floats(1e-12, 1e9),
    effective=st.dictionaries(st.text(max_size=8), scalars, max_size=4),
)
def test_a_measurement_comes_back_exactly(**drawn: Any) -> None:
    """By repr, which distinguishes True, 1 and 1.0, and 0.0 from -0.0."""
    measurement = replace(FULL, **drawn)

    line = lines.encode(measurement)

    assert repr(lines.decode(line, "here")) == repr(measurement)
    assert line.index(b"\n") == len(line) - 1


def test_a_run_comes_back_exactly(tmp_path: Path, writer: RunWriter) -> None:
    recorded = (measured(0), measured(0, CASES[1]), measured(1, CASES[1]))
    writer.append(PROOF, *recorded)
    writer.finish(wall_s=12.5)

    run = reader.load(tmp_path, writer.run_id)

    assert (run.run_id, run.folder) == (writer.run_id, str(writer.folder))
    assert repr((run.suite, run.environment)) == repr((SUITE, ENVIRONMENT))
    assert run.measurements == recorded
    assert (run.self_test, run.wall_s, run.notes) == (PROOF, 12.5, ())
    assert run.started_at <= run.ended_at != ""
    assert (writer.folder / reader.SUITE_FILE).read_text() == SUITE.text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(writer: RunWriter, bad: float) -> None:
    size = run_file(writer).stat().st_size
    telemetry = replace(POWER, channels={"gpu_power_w": (1.0, bad)})

    with pytest.raises(StoreError, match=r"seq_len=128: telemetry\.channels\.gpu_power_w\[1\] is"):
        writer.append(replace(measured(0), telemetry=telemetry))

    assert run_file(writer).stat().st_size == size


@pytest.mark.parametrize(
    "make",
    [
        lambda: replace(measured(0), tokens=-5),
        lambda: replace(measured(0), samples_s=(float("nan"),)),
        lambda: replace(measured(0), log="/etc/passwd"),
        lambda: Built(tokens=10**400, flops=None),
        lambda: replace(SUITE, cases=CASES[:1] * 2),
    ],
)
def test_an_impossible_value_is_refused_where_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"must be|not a path|same id"):
        make()


def test_text_that_is_not_unicode_is_recorded(tmp_path: Path, writer: RunWriter) -> None:
    writer.append(Measurement(case_id="a", process=0, outcome=Outcome.CRASH, detail="no \udcff"))

    assert reader.load(tmp_path, "latest").measurements[0].detail == "no ?"


# --- disks that are full or read-only ----------------------------------------------------


def test_a_full_disk_loses_nothing_recorded(tmp_path: Path, writer: RunWriter) -> None:
    writer.append(measured(0))
    before = run_file(writer).read_bytes()

    resume = f"--resume {re.escape(str(writer.folder))}"
    with file_size_limit(len(before) + 10), pytest.raises(StoreError, match=resume):
        writer.append(measured(1))

    assert run_file(writer).read_bytes() == before, "the half line is cut off again"
    writer.append(measured(1))
    assert reader.load(tmp_path, "latest").measurements == (measured(0), measured(1))


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()])
def test_a_line_is_synced_as_a_whole_or_left_out(
    writer: RunWriter, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    """Delayed allocation reports a full disk only when the file is synced."""
    before, synced = run_file(writer).read_bytes(), list[bytes]()

    def fails(fd: int) -> None:
        synced.append(run_file(writer).read_bytes())
        raise failure

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(StoreError if isinstance(failure, OSError) else KeyboardInterrupt):
        writer.append(measured(0))

    assert synced == [before + lines.encode(measured(0))]
    assert run_file(writer).read_bytes() == before


@pytest.mark.parametrize(
    ("root", "free_bytes"), [("", 100), ("file", 10**6), ("/proc/runs", 10**6)]
)
def test_a_store_that_cannot_be_made_is_an_error_with_its_path(
    tmp_path: Path, root: str, free_bytes: int
) -> None:
    (tmp_path / "file").touch()

    with file_size_limit(free_bytes), pytest.raises(StoreError, match=root or str(tmp_path)):
        store_writer.create(tmp_path / root, SUITE, ENVIRONMENT)

    assert [path.name for path in tmp_path.iterdir()] == ["file"], "no folder is left"


# --- folders and logs --------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@example("../../etc/passwd", "")
@example("a" * 5000, "a" * 5001)
@given(st.text(), st.text())
def test_each_case_id_gives_its_own_plain_log_name(
    tmp_path_factory: pytest.TempPathFactory, one: str, other: str
) -> None:
    folder = tmp_path_factory.mktemp("run")

    with RunWriter(folder, b"\n") as writer:
        paths = {writer.log_path(case_id, i) for case_id in (one, other) for i in (0, 1)}

    assert len(paths) == (2 if one == other else 4)
    assert {path.parent for path in paths} == {folder / "logs"}
    assert all(re.fullmatch(r"[\w=-][\w.=-]{1,110}", path.name, re.ASCII) for path in paths)


def test_a_log_is_made_again_or_its_error_names_the_run_to_resume(writer: RunWriter) -> None:
    logs = writer.folder / lines.LOG_FOLDER
    shutil.rmtree(logs)
    assert writer.log_path("case", 0).is_file()

    shutil.rmtree(logs)
    logs.touch()
    with pytest.raises(StoreError, match=f"--resume {writer.folder}"):
        writer.log_path("case", 0)


def test_a_run_that_is_removed_while_it_goes_on_is_said_to_be_lost(writer: RunWriter) -> None:
    shutil.rmtree(writer.folder)

    with pytest.raises(StoreError, match=r"removed the run .*\n  Its measurements are lost"):
        writer.append(measured(0))
    with pytest.raises(StoreError, match="removed the run"):
        writer.log_path("case", 0)
