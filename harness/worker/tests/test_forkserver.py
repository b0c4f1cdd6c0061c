"""What the forkserver imports before it forks."""

import importlib
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from harness.runner.forkserver import MAX_REPLY_BYTES
from harness.worker import forkserver


def test_the_code_under_test_is_on_the_path_only_for_its_own_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(
        "importlib.import_module", lambda name: seen.append((name, sys.path[0] == str(tmp_path)))
    )

    forkserver._preload(["own"], [str(tmp_path)])

    assert seen == [(forkserver.DYNAMO, False), ("own", True)]


@pytest.mark.parametrize("driver", ["/dev/null", "/dev/absent"])
def test_triton_is_hashed_before_the_fork_where_a_gpu_may_run_it(
    driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = Mock()
    monkeypatch.setattr(importlib.import_module(forkserver.TRITON_CACHE), "triton_key", hashed)
    monkeypatch.setattr(forkserver, "DRIVERS", (driver,))

    forkserver.prepare()

    assert hashed.called is (driver == "/dev/null")


def test_a_module_that_cannot_be_imported_is_the_reason_not_to_preload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.py").write_text("import sys; sys.exit(3)")
    monkeypatch.syspath_prepend(tmp_path)

    assert "no_such_module" in forkserver._preload(["no_such_module"])
    assert forkserver._preload(["leaves"]) == "SystemExit: 3"
    reply = {"preloaded": forkserver._preload(["\0" * 10**6])}
    assert len(json.dumps(reply)) < MAX_REPLY_BYTES
