"""The page of a stored run: one screen that decides, and a page that can be read."""

import re
from pathlib import Path

import pytest

from harness.cli.report import judged_by
from harness.report import context
from harness.store.reader import load
from harness.suite import load as suites
from harness.tests.command_line import harness

ROOT = Path(__file__).parents[2]
SUITES, STORE = ROOT / "suites", ROOT / "reports" / "runs"
STORED = sorted(folder.parent.name for folder in STORE.glob("*/run.jsonl"))
SHOWN = {
    made.run_id: page
    for page in STORE.parent.glob("*.md")
    if (made := context.written(page.read_text(encoding="utf-8")))
}
NEWEST = {re.sub(r"^\d+-\d+-|-[^-]+-[^-]+$", "", run): run for run in STORED}
RUNS = sorted({*SHOWN, *NEWEST.values()})
"""Those that a committed page shows, and the newest of each suite."""
WORDS, ROWS, LINES = 200, 8, 150
"""Of the screen without its table, of that table, and of the page below the screen."""


@pytest.fixture(scope="module", params=RUNS)
def page(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """The page of a run by the rules of its suite, and the ids of its cases; a committed page is
    what would be written now."""
    run = load(STORE, request.param)
    ids = [c.case_id for c in run.suite.cases]
    if shown := SHOWN.get(run.run_id):
        return shown.read_text(encoding="utf-8"), ids
    run = judged_by(run.suite.name, run)
    to = Path("page.md")
    return context.pages(run, to, "v1")[to], ids


@pytest.mark.parametrize(
    "path", sorted(STORE.parent.glob("*Test Engineer Report*.md")), ids=lambda path: path.stem
)
def test_a_committed_page_says_what_its_record_says(path: Path) -> None:
    store = ("--store", str(STORE.relative_to(ROOT)))

    answer = harness("verify", str(path.relative_to(ROOT)), *store, cwd=ROOT)

    assert answer.returncode == 0, answer.stdout + answer.stderr


def test_the_screen_can_be_read_in_thirty_seconds(page: tuple[str, list[str]]) -> None:
    text, ids = page
    screen = text.partition("\n## Verdict")[0].splitlines()[1:]
    rows = [line for line in screen if line.startswith("|")]
    said = "\n".join(line for line in screen if line not in rows)

    assert len(re.findall(r"\S*\w\S*", said)) <= WORDS
    assert len(rows) <= 2 + ROWS
    prose = re.sub(r"`(harness|python) [^`]*`", "", said)  # a command may need an id
    assert [i for i in ids if i in prose] == []
    assert re.match(r"\*\*(Nothing to do|Read|Act)\*\*: ", screen[1])


def test_the_page_below_the_screen_is_short(page: tuple[str, list[str]]) -> None:
    below = page[0].partition("\n## Verdict")[2].splitlines()

    assert len(below) <= LINES


def test_the_users_questions_name_parts_that_their_suites_ask() -> None:
    page = (ROOT / "reports/README.md").read_text(encoding="utf-8")
    section = page.partition("## The users' five reports and ours")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z0-9-]+)`, ((?!workload)\w+(?: and \w+)?)", section)

    asked = {name: suites.load(name) for name, _ in named if (SUITES / f"{name}.yaml").is_file()}
    lacking = [
        (name, part)
        for name, parts in named
        for part in parts.split(" and ")
        if name in asked and part not in asked[name].parts
    ]

    assert {"a100-retest", "single-a100-production"} <= asked.keys()
    assert lacking == []
