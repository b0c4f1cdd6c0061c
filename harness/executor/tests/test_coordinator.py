"""Blocks are dealt, retried once and merged; no measurement is lost or comes from two GPUs."""

import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import HarnessError
from harness.executor import coordinator as dealing
from harness.executor.coordinator import Coordinator, Dealt
from harness.executor.jobs import BLOCK_S, Attempt, CaseBlock, JobEnd
from harness.executor.tests.fake_nodes import FakeNodes, Plan, measure, suite
from harness.records import Match, Outcome, Rule, Run, Stop
from harness.store import reader, writer
from harness.tests import fake_runs

GPUS = ["GPU-0", "GPU-1"]
LOST = JobEnd(detail="node7: no answer", lost=True)
DONE = 1000, JobEnd()


def deal(
    folder: Path, nodes: FakeNodes, *, expected_s: float = 1.0, resume: bool = False
) -> tuple[Run, list[str]]:
    """Measure the suite of the nodes in a folder, or go on there; the run, and what is said."""
    how = Dealt(executor="local", suite="s.yaml")
    before = reader.load(folder, "latest") if resume else None
    with dealing.begin(nodes.whole, before, how, folder, ["harness", "run", "s.yaml"]) as writing:
        times = {c.case_id: expected_s for c in nodes.whole.cases}
        said: list[str] = []
        Coordinator(writing, nodes, how, expected_s=times, say=said.append).run()
    return reader.load(folder, writing.folder), said


def planned(**by_block: tuple[int, JobEnd | BaseException]) -> Plan:
    """What happens at the first start of these blocks; all others go well."""
    left = dict(by_block)
    return lambda attempt, gpu: left.pop(attempt.block.name, DONE)


def cards(run: Run) -> dict[str, set[str]]:
    """Workload -> the GPUs of its measurements."""
    found: dict[str, set[str]] = {}
    for m in run.measurements:
        if m.outcome is Outcome.OK:
            found.setdefault(m.case_id.partition("/")[0], set()).add(m.card)
    return found


def complete(run: Run) -> bool:
    """Whether each process of each case is recorded once, with its log."""
    count = Counter((m.case_id, m.process) for m in run.measurements if m.outcome is Outcome.OK)
    logs = all(Path(run.folder, m.log).read_text() == m.card for m in run.measurements if m.log)
    return logs and {*count.values()} == {1} and len(count) == 16


def test_a_run_of_two_gpus_says_so_and_no_unit_is_on_both(tmp_path: Path) -> None:
    run, said = deal(tmp_path, FakeNodes(suite(), GPUS))
    assert complete(run)
    assert run.ended_at
    assert sorted(map(sorted, cards(run).values())) == [["GPU-0"], ["GPU-0"], ["GPU-1"], ["GPU-1"]]
    assert [e.card for e in run.environments] == GPUS
    assert run.environment.card == "GPU-0, GPU-1"
    assert run.environment.device_name == "NVIDIA H200"
    assert run.environment.variables == {"NSA_X": "1"}
    assert any("2 GPUs measured this run" in note for note in run.notes)
    assert [line.partition("; ")[2] for line in said[1:]] == ["blocks left: 1", "blocks left: 0"]
    assert not Path(run.folder, dealing.BLOCKS).exists()


def test_a_job_that_died_goes_on_on_its_gpu(tmp_path: Path) -> None:
    nodes = FakeNodes(suite(), GPUS, planned(b001=(6, JobEnd(detail="SIGKILL"))))
    run, said = deal(tmp_path, nodes)
    assert complete(run)
    assert nodes.started == [("b000", "GPU-0"), ("b001", "GPU-1"), ("b001", "GPU-1")]
    cases = [re.findall(r"measured: (\d)", line) for line in said]
    assert cases == [[], ["4"], ["2"], ["2"]]
    assert "; tried again: SIGKILL;" in said[2]


def test_a_job_that_measured_nothing_is_tried_elsewhere(tmp_path: Path) -> None:
    nodes = FakeNodes(suite(), GPUS, planned(b001=(0, JobEnd(detail="failed self-test"))))
    assert complete(deal(tmp_path, nodes)[0])
    assert nodes.started[1:] == [("b001", "GPU-1"), ("b001", "GPU-0")]


