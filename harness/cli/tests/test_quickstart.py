"""The page "Your own training script in five minutes", followed to the letter in a fresh folder."""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.records import Outcome
from harness.store.reader import load
from harness.tests.command_line import harness

README = Path(__file__).resolve().parents[2] / "README.md"

QUICK = ("--set", "measure.sample_s=0.1", "--set", "measure.warmup_s=0.1", "--no-self-test")
"""Beside the page's options."""


def blocks(language: str) -> list[str]:
    """The page's code blocks of a language."""
    text = README.read_text(encoding="utf-8")
    section = text.partition("## Your own training script in five minutes\n")[2]
    section = section.partition("\n## ")[0]
    return re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)


@dataclass(frozen=True)
class Followed:
    folder: Path
    said: tuple[str, ...]
    report: str
    appendix: str


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The files and the output of a reader who followed the page."""
    folder = tmp_path_factory.mktemp("fresh")
    for name, language in (("train.py", "python"), ("train.yaml", "yaml")):
        (folder / name).write_text(blocks(language)[0])
    said = []
    for line in blocks("bash")[0].splitlines():
        program, *arguments = shlex.split(line)
        assert program == "harness"
        answer = harness(*arguments, *QUICK, cwd=folder, env={"COLUMNS": "160"})
        assert answer.returncode == 0, answer.stderr + answer.stdout
        said.append(answer.stdout)
    (report,) = folder.glob("reports/*.md")
    (appendix,) = folder.glob("reports/figures/*-appendix.md")
    pages = [page.read_text(encoding="utf-8") for page in (report, appendix)]
    return Followed(folder, tuple(said), *pages)


def test_the_plan_and_the_run_show_commands_speed_and_loss(followed: Followed) -> None:
    plan, said = followed.said

    assert all(f"python train.py --batch 8 --length {n}" in plan for n in (32, 128))
    assert re.search(r"train/program/length=32 +ok +[\d,]+ +\S+ m?s +\d\.\d+", said), said
    assert "tokens/s" in said
    assert "loss (nats)" in said
    assert "train runs: python train.py --batch 8 --length 32 (in " in said
    assert f"python is that of the harness, by {{python}} in the suite: {sys.executable}" in said
    assert "a program has no reference: outputs are not checked" in followed.report
    assert "Verdict  measured" in said
    assert f"python train.py --batch 8 --length 32 (in {followed.folder}" in followed.appendix


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page speaks of a CPU")
def test_the_counts_are_those_that_the_page_explains(followed: Followed) -> None:
    (record,) = (followed.folder / "reports" / "runs").glob("*/run.jsonl")
    (measurement,) = load(record.parents[1], record.parent.name).measurements
    page = " ".join(README.read_text(encoding="utf-8").split())

    assert measurement.outcome is Outcome.OK
    assert measurement.counters is not None
    assert measurement.counters.exact
    assert measurement.effective["counted_by"] == "progress lines"
    assert f"appendix has {measurement.counters.host_syncs} host syncs a step" in page
    assert re.search(
        rf"\| `train/program` \| \d+ \| {measurement.counters.host_syncs} \|", followed.appendix
    )
    assert measurement.profile is not None
    assert "aten::addmm" in {use.name for use in measurement.profile.operators}
