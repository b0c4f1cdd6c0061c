"""Runs on disk: nothing recorded is lost, and nothing else passes for a record."""

import errno
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import lines, store
from harness.errors import StoreError
from harness.records import (
    SCHEMA_VERSION,
    Accuracy,
    Case,
    Clock,
    CostPlan,
    Environment,
    Expectation,
    Git,
    Gpu,
    Match,
    Measurement,
    Outcome,
    Peaks,
    Phase,
    Proof,
    ProofCheck,
    Rule,
    Suite,
    Telemetry,
    TensorError,
)

GPU = Gpu(
    name="NVIDIA H200",
    uuid="GPU-6f0c",
    index=0,
    memory_bytes=150 * 10**9,
    driver="570.86",
    cuda_driver="12.8",
    compute_capability="9.0",
    power_limit_w=700.0,
)
ENVIRONMENT = Environment(
    captured_at="2026-11-21T07:30:12+00:00",
    hostname="node",
    os="Linux",
    cpu="a CPU",
    cpu_count=2,
    memory_bytes=2**33,
    gpu=GPU,
    versions={"torch": "2.11.0", "flash-attn": None},
    torch_settings={"allow_tf32_matmul": True, "num_threads": 2, "allocator": "native"},
    git=Git(commit="3f2a" * 10, branch="main"),
    command=("harness", "run", "smoke"),
)
CASES = tuple(
    Case(
        case_id=f"train/nsa/seq_len={T}",
        workload="train",
        factory="suites.workloads:train",
        provider="nsa",
        axes={"seq_len": T, "gc": False, "lr": 1.0},
        swept=("seq_len",),
        allow={Outcome.TIMEOUT: "slow by design"},
    )
    for T in (128, 256)
)
SUITE = Suite(
    name="smoke",
    title="Smoke",
    subject="Smoke",
    question="Does it run?",
    path="suites/smoke.yaml",
    text="# Does it run?\ntitle: Smoke\n",
    sha256="0" * 64,
    cases=CASES,
    expectations=(Expectation(metric="mfu", low=0.2, match=Match(criteria={"gc": (False,)})),),
    rules=(Rule(name="floor", metric="tokens_per_s", go=500.0, abort=100.0),),
    cost=CostPlan(steps=1000),
)


def measured(process: int, case: Case = CASES[0]) -> Measurement:
    return Measurement(
        case_id=case.case_id,
        process=process,
        outcome=Outcome.OK,
        clock=Clock.HOST,
        samples_s=(0.1, 0.1 + 1e-17, 1 / 3),
        effective={"routes": "gather", "layers": 12, "scale": 1.0},
    )


PROOF = Proof(
    at="2026-11-21T07:30:13+00:00",
    device="GPU-6f0c",
    checks=(ProofCheck(name="spin_kernel", holds=None, fact="NVML does not tell the clock"),),
    peaks=Peaks(flops_per_s={"bf16": 7.9e14}, bytes_per_s=4.1e12, launch_s=2e-6),
    wall_s=2.9,
)


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[store.RunWriter]:
    with store.create(tmp_path, SUITE, ENVIRONMENT) as writer:
        yield writer


def run_file(writer: store.RunWriter) -> Path:
    return writer.folder / store.RUN_FILE


# --- round trip --------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
scalars = st.booleans() | st.integers() | finite | st.text()
names = st.text(max_size=8)


@st.composite
def measurements(draw: st.DrawFn) -> Measurement:
    outcome = draw(st.sampled_from(Outcome))
    time_s = st.floats(min_value=1e-9, max_value=1e9)
    return Measurement(
        case_id=draw(names),
        process=draw(st.integers(0, 9)),
        outcome=outcome,
        detail=draw(st.text()),
        clock=draw(st.none() | st.sampled_from(Clock)),
        warmup_s=draw(st.lists(finite, max_size=3).map(tuple)),
        samples_s=tuple(draw(st.lists(time_s, min_size=1, max_size=3)))
        if outcome is Outcome.OK
        else (),
        steady=draw(st.none() | st.booleans()),
        flops=draw(st.none() | st.integers(0)),
        lower_bound_s=draw(st.none() | finite),
        accuracy=draw(
            st.none()
            | st.builds(
                Accuracy,
                tensors=st.lists(
                    st.builds(TensorError, name=names, error=finite, bound=finite), max_size=2
                ).map(tuple),
                skipped=names,
            )
        ),
        effective=draw(st.dictionaries(names, scalars, max_size=4)),
        telemetry=draw(
            st.none()
            | st.builds(
                Telemetry,
                t_s=st.lists(finite, max_size=2).map(tuple),
                channels=st.dictionaries(
                    names, st.lists(st.none() | finite, max_size=2).map(tuple), max_size=2
                ),
                unavailable=st.dictionaries(names, names, max_size=2),
            )
        ),
        phases=draw(
            st.lists(st.builds(Phase, name=names, start_s=finite, end_s=finite), max_size=2).map(
                tuple
            )
        ),
    )


