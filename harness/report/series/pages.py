"""The files of a report: its page, appendix, guide and figures; and from a page back to its run."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from urllib.parse import quote

from harness.analysis.study import Study
from harness.records import Run
from harness.report import context, figures
from harness.report.figures import Picture
from harness.report.series import render
from harness.report.series.since import day_of
from harness.store.reader import is_full

GUIDE = "figures/how-to-read.md"
"""What the words of all pages mean, below their folder."""
_MADE, _END = "<!-- made from ", " -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How a page was made: its last line, which no reader sees."""

    run: str
    mark: str
    """The last words of its title: `v2`."""
    rules: str = ""
    against: str = ""


def made(page: str) -> Made | None:
    """How a report was made; None if this is not a report of a run."""
    last = page.rstrip().rpartition("\n")[2]
    if not last.startswith(_MADE):
        return None
    return Made(**json.loads(last.removeprefix(_MADE).removesuffix(_END)))


def write(of: Study, directory: Path, against: Study | None = None, version: int = 1) -> Path:
    """Analyse, judge and draw a run; write its report, and its figures in `figures/`; all of them,
    or a HarnessError. `against`: the earlier run that it is compared with; `version`: which full
    run of its suite this is; partial runs and studies are named as such."""
    values, pictures = context.build(of, directory, against)
    run, drawn = of.run, {p.name: p.png() for p in pictures}

    def files(name: str, mark: str) -> dict[str, bytes]:
        links, texts = _texts(run, values, pictures, name, mark)
        pages = {to: text.encode() for to, text in texts.items()}
        return {links[p]: png for p, png in drawn.items()} | pages

    mark, day, subject = _mark(run, version), day_of(run), run.suite.subject
    page = render.write(directory, day, subject, files, mark)
    (directory / GUIDE).write_text(render.rendered("guide.md.j2", {}), encoding="utf-8")
    return page


def _mark(run: Run, version: int) -> str:
    """`v2`, `partial 6ffe` or `study 459c`; the last two by the run's id."""
    own = run.run_id.rpartition("-")[2]
    if run.suite.name != PurePath(run.suite.path).stem:
        return f"study {own}"
    return f"v{version}" if is_full(run) else f"partial {own}"


def _texts(
    run: Run, values: Mapping[str, object], pictures: Sequence[Picture], name: str, mark: str
) -> tuple[dict[str, str], dict[str, str]]:
    """Name of a figure -> its path below the directory; such a path -> its text, the page last."""
    day = day_of(run)
    start = f"figures/{day}-{figures.slug(f'{run.suite.subject} {mark}')}"
    links = {p.name: f"{start}-{p.name}.png" for p in pictures}
    appendix = f"{start}-appendix.md"
    before = values["against"]
    how = Made(run=run.run_id, mark=mark, rules=run.judged_by, against=str(before))
    fields = json.dumps({name: value for name, value in asdict(how).items() if value})
    printed = {
        **values,
        "made": f"{_MADE}{fields}{_END}",
        "title": f"{day} Test Engineer Report - {run.suite.subject} {mark}: {values['outcome']}",
        "date": day,
        "page": quote(name),
        "appendix": appendix,
        "guide": GUIDE,
        "figures": {p.name: (p.alt, links[p.name]) for p in pictures},
    }
    pages = {appendix: "appendix.md.j2", name: "report.md.j2"}
    return links, {to: render.rendered(template, printed) for to, template in pages.items()}


def again(
    of: Study, page: Path, how: Made, against: Study | None = None
) -> tuple[dict[str, str], dict[str, Picture]]:
    """The texts of a page and its appendix as they would be written now, and its figures, by their
    paths below the page's folder."""
    values, pictures = context.build(of, page.parent, against)
    links, texts = _texts(of.run, values, pictures, page.name, how.mark)
    guide = {GUIDE: render.rendered("guide.md.j2", {})}
    return texts | guide, {links[p.name]: p for p in pictures}