def test_a_lost_host_keeps_its_finished_units_and_the_rest_is_measured_elsewhere(
    tmp_path: Path,
) -> None:
    # Process 0 of all four cases, then process 1 in reverse order: the last unit is finished.
    nodes = FakeNodes(suite(), GPUS, planned(b001=(7, LOST)))
    run, _ = deal(tmp_path, nodes)
    assert complete(run)
    assert nodes.jobs[-1].attempt.avoid == "GPU-1"
    assert not Path(run.folder, dealing.BLOCKS).exists()
    assert cards(run) == {"a": {"GPU-0"}, "b": {"GPU-0"}, "c": {"GPU-0"}, "d": {"GPU-1"}}


def test_a_block_that_is_lost_twice_is_reported_with_its_host(tmp_path: Path) -> None:
    def plan(attempt: Attempt, gpu: str) -> tuple[int, JobEnd]:
        measured = 6 if attempt.folder.name == "b001-0" else 1
        return (measured, LOST) if attempt.block.name == "b001" else DONE

    run, _ = deal(tmp_path, FakeNodes(suite(), GPUS, plan))
    lost = [m for m in run.measurements if m.outcome is Outcome.INVALID_ENVIRONMENT]
    # The better attempt is kept: unit d is whole, and c has both cases once.
    assert [m.case_id for m in lost] == ["c/nsa", "c/dense"]
    assert Path(run.folder, dealing.BLOCKS).exists()  # with the logs of the jobs
    assert all("node7" in m.detail for m in lost)
    assert run.ended_at
    assert len(run.measurements) == 8 + 6 + 2
    assert all(len(of) == 1 for of in cards(run).values())


@pytest.mark.parametrize("measured", [0, 3, 7, 8])
def test_a_killed_coordinator_is_resumed_without_loss(tmp_path: Path, measured: int) -> None:
    killed = FakeNodes(suite(), GPUS, planned(b001=(measured, SystemExit())))
    with pytest.raises(SystemExit):
        deal(tmp_path, killed)
    assert all(job.cancelled for job in killed.jobs if job.attempt.block.name == "b001")
    nodes = FakeNodes(suite(), GPUS[::-1])
    run, _ = deal(tmp_path, nodes, resume=True)
    assert complete(run)
    assert all(len(of) == 1 for of in cards(run).values())
    # Nothing is measured again: the block goes on where it was, on its own GPU.
    assert nodes.started == ([] if measured == 8 else [("b001", "GPU-1")])


def test_a_second_attempt_is_the_one_to_go_on_with(tmp_path: Path) -> None:
    tries = {"b001-0": planned(b001=(5, LOST)), "b001-1": planned(b001=(3, SystemExit()))}
    killed = FakeNodes(suite(), GPUS, lambda a, gpu: tries.get(a.folder.name, planned())(a, gpu))
    with pytest.raises(SystemExit):
        deal(tmp_path, killed)
    nodes = FakeNodes(suite(), GPUS, planned(b001=(1, LOST)))
    run, _ = deal(tmp_path, nodes, resume=True)
    assert nodes.started == [("b001", "GPU-0"), ("b001", "GPU-1")]
    assert nodes.jobs[-1].attempt.folder.name == "b001-2"
    assert complete(run)
    assert all(len(of) == 1 for of in cards(run).values())


@pytest.mark.parametrize("entered", [1, 8, 13])
def test_a_coordinator_that_is_killed_while_it_merges_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entered: int
) -> None:
    left, whole = iter(range(entered)), writer.RunWriter.append

    def append(self: writer.RunWriter, *found: Any) -> None:
        for line in found:
            if self.folder.parent == tmp_path and next(left, None) is None:
                raise SystemExit
            whole(self, line)

    monkeypatch.setattr(writer.RunWriter, "append", append)
    with pytest.raises(SystemExit):
        deal(tmp_path, FakeNodes(suite(), GPUS))
    monkeypatch.undo()
    run, _ = deal(tmp_path, FakeNodes(suite(), GPUS), resume=True)
    assert complete(run)
    assert not any("again" in note for note in run.notes)
    assert len(run.environments) == 2


