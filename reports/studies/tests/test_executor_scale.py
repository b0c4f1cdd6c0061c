"""The simulated coordinator merges what its GPUs measured."""

from pathlib import Path

import pytest

from reports.studies import executor_scale


def test_every_process_is_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_scale, "LOST", 4)
    rows = dict(executor_scale.simulate(4, 4, tmp_path))
    assert rows["cases, processes"] == "16, 48"
    assert rows["GPUs, jobs"] == "4, 10"
    assert rows["files of the merged run"] == "50"
