"""The pages agree with the tree, the command line and the schema of suites."""

import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.main import get_command

from harness.cli.main import app
from harness.records import METRICS
from harness.suite import load as suites
from harness.suite.fields import schema_of
from harness.suite.schema import SuiteModel

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("harness", "suites", "nsa", "ci", "reports")
LOG = ROOT / "reports/LOG.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    LOG,
    *sorted(
        page
        for folder in FOLDERS
        for page in (ROOT / folder).rglob("README.md")
        if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    ),
]
NAMED = r"(?:/|\.(?:py|sh|ya?ml|txt|json|md))"
"""How a file or folder of the tree ends."""
MOST_LINES = {"README.md": 100, "harness/README.md": 250}
MOST_LINES_OF_AN_ENTRY = 8
MOST_CHARACTERS = 160
"""Of a line of an entry: eight lines are no paragraphs."""

if not PAGES[0].is_file():
    pytest.skip("not a checkout: the pages are not installed", allow_module_level=True)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


each_page = pytest.mark.parametrize("page", PAGES, ids=name_of)
each_current_page = pytest.mark.parametrize("page", [p for p in PAGES if p != LOG], ids=name_of)
"""Without the log, which names files and commands of its day."""


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a language."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE)


def prose(page: Path) -> str:
    """A page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^ *```\w*\n.*?^ *```$", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(page: Path) -> list[str]:
    """The text in backticks, line breaks as spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`]*`", "", prose(page))
    found = re.findall(r"\]\((?:<([^>]+)>|([^)\s]+))\)", text)
    targets = [quoted or plain for quoted, plain in found]
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_first_page_stays_short(name: str) -> None:
    assert len((ROOT / name).read_text(encoding="utf-8").splitlines()) < MOST_LINES[name]


@each_page
def test_every_relative_link_and_anchor_resolves(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_current_page
def test_every_file_and_folder_named_in_backticks_exists(page: Path) -> None:
    ours = re.compile(rf"(?:{'|'.join(FOLDERS)}|\.github)/(?:[\w./-]*{NAMED})?")
    placeholder = re.compile(r"/[A-Z]+/")  # reports/runs/RUN/
    named = [s for s in spans(page) if ours.fullmatch(s) and not placeholder.search(s)]

    assert [name for name in named if not (ROOT / name).exists()] == []


@each_current_page
def test_every_module_that_is_run_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = {m for m in re.findall(r"python -m\s+([\w.]+)", text) if m.split(".")[0] in FOLDERS}
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    assert missing == []


def harness_commands(page: Path) -> Iterator[list[str]]:
    """The words after `harness` of every command in a code block or in backticks."""
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    for line in [*lines, *spans(page)]:
        if match := re.match(r"\s*harness ([^|>;&]*)", line):
            yield shlex.split(match[1], comments=True)


def known_options(words: list[str]) -> tuple[set[str], list[str]]:
    """The options of the command that the words name, and the words after it; KeyError without."""
    command: Any = get_command(app)
    rest = list(words)
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]
    known = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
    return known | {"--help"}, rest


@each_current_page
def test_every_command_and_option_of_the_harness_exists(page: Path) -> None:
    for words in harness_commands(page):
        if words[0] in ("COMMAND", "..."):  # stands for any of them
            continue
        known, rest = known_options(words)
        options = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert options <= known, words


def test_every_function_that_carries_a_number_to_a_page_exists() -> None:
    text = (ROOT / "harness/README.md").read_text(encoding="utf-8")
    hops = text.partition("An arrow (→) hands")[2].partition("###")[0]
    assert 10 < hops.count("→") <= 15
    for module, names in re.findall(r"`(\w+)\.([\w,\s]+)`", hops):
        source = "".join(p.read_text() for p in (ROOT / "harness").rglob(f"{module}.py"))
        defined = re.findall(r"(?:def|class) (\w+)", source)
        assert {*re.split(r",\s+", names)} <= {*defined}, module


def test_the_page_of_suites_names_every_key_metric_and_shipped_suite() -> None:
    text = (ROOT / "suites/README.md").read_text(encoding="utf-8")
    schema = schema_of(SuiteModel)
    parts = [schema, *schema["$defs"].values()]
    keys = {key for part in parts for key in part.get("properties", ())}

    assert [key for key in sorted(keys) if not re.search(rf"\b{key}\b", text)] == []
    named = (*METRICS, *(file.stem for file in suites.available()))
    assert [name for name in named if f"`{name}`" not in text] == []


def test_the_suite_and_the_factory_on_the_page_of_suites_fit_together() -> None:
    page = ROOT / "suites/README.md"
    suite = suites.loads(blocks(page, "yaml")[0], "norm.yaml")
    source = blocks(page, "python")[0]
    module: dict[str, Any] = {}
    exec(source, module)

    assert {case.factory for case in suite.cases} == {"benchmarks.workloads:norm"}
    for case in (suite.cases[0], suite.cases[-1]):
        workload = module["norm"](case.provider, {**case.axes, "rows": 4, "width": 8})
        found, exact = workload.check()["y"], workload.reference()["y"]
        assert torch.allclose(found.double(), exact, rtol=1e-5)
        assert workload.effective() == {"rows": 4, "width": 8}


def entries() -> list[str]:
    return LOG.read_text(encoding="utf-8").split("\n## ")[1:]


def test_an_entry_of_the_log_has_a_date_and_at_most_eight_lines() -> None:
    assert entries()
    for entry in entries():
        title, *lines = [line for line in entry.splitlines() if line.strip()]
        assert re.match(r"\d{4}-\d\d-\d\d: \S", title), title
        assert 1 <= len(lines) <= MOST_LINES_OF_AN_ENTRY, title
        assert max(map(len, lines)) <= MOST_CHARACTERS, title
