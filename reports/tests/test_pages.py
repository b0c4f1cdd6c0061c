"""The page of a stored run: one screen that decides, and a page that can be read."""

import re
import shlex
from pathlib import Path

import pytest

from harness.analysis.study import Study
from harness.git import repository as git
from harness.report.series import every_page, pages
from harness.report.series.pages import Made
from harness.report.series.rules import judged_by
from harness.report.series.since import NO_RUN
from harness.store.reader import load
from harness.suite import load as suites
from harness.suite.choice import passing

ROOT = Path(__file__).parents[2]
SUITES, STORE = ROOT / "suites", ROOT / "reports" / "runs"
STORED = sorted(folder.parent.name for folder in STORE.glob("*/run.jsonl"))
SHOWN = {
    made.run: page
    for page in STORE.parent.glob("*.md")
    if (made := pages.made(page.read_text(encoding="utf-8")))
}
NEWEST = {re.sub(r"^\d+-\d+-|-[^-]+-[^-]+$", "", run): run for run in STORED}
RUNS = sorted({*SHOWN, *NEWEST.values()})
"""Those that a committed page shows, and the newest of each suite."""
WORDS, ROWS, LINES = 175, 8, 150
"""Of the first five lines, of the table of answers, and of the page below the screen."""
SECTIONS = (
    "Answer",
    "Why",
    "Do next",
    "Since the last report",
    "Time and cost",
    "Results",
    "Evidence",
    "Environment",
)


@pytest.fixture(scope="module", params=RUNS)
def page(request: pytest.FixtureRequest) -> tuple[str, list[str]]:
    """The page of a run by the rules of its suite, and the ids of its cases; a committed page is
    what would be written now."""
    run = load(STORE, request.param)
    ids = [c.case_id for c in run.suite.cases]
    if shown := SHOWN.get(run.run_id):
        return shown.read_text(encoding="utf-8"), ids
    run = judged_by(run.suite.name, run)
    texts, _ = pages.again(Study(run), Path("page.md"), Made(run=run.run_id, mark="v1"))
    return texts["page.md"], ids


def test_the_committed_pages_are_those_of_their_records() -> None:
    """Also the list in the README, unless a run of one's own has a page, which `harness run` does
    not list; and no figure is absent or left over."""
    folder = STORE.parent

    texts, figures = every_page.rendered(folder, STORE)
    listed = git.try_git(ROOT, "ls-files", "--others", "--exclude-standard", "-z", "reports")
    own = {ROOT / name for name in (listed or "").split("\0")} & {*texts}
    if own:
        texts = {p: now for p, now in texts.items() if p not in {*own, folder / "README.md"}}

    assert [p.name for p, now in texts.items() if p.read_text(encoding="utf-8") != now] == []
    learning = folder / "figures/2026-11-21-learning-curve.png"
    assert {*folder.glob("figures/*.png")} == {*figures, learning}
    for path, picture in figures.items():
        first, *_ = picture.figure.axes
        rows = [] if "scaling" in path.stem else first.get_yticklabels()
        for labels in (rows, *(legend.get_texts() for legend in picture.figure.legends)):
            names = [label.get_text() for label in labels]
            assert len({*names}) == len(names), f"{path.name} has two labels that are equal"
        title = picture.figure.get_suptitle() or "; ".join(
            axes.get_title(loc="left") for axes in picture.figure.axes
        )
        assert re.sub(r"\s", "", title) == re.sub(r"\s", "", picture.alt), path.name


def test_the_first_lines_can_be_read_in_thirty_seconds(page: tuple[str, list[str]]) -> None:
    text, ids = page
    lines = text.partition("\n**Status**")[0].splitlines()[2:]
    said = re.sub(r"`(harness|python) [^`]*`", "", "\n".join(lines))  # a command may need an id

    labels = [m[1] for line in lines if (m := re.match(r"- \*\*([^*]+)\*\*: \S", line))]
    first, last = labels[:2], labels[-2:]
    assert (first, last) == (["Asked", "Answer"], ["Next", "Trust"])
    assert all(why.startswith("Why") for why in labels[2:-2]), "a part of the question, or Why"
    assert len(re.findall(r"\S*\w\S*", said)) <= WORDS
    assert [i for i in ids if i in said] == []


def test_the_sections_come_in_one_order(page: tuple[str, list[str]]) -> None:
    found = re.findall(r"^## (.*)$", page[0], re.MULTILINE)

    assert found == [name for name in SECTIONS if name in found]
    answers = page[0].partition("\n## Answer\n")[2].partition("\n## ")[0].splitlines()
    assert len([line for line in answers if line.startswith("|")]) <= 2 + ROWS
    below = re.split(r"^## (?:Since|Time|Results)", page[0], maxsplit=1, flags=re.MULTILINE)[1]
    assert len(below.splitlines()) <= LINES


def test_steps_have_a_command_and_a_price_and_a_condition_stands_apart() -> None:
    texts = [path.read_text(encoding="utf-8") for path in SHOWN.values()]
    steps = [line for text in texts for line in re.findall(r"^\d\. (.*)$", text, re.MULTILINE)]
    measured = [step for step in steps if step.startswith(("Speed up", "Run the suite"))]
    met_if = [text for text in texts if "CONDITIONAL" in text and "**Ready**" in text]

    assert measured
    assert [s for s in measured if not re.search(r"`harness run .*`, [\d.]+ .* here\b", s)] == []
    assert met_if
    assert all("- **Conditional**: " in text for text in met_if)


@pytest.mark.parametrize("run_id", SHOWN)
def test_the_commands_of_a_page_give_that_page_and_one_case(run_id: str) -> None:
    text = SHOWN[run_id].read_text(encoding="utf-8")
    report, *_, alone = [
        shlex.split(line, comments=True)
        for line in text.partition("```bash\n")[2].partition("\n```")[0].splitlines()
        if line.startswith("harness ")
    ]
    options = dict(zip(report[3::2], report[4::2], strict=True))
    options = {name: value for name, value in options.items() if value != NO_RUN}
    how = pages.made(text)

    assert how
    assert report[2] == how.run
    assert (options.get("--rules", ""), options.get("--against", "")) == (how.rules, how.against)
    if how.mark.startswith("study"):  # it made its cases itself: no suite has them
        assert "-f" not in alone
        return
    assert len(passing(load(STORE, run_id).suite.cases, alone[alone.index("-f") + 1 :])) == 1


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
