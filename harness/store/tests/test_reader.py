"""Runs read back and resumed, also from incomplete and damaged files."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import StoreError
from harness.records import Stop
from harness.store import lines, reader
from harness.store.writer import RunWriter, create, resume
from harness.tests.small_run import ENVIRONMENT, GPU, SUITE, measured, run_file

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

    around = {end + i for end in (*ends, len(whole) - 2) for i in (-1, 0, 1)}
    for size in sorted({*range(0, len(whole), 101), *around}):
        run_file(writer).write_bytes(whole[:size])
        if size < ends[0]:
            with pytest.raises(StoreError, match=reader.RUN_FILE):
                reader.load(tmp_path, "latest")
            continue
        run = reader.load(tmp_path, "latest")
        complete = sum(end <= size for end in ends[1:])
        assert run.measurements == tuple(recorded[:complete])
        assert not run.ended_at
        assert bool(run.notes) == (size not in ends), "only an incomplete line is noted"


def test_resume_drops_an_incomplete_line_and_continues_with_the_stored_suite(
    tmp_path: Path, writer: RunWriter
) -> None:
    writer.append(measured(0), measured(1))
    writer.close()
    data = run_file(writer).read_bytes()[:-7]
    run_file(writer).write_bytes(data)
    (writer.folder / reader.SUITE_FILE).write_text("title: edited since\n")

    resumed, run = resume(tmp_path, writer.run_id, notes=["Another commit."])
    with resumed:
        assert (run.suite, run.measurements) == (SUITE, (measured(0),))
        resumed.append(measured(1))
        resumed.finish()

    after = reader.load(tmp_path, writer.run_id)
    assert (after.measurements, bool(after.ended_at)) == ((measured(0), measured(1)), True)
    resumed_note, cut_note, given = run.notes
    assert "after 1 measurements" in resumed_note
    assert f"({len(data) - data.rindex(bytes([10])) - 1} bytes)" in cut_note
    assert (given, after.notes) == ("Another commit.", run.notes)


def test_each_process_of_a_run_that_goes_on_elsewhere_names_its_gpu(
    tmp_path: Path, writer: RunWriter
) -> None:
    writer.append(replace(measured(0), card=writer.card))
    writer.close()
    there = replace(ENVIRONMENT, gpu=replace(GPU, uuid="there"))
    for process, place in enumerate((there, ENVIRONMENT, there), 1):
        resumed, _ = resume(tmp_path, writer.run_id, here=place)
        with resumed:
            resumed.append(replace(measured(process), card=resumed.card))

    run = reader.load(tmp_path, writer.run_id)
    assert [m.card for m in run.measurements] == [ENVIRONMENT.card, "there"] * 2
    assert [e.card for e in run.environments] == [ENVIRONMENT.card, "there"]
    assert "2 GPUs measured this run" in run.notes[-1]


def test_a_stopped_run_is_complete_until_it_is_resumed(tmp_path: Path, writer: RunWriter) -> None:
    stop = Stop(rule="floor")
    writer.append(measured(0))
    with pytest.raises(StoreError, match=f"{writer.run_id} is being written"):
        resume(tmp_path, writer.run_id)
    writer.finish(stopped=stop, wall_s=2.0)
    before = reader.load(tmp_path, writer.run_id)

    with resume(tmp_path, writer.run_id)[0] as again:
        during = reader.load(tmp_path, writer.run_id)
        again.append(measured(1))
        again.finish()
    after = reader.read(writer.folder)

    assert (before.stopped, before.wall_s, bool(before.ended_at)) == (stop, 2.0, True)
    assert (during.stopped, during.wall_s, during.ended_at) == (None, None, "")
    assert (after.stopped, bool(after.ended_at), len(after.measurements)) == (None, True, 2)
    for _ in range(2):  # a refusal must also release the lock
        with pytest.raises(StoreError, match=r"cannot be continued\n.* run suites/smoke\.yaml"):
            resume(tmp_path, writer.run_id)
    assert reader.read(writer.folder) == after


# --- damage ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "garbage",
    [
        b"{",
        b"\xff\xfe",
        b'{"kind": "measurment"}',
        b'{"kind": "end", "at": "", "measurements": "many"}',
        b'{"kind": "measurement", "case_id": "a", "process": 0, "outcome": "hang", "wall_s": NaN}',
        b'{"kind": "measurement", "case_id": "a", "process": 0, "outcome": "ok"}',  # no samples
    ],
)
def test_a_damaged_line_is_an_error_with_its_number(
    tmp_path: Path, writer: RunWriter, garbage: bytes
) -> None:
    writer.append(measured(0))
    first, second, _ = run_file(writer).read_bytes().split(b"\n")
    run_file(writer).write_bytes(b"\n".join((first, garbage, second, b"")))

    with pytest.raises(StoreError, match=r"run\.jsonl:2: "):
        reader.load(tmp_path, "latest")


@pytest.mark.parametrize("stop", [None, Stop(budget_s=60.0)])
def test_only_a_resumed_run_goes_on(tmp_path: Path, writer: RunWriter, stop: Stop | None) -> None:
    writer.finish(stopped=stop)
    with run_file(writer).open("ab") as file:
        file.write(lines.encode(measured(0)))

    with pytest.raises(StoreError, match=r"run\.jsonl:3: .*follows the end"):
        reader.load(tmp_path, "latest")


def test_a_repeated_line_counts_once_and_is_noted(tmp_path: Path, writer: RunWriter) -> None:
    writer.append(measured(0), replace(measured(0), samples_s=(9.0,)))

    run = reader.load(tmp_path, "latest")

    assert run.measurements == (measured(0),)
    assert ["line 3" in note for note in run.notes] == [True]


@pytest.mark.parametrize("schema", [3, 99, "4"])
def test_a_run_of_another_schema_is_refused(writer: RunWriter, schema: object) -> None:
    first, *_ = run_file(writer).read_bytes().splitlines()
    other = json.dumps(json.loads(first) | {"schema": schema}).encode()

    with pytest.raises(StoreError, match=f"schema {schema!r}; .* reads schema 4\n.*git log -S"):
        lines.decode(other, "place")


# --- names -------------------------------------------------------------------------------


def make_runs(root: Path, *names: str) -> None:
    for name in names:
        with create(root, SUITE, ENVIRONMENT) as made:
            made.folder.rename(root / name)


def test_a_run_is_found_by_id_prefix_latest_and_path(tmp_path: Path) -> None:
    make_runs(tmp_path, "20260102-b", "20260101-a", "20260101-ab")
    folder = tmp_path / "20260101-a"

    assert reader.find(tmp_path, "20260101-a") == folder, "exact before prefix"
    assert reader.find(tmp_path, "20260102").name == "20260102-b"
    assert reader.find(tmp_path, "latest").name == "20260102-b"
    assert reader.find(Path("elsewhere"), folder) == folder
    assert reader.find(Path("elsewhere"), str(folder / reader.RUN_FILE)) == folder


def test_a_name_that_is_not_one_run_lists_similar_ones(tmp_path: Path) -> None:
    make_runs(tmp_path, "20260101-a", "20260101-ab", "20260102-b")

    for name, similar in (
        ("20260101", "20260101-a, 20260101-ab"),
        ("20260103-b", "20260102-b"),
        ("nothing like it", "20260101-a, 20260101-ab, 20260102-b"),
    ):
        with pytest.raises(StoreError, match=f"'{name}'.*\n.*: {similar}"):
            reader.load(tmp_path, name)


def test_the_runs_of_a_store_are_read_and_a_damaged_one_harms_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_runs(tmp_path, "a", "b", "c", "d")
    (tmp_path / "b" / reader.RUN_FILE).write_bytes(b"{}\n")
    with (tmp_path / "c" / reader.RUN_FILE).open("ab") as file:
        file.write(b"{\n")
    said: list[str] = []

    found = [Path(run.folder).name for run in reader.stored(tmp_path, said.append)]
    monkeypatch.setattr(reader, "read", None)
    unwanted = [*reader.stored(tmp_path, print, lambda run: run.suite != SUITE)]

    assert found == ["a", "d"]
    first, second = said
    assert "b/run.jsonl:1: " in first
    assert "c/run.jsonl:2: " in second
    assert unwanted == [], "without their measurements"
    with pytest.raises(StoreError, match="harness run"):
        reader.load(tmp_path / "absent", "latest")