@settings(max_examples=150, deadline=None)
@given(measurements())
def test_a_measurement_comes_back_exactly(measurement: Measurement) -> None:
    """By repr, which also tells True from 1 and 1 from 1.0, and 0.0 from -0.0."""
    line = lines.encode(measurement)

    assert repr(lines.decode(line, "here")) == repr(measurement)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")


def test_a_run_comes_back_exactly(tmp_path: Path, writer: store.RunWriter) -> None:
    recorded = (measured(0), measured(0, CASES[1]), measured(1, CASES[1]))
    for measurement in recorded:
        writer.append(measurement)
    writer.finish()

    run = store.load(tmp_path, writer.run_id)

    assert (run.run_id, run.folder) == (writer.run_id, str(writer.folder))
    assert repr((run.suite, run.environment)) == repr((SUITE, ENVIRONMENT))
    assert run.measurements == recorded
    assert run.started_at
    assert run.ended_at
    assert run.notes == ()
    assert (writer.folder / store.SUITE_FILE).read_text() == SUITE.text


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused_by_name(writer: store.RunWriter, bad: float) -> None:
    size = run_file(writer).stat().st_size
    telemetry = Telemetry(t_s=(0.0, 0.1), channels={"gpu_power_w": (1.0, bad)})

    with pytest.raises(StoreError, match=r"seq_len=128: telemetry\.channels\.gpu_power_w\[1\] is"):
        writer.append(replace(measured(0), telemetry=telemetry))

    assert run_file(writer).stat().st_size == size


def test_text_that_is_no_unicode_is_recorded_all_the_same(
    tmp_path: Path, writer: store.RunWriter
) -> None:
    """A worker's message may quote a file name of raw bytes."""
    writer.append(Measurement(case_id="a", process=0, outcome=Outcome.CRASH, detail="no \udcff"))

    assert store.load(tmp_path, "latest").measurements[0].detail == "no ?"


# --- crashes -----------------------------------------------------------------------------


def test_a_crash_at_any_byte_loses_at_most_the_case_in_flight(
    tmp_path: Path, writer: store.RunWriter
) -> None:
    recorded = [measured(0), measured(1)]
    ends = [run_file(writer).stat().st_size]
    for measurement in recorded:
        writer.append(measurement)
        ends.append(run_file(writer).stat().st_size)
    writer.finish()
    whole = run_file(writer).read_bytes()

    in_first_line = range(0, ends[0], 50)
    for size in (*in_first_line, *range(ends[0] - 1, len(whole))):
        run_file(writer).write_bytes(whole[:size])
        if size < ends[0]:
            with pytest.raises(StoreError, match="before it measured anything"):
                store.load(tmp_path, "latest")
            continue
        run = store.load(tmp_path, "latest")
        complete = sum(end <= size for end in ends[1:])
        assert run.measurements == tuple(recorded[:complete])
        assert not run.ended_at
        assert bool(run.notes) == (size not in ends), "a cut line is noted, and only that"


