"""How long processes of stored runs lived."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.records import Outcome
from harness.store import reader
from reports.studies import process_overhead


def test_a_process_that_lived_far_longer_than_the_shortest_of_its_case_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lived = {"a": (9.0, 2.0, 2.2), "b": (3.0, 2.9), "alone": (30.0,)}
    measurements = [
        SimpleNamespace(case_id=case, wall_s=wall_s, outcome=Outcome.OK)
        for case, walls in lived.items()
        for wall_s in walls
    ]
    crashed = SimpleNamespace(case_id="b", wall_s=0.1, outcome=Outcome.CRASH)
    run = SimpleNamespace(measurements=[*measurements, crashed])
    monkeypatch.setattr(reader, "load", lambda *_: run)

    row = process_overhead.stored_table(["run"], Path()).splitlines()[-1]

    assert row == "| run | 5 | 2.5 | 1 (20%) | 9.0 |"
