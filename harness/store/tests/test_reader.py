"""Runs read back and gone on with: a cut or damaged file passes for no more than it holds."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.records import SCHEMA_VERSION
from harness.store import lines, reader
from harness.store.writer import RunWriter, resume
from harness.tests.small_run import ENVIRONMENT, SUITE, measured, run_file

# --- crashes -----------------------------------------------------------------------------


def test_a_crash_at_any_byte_loses_at_most_the_case_in_flight(
    tmp_path: Path, writer: RunWriter
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
            with pytest.raises(StoreError, match=reader.RUN_FILE):
                reader.load(tmp_path, "latest")
            continue
        run = reader.load(tmp_path, "latest")
        complete = sum(end <= size for end in ends[1:])
        assert run.measurements == tuple(recorded[:complete])
        assert not run.ended_at
        assert bool(run.notes) == (size not in ends), "a cut line is noted, and only that"


def test_resume_cuts_the_file_back_and_goes_on(tmp_path: Path, writer: RunWriter) -> None:
    writer.append(measured(0))
    writer.append(measured(1))
    writer.close()
    data = run_file(writer).read_bytes()
    run_file(writer).write_bytes(data[:-7])

    resumed, run = resume(tmp_path, writer.run_id, notes=["Another commit."])
    with resumed:
        assert run.measurements == (measured(0),)
        resumed.append(measured(1))
        resumed.finish()

    after = reader.load(tmp_path, writer.run_id)
    assert after.measurements == (measured(0), measured(1))
    assert after.ended_at
    assert re.fullmatch("Resumed at .* after 1 measurements.", after.notes[0])
    assert "cut short" in after.notes[1]
    assert after.notes[2] == "Another commit."
    assert run.notes == after.notes


def test_resume_uses_the_suite_as_it_was(tmp_path: Path, writer: RunWriter) -> None:
    writer.close()
    (writer.folder / reader.SUITE_FILE).write_text("title: edited since\n")

    resumed, run = resume(tmp_path, "latest")
    resumed.close()

    assert run.suite == SUITE


def test_a_finished_run_is_not_resumed(tmp_path: Path, writer: RunWriter) -> None:
    writer.finish()
    before = run_file(writer).read_bytes()

    for _ in range(2):  # a refusal must also let go of the lock
        with pytest.raises(StoreError, match=r"harness run suites/smoke.yaml"):
            resume(tmp_path, writer.run_id)

    assert run_file(writer).read_bytes() == before


def test_a_second_writer_is_refused(tmp_path: Path, writer: RunWriter) -> None:
    with pytest.raises(StoreError, match=writer.run_id):
        resume(tmp_path, writer.run_id)

    writer.close()
    resume(tmp_path, writer.run_id)[0].close()


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
    tmp_path: Path, writer: RunWriter, garbage: bytes
) -> None:
    writer.append(measured(0))
    first, second, _ = run_file(writer).read_bytes().split(b"\n")
    run_file(writer).write_bytes(b"\n".join((first, garbage, second, b"")))

    with pytest.raises(StoreError, match=r"run\.jsonl:2: "):
        reader.load(tmp_path, "latest")


def test_lines_after_the_end_are_damage(tmp_path: Path, writer: RunWriter) -> None:
    writer.finish()
    with run_file(writer).open("ab") as file:
        file.write(lines.encode(measured(0)))

    with pytest.raises(StoreError, match=r"run\.jsonl:3: "):
        reader.load(tmp_path, "latest")


def test_a_repeated_line_counts_once_and_is_noted(tmp_path: Path, writer: RunWriter) -> None:
    writer.append(measured(0))
    writer.append(replace(measured(0), samples_s=(9.0,)))

    run = reader.load(tmp_path, "latest")

    assert run.measurements == (measured(0),)
    assert run.notes == (
        "train/nsa/seq_len=128, process 0, was recorded again on line 3; the first record counts.",
    )


# --- other schemas -----------------------------------------------------------------------


def test_a_later_schema_is_refused_with_both_versions(tmp_path: Path, writer: RunWriter) -> None:
    first = json.loads(run_file(writer).read_text())
    run_file(writer).write_text(json.dumps(first | {"schema": SCHEMA_VERSION + 1}) + "\n")

    with pytest.raises(StoreError, match=f"{SCHEMA_VERSION + 1}.* {SCHEMA_VERSION}\n"):
        reader.load(tmp_path, "latest")


def test_a_run_of_schema_1_has_no_proof_and_no_times_of_samples(writer: RunWriter) -> None:
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

    run = reader.load(writer.folder.parent, writer.run_id)

    assert (run.proof, run.wall_s) == (None, None)
    assert run.measurements[0].kept_s == run.measurements[0].samples_s
    assert run.suite.cases[0].settings.telemetry


# --- names -------------------------------------------------------------------------------


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
        (root / run_id / reader.RUN_FILE).write_bytes(line)


def test_a_run_is_found_by_id_prefix_latest_and_path(tmp_path: Path) -> None:
    make_runs(tmp_path, "20260102-b", "20260101-a", "20260101-ab")

    folder = tmp_path / "20260101-a"

    assert reader.load(tmp_path, "20260101-a").run_id == "20260101-a", "exact before prefix"
    assert reader.load(tmp_path, "20260102").run_id == "20260102-b"
    assert reader.load(tmp_path, "latest").run_id == "20260102-b"
    assert reader.load(Path("elsewhere"), folder).run_id == "20260101-a"
    assert reader.load(Path("elsewhere"), str(folder / reader.RUN_FILE)).run_id == "20260101-a"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("20260101", "'20260101'.*\n.*20260101-a, 20260101-ab"),
        ("20260103-b", "'20260103-b'\n.*20260102-b"),
        ("nothing like it", "'nothing like it'\n.*20260101-a, 20260101-ab, 20260102-b"),
    ],
)
def test_a_name_that_fits_no_single_run_lists_near_ones(
    tmp_path: Path, name: str, message: str
) -> None:
    make_runs(tmp_path, "20260101-a", "20260101-ab", "20260102-b")

    with pytest.raises(StoreError, match=message):
        reader.load(tmp_path, name)


def test_without_runs_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="harness run"):
        reader.load(tmp_path / "absent", "latest")