def test_resume_cuts_the_file_back_and_goes_on(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.append(measured(0))
    writer.append(measured(1))
    writer.close()
    data = run_file(writer).read_bytes()
    run_file(writer).write_bytes(data[:-7])

    resumed, run = store.resume(tmp_path, writer.run_id, notes=["Another commit."])
    with resumed:
        assert run.measurements == (measured(0),)
        resumed.append(measured(1))
        resumed.finish()

    after = store.load(tmp_path, writer.run_id)
    assert after.measurements == (measured(0), measured(1))
    assert after.ended_at
    assert re.fullmatch("Resumed at .* after 1 measurements.", after.notes[0])
    assert "cut short" in after.notes[1]
    assert after.notes[2] == "Another commit."
    assert run.notes == after.notes


def test_resume_uses_the_suite_as_it_was(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.close()
    (writer.folder / store.SUITE_FILE).write_text("title: edited since\n")

    resumed, run = store.resume(tmp_path, "latest")
    resumed.close()

    assert run.suite == SUITE


def test_a_finished_run_is_not_resumed(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.finish()
    before = run_file(writer).read_bytes()

    for _ in range(2):  # a refusal must also let go of the lock
        with pytest.raises(StoreError, match=r"finished at .*\n.*harness run suites/smoke.yaml"):
            store.resume(tmp_path, writer.run_id)

    assert run_file(writer).read_bytes() == before


def test_a_second_writer_is_refused(tmp_path: Path, writer: store.RunWriter) -> None:
    with pytest.raises(StoreError, match="is being written by another process"):
        store.resume(tmp_path, writer.run_id)

    writer.close()
    store.resume(tmp_path, writer.run_id)[0].close()


# --- disks that are full, absent or read-only --------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Files cannot grow past `size`: the kernel writes up to it, then fails, as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_loses_nothing_recorded(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.append(measured(0))
    before = run_file(writer).read_bytes()

    with (
        file_size_limit(len(before) + 10),
        pytest.raises(
            StoreError,
            match=f"All measurements before are safe.*--resume {re.escape(str(writer.folder))}",
        ),
    ):
        writer.append(measured(1))

    assert run_file(writer).read_bytes() == before, "the half line is cut off again"
    writer.append(measured(1))
    assert store.load(tmp_path, "latest").measurements == (measured(0), measured(1))


def test_a_failed_sync_is_a_failed_write(
    writer: store.RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delayed allocation reports a full disk only here."""
    before = run_file(writer).read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="No space left on device"):
        writer.append(measured(0))

    assert run_file(writer).read_bytes() == before


def test_every_line_is_synced_before_append_returns(
    writer: store.RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda fd: sizes.append(os.fstat(fd).st_size))

    writer.append(measured(0))

    assert sizes == [run_file(writer).stat().st_size]


def test_ctrl_c_within_a_write_leaves_no_half_line(
    writer: store.RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run_file(writer).read_bytes()

    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        writer.append(measured(0))

    assert run_file(writer).read_bytes() == before


def test_a_disk_too_full_to_begin_leaves_no_folder_behind(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(StoreError, match="cannot begin a run in"):
        store.create(tmp_path, SUITE, ENVIRONMENT)

    assert list(tmp_path.iterdir()) == []


def test_a_root_that_is_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")

    with pytest.raises(StoreError, match="runs exists already\n  Name a folder"):
        store.create(tmp_path / "runs", SUITE, ENVIRONMENT)


def test_a_root_that_cannot_be_made_is_one_clear_error() -> None:
    """/proc refuses new folders to everybody, root included."""
    with pytest.raises(StoreError, match="cannot begin a run in /proc/runs: "):
        store.create(Path("/proc/runs"), SUITE, ENVIRONMENT)


def test_two_runs_of_one_name_do_not_share_a_folder(
    tmp_path: Path, writer: store.RunWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append(measured(0))
    monkeypatch.setattr(store, "_run_id", lambda *_: writer.run_id)

    with pytest.raises(StoreError, match="exists already"):
        store.create(tmp_path, SUITE, ENVIRONMENT)

    assert store.load(tmp_path, "latest").measurements == (measured(0),)


# --- damage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        pytest.param(b"{", id="half an object"),
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b"[]", id="no object"),
        pytest.param(b'{"kind": "measurment"}', id="unknown kind"),
        pytest.param(b'{"kind": "end"}', id="fields missing"),
        pytest.param(b'{"kind": "end", "at": "", "measurements": "many"}', id="wrong type"),
        pytest.param(
            b'{"kind": "measurement", "case_id": "a", "process": 0, "outcome": "crash", '
            b'"wall_s": NaN}',
            id="NaN",
        ),
        pytest.param(
            b'{"kind": "measurement", "case_id": "a", "process": 0, "outcome": "ok"}',
            id="ok without samples",
        ),
    ],
)
def test_garbage_in_the_middle_is_an_error_with_its_line(
    tmp_path: Path, writer: store.RunWriter, garbage: bytes
) -> None:
    writer.append(measured(0))
    first, second, _ = run_file(writer).read_bytes().split(b"\n")
    run_file(writer).write_bytes(b"\n".join((first, garbage, second, b"")))

    with pytest.raises(StoreError, match=r"run\.jsonl:2: .*\n  The file is damaged"):
        store.load(tmp_path, "latest")


def test_lines_after_the_end_are_damage(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.finish()
    with run_file(writer).open("ab") as file:
        file.write(lines.encode(measured(0)))

    with pytest.raises(StoreError, match=r"run\.jsonl:3: nothing may follow the end"):
        store.load(tmp_path, "latest")


def test_a_repeated_line_counts_once_and_is_noted(tmp_path: Path, writer: store.RunWriter) -> None:
    writer.append(measured(0))
    writer.append(replace(measured(0), samples_s=(9.0,)))

    run = store.load(tmp_path, "latest")

    assert run.measurements == (measured(0),)
    assert run.notes == (
        "train/nsa/seq_len=128, process 0, was recorded again on line 3; the first record counts.",
    )


def test_a_later_schema_is_refused_with_both_versions(
    tmp_path: Path, writer: store.RunWriter
) -> None:
    first = json.loads(run_file(writer).read_text())
    run_file(writer).write_text(json.dumps(first | {"schema": SCHEMA_VERSION + 1}) + "\n")

    with pytest.raises(
        StoreError, match=f"has schema {SCHEMA_VERSION + 1}.* reads up to {SCHEMA_VERSION}"
    ):
        store.load(tmp_path, "latest")


# --- names -------------------------------------------------------------------------------


def test_run_ids_sort_by_time_and_say_what_and_where(writer: store.RunWriter) -> None:
    assert re.fullmatch(r"20\d{6}-\d{6}-smoke-h200-[0-9a-f]{4}", writer.run_id)


def make_runs(root: Path, *run_ids: str) -> None:
    for run_id in run_ids:
        line = lines.encode(
            lines.Started(
                schema=SCHEMA_VERSION,
                run_id=run_id,
                started_at="",
                environment=ENVIRONMENT,
                suite=SUITE,
            )
        )
        (root / run_id).mkdir()
        (root / run_id / store.RUN_FILE).write_bytes(line)


def test_a_run_is_found_by_id_prefix_latest_and_path(tmp_path: Path) -> None:
    make_runs(tmp_path, "20260102-b", "20260101-a", "20260101-ab")

    folder = tmp_path / "20260101-a"

    assert store.load(tmp_path, "20260101-a").run_id == "20260101-a", "exact before prefix"
    assert store.load(tmp_path, "20260102").run_id == "20260102-b"
    assert store.load(tmp_path, "latest").run_id == "20260102-b"
    assert store.load(Path("elsewhere"), folder).run_id == "20260101-a"
    assert store.load(Path("elsewhere"), str(folder / store.RUN_FILE)).run_id == "20260101-a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20260101", "fits 2 runs of .*\n  There are 20260101-a, 20260101-ab"),
        ("20260103-b", "has no run '20260103-b'\n  There .*20260102-b"),
        ("nothing like it", "has no run .*\n  There are 20260101-a, 20260101-ab, 20260102-b"),
    ],
)
def test_a_name_that_fits_no_single_run_lists_near_ones(
    tmp_path: Path, name: str, message: str
) -> None:
    make_runs(tmp_path, "20260101-a", "20260101-ab", "20260102-b")

    with pytest.raises(StoreError, match=message):
        store.load(tmp_path, name)


def test_without_runs_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no runs\n  `harness run`"):
        store.load(tmp_path / "absent", "latest")
    assert store.headers(tmp_path / "absent") == ()


def test_headers_list_every_run_even_a_broken_one(tmp_path: Path) -> None:
    make_runs(tmp_path, "20260101-unfinished", "20260103-broken")
    with store.create(tmp_path, SUITE, ENVIRONMENT) as writer:
        writer.append(measured(0))
        writer.finish()
    (tmp_path / "20260103-broken" / store.RUN_FILE).write_bytes(b'{"kind": "ru')

    unfinished, broken, finished = store.headers(tmp_path)

    states = [header.state for header in (unfinished, broken, finished)]
    assert states == ["unfinished", "unreadable", "complete"]
    assert (unfinished.ended_at, unfinished.measurements, unfinished.problem) == ("", None, "")
    assert "before it measured anything" in broken.problem
    assert (finished.suite, finished.device, finished.commit[:4]) == ("smoke", GPU.name, "3f2a")
    assert (finished.cases, finished.measurements) == (2, 1)
    assert finished.ended_at


def test_headers_do_not_read_the_measurements(tmp_path: Path, writer: store.RunWriter) -> None:
    """Checked with a damaged one, which only `load` must find."""
    with run_file(writer).open("ab") as file:
        file.write(b"damage\n" * store.TAIL_BYTES)
        file.write(lines.encode(lines.Ended(at="today", measurements=7)))

    (header,) = store.headers(tmp_path)

    assert (header.ended_at, header.measurements, header.problem) == ("today", 7, "")


@settings(deadline=None)
@given(st.text(), st.text())
def test_any_case_id_gives_its_own_plain_log_name(
    tmp_path_factory: pytest.TempPathFactory, one: str, other: str
) -> None:
    folder = tmp_path_factory.mktemp("run")
    writer = store.RunWriter("run", folder, fd=-1, recorded=0)

    paths = {writer.log_path(case_id, process) for case_id in (one, other) for process in (0, 1)}

    assert len(paths) == (2 if one == other else 4)
    for path in paths:
        assert path.parent == folder / "logs"
        assert re.fullmatch(r"[\w=-][\w.=-]{1,110}", path.name, re.ASCII)


@pytest.mark.parametrize("case_id", ["../../etc/passwd", "/etc/passwd", "..", "a" * 5000, ""])
def test_a_log_stays_in_its_folder(writer: store.RunWriter, case_id: str) -> None:
    path = writer.log_path(case_id, 3)

    path.write_text("output")

    assert not path.name.startswith(".")
    assert path.resolve().parent == (writer.folder / store.LOG_FOLDER).resolve()


def test_a_log_can_be_written_after_all_logs_were_removed(writer: store.RunWriter) -> None:
    shutil.rmtree(writer.folder / store.LOG_FOLDER)

    assert writer.log_path("case", 0).is_file()


def test_a_log_that_cannot_be_made_names_the_run_to_resume(writer: store.RunWriter) -> None:
    shutil.rmtree(writer.folder / store.LOG_FOLDER)
    (writer.folder / store.LOG_FOLDER).write_text("in the way")

    with pytest.raises(StoreError, match=rf"(?s)cannot write .*--resume {writer.folder}"):
        writer.log_path("case", 0)


def test_the_proof_stands_before_the_measurements_and_is_read_again(
    writer: store.RunWriter,
) -> None:
    writer.append_proof(PROOF)
    writer.append(measured(0))
    writer.finish(wall_s=12.5)

    run = store.load(writer.folder.parent, writer.run_id)

    kinds = [json.loads(line)["kind"] for line in run_file(writer).read_text().splitlines()]
    assert kinds == ["run", "proof", "measurement", "end"]
    assert (run.proof, run.wall_s) == (PROOF, 12.5)


def test_a_run_of_schema_1_has_no_proof_and_no_times_of_samples(writer: store.RunWriter) -> None:
    """Its lines lack every field that came later."""
    writer.append(measured(0))
    writer.finish()
    lines_of_1 = []
    for line in map(json.loads, run_file(writer).read_text().splitlines()):
        if line["kind"] == "run":
            line["schema"] = 1
            for case in line["suite"]["cases"]:
                for setting in ("rotate_inputs", "graph", "telemetry"):
                    del case["settings"][setting]
        if line["kind"] == "end":
            del line["wall_s"]
        if line["kind"] == "measurement":
            line = {k: v for k, v in line.items() if k not in ("samples_at_s", "discarded")}
        lines_of_1.append(json.dumps(line))
    run_file(writer).write_text("\n".join(lines_of_1) + "\n")

    run = store.load(writer.folder.parent, writer.run_id)

    assert (run.proof, run.wall_s) == (None, None)
    assert run.measurements[0].kept_s == run.measurements[0].samples_s
    assert run.suite.cases[0].settings.telemetry
