"""The study of a large store asks what its store can answer."""

from pathlib import Path

import pytest

from harness.store import index
from harness.tests.indexed import silent
from reports.studies import index_speed


def test_every_question_has_answers_in_a_generated_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index_speed.make(tmp_path, runs=24, cases=8)
    index.rebuild(tmp_path, silent)

    answers = {name: index_speed.ask(tmp_path, name)[2] for name in index_speed.QUESTIONS}

    assert answers["list all runs"] == 24
    assert answers["by GPU"] == 8
    assert answers["history of a case"] == 24
    assert capsys.readouterr().err == ""