def test_attempts_on_the_disk_are_merged_once(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        deal(tmp_path, FakeNodes(suite(), GPUS, planned(b000=(8, SystemExit()))))
    (folder,) = tmp_path.glob("*")
    ids = tuple(c.case_id for c in suite().cases[:4])
    block = CaseBlock(name="b000", case_ids=ids, expected_s=1.0, limit_s=9.0)
    twice = Attempt(block=block, folder=folder / "blocks" / "b007-0", suite="s.yaml")
    twice.folder.mkdir()
    measure(twice, suite(), "GPU-9", 1000)  # another attempt at the same cases
    run, _ = deal(tmp_path, FakeNodes(suite(), GPUS), resume=True)
    assert complete(run)
    assert "GPU-9" not in run.environment.card


@pytest.mark.parametrize("tries", [1, 2])
def test_a_gpu_of_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tries: int
) -> None:
    def plan(attempt: Attempt, gpu: str) -> tuple[int, JobEnd]:
        nonlocal tries
        monkeypatch.undo()
        if attempt.block.name == "b001" and (tries := tries - 1) >= 0:
            other = replace(fake_runs.H200, name="NVIDIA A100")
            monkeypatch.setattr(fake_runs, "H200", other)
        return DONE

    asked = tries
    run, said = deal(tmp_path, FakeNodes(suite(), GPUS, plan))
    assert {e.device_name for e in run.environments} == {"NVIDIA H200"}
    assert "A100" in said[2]
    lost = [m for m in run.measurements if m.outcome is Outcome.INVALID_ENVIRONMENT]
    assert [len(lost), complete(run)] == ([0, True] if asked == 1 else [4, False])


def test_a_block_of_another_suite_is_refused(tmp_path: Path) -> None:
    asked = suite()
    changed = replace(asked, cases=tuple(replace(c, env={"X": "1"}) for c in asked.cases))
    nodes = FakeNodes(asked, GPUS)

    def plan(attempt: Attempt, gpu: str) -> tuple[int, JobEnd]:
        nodes.whole = changed if attempt.folder.name == "b001-0" else asked
        return DONE

    nodes.plan = plan
    run, said = deal(tmp_path, nodes)
    assert complete(run)
    assert "the suite changed" in said[2]


def test_a_block_does_not_wait_for_a_slot_that_died(tmp_path: Path) -> None:
    def plan(attempt: Attempt, gpu: str) -> tuple[int, JobEnd]:
        if attempt.folder.name != "b001-0":
            return DONE
        nodes.gpus = GPUS[:1]
        return 6, JobEnd(detail="SIGKILL")

    nodes = FakeNodes(suite(), GPUS, plan)
    assert complete(deal(tmp_path, nodes)[0])
    assert nodes.started[-1] == ("b001", "GPU-0")


def test_a_resumption_that_is_refused_starts_afresh(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        deal(tmp_path, FakeNodes(suite(), GPUS, planned(b001=(6, SystemExit()))))
    nodes = FakeNodes(suite(), GPUS, planned(b001=(0, JobEnd(status=2))))
    assert complete(deal(tmp_path, nodes, resume=True)[0])
    assert nodes.started[-1] == ("b001", "GPU-0")


def test_a_suite_that_every_slot_refuses_ends_the_run(tmp_path: Path) -> None:
    refused = JobEnd(detail="error: seq_len is no axis", status=2)
    nodes = FakeNodes(suite(), GPUS, lambda *_: (0, refused))
    with pytest.raises(HarnessError, match="seq_len is no axis"):
        deal(tmp_path, nodes)
    assert len(nodes.started) <= 4


def test_sigterm_ends_the_jobs(tmp_path: Path) -> None:
    def plan(attempt: Attempt, gpu: str) -> tuple[int, JobEnd]:
        os.kill(os.getpid(), signal.SIGTERM)
        return DONE

    with pytest.raises(KeyboardInterrupt):
        deal(tmp_path, FakeNodes(suite(), GPUS, plan))


def test_without_a_slot_the_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="--resume"):
        deal(tmp_path, FakeNodes(suite(), []))
    assert complete(deal(tmp_path, FakeNodes(suite(), GPUS), resume=True)[0])


def test_a_rule_that_is_no_go_ends_the_run_early(tmp_path: Path) -> None:
    match = Match(criteria={"workload": ("d",)})
    rule = Rule(name="fast", metric="tokens_per_s", go=1e9, match=match, abort_early=True)
    nodes = FakeNodes(suite(rules=(rule,)), GPUS[:1])
    run, _ = deal(tmp_path, nodes, expected_s=BLOCK_S / 5)  # a unit is a block
    assert {m.case_id for m in run.measurements} == {"d/nsa", "d/dense"}
    assert run.stopped == Stop(rule="fast")
